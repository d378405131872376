"""Gradients of a rank in one flat buffer, reduced over all copies of its stages."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from gems.engine.optimization.parameter_groups import trained
from gems.engine.optimization.staged_sum import StagedSum, needs_staging
from gems.engine.stage import StageKey
from gems.engine.transport.links import Sums

NORM_ELEMENTS = 2**22  # of which a copy in float64 is made at a time


def running_statistics(module: nn.Module) -> list[Tensor]:
    """Return the floating-point buffers of a module (running means and variances), in a fixed order."""
    return [buffer for buffer in module.buffers() if buffer.is_floating_point()]


class Gradients:
    """The gradients of all stages on a rank, as views of one buffer, and their sum over all copies.

    Frozen parameters have none.

    The buffer is [gradients by stage | running statistics | gradients of second copies], and the first two parts are
    the message. Ranks r and P-1-r hold the same two stages, so one all-reduce serves both directions and all replicas
    (GEMS). Running statistics come back as their mean, so that all copies stay equal.
    """

    def __init__(
        self, modules: Mapping[StageKey, nn.Module], transport: Sums, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._transport = transport
        stages = sorted({stage for _, stage in modules})
        copies = [[modules[key] for key in sorted(modules) if key[1] == stage] for stage in stages]
        # each with those of the other copies on the rank
        self._statistics = [
            tensors for same in copies for tensors in zip(*(running_statistics(copy) for copy in same), strict=True)
        ]
        num_gradients = sum(p.numel() for same in copies for p in trained(same[0].parameters()))
        end_of_message = num_gradients + sum(tensors[0].numel() for tensors in self._statistics)
        num_seconds = sum(p.numel() for same in copies for copy in same[1:] for p in trained(copy.parameters()))
        self._flat = torch.zeros(end_of_message + num_seconds, dtype=dtype, device=device)
        self._message, self._packed = self._flat[:end_of_message], self._flat[num_gradients:end_of_message]
        # a second copy of a stage on the rank, the middle one of an odd number, is added before the message is sent
        self._seconds: list[tuple[Tensor, Tensor]] = []
        self._of_stage: dict[int, Tensor] = {}
        at, at_second = 0, end_of_message
        for stage, same in zip(stages, copies, strict=True):
            size = _set_views(trained(same[0].parameters()), self._flat, at)
            for copy in same[1:]:
                _set_views(trained(copy.parameters()), self._flat, at_second)
                self._seconds.append((self._flat[at : at + size], self._flat[at_second : at_second + size]))
                at_second += size
            self._of_stage[stage] = self._flat[at : at + size]
            at += size
        self._has_copies = transport.size > 1 or bool(self._seconds)
        self._staged = StagedSum(self._message, transport) if needs_staging(self._message, transport) else None

    @property
    def num_bytes(self) -> int:
        """Size of one rank's message in bytes."""
        return self._message.numel() * self._message.element_size()

    def zero(self) -> None:
        """Clear all gradients, for the next step."""
        self._flat.zero_()

    def squared_norm(self, stages: Iterable[int]) -> float:
        """Return the sum of the squared gradients of some stages on this rank, in float64 and in a fixed order."""
        parts = (part for stage in stages for part in torch.split(self._of_stage[stage], NORM_ELEMENTS))
        squares = [part.double().square().sum() for part in parts]
        return float(torch.stack(squares).sum()) if squares else 0.0

    def scale(self, factor: float) -> None:
        """Multiply all gradients."""
        if factor != 1:
            self._flat.mul_(factor)

    def reduce(self) -> None:
        """Sum the gradients and average the running statistics over all copies; collective."""
        if not self._has_copies:
            return
        for first, second in self._seconds:
            first += second
        with torch.no_grad():
            num_ranks = self._transport.size
            means = [(sum(tensors) / (len(tensors) * num_ranks)).reshape(-1) for tensors in self._statistics]
            if means:
                torch.cat(means, out=self._packed)
        if num_ranks > 1 and self._staged is None:
            self._transport.sum_in_place(self._message)
        elif num_ranks > 1 and self._staged is not None:
            self._staged.run()
        at = 0
        with torch.no_grad():
            for tensors in self._statistics:
                size = tensors[0].numel()
                for tensor in tensors:
                    tensor.copy_(self._packed[at : at + size].view_as(tensor))
                at += size
        for first, second in self._seconds:
            second.copy_(first)


def _set_views(parameters: Iterable[nn.Parameter], flat: Tensor, start: int) -> int:
    """Make the gradients of `parameters` views of `flat` from `start` on, and return their number of elements.

    Each has the order of memory of its parameter, in which autograd makes what it adds.
    """
    at = start
    for parameter in parameters:
        part = flat[at : at + parameter.numel()]
        is_last = parameter.dim() == 4 and parameter.is_contiguous(memory_format=torch.channels_last)
        parameter.grad = part.as_strided(parameter.size(), parameter.stride()) if is_last else part.view_as(parameter)
        at += parameter.numel()
    return at - start
