"""LMS by need: the plan of what an allocator with a limit pages out in a step.

IBM's large model support for PyTorch 1.5 pages out from within the allocator, the least recently used first, when a
request meets the limit, and pages in when an operation reads. A step repeats itself, and the allocator learns it: what
was reclaimed at a place in the last step is copied out there as soon as it is not in use. Here each rank's list is
simulated with those rules until a step is like the one before. What is then reclaimed is the plan.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

from gems.errors import DoesNotFitError
from gems.memory.case import MemoryCase, PlanOutcome
from gems.memory.plan import Choice, MemoryPlan, Segment
from gems.memory.policies.lms.allocator import Counts, LmsAllocator, OutOfMemoryError, Paged
from gems.memory.storages import Storage, saved_storages
from gems.schedule.action import Action, Kind

DEFAULT_SHARE = 0.95  # of the device, where no limit is given
_UNLIMITED = 1 << 62
_TRIES = 8
_SHARE = 0.98  # of the limit that a try leaves to the next, so that tries end
_HELP = "lms_limit pages out saved tensors only: use memory=plan, more partitions, or a smaller image or micro-batch"


def lms_limit(case: MemoryCase, limit_bytes: int | None = None, reclaim: str = "first") -> MemoryPlan:
    """Return the plan of what is reclaimed in a step that repeats itself.

    A layer is offloaded where, over its micro-batches, most of the bytes that leave with it are reclaimed before its
    backward; its memory is free where the first of them is needed by another, and it comes back on demand. What is not
    saved for backward (parameters, gradients, messages, workspace) stays, where the original pages that out as well.
    The limit is on what the allocator reserves, in its segments; where the plan, which treats all micro-batches alike,
    holds more than the limit, the step is simulated again under less. `counters` has the original's for the first and
    for the repeated step, rank by rank.

    Args:
        case: the run; its `limit_bytes` is what a rank may hold.
        limit_bytes: of the allocator; None or 0 for 0.95 of what the rank may hold. Without either nothing is
            reclaimed.
        reclaim: "first" takes the least recently used that is large enough, "size" the one that fits best.

    Raises:
        DoesNotFitError: a request that does not fit although everything that may leave has left.
    """
    allowed = limit_bytes or case.limit_bytes or _UNLIMITED
    limit = limit_bytes or (int(DEFAULT_SHARE * allowed) if allowed < _UNLIMITED else _UNLIMITED)
    limits = [max(1, limit)] * case.schedule.num_ranks
    outcome: PlanOutcome | None = None
    played: dict[int, RankPaging] = {}
    for tries in range(1, _TRIES + 1):
        for rank, limit in enumerate(limits):
            if rank in played:
                continue
            played[rank] = RankPaging(case, rank, limit, reclaim)
            try:
                played[rank].settle()
            except OutOfMemoryError as error:
                wanted = -(-(error.reserved_bytes + error.num_bytes) * allowed // limit)
                raise _too_large(rank, outcome.peak_bytes[rank] if outcome else wanted, allowed) from error
        plan = replace(_plan(case, played), counters=_counters(played, tries, limits))
        if allowed == _UNLIMITED:
            return plan
        outcome = case.outcome(plan)
        for rank, peak in enumerate(outcome.peak_bytes):
            if peak > allowed:
                limits[rank] = max(1, int(limits[rank] * _SHARE * allowed / peak))
                del played[rank]
        if len(played) == len(limits):
            return plan
    assert outcome is not None
    rank = outcome.fullest_rank
    raise _too_large(rank, outcome.peak_bytes[rank], allowed)


def _too_large(rank: int, needed_bytes: int, limit_bytes: int) -> DoesNotFitError:
    return DoesNotFitError(f"rank {rank} under lms_limit", needed_bytes, limit_bytes, _HELP)


def _plan(case: MemoryCase, played: Mapping[int, RankPaging]) -> MemoryPlan:
    """Offload the layers most of whose bytes are reclaimed, over all ranks that hold them."""
    uses: dict[int, list[Use]] = {}
    for paging in played.values():
        for layer, use in paging.uses.items():
            uses.setdefault(layer, []).append(use)
    layers = {}
    for layer, found in uses.items():
        soonest = [use.soonest for use in found if use.soonest is not None]
        if 2 * sum(use.reclaimed_bytes for use in found) > sum(use.movable_bytes for use in found):
            layers[layer] = Segment(layer, layer + 1, Choice.OFFLOAD, free_after=max(0, min(soonest)), ahead=0)
    return MemoryPlan.by_layer("lms_limit", case.boundaries, layers)


def _counters(played: Mapping[int, RankPaging], tries: int, limits: Sequence[int]) -> dict[str, Any]:
    return {
        "tries": tries,
        "ranks": [
            {
                "limit_bytes": limits[rank] if limits[rank] < _UNLIMITED else None,
                "steps": len(played[rank].steps),
                "first": played[rank].steps[0].to_json(),
                "steady": played[rank].steps[-1].to_json(),
            }
            for rank in sorted(played)
        ],
    }


MAX_STEPS = 8


@dataclass(slots=True)
class Use:
    """What becomes of the bytes that leave with one layer, over a step.

    `soonest` is the fewest actions that run between the layer's forward and the one that needs their memory, or the
    stage's backward if that is sooner: there another layer may bring back what left with this one.
    """

    movable_bytes: int = 0
    reclaimed_bytes: int = 0
    soonest: int | None = None


class _Stage:
    """The storages of a stage by number, and which of them each layer makes, reads forward and reads backward."""

    def __init__(self, case: MemoryCase, first: int, end: int) -> None:
        self.first, self.end = first, end
        self.storages = saved_storages(case.profile, first, end, case.least_bytes)
        self.makes: dict[int, list[int]] = {layer: [] for layer in range(first, end)}
        self.reads: dict[int, list[int]] = {layer: [] for layer in range(first, end)}
        self.saves: dict[int, list[int]] = {layer: [] for layer in range(first, end)}
        for number, storage in enumerate(self.storages):
            self.makes[storage.maker].append(number)
            for layer in sorted({*storage.savers, storage.maker + 1, storage.last_use}):
                if storage.maker < layer <= storage.last_use:
                    self.reads[layer].append(number)
            for layer in storage.savers:
                self.saves[layer].append(number)


@dataclass(slots=True)
class _Flight:
    """One micro-batch of one stage in flight.

    `forward` and `back` say when a layer's forward and whether its backward has run, `turn` when backward began.
    """

    stage: _Stage
    paged: dict[int, list[Paged]] = field(default_factory=dict)
    forward: dict[int, int] = field(default_factory=dict)
    back: set[int] = field(default_factory=set)
    turn: int | None = None
    gone: set[Paged] = field(default_factory=set)
    others: list[Any] = field(default_factory=list)


class RankPaging:
    """Simulates the steps of a rank; `uses` is of the last step, by layer, `steps` has the counts of all."""

    def __init__(self, case: MemoryCase, rank: int, limit_bytes: int, reclaim: str) -> None:
        self.allocator = LmsAllocator(limit_bytes, reclaim)
        self.steps: list[Counts] = []
        self.uses: dict[int, Use] = {}
        self._case, self._rank = case, rank
        spans = list(pairwise(case.boundaries))
        held = {stage for _, stage in case.schedule.placement.stages_on(rank)}
        self._stages = {stage: _Stage(case, *spans[stage]) for stage in held}
        self._flights: dict[tuple[int, int, int | None], _Flight] = {}
        self._of: dict[Paged, tuple[_Flight, Storage]] = {}
        self._now = 0

    def settle(self) -> None:
        """Simulate steps until one reclaims as the one before did, at most 8.

        Raises:
            OutOfMemoryError: a request that does not fit although everything that may leave has left.
        """
        for num_bytes in self._case.static_blocks(self._rank):
            self.allocator.take(num_bytes)
        before = None
        for _ in range(MAX_STEPS):
            self.uses, self._now = {}, 0
            for action in self._case.schedule.rows[self._rank]:
                self._act(action)
            self.steps.append(self.allocator.restart())
            if self.uses == before:
                return
            before = self.uses

    def _act(self, action: Action) -> None:
        kind, stage = action.kind, self._stages[action.stage]
        key = (action.direction, action.stage, action.micro_batch)
        passing: list[Any] = []
        if kind is Kind.F:
            flight = self._flights[key] = _Flight(stage)
            if stage.first:
                flight.others.append(self._take(self._case.profile.given_bytes(stage.first)))
            for layer in range(stage.first, stage.end):
                passing = self._forward(flight, layer, passing)
                self._now += 1
        elif kind in (Kind.B, Kind.I):
            flight = self._flights[key]
            flight.turn = self._now
            passing.append(self._take(self._case.profile.layers[stage.end - 1].output_grad_bytes))
            for layer in range(stage.end - 1, stage.first - 1, -1):
                passing = self._backward(flight, layer, passing, kind is Kind.I)
                self._now += 1
        elif kind is Kind.W:
            self._now += stage.end - stage.first
        self._give(passing)
        if kind in (Kind.B, Kind.W):
            self._give(self._flights.pop(key).others)

    def _forward(self, flight: _Flight, layer: int, passing: Sequence[Any]) -> list[Any]:
        """Run a layer's forward, and return its outputs that no layer saves."""
        stage = flight.stage
        read = [paged for number in stage.reads[layer] for paged in flight.paged[number]]
        self._pin(read)
        made = 0
        for number in stage.makes[layer]:
            storage = stage.storages[number]
            made += storage.total_bytes
            mine = flight.paged[number] = [Paged(storage.num_bytes) for _ in range(storage.count)]
            for paged in mine:
                self._of[paged] = (flight, storage)
                self._note(self.allocator.make(paged))
            if storage.is_movable:
                self._use(storage).movable_bytes += storage.total_bytes
        extra = self._case.profile.layers[layer].forward_peak_bytes - made
        handed = [self._take(extra)] if extra > 0 else []
        self._give(passing)
        flight.forward[layer] = self._now
        used = (number for number in stage.makes[layer] if number in stage.saves[layer])
        self._unpin([*read, *(paged for number in used for paged in flight.paged[number])])
        return handed

    def _backward(self, flight: _Flight, layer: int, passing: Sequence[Any], is_split: bool) -> list[Any]:
        """Run a layer's backward, and return the gradient of its input."""
        stage, profile = flight.stage, self._case.profile.layers[layer]
        flight.back.add(layer)
        self._pin([paged for number in stage.saves[layer] for paged in flight.paged[number]])
        needed = max(0, profile.backward_peak_bytes - profile.output_grad_bytes)
        handed = min(needed, profile.output_grad_bytes)
        made = [self._take(num_bytes) for num_bytes in (handed, needed - handed)]
        self._give([*passing, made[1]])
        if is_split and profile.held_for_weights_bytes:
            flight.others.append(self._take(profile.held_for_weights_bytes))
        for number in stage.saves[layer]:
            if stage.storages[number].savers[0] != layer:
                self._unpin(flight.paged[number])
                continue
            for paged in flight.paged.pop(number):
                self.allocator.drop(paged)
                del self._of[paged]
        return made[:1]

    def _take(self, num_bytes: int) -> Any:
        block = self.allocator.take(num_bytes)
        self._note(self.allocator.reclaimed)
        return block

    def _pin(self, storages: Sequence[Paged]) -> None:
        """Pin those that are there before any is paged in, so that none leaves for another of the same operation."""
        away = [storage for storage in storages if storage.block is None]
        for storage in (*(one for one in storages if one.block is not None), *away):
            self._note(self.allocator.pin(storage))

    def _unpin(self, storages: Iterable[Paged]) -> None:
        for storage in storages:
            if self._of[storage][1].is_movable:
                self.allocator.unpin(storage)

    def _note(self, reclaimed: Sequence[Paged]) -> None:
        """Record what is reclaimed between a layer's forward and backward, once each, and how soon."""
        for paged in reclaimed:
            flight, storage = self._of[paged]
            layer = storage.owner
            if layer not in flight.forward or layer in flight.back or paged in flight.gone:
                continue
            flight.gone.add(paged)
            use = self._use(storage)
            use.reclaimed_bytes += storage.num_bytes
            now = self._now if flight.turn is None else flight.turn
            soon = now - flight.forward[layer] - 1
            use.soonest = soon if use.soonest is None else min(use.soonest, soon)

    def _use(self, storage: Storage) -> Use:
        return self.uses.setdefault(storage.owner, Use())

    def _give(self, blocks: Iterable[Any]) -> None:
        for block in blocks:
            self.allocator.give(block)
