"""Gradients of a rank in one flat buffer, reduced over all copies of its stages in one message."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from gems.engine.stage import StageKey
from gems.engine.transport.mpi import Transport


def running_statistics(module: nn.Module) -> list[Tensor]:
    """Return the floating-point buffers of a module (running means and variances), in a fixed order."""
    return [buffer for buffer in module.buffers() if buffer.is_floating_point()]


class Gradients:
    """The gradients of all stages on a rank, as views of one buffer, and their sum over all copies.

    The buffer is [gradients by stage | running statistics | gradients of second copies], and the first two parts are
    the message. Ranks r and P-1-r hold the same two stages, so one all-reduce serves both directions and all replicas
    (GEMS). Running statistics come back as their mean, so that all copies stay equal.
    """

    def __init__(
        self, modules: Mapping[StageKey, nn.Module], transport: Transport, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._transport = transport
        copies: dict[int, list[nn.Module]] = {}
        for _, stage in sorted(modules, key=lambda key: (key[1], key[0])):
            copies.setdefault(stage, [])
        for (_, stage), module in sorted(modules.items()):
            copies[stage].append(module)
        self._statistics = [
            [tensors for tensors in zip(*(running_statistics(copy) for copy in same), strict=True)]
            for same in copies.values()
        ]
        num_gradients = sum(parameter.numel() for same in copies.values() for parameter in same[0].parameters())
        num_statistics = sum(tensors[0].numel() for stage in self._statistics for tensors in stage)
        num_seconds = sum(p.numel() for same in copies.values() for copy in same[1:] for p in copy.parameters())
        self._flat = torch.zeros(num_gradients + num_statistics + num_seconds, dtype=dtype, device=device)
        self._message = self._flat[: num_gradients + num_statistics]
        self._packed = self._flat[num_gradients : num_gradients + num_statistics]
        # a second copy of a stage on the rank, the middle one of an odd number, is added before the message is sent
        self._seconds: list[tuple[Tensor, Tensor]] = []
        self._lay_out(copies, num_gradients + num_statistics)
        self._has_copies = transport.size > 1 or bool(self._seconds)
        self._staged: Tensor | None = None
        if device.type != "cpu" or dtype not in (torch.float32, torch.float64):
            sum_dtype = torch.float64 if dtype is torch.float64 else torch.float32
            self._staged = torch.empty(self._message.shape, dtype=sum_dtype, pin_memory=device.type != "cpu")

    @property
    def num_bytes(self) -> int:
        """Size of one rank's message in bytes."""
        return self._message.numel() * self._message.element_size()

    def zero(self) -> None:
        """Clear all gradients, for the next step."""
        self._flat.zero_()

    def reduce(self) -> None:
        """Sum the gradients and average the running statistics over all copies; collective.

        Raises:
            StalledError: a peer did not join within the hang timeout.
        """
        if not self._has_copies:
            return
        for first, second in self._seconds:
            first += second
        self._pack()
        if self._transport.size > 1:
            self._sum()
        self._unpack()
        for first, second in self._seconds:
            second.copy_(first)

    def _sum(self) -> None:
        if self._staged is None:
            self._transport.sum_in_place(self._message)
            return
        self._staged.copy_(self._message)
        self._transport.sum_in_place(self._staged)
        self._message.copy_(self._staged)

    def _lay_out(self, copies: Mapping[int, list[nn.Module]], end_of_message: int) -> None:
        at, at_second = 0, end_of_message
        for same in copies.values():
            size = _set_views(same[0].parameters(), self._flat, at)
            for copy in same[1:]:
                _set_views(copy.parameters(), self._flat, at_second)
                self._seconds.append((self._flat[at : at + size], self._flat[at_second : at_second + size]))
                at_second += size
            at += size

    def _pack(self) -> None:
        with torch.no_grad():
            means = [
                (sum(tensors) / (len(tensors) * self._transport.size)).reshape(-1)
                for stage in self._statistics
                for tensors in stage
            ]
            if means:
                torch.cat(means, out=self._packed)

    def _unpack(self) -> None:
        at = 0
        with torch.no_grad():
            for stage in self._statistics:
                for tensors in stage:
                    size = tensors[0].numel()
                    for tensor in tensors:
                        tensor.copy_(self._packed[at : at + size].view_as(tensor))
                    at += size


def _set_views(parameters: Iterable[nn.Parameter], flat: Tensor, start: int) -> int:
    """Make the gradients of `parameters` views of `flat` from `start` on, and return their number of elements."""
    at = start
    for parameter in parameters:
        parameter.grad = flat[at : at + parameter.numel()].view_as(parameter)
        at += parameter.numel()
    return at - start
