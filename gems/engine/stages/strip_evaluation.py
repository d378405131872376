"""A stage that evaluates images strip by strip."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gems.autograd.storages import storage_addresses
from gems.engine.stages.boundary_tensors import BoundaryTensors
from gems.engine.stages.streamed import InStrips
from gems.streaming.strip_stage import StripStage


class EvaluationInStrips(InStrips):
    """Runs forward of strips in order, image after image, and keeps what the next strip needs.

    The last stage gives the whole output with the last strip of an image. It uses the weights that
    the modules of the form have at the time.
    """

    def __init__(
        self,
        modules: nn.ModuleList,
        is_first: bool,
        poll: Callable[[], None],
        form: StripStage,
        takes: BoundaryTensors,
        device: torch.device,
        is_last: bool,
    ) -> None:
        """Take the modules' streaming form in evaluation and the description of its inputs."""
        super().__init__(modules, is_first, poll, form, takes, device)
        self._is_last = is_last
        self._strip = 0
        self._carries: tuple[Tensor, ...] = ()
        self._outputs: list[tuple[Tensor | None, ...]] = []  # on the last stage, by strip

    def infer(self, inputs: Sequence[Tensor]) -> Any:
        """Run the next strip and return its outputs; nothing holds the inputs afterwards."""
        strip = self._strip
        taken = storage_addresses(inputs)
        with torch.no_grad():
            given = self.takes.given(self._rows_of(strip, inputs), strip, self.device)
            outputs, carries = self.form.forward(strip, given, self._carries)
            self._carries = tuple(_alone(tensor, taken) for tensor in carries)
        self.poll()
        is_end = strip == self.form.strips - 1
        self._strip = 0 if is_end else strip + 1
        if not self._is_last:
            return self._given_on(strip, outputs)
        self._outputs.append(
            tuple(None if tensor is None else _alone(tensor, taken) for tensor in outputs)
        )
        if not is_end:
            return None
        found = self._outputs
        self._outputs = []
        return self.form.joined(found)

    def reset(self) -> None:
        """Drop the image under way after a failed step."""
        super().reset()
        self._strip = 0
        self._carries = ()
        self._outputs = []


def _alone(tensor: Tensor, taken: set[int]) -> Tensor:
    """Return a tensor to keep, copied if it is part of more memory or of inputs that are reused."""
    storage = tensor.untyped_storage()
    return (
        tensor.clone()
        if storage.data_ptr() in taken or storage.nbytes() > tensor.nbytes
        else tensor
    )
