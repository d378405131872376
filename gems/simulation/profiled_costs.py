"""The costs of a run from its model's profile and partition, in seconds and bytes, in the form of `CostConfig`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

from gems.config.schema import CostConfig, RunSpec
from gems.memory.timeline import stage_costs
from gems.partition.methods import partition_model
from gems.profile import ModelProfile
from gems.profile.spans import Spans
from gems.profile.store import profile_of
from gems.schedule import CAPPED
from gems.schedule.costs import DepthCosts
from gems.simulation.build import compute_schedule

PROFILE = "profile"
MIN_S = 1e-9  # times are above 0


def with_profiled_costs(spec: RunSpec) -> RunSpec:
    """Return the run with the costs of its profile in place of the configured ones, if it asks for them (cost=profile).

    This is for simulation only: the run's identity, and run.yaml, stay those of `spec`. The unit of time is the second,
    that of activations what the heaviest of P equal parts keeps of one micro-batch. A named schedule has the stages of
    its partition; a searched one, whose number of stages is not known before, the layers themselves, cut at equal
    depth. Forward, input and weight gradient share a stage's time as they share the model's.

    Raises:
        ConfigError: as `profile_of` and `cut`.
        DoesNotFitError: a rank would hold more than machine.device_bytes.
    """
    if spec.cost.name != PROFILE or spec.cost.activation_bytes:
        return spec
    profile = profile_of(spec)
    by_layer = replace(spec, cost=profiled_costs(spec, profile, list(range(profile.num_layers + 1))))
    if spec.schedule.name == CAPPED:
        return by_layer
    boundaries = partition_model(spec, compute_schedule(by_layer)).boundaries
    kept = list(stage_costs(Spans(profile), boundaries).activation)
    return replace(spec, cost=profiled_costs(spec, profile, boundaries, kept))


def profiled_costs(
    spec: RunSpec, profile: ModelProfile, boundaries: Sequence[int], kept: list[float] | None = None
) -> CostConfig:
    """Return the costs of pieces of the depth, each the layers between two boundaries, in seconds and bytes.

    `kept` is what each piece keeps of one micro-batch, if it is not the sum over its layers.
    """
    pieces = [profile.layers[first:end] for first, end in pairwise(boundaries)]
    num_ranks = spec.parallel.partitions
    if kept is None:
        kept = [float(sum(layer.kept_bytes for layer in piece)) for piece in pieces]
    activations = [max(1.0, size) for size in kept]
    one = DepthCosts(num_ranks, activations=tuple(activations)).stages(num_ranks).activation
    shares: dict[str, Any] = {
        name: max(MIN_S, sum(float(getattr(layer, f"{name}_s")) for layer in profile.layers) / num_ranks)
        for name in ("forward", "input_grad", "weight_grad", "recompute")
    }
    return replace(
        spec.cost,
        **shares,
        times=[max(MIN_S, sum(layer.time_s for layer in piece)) for piece in pieces],
        activations=activations,
        unit_s=1.0,
        activation_bytes=max(1, round(sum(activations) / sum(one))),
        boundary_bytes=max((profile.layers[cut - 1].output_bytes for cut in boundaries[1:-1]), default=0),
        param_bytes=sum(layer.param_bytes for layer in profile.layers) // num_ranks,
    )
