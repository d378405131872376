"""Track whether a convolution is running; its backward needs the tensors saved in that time."""

from __future__ import annotations

from typing import Any

from torch import nn


class ConvolutionWatch:
    """Hooks on the convolution layers of some modules, until `close`.

    Convolutions that are called as functions are not seen.
    """

    def __init__(self, *roots: nn.Module) -> None:
        self._num_running = 0
        convolutions = {
            module: None
            for root in roots
            for module in root.modules()
            if isinstance(module, nn.modules.conv._ConvNd)
        }
        self._handles = [
            handle
            for module in convolutions
            for handle in (
                module.register_forward_pre_hook(self._begin),
                module.register_forward_hook(self._end, always_call=True),
            )
        ]

    @property
    def is_running(self) -> bool:
        """Whether the forward of a convolution is running."""
        return self._num_running > 0

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()

    def _begin(self, module: nn.Module, inputs: Any) -> None:
        self._num_running += 1

    def _end(self, module: nn.Module, inputs: Any, output: Any) -> None:
        self._num_running -= 1
