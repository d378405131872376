"""The whole model at once: its inputs, and its peak on one device by torch's own tracker."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gems.config.schema import DataConfig
from gems.models.build import as_tuple, input_spec
from gems.profile.profilers.layer_run import give_gradients, training_loss


def given_tensors(data: DataConfig, micro_batch_size: int, dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    """Return what the model takes of one micro-batch, without its values."""
    spec = input_spec(data, micro_batch_size, dtype)
    return [torch.empty(spec.shape, dtype=spec.dtype, device=device)]


def tracked_peak_bytes(modules: Sequence[nn.Module], given: Sequence[Tensor]) -> int:
    """Return the peak of one training step of the unsplit model: parameters, gradients, activations, images.

    Of `MemTracker` the whole is taken; the optimizer's state is not in it, nor what kernels use within themselves.
    """
    from torch.distributed._tools.mem_tracker import MemTracker  # doubles the time that a rank takes to start

    class WholePeak(MemTracker):  # type: ignore[no-untyped-call]
        """Keep the peak of the whole only: those of all modules take time that grows with the square of the depth."""

        peak_bytes = 0

        def _update_peak_stats(self, peak_state: Any) -> None:
            for snapshot in self.get_tracker_snapshot("current").values():
                self.peak_bytes = max(self.peak_bytes, int(snapshot["Total"]))

    tracker = WholePeak()
    net = nn.ModuleList(modules)
    give_gradients(net)
    tracker.track_external(net, *given)
    with tracker:
        values: tuple[Tensor, ...] = tuple(given)
        for module in net:
            values = as_tuple(module(*values))
        loss = training_loss(values[0])
        del values
        torch.autograd.backward([loss])
    return tracker.peak_bytes
