"""Gradient clipping by the norm over all stages of a pipeline (train.max_grad_norm)."""

from __future__ import annotations

import math

import numpy as np

from gems.engine.transport.mpi import Transport

FLOOR = 1e-6  # added to the norm, as in torch.nn.utils.clip_grad_norm_


class GlobalNorm:
    """The norm over all stages of a pipeline, as a sum that has the same bits on all ranks.

    Each entry of the message comes from one rank: the squared norms of the first replica by rank,
    then the number of ranks with a loss that is not finite.
    """

    def __init__(self, control: Transport, partitions: int) -> None:
        self._control = control
        self._message = np.zeros(partitions + 1)

    @property
    def counts_mine(self) -> bool:
        """Return whether this rank is of the first replica, whose norms are summed."""
        return self._control.rank < len(self._message) - 1

    def agree(self, squared_norm: float, is_lost: bool) -> tuple[float, bool]:
        """Return the norm over all stages, and whether a loss of any rank is lost; collective."""
        self._message[:] = 0
        if self.counts_mine:
            self._message[self._control.rank] = squared_norm
        self._message[-1] = is_lost
        self._control.sum_in_place(self._message)
        return math.sqrt(self._message[:-1].sum()), bool(self._message[-1])


def clip_factor(norm: float, max_norm: float) -> float:
    """Return the factor that scales gradients of this norm to at most `max_norm`."""
    return min(1.0, max_norm / (norm + FLOOR))
