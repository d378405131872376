"""LMS by distance: the swaps of a tuned graph of layers, as a memory plan.

Sources: Le et al. 2018 (arXiv 1807.02037) and 2019 ("Automatic GPU memory management for large
neural models in TensorFlow", TFLMSv2). An operation is the forward or the backward of a layer here,
instead of a kernel. The graph consists of one micro-batch on each stage of a rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from math import inf
from typing import Any

from gems.errors import DoesNotFitError
from gems.memory.case import MemoryCase, PlanOutcome
from gems.memory.plan import Choice, MemoryPlan, Segment
from gems.memory.policies.lms.graph import Graph, Parameters, Tensor, Tuned, simulate, tune
from gems.memory.storages import Storage, saved_storages
from gems.schedule.action import Kind

RATIO = 0.9
RATIO_WITH_REPLICAS = 0.8
_TRIES = 16
_SHARE = 0.97  # largest factor of the room from one try to the next
_HELP = (
    "lms swaps saved tensors only: use memory=plan, more partitions, or a smaller image or"
    " micro-batch"
)


@dataclass(slots=True)
class _Holder:
    """Ranks with the same stages, their static bytes, and the bytes under which they are tuned."""

    ranks: list[int]
    layers: RankGraph
    static_bytes: int
    room_bytes: float
    tuned: Tuned = field(init=False)
    is_least: bool = False

    def tune(self, fixed: tuple[int | None, ...], is_last: bool = False) -> bool:
        """Find parameters, or fall back to those that swap everything synchronously.

        Return False if this fallback was already in use.
        """
        tuned = None if is_last else tune(self.layers.graph, self.room_bytes, *fixed)
        if tuned is None and self.is_least:
            return False
        if tuned is None:
            _, ahead, groupby, _ = fixed
            tuned = Tuned(Parameters(1, ahead or 1, groupby or 0, 3), True, 0)
            self.is_least = True
        self.tuned = tuned
        return True

    def needed_bytes(self, outcome: PlanOutcome) -> int:
        """Return the peak of the fullest of these ranks."""
        return max(outcome.peak_bytes[rank] for rank in self.ranks)


def lms(
    case: MemoryCase,
    swapout_threshold: int | None = None,
    swapin_ahead: int | None = None,
    swapin_groupby: int | None = None,
    sync_mode: int | None = None,
    ratio: float | None = None,
) -> MemoryPlan:
    """Return the plan for the given parameters; those that are None are tuned.

    Each rank is tuned under M = (limit - static bytes) x ratio, with a default ratio of 0.9, or 0.8
    with replicas (`gems.memory.policies.lms.graph`). This covers one micro-batch and no workspace.
    A rank that exceeds its limit is tuned again with less room; if the tuner finds nothing,
    everything is swapped synchronously. With a given threshold, or without a limit, ranks are tuned
    once.

    A layer is offloaded if most of the bytes that leave with it are swapped. Its memory is free one
    action after the posting of the copy, or at once if copies out are synchronous. It returns as
    many actions ahead as the operation that triggers it. As in the original, a tensor whose maker
    is nearer than this distance returns on demand.

    Raises:
        DoesNotFitError: no parameters fit one of the ranks.
    """
    share = ratio if ratio is not None else RATIO_WITH_REPLICAS if len(case.paces) > 1 else RATIO
    limit = case.limit_bytes
    fixed = (swapout_threshold, swapin_ahead, swapin_groupby, sync_mode)
    by_stages: dict[tuple[int, ...], list[int]] = {}
    for rank in range(case.schedule.num_ranks):
        stages = tuple(sorted({stage for _, stage in case.schedule.placement.stages_on(rank)}))
        by_stages.setdefault(stages, []).append(rank)
    holders = []
    for ranks in by_stages.values():
        static = max(sum(case.static_blocks(rank)) for rank in ranks)
        room = inf if limit is None else (limit - static) * share
        holders.append(_Holder(ranks, RankGraph(case, ranks[0]), static, room))
        holders[-1].tune(fixed)
    for tries in range(1, _TRIES + 1):
        plan = _plan(case, holders, {"ratio": share, "tries": tries})
        if limit is None or swapout_threshold is not None:
            return plan
        outcome = case.outcome(plan)
        if max(outcome.peak_bytes) <= limit:
            return plan
        for holder in holders if tries < _TRIES else ():
            needed = holder.needed_bytes(outcome)
            if needed > limit:
                # lower the room by the factor by which the ranks exceed the limit
                simulated = simulate(holder.layers.graph, holder.tuned.parameters, inf).peak_bytes
                fitting = (limit - holder.static_bytes) / max(1, needed - holder.static_bytes)
                holder.room_bytes = min(holder.room_bytes, simulated) * max(
                    0.0, min(_SHARE, fitting)
                )
                if not holder.tune(fixed, is_last=tries + 1 == _TRIES):
                    raise _too_large(case, holder, outcome)
    raise _too_large(case, max(holders, key=lambda holder: holder.needed_bytes(outcome)), outcome)


def _plan(case: MemoryCase, holders: list[_Holder], counters: Mapping[str, Any]) -> MemoryPlan:
    layers = {}
    ranks = []
    for holder in holders:
        if holder.tuned.is_needed:
            layers.update(holder.layers.segments(holder.tuned.parameters))
        ranks.append(
            {
                "ranks": holder.ranks,
                **holder.tuned.parameters._asdict(),
                "is_needed": holder.tuned.is_needed,
                "num_levels": holder.layers.graph.num_levels,
                "num_plays": holder.tuned.num_plays,
                "room_bytes": None if holder.room_bytes == inf else int(holder.room_bytes),
            }
        )
    plan = MemoryPlan.by_layer("lms", case.boundaries, layers)
    return replace(plan, counters={**counters, "tuned": ranks})


def _too_large(case: MemoryCase, holder: _Holder, outcome: PlanOutcome) -> DoesNotFitError:
    assert case.limit_bytes is not None
    rank = max(holder.ranks, key=lambda rank: outcome.peak_bytes[rank])
    return DoesNotFitError(
        f"rank {rank} under lms", outcome.peak_bytes[rank], case.limit_bytes, _HELP
    )


_Held = tuple[int, int]  # direction and stage
_Layer = tuple[_Held, int]


class RankGraph:
    """One micro-batch of each stage of a rank, in the order in which the rank first runs them.

    Operations are the forward and backward of layers. Tensors are saved storages, which are movable
    if large enough; unsaved tensors between layers; gradients; and the tensors that a stage
    receives.
    """

    def __init__(self, case: MemoryCase, rank: int) -> None:
        self._case = case
        self._forward: dict[_Layer, int] = {}
        self._backward: dict[_Layer, int] = {}
        self._tensors: list[Tensor] = []
        self._movable: dict[int, tuple[_Held, Storage]] = {}
        cuts = case.boundaries
        num_ops = 0
        first: dict[_Held, int | None] = {}
        for action in case.schedule.rank_schedules[rank]:
            key = (action.direction, action.stage)
            if (
                action.kind is Kind.W
                or first.setdefault(key, action.micro_batch) != action.micro_batch
            ):
                continue
            layers = range(*cuts[action.stage : action.stage + 2])
            is_forward = action.kind is Kind.F
            for layer in layers if is_forward else reversed(layers):
                (self._forward if is_forward else self._backward)[key, layer] = num_ops
                num_ops += 1
        for key in case.schedule.placement.stages_on(rank):
            self._add_stage(key, *cuts[key[1] : key[1] + 2])
        for op in range(1, num_ops):  # they run one after the other
            self._add(0, op - 1, [op])
        self.graph = Graph(num_ops, tuple(self._tensors))

    def segments(self, parameters: Parameters) -> dict[int, Segment]:
        """Return the segments of the layers most of whose bytes are swapped.

        A copy back is posted right after the operation that triggers it; `ahead` is the number of
        actions in between.
        """
        swaps = {swap.tensor: swap for swap in self.graph.swaps(parameters)}
        movable: dict[int, int] = {}
        swapped: dict[int, int] = {}
        ahead: dict[int, int] = {}
        for tensor, (key, storage) in self._movable.items():
            layer = storage.owner
            movable[layer] = movable.get(layer, 0) + storage.total_bytes
            for _, (reader, *_), trigger in swaps[tensor].returns if tensor in swaps else ():
                if reader == self._backward[key, layer]:
                    swapped[layer] = swapped.get(layer, 0) + storage.total_bytes
                    ahead[layer] = max(
                        ahead.get(layer, 0), 0 if trigger is None else reader - trigger - 1
                    )
        free_after = 0 if parameters.is_swapout_sync else 1
        return {
            layer: Segment(
                layer, layer + 1, Choice.OFFLOAD, free_after=free_after, ahead=ahead[layer]
            )
            for layer, num_bytes in swapped.items()
            if 2 * num_bytes > movable[layer]
        }

    def _add_stage(self, key: _Held, first: int, end: int) -> None:
        layers = self._case.profile.layers
        forward = self._forward
        backward = self._backward
        for storage in saved_storages(self._case.profile, first, end, self._case.least_bytes):
            readers = {*storage.savers, storage.last_use} - {storage.maker}
            consumers = {forward[key, layer] for layer in readers}
            consumers |= {backward[key, layer] for layer in storage.savers}
            if storage.is_movable:
                self._movable[len(self._tensors)] = (key, storage)
            self._add(
                storage.total_bytes, forward[key, storage.maker], consumers, storage.is_movable
            )
        for layer in range(first + 1, end):
            unsaved = layers[layer].unsaved_input_bytes
            for back, num_bytes in layers[layer].unsaved_from:
                unsaved -= num_bytes
                if layer - back >= first:
                    self._add(num_bytes, forward[key, layer - back], [forward[key, layer]])
            self._add(max(0, unsaved), forward[key, layer - 1], [forward[key, layer]])
            self._add(
                layers[layer - 1].output_grad_bytes,
                backward[key, layer],
                [backward[key, layer - 1]],
            )
        if first and forward[key, first]:
            input_bytes = self._case.profile.given_bytes(first)
            self._add(
                input_bytes, forward[key, first] - 1, [forward[key, first], backward[key, first]]
            )
        output_grad_bytes = layers[end - 1].output_grad_bytes
        self._add(output_grad_bytes, backward[key, end - 1] - 1, [backward[key, end - 1]])

    def _add(
        self, num_bytes: int, maker: int, consumers: Iterable[int], is_movable: bool = False
    ) -> None:
        self._tensors.append(Tensor(num_bytes, maker, tuple(sorted(consumers)), is_movable))
