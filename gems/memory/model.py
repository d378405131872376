"""The memory model: the peak bytes of each rank, for every partition at once, from the schedule's own order."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from types import EllipsisType
from typing import Any

import numpy as np

from gems.memory.in_flight import HeldCounts, Snapshot, StageKey, peak_snapshots
from gems.profile import ModelProfile
from gems.profile.spans import RankCosts, Spans, Table
from gems.schedule.action import Kind
from gems.schedule.schedule import Schedule

Where = tuple[int, int] | EllipsisType  # one entry of a table, or all of it
MESSAGE_COPIES = 2  # a buffer such as a running mean stands in the layer, and in the message that averages it


@dataclass(frozen=True, slots=True)
class Optimizer:
    """What training keeps per byte of parameters: itself, its gradient, and `states` of the optimizer."""

    states: int

    @property
    def copies(self) -> int:
        """Bytes held for each byte of parameters."""
        return 2 + self.states


OPTIMIZERS = {"sgd": Optimizer(1), "sgd_plain": Optimizer(0), "adam": Optimizer(2)}


def static_blocks(
    profile: ModelProfile, schedule: Schedule, rank: int, boundaries: Sequence[int], optimizer: Optimizer
) -> Iterator[int]:
    """Yield the sizes in bytes of all that a rank holds throughout a step, allocation by allocation.

    These are parameters, their gradients and the optimizer's state, buffers, and the images of the step.
    """
    directions = list(schedule.directions().values())
    for direction, stage in schedule.placement.stages_on(rank):
        for layer in profile.layers[boundaries[stage] : boundaries[stage + 1]]:
            yield from (layer.param_bytes,) * optimizer.copies
            yield from (layer.buffer_bytes,) * MESSAGE_COPIES
        if stage == 0:
            yield from (profile.input_bytes,) * directions.count(direction)


class MemoryModel:
    """Predicts the peak of each rank in bytes allocated, as the list itself orders what comes and goes.

    Counted are parameters, gradients and optimizer state, buffers, activations in flight, boundary tensors, the largest
    transient and what waits to be sent. The images of a step are on the device from its beginning to its end; what
    torch's allocator reserves beyond is another prediction (`gems.memory.reserved`).
    """

    def __init__(self, spans: Spans, optimizer: Optimizer) -> None:
        self._spans = spans
        self._static = optimizer.copies * spans.params + MESSAGE_COPIES * spans.buffers

    def rank_costs(self, schedule: Schedule) -> tuple[RankCosts, ...]:
        """Return the costs in bytes of each rank of a lowered schedule, as tables over the layers of its stages."""
        made: dict[object, RankCosts] = {}
        listed = []
        for rank in range(schedule.num_ranks):
            snapshots = peak_snapshots(schedule, rank)
            key = (schedule.placement.stages_on(rank), snapshots)
            if key not in made:
                made[key] = self._costs(schedule.placement.stages_on(rank), snapshots)
            listed.append(made[key])
        return tuple(listed)

    def peak_bytes(self, schedule: Schedule, boundaries: Sequence[int]) -> tuple[int, ...]:
        """Return each rank's peak under one partition, in bytes, without a table over all the others."""
        spans = tuple(pairwise(boundaries))
        found = []
        for rank in range(schedule.num_ranks):
            held = schedule.placement.stages_on(rank)
            stages = sorted({stage for _, stage in held})
            snapshots = peak_snapshots(schedule, rank)
            found.append(max(sum(float(self._of_stage(each, s, spans[s])) for s in stages) for each in snapshots))
        return tuple(map(round, found))

    def _costs(self, held: tuple[StageKey, ...], snapshots: tuple[Snapshot, ...]) -> RankCosts:
        stages = tuple(sorted({stage for _, stage in held}))
        tables = tuple(
            tuple(_kept(partial(self._table, snapshot, stage)) for stage in stages) for snapshot in snapshots
        )
        if len(stages) == 1:
            return RankCosts(stages, ((_kept(partial(_largest, tables)),),))
        return RankCosts(stages, tables)

    def _table(self, snapshot: Snapshot, stage: int) -> Table:
        """Return what a stage of the rank holds at a snapshot, for any of its layers."""
        return np.asarray(self._of_stage(snapshot, stage, ...))

    def _of_stage(self, snapshot: Snapshot, stage: int, where: Where) -> Any:
        """Return what one stage of the rank holds at a snapshot, in all directions that the rank holds it in."""
        total: Any = 0.0
        for held, counts in snapshot.counts:
            if held[1] == stage:
                total = total + self._static[where] + self._of(counts, where)
                if snapshot.active == held:
                    total = total + self._transient(snapshot.kind)[where]
        return total

    def _of(self, counts: HeldCounts, where: Where) -> Any:
        spans = self._spans
        found: Any = 0.0
        for number, table in (
            (counts.stashes, "stash"), (counts.weights, "held_for_weights"), (counts.outputs, "handed_on"),
            (counts.inputs + counts.images, "given"), (counts.gradients, "given_back"),
            (counts.input_gradients, "handed_back"),
        ):  # fmt: skip
            if number:
                found = found + number * getattr(spans, table)[where]
        return found

    def _transient(self, kind: Kind) -> Table:
        if kind in (Kind.F, Kind.R):
            return self._spans.forward_peak
        if kind is Kind.B:
            return self._spans.backward_peak
        return self._spans.input_gradient_peak if kind is Kind.I else self._spans.weight_gradient_peak


def time_costs(spans: Spans, schedule: Schedule) -> tuple[RankCosts, ...]:
    """Return each rank's compute seconds of a step: forward and backward of all its micro-batches."""
    directions = list(schedule.directions().values())
    listed: dict[tuple[tuple[int, int], ...], RankCosts] = {}
    for rank in range(schedule.num_ranks):
        counted: dict[int, int] = {}
        for direction, stage in schedule.placement.stages_on(rank):
            counted[stage] = counted.get(stage, 0) + directions.count(direction)
        key = tuple(sorted(counted.items()))
        tables = tuple(_kept(partial(np.multiply, number, spans.time_s)) for _, number in key)
        listed.setdefault(key, RankCosts(tuple(stage for stage, _ in key), (tables,)))
    return tuple(listed.values())


def _kept(make: Callable[[], Table]) -> Callable[[], Table]:
    """Return a function that builds a table at its first call and keeps it."""
    found: list[Table] = []

    def table() -> Table:
        if not found:
            found.append(make())
        return found[0]

    return table


def _largest(tables: Sequence[Sequence[Callable[[], Table]]]) -> Table:
    """Fold the snapshots of a rank with one stage into one table."""
    largest = tables[0][0]()
    for (table,) in tables[1:]:
        largest = np.maximum(largest, table())
    return largest
