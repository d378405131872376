"""A stage whose layers torch.compile compiles."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from gems.autograd.compiled import check_compiler, compile_layers
from gems.engine.stage import Loss, Tensors
from gems.engine.stages.whole import WholeStage


class CompiledStage(WholeStage):
    """A stage whose layers torch.compile compiles on its first forward; its backward is whole."""

    def __init__(
        self,
        modules: nn.ModuleList,
        is_first: bool,
        poll: Callable[[], None],
        device: torch.device,
        is_drawing: Callable[[nn.Module], bool],
    ) -> None:
        """Take also a function that tells which layers draw random numbers, and so stay uncompiled.

        Raises:
            ConfigError: This machine cannot compile for the device.
        """
        super().__init__(modules, is_first, poll)
        check_compiler(device)
        self._is_drawing = is_drawing

    def forward(
        self,
        index: int,
        inputs: Sequence[Tensor],
        loss: Loss | None = None,
        is_split: bool = False,
        is_run_again: bool = False,
    ) -> Tensors:
        """Run the layers like `Stage.forward`.

        The first call compiles them, so that the memory that they then keep is measured.
        """
        assert not is_split, "a layer's backward is compiled as a whole"
        if self.stash_bytes is None:
            compile_layers(list(self.modules), inputs, self._is_drawing)
        return super().forward(index, inputs, loss)
