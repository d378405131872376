"""One published pipeline in the terms of the simulator: schedule, memory plan, messages and bytes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import fmean
from typing import Any

from analysis.outside.streams import received_bytes, stages_of
from analysis.outside.table import Row
from gems.memory.case import MemoryCase
from gems.memory.plan import MemoryPlan
from gems.memory.policies.recompute import recompute
from gems.profile import ModelProfile
from gems.schedule.action import Kind
from gems.schedule.costs import FREE, Network, StageCosts
from gems.schedule.lower import compute_only, lower
from gems.schedule.registry import FAMILIES, Request
from gems.schedule.schedule import Schedule
from gems.schedule.simulate import Simulation, rank_times, simulate
from gems.utils.units import GIB


@dataclass(frozen=True)
class Pipeline:
    """A row with the profile of its micro-batch, the boundaries of its stages, and its links."""

    row: Row
    profile: ModelProfile
    boundaries: tuple[int, ...]
    micro_batches: int
    network: Network

    @cached_property
    def schedule(self) -> Schedule:
        """GPipe's schedule with torchgpipe's order of backward: the last micro-batch first.

        Without dependencies between micro-batches, the ranks do not agree on an order, so the first
        gradient that a rank uses is the last that the rank after it sends (late receives), and all
        recomputation comes before.
        """
        request = Request(self.row.partitions, self.micro_batches)
        schedule = FAMILIES["gpipe"].build(request)
        last = schedule.num_ranks - 1
        ranks = [
            _reordered(actions, self.row.has_order or (last - rank) % 2 == 0)
            for rank, actions in enumerate(schedule.rank_schedules)
        ]
        return replace(schedule, rank_schedules=tuple(ranks))

    @cached_property
    def case(self) -> MemoryCase:
        """The case of the memory model; the optimizer of the benchmarks keeps no state."""
        return MemoryCase(self.profile, self.schedule, self.boundaries, optimizer="sgd_plain")

    @cached_property
    def plan(self) -> MemoryPlan:
        """The memory plan: all stages are recomputed, but not for the last micro-batch."""
        if self.row.recompute == "never":
            return MemoryPlan.keeping(self.boundaries)
        return recompute(self.case, "stage", except_last=self.row.recompute == "except_last")

    @cached_property
    def step(self) -> tuple[Schedule, StageCosts, Network, Simulation]:
        """The simulated step, with what it was simulated from."""
        outcome = self.case.outcome(self.plan)
        costs = outcome.costs
        if self.row.has_portals:
            direct = direct_bytes(self.profile, self.boundaries)
            costs = replace(costs, boundary_bytes=direct)
        network = self.network
        if not self.row.has_streams:
            costs = _with_copies(costs, network, self.row.has_order)
            network = FREE
        compute = compute_only(outcome.schedule)
        if not self.row.has_order:
            ranks = tuple(map(_recomputed_first, compute.rank_schedules))
            compute = replace(compute, rank_schedules=ranks)
        schedule = lower(compute, costs, network)
        return schedule, costs, network, simulate(schedule, costs, network)

    @property
    def step_s(self) -> float:
        """Seconds of the simulated step."""
        return self.step[3].span

    @property
    def parts(self) -> dict[str, float]:
        """The shares of the step by activity, as means over the ranks."""
        times = rank_times(*self.step[:2], self.step[3], self.step[2])
        names = ("useful", "recompute", "link", "idle")
        return {name: fmean(getattr(time, name) for time in times) / self.step_s for name in names}

    @property
    def memory_gib(self) -> float:
        """The peaks of all ranks together; of activations alone if the row counts these.

        Messages on copy streams take segments of their own, instead of a share of the peak.
        """
        ranks = self.case.timelines(self.plan, self.step[0])
        total = sum(rank.peak_bytes for rank in ranks)
        if self.row.has_streams:
            total += received_bytes(
                self.profile, self.boundaries, self.row.has_portals, self.micro_batches
            )
            inputs = (self.profile.given_bytes(first) for first in self.boundaries[1:-1])
            total -= self.micro_batches * sum(inputs)
        if self.row.is_activations:
            total -= 2 * sum(layer.param_bytes for layer in self.profile.layers)
        return total / GIB


def _reordered(actions: Sequence[Any], is_last_first: bool) -> tuple[Any, ...]:
    forwards = [action for action in actions if action.kind is Kind.F]
    backwards = [action for action in actions if action.kind is not Kind.F]
    return (*forwards, *(reversed(backwards) if is_last_first else backwards))


def _recomputed_first(actions: Iterable[Any]) -> tuple[Any, ...]:
    places = {Kind.F: 0, Kind.R: 1}
    return tuple(sorted(actions, key=lambda action: places.get(action.kind, 2)))


def direct_bytes(profile: ModelProfile, boundaries: Sequence[int]) -> tuple[float, ...]:
    """Return the bytes of the message over each boundary if skips go straight to their reader.

    Those that pass by a stage travel long before they are needed, on streams of their own.
    """
    stage_of = stages_of(boundaries)
    sizes = [0.0] * (len(boundaries) - 1)
    for index, layer in enumerate(profile.layers):
        for storage in (*layer.saved, *layer.passing):
            stage = stage_of[index]
            if storage.last_use and stage_of[index + storage.last_use] == stage + 1:
                sizes[stage] += storage.total_bytes
    return tuple(sizes)


def _with_copies(costs: StageCosts, network: Network, has_order: bool) -> StageCosts:
    """Return costs whose messages pass on the compute streams of both ranks.

    Without an order of backward, gradients are received while a rank waits for the last of them.
    """
    last = costs.num_stages - 1
    hops = [
        network.delay(stage, stage + 1, size) if stage < last else 0.0
        for stage, size in enumerate(costs.boundary_bytes)
    ]
    segments = []
    for stage, parts in enumerate(costs.segments):
        before = hops[stage - 1] if stage else 0.0
        part = parts[0]
        received = hops[stage] if has_order else 0.0
        segments.append(
            (
                replace(
                    part,
                    forward=part.forward + before + hops[stage],
                    input_grad=part.input_grad + before + received,
                ),
                *parts[1:],
            )
        )
    return replace(costs, segments=tuple(segments))
