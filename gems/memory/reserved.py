"""The bytes that torch's allocator reserves on a rank's GPU, by a model of that allocator."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from gems.memory.model import Optimizer, static_blocks
from gems.profile import LayerProfile, ModelProfile
from gems.schedule.action import Kind
from gems.schedule.schedule import Schedule

STEPS = 2  # the second step starts with the fragmentation of the first
BLOCK_BYTES = 512  # granularity of requests
SMALL_BYTES = 1 << 20  # largest request that is served from small segments
SMALL_SEGMENT_BYTES = 2 << 20
LARGE_SEGMENT_BYTES = 20 << 20  # requests below OWN_SEGMENT_BYTES share segments of this size
OWN_SEGMENT_BYTES = 10 << 20
OWN_SEGMENT_STEP_BYTES = 2 << 20  # granularity of the segments of larger requests


@dataclass(slots=True, eq=False)
class Block:
    """A piece of a segment of `segment_bytes`, with its neighbours `before` and `after`."""

    num_bytes: int
    segment_bytes: int
    is_small: bool
    is_free: bool = False
    before: Block | None = None
    after: Block | None = None


class CachingAllocator:
    """A simulation of torch's CUDA caching allocator with its default settings.

    It has two pools with best fit; blocks are split and merged with free neighbours, and segments
    are never returned. `reserved_bytes` is the memory taken from the device, and `allocated_bytes`
    the memory in use, rounded as the allocator counts it. Source: torch.cuda memory management
    notes.
    """

    def __init__(self) -> None:
        self.reserved_bytes = 0
        self.allocated_bytes = 0
        self._free: dict[bool, list[tuple[int, int, Block]]] = {True: [], False: []}
        self._number = 0

    def take(self, num_bytes: int) -> Block:
        """Serve a request; free the block with `give`."""
        size = max(BLOCK_BYTES, _rounded(num_bytes, BLOCK_BYTES))
        is_small = size <= SMALL_BYTES
        block = self._best(size, is_small) or self._segment(size, is_small)
        rest_bytes = block.num_bytes - size
        if rest_bytes >= BLOCK_BYTES if is_small else rest_bytes > SMALL_BYTES:
            rest = Block(rest_bytes, block.segment_bytes, is_small, before=block, after=block.after)
            if block.after is not None:
                block.after.before = rest
            block.num_bytes = size
            block.after = rest
            self._keep(rest)
        block.is_free = False
        self.allocated_bytes += block.num_bytes
        return block

    def give(self, block: Block) -> None:
        """Free a block; it joins free neighbours of its segment."""
        self.allocated_bytes -= block.num_bytes
        for other in (block.before, block.after):
            if other is not None and other.is_free:
                self._forget(other)
                block.num_bytes += other.num_bytes
                if other is block.before:
                    block.before = other.before
                    if block.before is not None:
                        block.before.after = block
                else:
                    block.after = other.after
                    if block.after is not None:
                        block.after.before = block
        self._keep(block)

    def give_all(self, blocks: Iterable[Block]) -> None:
        """Free blocks, one after the other."""
        for block in blocks:
            self.give(block)

    def _best(self, size: int, is_small: bool) -> Block | None:
        free = self._free[is_small]
        place = bisect_left(free, (size, -1))
        if place == len(free):
            return None
        return free.pop(place)[2]

    def _segment(self, size: int, is_small: bool) -> Block:
        if is_small:
            num_bytes = SMALL_SEGMENT_BYTES
        elif size < OWN_SEGMENT_BYTES:
            num_bytes = LARGE_SEGMENT_BYTES
        else:
            num_bytes = _rounded(size, OWN_SEGMENT_STEP_BYTES)
        self.reserved_bytes += num_bytes
        return Block(num_bytes, num_bytes, is_small)

    def _keep(self, block: Block) -> None:
        block.is_free = True
        self._number += 1
        insort(self._free[block.is_small], (block.num_bytes, self._number, block))

    def _forget(self, block: Block) -> None:
        free = self._free[block.is_small]
        place = bisect_left(free, (block.num_bytes, -1))
        while free[place][2] is not block:
            place += 1
        del free[place]


def _rounded(num_bytes: int, step: int) -> int:
    return -(-num_bytes // step) * step


def reserved_bytes(
    profile: ModelProfile,
    schedule: Schedule,
    rank: int,
    boundaries: Sequence[int],
    optimizer: Optimizer,
) -> int:
    """Return the bytes that the allocator of a rank has taken from the device after two steps.

    A layer's requests are its own stash, its tensors that later layers save, its output and its
    workspace. So fragmentation is simulated between layers and micro-batches, not within a layer.
    """
    allocator = CachingAllocator()
    for num_bytes in static_blocks(profile, schedule, rank, boundaries, optimizer):
        allocator.take(num_bytes)
    stages = {stage for _, stage in schedule.placement.stages_on(rank)}
    layers = {stage: profile.layers[boundaries[stage] : boundaries[stage + 1]] for stage in stages}
    arrived: dict[object, list[Block]] = {}
    stashes: dict[object, tuple[list[Block], list[list[Block]]]] = {}
    for kind, stage, micro_batch, direction, _ in schedule.rank_schedules[rank] * STEPS:
        place = (direction, stage, micro_batch)
        if kind is Kind.RECV_F:
            arrived[kind, place] = [allocator.take(profile.given_bytes(boundaries[stage]))]
        elif kind is Kind.RECV_B:
            arrived[kind, place] = [allocator.take(layers[stage][-1].output_grad_bytes)]
        elif kind is Kind.F:
            stashes[place] = (
                arrived.pop((Kind.RECV_F, place), []),
                _forward(allocator, layers[stage]),
            )
        elif kind in (Kind.B, Kind.I):
            inputs, by_layer = stashes.pop(place)
            _backward(allocator, layers[stage], by_layer, arrived.pop((Kind.RECV_B, place), []))
            allocator.give_all(inputs)
    return allocator.reserved_bytes


def _forward(allocator: CachingAllocator, layers: Sequence[LayerProfile]) -> list[list[Block]]:
    """Run the forward of a stage and return the blocks that it keeps, by layer."""
    stashes = []
    passing: list[Block] = []
    for layer in layers:
        later = sum(size for _, size in layer.saved_later)
        stashes.append([allocator.take(size) for size in (layer.stash_bytes, later) if size])
        extra = layer.forward_peak_bytes - layer.stash_bytes - later
        outputs = [allocator.take(extra)] if extra > 0 else []
        allocator.give_all(passing)
        passing = outputs
    allocator.give_all(passing)
    return stashes


def _backward(
    allocator: CachingAllocator,
    layers: Sequence[LayerProfile],
    stashes: list[list[Block]],
    passing: list[Block],
) -> None:
    for layer, blocks in zip(reversed(layers), reversed(stashes), strict=True):
        gradient, rest = backward_requests(layer)
        blocks_made = [allocator.take(size) for size in (max(1, gradient), rest) if size > 0]
        allocator.give_all([*blocks, *passing, *blocks_made[1:]])
        passing = blocks_made[:1]
    allocator.give_all(passing)


def backward_requests(layer: LayerProfile) -> tuple[int, int]:
    """Return the bytes of a layer's input gradient, and the rest of its backward's needs."""
    needed = max(0, layer.backward_peak_bytes - layer.output_grad_bytes)
    gradient = min(needed, layer.output_grad_bytes)
    return gradient, needed - gradient
