"""The memory of messages that torchgpipe receives on copy streams.

A stream of torch's caching allocator has a pool of its own, and torchgpipe asks for one copy stream
for each micro-batch on each device, of the 32 that torch has (c10/cuda/CUDAStream). So what a
device receives, from the stage before and as gradients from the stage after, takes whole segments
in each pool: 20 MiB for what is below 10 MiB. A message that a compute stream receives would share
the segments of everything else.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from gems.memory.reserved import CachingAllocator
from gems.profile import ModelProfile

STREAMS = 32  # of a device


def stages_of(boundaries: Sequence[int]) -> list[int]:
    """Return the stage of each layer."""
    return [
        stage for stage, (first, end) in enumerate(pairwise(boundaries)) for _ in range(first, end)
    ]


def received_bytes(
    profile: ModelProfile, boundaries: Sequence[int], has_portals: bool, micro_batches: int
) -> int:
    """Return the bytes of the segments of all copy streams of all devices.

    With portals a tensor goes straight to the stage of its last reader, else through all between.
    A stream holds the inputs of all its micro-batches, and the gradients of one.
    """
    stage_of = stages_of(boundaries)
    streams = min(STREAMS, micro_batches)
    together = -(-micro_batches // streams)
    pools = [CachingAllocator() for _ in boundaries[1:]]
    for index, layer in enumerate(profile.layers):
        for storage in (*layer.saved, *layer.passing):
            maker, reader = stage_of[index], stage_of[index + storage.last_use]
            if maker == reader:
                continue
            for stage in (reader,) if has_portals else range(maker + 1, reader + 1):
                for _ in range(together * storage.count):
                    pools[stage].take(storage.num_bytes)
            for stage in (maker,) if has_portals else range(maker, reader):
                for _ in range(storage.count):
                    pools[stage].take(storage.num_bytes)
    return streams * sum(pool.reserved_bytes for pool in pools)
