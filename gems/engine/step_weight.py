"""The divisor that turns the summed losses of a step into their mean."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from gems.losses.summed import SummedLoss

if TYPE_CHECKING:
    from gems.engine.transport.mpi import Transport  # this import starts MPI


class StepWeight:
    """The weight of all labels of a step, over all ranks that read labels."""

    def __init__(
        self, loss: SummedLoss, global_batch: int, transport: Transport | None = None
    ) -> None:
        self._loss = loss
        self._global_batch = global_batch
        self._transport = transport
        self.mine = 0.0  # weight of this rank's own labels
        self._constant: dict[tuple[torch.Size, ...], float] = {}

    def __call__(
        self, labels: Mapping[int, Tensor], windows: Callable[[], Iterable[Tensor]] | None = None
    ) -> float:
        """Return the divisor for the sums of a step, given this rank's labels by micro-batch.

        If `windows` is given, it gives the labels part by part, one at a time.
        If the divisor depends on the labels, the call is collective over the ranks that read
        labels. Other ranks get 1.
        """
        self.mine = 0.0
        if not labels:
            return 1.0
        self.mine = self._weigh(labels.values()) if windows is None else self._sum(windows())
        if self._loss.is_sum:
            return 1.0
        if self._loss.is_constant:
            return self.mine * self._global_batch / sum(map(len, labels.values()))
        total = np.array([self.mine])
        if self._transport is not None and self._transport.size > 1:
            self._transport.sum_in_place(total)
        return float(total[0])

    def _weigh(self, labels: Collection[Tensor]) -> float:
        """Return the weight of labels; the host waits for it unless their shapes alone tell it."""
        shapes = tuple(micro_batch_labels.shape for micro_batch_labels in labels)
        if shapes in self._constant:
            return self._constant[shapes]
        weight = self._sum(labels)
        if self._loss.is_constant:
            self._constant[shapes] = weight
        return weight

    def _sum(self, labels: Iterable[Tensor]) -> float:
        return float(torch.stack([self._loss.weight(part) for part in labels]).sum())
