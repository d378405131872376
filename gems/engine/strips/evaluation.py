"""A stage that evaluates images strip by strip."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gems.autograd.storages import storage_addresses
from gems.autograd.strips.stage import StripStage
from gems.engine.stage import Stage
from gems.engine.strips.passed import Passed


class EvaluationInStrips(Stage):
    """Runs forward of strips in their order, one image after the other, and keeps what the next strip needs.

    It takes and gives tensors as `StageInStrips`; the last stage gives the whole output with the last strip of an
    image. Weights are those that the modules of the form have at the time.
    """

    def __init__(
        self,
        modules: nn.ModuleList,
        is_first: bool,
        poll: Callable[[], None],
        form: StripStage,
        takes: Passed,
        device: torch.device,
        is_last: bool,
    ) -> None:
        """Take the streaming form of the modules in evaluation and what it takes."""
        super().__init__(modules, is_first, poll)
        self._form, self._takes, self._gives = form, takes, Passed(form.outputs, form.strips)
        self._is_last, self._device = is_last, device
        self._strip = 0
        self._carries: tuple[Tensor, ...] = ()
        self._outputs: list[tuple[Tensor | None, ...]] = []  # of the last stage, by strip

    def infer(self, inputs: Sequence[Tensor]) -> Any:
        """Run the next strip, and return what it gives; nothing holds the inputs afterwards."""
        strip, taken = self._strip, storage_addresses(inputs)
        if self.is_first:
            inputs = tuple(self._takes.rows_of(tensor, strip) for tensor in inputs)
        with torch.no_grad():
            given = self._takes.given(inputs, strip, self._device)
            outputs, carries = self._form.forward(strip, given, self._carries)
            self._carries = tuple(_alone(tensor, taken) for tensor in carries)
        self.poll()
        is_end = strip == self._form.strips - 1
        self._strip = 0 if is_end else strip + 1
        if not self._is_last:
            return tuple(each for place in self._gives.places(strip) if (each := outputs[place]) is not None)
        self._outputs.append(tuple(None if tensor is None else _alone(tensor, taken) for tensor in outputs))
        return self._whole() if is_end else None

    def reset(self) -> None:
        """Drop the image that is under way, after a failed step."""
        super().reset()
        self._strip, self._carries, self._outputs = 0, (), []

    def _whole(self) -> Any:
        """Return the outputs of all strips as the model gives them."""
        found, self._outputs = self._outputs, []
        whole: list[Tensor] = []
        for place, boundary in enumerate(self._form.outputs):
            parts = [each for outputs in found if (each := outputs[place]) is not None]
            whole.append(parts[-1] if boundary.ends is None else torch.cat(parts, boundary.dim))
        return self._form.structured(whole)


def _alone(tensor: Tensor, taken: set[int]) -> Tensor:
    """Return a tensor that is kept, copied if it is a part of more memory, or of inputs, whose memory is reused."""
    storage = tensor.untyped_storage()
    return tensor.clone() if storage.data_ptr() in taken or storage.nbytes() > tensor.nbytes else tensor
