"""The graph of a rank's layers that large model support by distance tunes, and what its swaps mean for the layers."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

from gems.memory.case import MemoryCase
from gems.memory.layer_storages import Storage, saved_storages
from gems.memory.plan import Choice, Segment
from gems.memory.policies.lms.graph import Graph, Return, Tensor
from gems.memory.policies.lms.tuner import Parameters
from gems.schedule.action import Kind
from gems.schedule.schedule import Schedule

_Held = tuple[int, int]  # direction and stage
_Layer = tuple[_Held, int]


class RankGraph:
    """One micro-batch of each stage of a rank, in the order in which the rank's list first runs them.

    Operations are a stage's layers, forward from the first and backward from the last. Tensors are the storages that they
    save, of which a copy may take those that are large enough; what a layer hands to the next that nobody saves; the
    gradients on their way back; and what a stage is given, forward and backward.
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
        """Return the segments of the layers of which most of the bytes that leave with them are swapped for their backward.

        A copy back is posted right behind the operation that sets it off: so many actions ahead as run in between.
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
