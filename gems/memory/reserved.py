"""What torch's allocator reserves on a rank's GPU: its requests, served by a model of the allocator."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from gems.memory.caching_allocator import CachingAllocator
from gems.memory.in_flight import StageKey
from gems.memory.model import Optimizer, static_blocks
from gems.profile import LayerProfile, ModelProfile
from gems.schedule.action import Action, Kind
from gems.schedule.schedule import Schedule

STEPS = 2  # the second finds the memory as the first has left it

Blocks = list[Any]


@dataclass(slots=True)
class _Kept:
    """The blocks of one micro-batch in one stage, by layer."""

    by_layer: list[Blocks]
    given: Blocks = field(default_factory=list)


def reserved_bytes(
    profile: ModelProfile, schedule: Schedule, rank: int, boundaries: Sequence[int], optimizer: Optimizer
) -> int:
    """Return the bytes that the allocator of a rank has taken from the device after two steps.

    A layer's requests are those that its profile tells apart: what it keeps, what others keep of it, its output, and
    its workspace; so fragmentation is seen between layers and micro-batches and not within a layer.
    """
    play = _Play(profile, schedule, rank, boundaries, optimizer)
    for _ in range(STEPS):
        for action in schedule.rows[rank]:
            play.act(action)
    return play.allocator.reserved_bytes


class _Play:
    def __init__(
        self, profile: ModelProfile, schedule: Schedule, rank: int, boundaries: Sequence[int], optimizer: Optimizer
    ) -> None:
        self.allocator = CachingAllocator()
        self._layers = {
            held: profile.layers[boundaries[held[1]] : boundaries[held[1] + 1]]
            for held in schedule.placement.stages_on(rank)
        }
        self._given = {held: profile.given_bytes(boundaries[held[1]]) for held in self._layers}
        self._kept: dict[tuple[StageKey, int | None], _Kept] = {}
        self._waiting: dict[tuple[StageKey, int | None, str], Any] = {}
        for num_bytes in static_blocks(profile, schedule, rank, boundaries, optimizer):
            self.allocator.take(num_bytes)

    def act(self, action: Action) -> None:
        held, kind = (action.direction, action.stage), action.kind
        if kind in (Kind.RECV_F, Kind.RECV_B):
            num_bytes = self._given[held] if kind is Kind.RECV_F else self._layers[held][-1].output_grad_bytes
            self._waiting[held, action.micro_batch, kind.value] = self.allocator.take(num_bytes)
        elif kind is Kind.F:
            self._forward(action, held)
        elif kind in (Kind.B, Kind.I):
            self._backward(action, held)

    def _forward(self, action: Action, held: StageKey) -> None:
        take, give = self.allocator.take, self.allocator.give
        kept = _Kept([])
        arrived = self._waiting.pop((held, action.micro_batch, Kind.RECV_F.value), None)
        if arrived is not None:
            kept.given.append(arrived)
        passing: Blocks = []
        for layer in self._layers[held]:
            later = sum(size for _, size in layer.saved_later)
            mine = [take(size) for size in (layer.stash_bytes, later) if size]
            extra = layer.forward_peak_bytes - layer.stash_bytes - later
            handed = [take(extra)] if extra > 0 else []
            for block in passing:
                give(block)
            passing = handed
            kept.by_layer.append(mine)
        for block in passing:
            give(block)
        self._kept[held, action.micro_batch] = kept

    def _backward(self, action: Action, held: StageKey) -> None:
        take, give = self.allocator.take, self.allocator.give
        kept = self._kept.pop((held, action.micro_batch))
        arrived = self._waiting.pop((held, action.micro_batch, Kind.RECV_B.value), None)
        passing: Blocks = [] if arrived is None else [arrived]
        pairs = list(zip(self._layers[held], kept.by_layer, strict=True))
        for place, (layer, blocks) in reversed(list(enumerate(pairs))):
            made = [take(size) for size in _backward_requests(layer) if size > 0]
            for block in (*blocks, *passing, *made[1:]):
                give(block)
            passing = made[:1] if place else []
            if not place:
                for block in made[:1]:
                    give(block)
        for block in kept.given:
            give(block)


def _backward_requests(layer: LayerProfile) -> tuple[int, int]:
    """Return the gradient that a layer returns and the rest of what its backward needs, in bytes."""
    made = max(0, layer.backward_peak_bytes - layer.output_grad_bytes)
    given_back = min(made, layer.output_grad_bytes)
    return max(1, given_back), made - given_back
