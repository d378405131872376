"""Track whether a convolution is running: its backward reads what autograd saves meanwhile."""

from __future__ import annotations

from typing import Any

from torch import nn


class ConvolutionWatch:
    """Watches the convolution layers among some modules, from its making until it is closed.

    A convolution called as a function is not seen.
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
        """Watch no longer."""
        for handle in self._handles:
            handle.remove()

    def _begin(self, module: nn.Module, given: Any) -> None:
        self._num_running += 1

    def _end(self, module: nn.Module, given: Any, made: Any) -> None:
        self._num_running -= 1
