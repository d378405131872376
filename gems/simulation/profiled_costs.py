"""Costs of a run by its profile and partition, in seconds and bytes, as a `CostConfig`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

from gems.config.schema import CostConfig, RunSpec
from gems.memory.timeline import acting_stage_costs
from gems.partition.methods import partition_model
from gems.partition.operator_placement import stage_costs_of
from gems.profile import ModelProfile
from gems.profile.store import profile_of
from gems.profile.subject import Subject
from gems.schedule import CAPPED, PLACED
from gems.schedule.costs import (
    STAGE_BYTES,
    STAGE_SIZES,
    STAGE_TIMES,
    STRIP_LOADS,
    DepthCosts,
    StageCosts,
)
from gems.simulation.build import compute_schedule, search_schedule
from gems.simulation.costs import RunCosts
from gems.simulation.model_costs import PROFILE

MIN_S = 1e-9  # times are above 0


def with_profiled_costs(spec: RunSpec) -> RunSpec:
    """Return the run with the costs of its profile, if it asks for them (cost=profile).

    They replace the configured costs. For schedule=placed they are the costs of its operators. They
    are for simulation only: the run's identity, and run.yaml, remain those of `spec`. The unit of
    time is the second; the unit of activations is the size that the heaviest of P equal parts keeps
    of one micro-batch. A named schedule has the stages of its partition. A searched one has the
    stages with which it was found, and activations in the unit of its cap.

    Raises:
        ConfigError: as `profile_of`, `partition_model` and `search_schedule`.
        DoesNotFitError: a rank would hold more than machine.device_bytes.
    """
    if spec.schedule.name == PLACED:
        return replace(
            spec,
            cost=replace(
                spec.cost, stages=_of_stages(stage_costs_of(spec).in_units(spec.cost.unit_s, 1))
            ),
        )
    if spec.cost.name != PROFILE or spec.cost.activation_bytes:
        return spec
    profile = profile_of(Subject.of(spec))
    costs = RunCosts.of(spec)
    if spec.schedule.name == CAPPED:
        found = search_schedule(spec)
        return replace(
            spec, cost=profiled_costs(costs, profile, found["boundaries"], found["unit_bytes"])
        )
    made = compute_schedule(replace(spec, cost=layer_costs(costs, profile)))
    boundaries = partition_model(spec, made).boundaries
    return replace(spec, cost=profiled_costs(costs, profile, boundaries))


def layer_costs(costs: RunCosts, profile: ModelProfile) -> CostConfig:
    """Return the costs of a model with unknown stages, with each layer a piece of its depth."""
    kept = [float(layer.kept_bytes) for layer in profile.layers]
    return _costs(costs, profile, list(range(profile.num_layers + 1)), kept)


def profiled_costs(
    costs: RunCosts, profile: ModelProfile, boundaries: Sequence[int], unit_bytes: int | None = None
) -> CostConfig:
    """Return the costs of the stages between boundaries.

    `unit_bytes` is the unit of activations, if given.
    """
    machine = costs.machine
    rates = machine.d2h_bytes_per_s, machine.h2d_bytes_per_s
    stages = acting_stage_costs(profile, boundaries, costs.least_bytes, *rates)
    cost = _costs(costs, profile, boundaries, list(stages.activation), unit_bytes)
    return replace(cost, stages=_of_stages(stages.in_units(1.0, cost.activation_bytes)))


def _of_stages(stages: StageCosts) -> dict[str, Any]:
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
    kept: Sequence[float],
    unit_bytes: int | None = None,
) -> CostConfig:
    """Return the costs of pieces of the depth, each consisting of the layers between boundaries.

    Each piece keeps its entry of `kept`.
    """
    pieces = [profile.layers[first:end] for first, end in pairwise(boundaries)]
    num_ranks = costs.parallel.partitions
    activations = [max(1.0, size) for size in kept]
    one = DepthCosts(num_ranks, activations=tuple(activations)).stages(num_ranks).activation
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
        activation_bytes=unit_bytes or max(1, round(sum(activations) / sum(one))),
        boundary_bytes=max(
            (profile.layers[cut - 1].output_bytes for cut in boundaries[1:-1]), default=0
        ),
        param_bytes=sum(layer.param_bytes for layer in profile.layers) // num_ranks,
    )
