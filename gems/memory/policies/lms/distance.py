"""LMS by distance: a run's layers as a graph of operations, tuned as TFLMSv2 does, and its swaps as a memory plan.

Le et al. 2018 (arXiv 1807.02037) and 2019 ("Automatic GPU memory management for large neural models in TensorFlow").
An operation is the forward or the backward of a layer here, where theirs are kernels, and the graph is that of one
micro-batch of each stage of a rank. Swapping is local to a rank: beside data parallelism it only leaves more room.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from math import inf
from typing import Any

from gems.errors import DoesNotFitError
from gems.memory.case import MemoryCase, PlanOutcome
from gems.memory.plan import Choice, MemoryPlan, Segment
from gems.memory.policies.lms.graph import Graph, Parameters, Return, Tensor, Tuned, simulate, tune
from gems.memory.storages import Storage, saved_storages
from gems.schedule.action import Kind
from gems.schedule.schedule import Schedule

RATIO = 0.9
RATIO_WITH_REPLICAS = 0.8
_TRIES = 16
_SHARE = 0.97  # of the room that a try leaves to the next at most
_HELP = "lms swaps saved tensors only: use memory=plan, more partitions, or a smaller image or micro-batch"


@dataclass(slots=True)
class _Holder:
    """Ranks that hold the same stages, with their static bytes and the bytes that their graph is tuned under."""

    ranks: list[int]
    layers: RankGraph
    static_bytes: int
    room_bytes: float
    tuned: Tuned | None = None
    is_least: bool = False

    def tune(self, given: tuple[int | None, ...], is_last: bool) -> bool:
        """Find parameters, in the end those that swap and wait for everything; return whether any were left."""
        self.tuned = None if is_last else tune(self.layers.graph, self.room_bytes, *given)
        if self.tuned is None and not self.is_least:
            _, ahead, groupby, _ = given
            self.tuned, self.is_least = Tuned(Parameters(1, ahead or 1, groupby or 0, 3), True, 0), True
        return self.tuned is not None

    def tighten(self, limit_bytes: int, held_bytes: int) -> None:
        """Lower the room in the proportion in which the ranks hold too much, for other parameters."""
        assert self.tuned is not None
        played = simulate(self.layers.graph, self.tuned.parameters, inf).peak_bytes
        share = (limit_bytes - self.static_bytes) / max(1, held_bytes - self.static_bytes)
        self.room_bytes = min(self.room_bytes, played) * max(0.0, min(_SHARE, share))
        self.tuned = None


def lms(
    case: MemoryCase,
    swapout_threshold: int | None = None,
    swapin_ahead: int | None = None,
    swapin_groupby: int | None = None,
    sync_mode: int | None = None,
    ratio: float | None = None,
) -> MemoryPlan:
    """Return the plan of the given parameters; those that are None are tuned (`gems.memory.policies.lms.graph`).

    Each rank is tuned under M = (limit - what never leaves it) x ratio, by default 0.9, and 0.8 with replicas. That
    sees one micro-batch and no workspace; where a rank then holds more than its limit, it is tuned again under less,
    and where the tuner finds nothing, everything is swapped and waited for. With a threshold that is given, or without
    a limit, nothing is tuned again.

    A layer is offloaded where most of the bytes that leave with it are swapped. Its memory is free one action after the
    one that the copy is posted after, or at once where copies out are waited for; it comes back as many actions ahead
    as the operation lies that sets it off. As in the original, one whose maker is nearer than the distance ahead comes
    back on demand.

    Raises:
        DoesNotFitError: no parameters fit one of the ranks.
    """
    share = ratio if ratio is not None else RATIO_WITH_REPLICAS if case.num_replicas > 1 else RATIO
    holders = _holders(case, share)
    given = (swapout_threshold, swapin_ahead, swapin_groupby, sync_mode)
    outcome: PlanOutcome | None = None
    for tries in range(1, _TRIES + 1):
        for holder in holders:
            if holder.tuned is None and not holder.tune(given, is_last=tries == _TRIES):
                raise _too_large(case, holder, outcome)
        plan = _plan(case, holders, {"ratio": share, "tries": tries})
        if case.limit_bytes is None or swapout_threshold is not None:
            return plan
        outcome = case.outcome(plan)
        if max(outcome.peak_bytes) <= case.limit_bytes:
            return plan
        for holder in holders:
            held = _held(holder, outcome)
            if held > case.limit_bytes:
                holder.tighten(case.limit_bytes, held)
    raise _too_large(case, max(holders, key=lambda one: _held(one, outcome)), outcome)


def _holders(case: MemoryCase, share: float) -> list[_Holder]:
    by_stages: dict[tuple[int, ...], list[int]] = {}
    for rank in range(case.schedule.num_ranks):
        stages = tuple(sorted({stage for _, stage in case.schedule.placement.stages_on(rank)}))
        by_stages.setdefault(stages, []).append(rank)
    found = []
    for ranks in by_stages.values():
        static = max(sum(case.static_blocks(rank)) for rank in ranks)
        room = inf if case.limit_bytes is None else (case.limit_bytes - static) * share
        found.append(_Holder(ranks, RankGraph(case, ranks[0]), static, room))
    return found


def _plan(case: MemoryCase, holders: list[_Holder], counters: Mapping[str, Any]) -> MemoryPlan:
    layers, ranks = {}, []
    for holder in holders:
        assert holder.tuned is not None
        if holder.tuned.is_needed:
            layers.update(holder.layers.segments(holder.tuned.parameters))
        ranks.append(
            {
                "ranks": holder.ranks,
                **asdict(holder.tuned.parameters),
                "is_needed": holder.tuned.is_needed,
                "num_levels": holder.layers.graph.num_levels,
                "num_plays": holder.tuned.num_plays,
                "room_bytes": None if holder.room_bytes == inf else int(holder.room_bytes),
            }
        )
    plan = MemoryPlan.by_layer("lms", case.boundaries, layers)
    return replace(plan, counters={**counters, "tuned": ranks})


def _held(holder: _Holder, outcome: PlanOutcome | None) -> int:
    return max(outcome.peak_bytes[rank] for rank in holder.ranks) if outcome else 0


def _too_large(case: MemoryCase, holder: _Holder, outcome: PlanOutcome | None) -> DoesNotFitError:
    """Return the error: what a rank needs with everything swapped at once."""
    assert outcome is not None and case.limit_bytes is not None
    rank = max(holder.ranks, key=lambda rank: outcome.peak_bytes[rank])
    return DoesNotFitError(f"rank {rank} under lms", outcome.peak_bytes[rank], case.limit_bytes, _HELP)


_Held = tuple[int, int]  # direction and stage
_Layer = tuple[_Held, int]


class RankGraph:
    """One micro-batch of each stage of a rank, in the order in which the rank's list first runs them.

    Operations are a stage's layers, forward from the first and backward from the last. Tensors are the storages that
    they save, of which a copy may take those that are large enough; what a layer hands to the next that nobody saves;
    the gradients on their way back; and what a stage is given, forward and backward.
    """

    def __init__(self, case: MemoryCase, rank: int) -> None:
        self._case = case
        self._forward: dict[_Layer, int] = {}
        self._backward: dict[_Layer, int] = {}
        self._tensors: list[Tensor] = []
        self._movable: dict[int, tuple[_Held, Storage]] = {}
        spans = list(pairwise(case.boundaries))
        for (direction, stage), is_forward in _first_runs(case.schedule, rank):
            layers = range(*spans[stage]) if is_forward else reversed(range(*spans[stage]))
            for layer in layers:
                number = len(self._forward) + len(self._backward)
                (self._forward if is_forward else self._backward)[(direction, stage), layer] = number
        num_ops = len(self._forward) + len(self._backward)
        for held in case.schedule.placement.stages_on(rank):
            self._add_stage(held, *spans[held[1]])
        for op in range(1, num_ops):  # they run one after the other
            self._add(0, op - 1, [op])
        self.graph = Graph(num_ops, tuple(self._tensors))

    def segments(self, parameters: Parameters) -> dict[int, Segment]:
        """Return the segments of layers most of whose bytes are swapped for their backward.

        A copy back is posted right after the operation that sets it off: so many actions ahead as run in between.
        """
        swaps = {swap.tensor: swap for swap in parameters.swaps(self.graph)}
        movable: dict[int, int] = {}
        swapped: dict[int, int] = {}
        ahead: dict[int, int] = {}
        for tensor, (held, storage) in self._movable.items():
            layer = storage.owner
            movable[layer] = movable.get(layer, 0) + storage.total_bytes
            returns = swaps[tensor].returns if tensor in swaps else ()
            for back in returns:
                if back.consumers[0] == self._backward[held, layer]:
                    swapped[layer] = swapped.get(layer, 0) + storage.total_bytes
                    ahead[layer] = max(ahead.get(layer, 0), _ahead(back))
        free_after = 0 if parameters.is_swapout_sync else 1
        return {
            layer: Segment(layer, layer + 1, Choice.OFFLOAD, free_after=free_after, ahead=ahead[layer])
            for layer, num_bytes in swapped.items()
            if 2 * num_bytes > movable[layer]
        }

    def _add_stage(self, held: _Held, first: int, end: int) -> None:
        layers, forward, backward = self._case.profile.layers, self._forward, self._backward
        for storage in saved_storages(self._case.profile, first, end, self._case.least_bytes):
            readers = {*storage.savers, storage.last_use} - {storage.maker}
            consumers = {forward[held, layer] for layer in readers}
            consumers |= {backward[held, layer] for layer in storage.savers}
            if storage.is_movable:
                self._movable[len(self._tensors)] = (held, storage)
            self._add(storage.total_bytes, forward[held, storage.maker], consumers, storage.is_movable)
        for layer in range(first + 1, end):
            unsaved = layers[layer].unsaved_input_bytes
            for back, num_bytes in layers[layer].unsaved_from:
                unsaved -= num_bytes
                if layer - back >= first:
                    self._add(num_bytes, forward[held, layer - back], [forward[held, layer]])
            self._add(max(0, unsaved), forward[held, layer - 1], [forward[held, layer]])
            self._add(layers[layer - 1].output_grad_bytes, backward[held, layer], [backward[held, layer - 1]])
        if first and forward[held, first]:
            given = self._case.profile.given_bytes(first)
            self._add(given, forward[held, first] - 1, [forward[held, first], backward[held, first]])
        given_back = layers[end - 1].output_grad_bytes
        self._add(given_back, backward[held, end - 1] - 1, [backward[held, end - 1]])

    def _add(self, num_bytes: int, maker: int, consumers: Iterable[int], is_movable: bool = False) -> None:
        self._tensors.append(Tensor(num_bytes, maker, tuple(sorted(consumers)), is_movable))


def _ahead(back: Return) -> int:
    """Return the operations that run between the one that sets off a return and the first that reads it."""
    return 0 if back.trigger is None else back.consumers[0] - back.trigger - 1


def _first_runs(schedule: Schedule, rank: int) -> list[tuple[_Held, bool]]:
    """Return when a rank runs one micro-batch of each of its stages, in the order of its list: forward, or backward."""
    first: dict[_Held, int | None] = {}
    runs = []
    for action in schedule.rows[rank]:
        if action.kind not in (Kind.F, Kind.B, Kind.I):
            continue
        held = (action.direction, action.stage)
        if first.setdefault(held, action.micro_batch) == action.micro_batch:
            runs.append((held, action.kind is Kind.F))
    return runs
