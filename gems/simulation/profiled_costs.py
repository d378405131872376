"""Costs of a run by its profile and partition, in seconds and bytes, as a run's costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

from gems.config.schema import CostConfig
from gems.memory.timeline import acting_stage_costs
from gems.profile import ModelProfile
from gems.schedule.costs import (
    STAGE_BYTES,
    STAGE_SIZES,
    STAGE_TIMES,
    STRIP_LOADS,
    DepthCosts,
    StageCosts,
)
from gems.simulation.costs import RunCosts

MIN_S = 1e-9  # times are above 0


def layer_costs(costs: RunCosts, profile: ModelProfile) -> RunCosts:
    """Return the costs of a model with unknown stages, with each layer a piece of its depth."""
    kept_bytes = [float(layer.kept_bytes) for layer in profile.layers]
    cost = _costs(costs, profile, list(range(profile.num_layers + 1)), kept_bytes)
    return replace(costs, cost=cost)


def profiled_costs(
    costs: RunCosts, profile: ModelProfile, boundaries: Sequence[int], unit_bytes: int | None = None
) -> RunCosts:
    """Return the costs of the stages between boundaries.

    `unit_bytes` is the unit of activations, if given.
    """
    machine = costs.machine
    rates = machine.d2h_bytes_per_s, machine.h2d_bytes_per_s
    stages = acting_stage_costs(profile, boundaries, costs.least_bytes, *rates)
    cost = _costs(costs, profile, boundaries, list(stages.activation), unit_bytes)
    cost = replace(cost, stages=to_json(stages.in_units(1.0, cost.activation_bytes)))
    return replace(costs, cost=cost)


def to_json(stages: StageCosts) -> dict[str, Any]:
    """Return costs of stages in the form of `cost.stages`."""
    names = (*STAGE_TIMES, *STAGE_SIZES, *STAGE_BYTES)
    of_stages: dict[str, Any] = {name: list(getattr(stages, name)) for name in names}
    if stages.strip_loads:
        of_stages[STRIP_LOADS] = [list(loads) for loads in stages.strip_loads]
    return of_stages


def _costs(
    costs: RunCosts,
    profile: ModelProfile,
    boundaries: Sequence[int],
    activation_bytes: Sequence[float],
    unit_bytes: int | None = None,
) -> CostConfig:
    """Return the costs of pieces of the depth, each consisting of the layers between boundaries.

    Each piece keeps its entry of `kept`.
    """
    pieces = [profile.layers[first:end] for first, end in pairwise(boundaries)]
    num_ranks = costs.parallel.partitions
    activations = [max(1.0, size) for size in activation_bytes]
    rank_share = DepthCosts(num_ranks, activations=tuple(activations)).stages(num_ranks).activation
    shares: dict[str, Any] = {
        name: max(
            MIN_S, sum(float(getattr(layer, f"{name}_s")) for layer in profile.layers) / num_ranks
        )
        for name in ("forward", "input_grad", "weight_grad", "recompute")
    }
    return replace(
        costs.cost,
        **shares,
        times=[max(MIN_S, sum(layer.time_s for layer in piece)) for piece in pieces],
        activations=activations,
        unit_s=1.0,
        activation_bytes=unit_bytes or max(1, round(sum(activations) / sum(rank_share))),
        boundary_bytes=max(
            (profile.layers[cut - 1].output_bytes for cut in boundaries[1:-1]), default=0
        ),
        param_bytes=sum(layer.param_bytes for layer in profile.layers) // num_ranks,
    )
