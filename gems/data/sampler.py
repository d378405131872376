"""Which image is the n-th of a run: the same answer on every rank, however ranks are cut."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from gems.data.rng import generator


def batch_indices(num_images: int, seed: int, step: int, global_batch: int) -> NDArray[np.int64]:
    """Return the (index, draw) pairs of optimizer step `step`, an array of shape (global_batch, 2).

    The run is one sequence of epochs, each a permutation of all images drawn from (seed, epoch); a step takes
    the next `global_batch` of it and may straddle epochs. `draw` is the epoch, which seeds the augmentation.
    Raises ValueError for counts below 1 or a negative step.
    """
    if num_images < 1 or global_batch < 1 or step < 0:
        raise ValueError(f"num_images={num_images}, global_batch={global_batch}, step={step}")
    place = np.arange(step * global_batch, (step + 1) * global_batch, dtype=np.int64)
    epoch, offset = np.divmod(place, num_images)
    index = np.empty(global_batch, dtype=np.int64)
    for number in np.unique(epoch):
        here = epoch == number
        index[here] = _permutation(num_images, seed, int(number))[offset[here]]
    return np.stack([index, epoch], axis=1)


def micro_batch_slice(replica: int, micro_batch: int, num_micro_batches: int, micro_batch_size: int) -> slice:
    """Return where a micro-batch of a replica lies in the global batch.

    A global batch is replicas x num_micro_batches x micro_batch_size samples in that order;
    `num_micro_batches` counts those of one replica and step, over both directions.
    """
    if not 0 <= micro_batch < num_micro_batches:
        raise ValueError(f"micro-batch {micro_batch} of {num_micro_batches}")
    start = (replica * num_micro_batches + micro_batch) * micro_batch_size
    return slice(start, start + micro_batch_size)


@lru_cache(maxsize=4)
def _permutation(num_images: int, seed: int, epoch: int) -> NDArray[np.int64]:
    order = generator(seed, "epoch", epoch).permutation(num_images)
    order.flags.writeable = False
    return order
