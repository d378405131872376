"""LMS by need: the plan of the storages that an allocator with a limit pages out in a step.

IBM's large model support for PyTorch 1.5 works within the allocator. It pages out the least
recently used storages when a request hits the limit, and pages in when an operation reads. It also
learns the step: a storage that was reclaimed in the last step is copied out as soon as it is not in
use. Here each rank's schedule is simulated by these rules until the step repeats itself; the
reclaimed storages are the plan.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from gems.errors import DoesNotFitError
from gems.memory.case import MemoryCase, PlanOutcome
from gems.memory.plan import Choice, MemoryPlan, Segment
from gems.memory.policies.lms.allocator import Counts, LmsAllocator, OutOfMemoryError, Paged
from gems.memory.reserved import Block, backward_requests
from gems.memory.storages import Storage, saved_storages
from gems.schedule.action import Action, Kind

DEFAULT_SHARE = 0.95  # default limit, as a share of the device
_UNLIMITED = 1 << 62
_TRIES = 8
_SHARE = 0.98  # largest factor of the limit from one try to the next
_HELP = (
    "lms_limit pages out saved tensors only: use memory=plan, more partitions, or a smaller image"
    " or micro-batch"
)


def lms_limit(
    case: MemoryCase, limit_bytes: int | None = None, reclaim: str = "first"
) -> MemoryPlan:
    """Return the plan of the storages that are reclaimed in a step that repeats itself.

    A layer is offloaded if most of the bytes that leave with it, over its micro-batches, are
    reclaimed before its backward. Its memory is free when the first of these bytes is needed
    elsewhere, and it returns on demand. Unlike in the original, only saved tensors leave; not
    parameters, gradients, messages and workspace. The limit applies to the segments that the
    allocator reserves. The plan treats all micro-batches alike; if it exceeds the limit, the step
    is simulated again under a lower one. `counters` has the original's counters, by rank, for the
    first and the repeated step.

    `limit_bytes` is the allocator's limit; None or 0 means 0.95 of the rank's limit, and without
    that nothing is reclaimed. `reclaim` "first" takes the least recently used storage that is large
    enough, "size" the one that fits best.

    Raises:
        DoesNotFitError: a request does not fit although everything that may leave has left.
    """
    allowed = limit_bytes or case.limit_bytes or _UNLIMITED
    limit = limit_bytes or (int(DEFAULT_SHARE * allowed) if allowed < _UNLIMITED else _UNLIMITED)
    limits = [max(1, limit)] * case.schedule.num_ranks
    outcome: PlanOutcome | None = None
    ranks: dict[int, RankPaging] = {}
    for tries in range(1, _TRIES + 1):
        for rank, limit in enumerate(limits):
            if rank in ranks:
                continue
            ranks[rank] = RankPaging(case, rank, limit, reclaim)
            try:
                ranks[rank].settle()
            except OutOfMemoryError as error:
                wanted = -(-(error.reserved_bytes + error.num_bytes) * allowed // limit)
                needed = outcome.peak_bytes[rank] if outcome else wanted
                raise DoesNotFitError(
                    f"rank {rank} under lms_limit", needed, allowed, _HELP
                ) from error
        counters = {"tries": tries, "ranks": [ranks[rank].to_json() for rank in sorted(ranks)]}
        plan = replace(_plan(case, ranks.values()), counters=counters)
        if allowed == _UNLIMITED:
            return plan
        outcome = case.outcome(plan)
        for rank, peak in enumerate(outcome.peak_bytes):
            if peak > allowed:
                limits[rank] = max(1, int(limits[rank] * _SHARE * allowed / peak))
                del ranks[rank]
        if len(ranks) == len(limits):
            return plan
    assert outcome is not None
    rank = outcome.fullest_rank
    raise DoesNotFitError(f"rank {rank} under lms_limit", outcome.peak_bytes[rank], allowed, _HELP)


def _plan(case: MemoryCase, ranks: Iterable[RankPaging]) -> MemoryPlan:
    """Return the plan that offloads layers most of whose bytes are reclaimed, over all ranks."""
    uses: dict[int, list[Use]] = {}
    for paging in ranks:
        for layer, use in paging.uses.items():
            uses.setdefault(layer, []).append(use)
    layers = {}
    for layer, layer_uses in uses.items():
        if 2 * sum(use.reclaimed_bytes for use in layer_uses) > sum(
            use.movable_bytes for use in layer_uses
        ):
            soonest = min(use.soonest for use in layer_uses if use.soonest is not None)
            layers[layer] = Segment(
                layer, layer + 1, Choice.OFFLOAD, free_after=max(0, soonest), ahead=0
            )
    return MemoryPlan.by_layer("lms_limit", case.boundaries, layers)


MAX_STEPS = 8


@dataclass(slots=True)
class Use:
    """The bytes that may leave with a layer, and those reclaimed, over a step.

    `soonest` is the fewest actions between the layer's forward and the action that needs the
    memory, or the stage's backward if that is sooner: then another layer may bring back what left
    with this one.
    """

    movable_bytes: int = 0
    reclaimed_bytes: int = 0
    soonest: int | None = None


@dataclass(slots=True)
class _Flight:
    """One micro-batch of one stage in flight."""

    paged: dict[int, list[Paged]] = field(default_factory=dict)  # by the numbers of storages
    # time of the forward of each layer whose backward has not run yet
    forward: dict[int, int] = field(default_factory=dict)
    turn: int | None = None  # begin of backward
    gone: set[Paged] = field(default_factory=set)
    others: list[Block] = field(default_factory=list)


class RankPaging:
    """A simulation of the steps of a rank: `uses` of the last one by layer, and counts of all."""

    def __init__(self, case: MemoryCase, rank: int, limit_bytes: int, reclaim: str) -> None:
        self.allocator = LmsAllocator(limit_bytes, reclaim)
        self.steps: list[Counts] = []
        self.uses: dict[int, Use] = {}
        self._case = case
        self._rank = rank
        # storages that each layer makes, reads in its forward, and saves for backward
        self._makes, self._reads, self._saves = (
            defaultdict[int, list[Storage]](list) for _ in range(3)
        )
        for stage in {stage for _, stage in case.schedule.placement.stages_on(rank)}:
            first, end = case.boundaries[stage : stage + 2]
            for storage in saved_storages(case.profile, first, end, case.least_bytes):
                self._makes[storage.maker].append(storage)
                for layer in sorted({*storage.savers, storage.maker + 1, storage.last_use}):
                    if storage.maker < layer <= storage.last_use:
                        self._reads[layer].append(storage)
                for layer in storage.savers:
                    self._saves[layer].append(storage)
        self._flights: dict[tuple[int, int, int | None], _Flight] = {}
        self._of: dict[Paged, tuple[_Flight, Storage]] = {}
        self._now = 0

    def to_json(self) -> dict[str, Any]:
        """Return the counts of the first and of the repeated step."""
        limit = self.allocator.limit_bytes
        return {
            "limit_bytes": limit if limit < _UNLIMITED else None,
            "steps": len(self.steps),
            "first": self.steps[0].to_json(),
            "steady": self.steps[-1].to_json(),
        }

    def settle(self) -> None:
        """Simulate steps, at most 8, until one reclaims the same as the one before.

        Raises:
            OutOfMemoryError: a request does not fit although everything that may leave has left.
        """
        for num_bytes in self._case.static_blocks(self._rank):
            self.allocator.take(num_bytes)
        before = None
        for _ in range(MAX_STEPS):
            self.uses = {}
            self._now = 0
            for action in self._case.schedule.rank_schedules[self._rank]:
                self._act(action)
            self.steps.append(self.allocator.restart())
            if self.uses == before:
                return
            before = self.uses

    def _act(self, action: Action) -> None:
        kind = action.kind
        profile = self._case.profile
        layers = range(*self._case.boundaries[action.stage : action.stage + 2])
        key = (action.direction, action.stage, action.micro_batch)
        passing: list[Block] = []
        if kind is Kind.F:
            flight = self._flights[key] = _Flight()
            if layers.start:
                flight.others.append(self._take(profile.given_bytes(layers.start)))
            for layer in layers:
                passing = self._forward(flight, layer, passing)
                self._now += 1
        elif kind in (Kind.B, Kind.I):
            flight = self._flights[key]
            flight.turn = self._now
            passing = [self._take(profile.layers[layers[-1]].output_grad_bytes)]
            for layer in reversed(layers):
                passing = self._backward(flight, layer, passing, kind is Kind.I)
                self._now += 1
        elif kind is Kind.W:
            self._now += len(layers)
        self.allocator.give_all(passing)
        if kind in (Kind.B, Kind.W):
            self.allocator.give_all(self._flights.pop(key).others)

    def _forward(self, flight: _Flight, layer: int, passing: Sequence[Block]) -> list[Block]:
        """Run a layer's forward, and return its unsaved outputs."""
        read = [paged for storage in self._reads[layer] for paged in flight.paged[storage.number]]
        self._pin(read)
        for storage in self._makes[layer]:
            storages = flight.paged[storage.number] = [
                Paged(storage.num_bytes) for _ in range(storage.count)
            ]
            for paged in storages:
                self._of[paged] = (flight, storage)
                self._note(self.allocator.make(paged))
            if storage.is_movable:
                self.uses.setdefault(storage.owner, Use()).movable_bytes += storage.total_bytes
        made_bytes = sum(storage.total_bytes for storage in self._makes[layer])
        extra = self._case.profile.layers[layer].forward_peak_bytes - made_bytes
        outputs = [self._take(extra)] if extra > 0 else []
        self.allocator.give_all(passing)
        flight.forward[layer] = self._now
        used = (storage.number for storage in self._makes[layer] if layer in storage.savers)
        self._unpin([*read, *(paged for number in used for paged in flight.paged[number])])
        return outputs

    def _backward(
        self, flight: _Flight, layer: int, passing: Sequence[Block], is_split: bool
    ) -> list[Block]:
        """Run a layer's backward, and return the gradient of its input."""
        saves = self._saves[layer]
        profile = self._case.profile.layers[layer]
        del flight.forward[layer]
        self._pin([paged for storage in saves for paged in flight.paged[storage.number]])
        gradient, rest = map(self._take, backward_requests(profile))
        self.allocator.give_all([*passing, rest])
        if is_split and profile.held_for_weights_bytes:
            flight.others.append(self._take(profile.held_for_weights_bytes))
        for storage in saves:
            if storage.savers[0] != layer:
                self._unpin(flight.paged[storage.number])
                continue
            for paged in flight.paged.pop(storage.number):
                self.allocator.drop(paged)
                del self._of[paged]
        return [gradient]

    def _take(self, num_bytes: int) -> Block:
        block = self.allocator.take(num_bytes)
        self._note(self.allocator.reclaimed)
        return block

    def _pin(self, storages: Sequence[Paged]) -> None:
        """Pin storages, those on the device first, so that none of them is paged out meanwhile."""
        away = [storage for storage in storages if storage.block is None]
        for storage in (*(storage for storage in storages if storage.block is not None), *away):
            self._note(self.allocator.pin(storage))

    def _unpin(self, storages: Iterable[Paged]) -> None:
        for storage in storages:
            if self._of[storage][1].is_movable:
                self.allocator.unpin(storage)

    def _note(self, reclaimed: Sequence[Paged]) -> None:
        """Record storages that are reclaimed between a layer's forward and backward, once each."""
        for paged in reclaimed:
            flight, storage = self._of[paged]
            layer = storage.owner
            if layer not in flight.forward or paged in flight.gone:
                continue
            flight.gone.add(paged)
            use = self.uses.setdefault(storage.owner, Use())
            use.reclaimed_bytes += storage.num_bytes
            now = self._now if flight.turn is None else flight.turn
            soon = now - flight.forward[layer] - 1
            use.soonest = soon if use.soonest is None else min(use.soonest, soon)
