"""Gradients of a rank in one flat buffer, reduced over all copies of its stages."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from itertools import chain

import torch
from torch import Tensor, nn

from gems.autograd.torch_internals import copy_all
from gems.engine.optimization.gradient_sum import FlatSum
from gems.engine.optimization.parameter_groups import trained
from gems.engine.stage import StageKey
from gems.engine.transport.links import Sums


def running_statistics(module: nn.Module) -> list[Tensor]:
    """Return a module's floating-point buffers (running means and variances) in a fixed order."""
    return [buffer for buffer in module.buffers() if buffer.is_floating_point()]


class Gradients:
    """The gradients of all stages on a rank, as views of one buffer, and their sum over all copies.

    Frozen parameters have no gradient. Without other copies, running statistics stay in place.

    The buffer is [gradients by stage | running statistics | gradients of second copies]. The stages
    that START_REDUCE sums come first, and each of them is summed by itself. The rest of the first
    two parts is one message. Ranks r and P-1-r hold the same two stages, so one all-reduce serves
    both directions and all replicas (GEMS). Running statistics come back as their mean, so that all
    copies stay equal.
    """

    def __init__(
        self,
        modules: Mapping[StageKey, nn.Module],
        transport: Sums,
        dtype: torch.dtype,
        device: torch.device,
        started: Collection[int] = (),
    ) -> None:
        self._transport = transport
        self._counted = sorted(stage for direction, stage in modules if direction == 0)
        stages = sorted(
            {stage for _, stage in modules}, key=lambda stage: (stage not in started, stage)
        )
        copies = [[modules[key] for key in sorted(modules) if key[1] == stage] for stage in stages]
        self._has_copies = transport.size > 1 or any(len(same) > 1 for same in copies)
        # each with those of the other copies on the rank
        self._statistics = [
            tensors
            for same in copies
            for tensors in zip(*(running_statistics(copy) for copy in same), strict=True)
            if self._has_copies
        ]
        num_gradients = sum(p.numel() for same in copies for p in trained(same[0].parameters()))
        end_of_message = num_gradients + sum(tensors[0].numel() for tensors in self._statistics)
        num_seconds = sum(
            p.numel() for same in copies for copy in same[1:] for p in trained(copy.parameters())
        )
        self._flat = torch.zeros(end_of_message + num_seconds, dtype=dtype, device=device)
        self._packed = self._flat[num_gradients:end_of_message]
        parts = torch.split(self._packed, [tensors[0].numel() for tensors in self._statistics])
        groups = zip(parts, self._statistics, strict=True)
        self._means = [part.view_as(tensor) for part, tensors in groups for tensor in tensors]
        # a second copy of a stage on the rank (the middle stage of an odd number) is added before
        # the message is sent
        self._seconds: list[tuple[Tensor, Tensor]] = []
        self._of_stage: dict[int, Tensor] = {}
        at = 0
        at_second = end_of_message
        for stage, same in zip(stages, copies, strict=True):
            size = _set_views(trained(same[0].parameters()), self._flat, at)
            for copy in same[1:]:
                _set_views(trained(copy.parameters()), self._flat, at_second)
                self._seconds.append(
                    (self._flat[at : at + size], self._flat[at_second : at_second + size])
                )
                at_second += size
            self._of_stage[stage] = self._flat[at : at + size]
            at += size
        at = sum(self._of_stage[stage].numel() for stage in started)
        self._sum = FlatSum(self._flat[at:end_of_message], transport)
        self._sums = {
            stage: FlatSum(part, transport)
            for stage in started
            if len(part := self._of_stage[stage])
        }
        self.starts_early = transport.size > 1 and bool(started)
        self._message_bytes: int = end_of_message * self._flat.element_size()
        self._started: list[FlatSum] = []
        self._unreported: list[tuple[FlatSum, Callable[[], None]]] = []  # the last of them

    @property
    def num_bytes(self) -> int:
        """Return the bytes that one rank sums with its peers."""
        return self._message_bytes

    def zero(self) -> None:
        """Clear all gradients for the next step."""
        self._flat.zero_()

    def squared_norm(self) -> Tensor:
        """Return the squared norm of the gradients of this rank's stages in direction 0.

        It is a scalar on the device, summed in float64 and in a fixed order.
        """
        norms = [
            torch.linalg.vector_norm(self._of_stage[stage], dtype=torch.float64)
            for stage in self._counted
        ]
        if not norms:
            return self._flat.new_zeros((), dtype=torch.float64)
        return torch.stack(norms).square().sum()

    def scale(self, factor: float) -> None:
        """Multiply all gradients by a factor."""
        if factor != 1:
            self._flat.mul_(factor)

    def start_reduce(self, stage: int, done: Callable[[int], None]) -> None:
        """Begin to sum the gradients of a stage over its copies; collective.

        `done` gets their size in bytes at the end.
        """
        if self._transport.size > 1 and stage in self._sums:
            size = self._of_stage[stage].nbytes
            self._sums[stage].start()
            self._started.append(self._sums[stage])
            self._unreported.append((self._sums[stage], lambda: done(size)))

    def poll(self) -> None:
        """Let the started sums make progress."""
        for sums, _ in self._unreported:
            if not sums.poll():
                break
        while self._unreported and self._unreported[0][0].is_over:
            self._unreported.pop(0)[1]()

    def reduce(self) -> None:
        """Sum the other gradients, average running statistics, wait for all sums; collective."""
        if not self._has_copies:
            return
        for first, second in self._seconds:
            first += second
        with torch.no_grad():
            num_ranks = self._transport.size
            means = [
                sum(tensors) / len(tensors) if len(tensors) > 1 else tensors[0]
                for tensors in self._statistics
            ]
            if means:
                torch.cat([mean.reshape(-1) for mean in means], out=self._packed)
                self._packed.div_(num_ranks)
        if num_ranks > 1:
            for sums in self._started:
                sums.post()
            self._sum.start()
            for sums in (*self._started, self._sum):
                sums.finish()
            self.poll()
            self._started.clear()
        with torch.no_grad():
            copy_all(list(chain.from_iterable(self._statistics)), self._means)
        for first, second in self._seconds:
            second.copy_(first)


def _set_views(parameters: Iterable[nn.Parameter], flat: Tensor, start: int) -> int:
    """Make the gradients of `parameters` views of `flat` from `start` on; return the element count.

    Each gradient has the memory order of its parameter, which autograd uses for what it adds.
    """
    at = start
    for parameter in parameters:
        part = flat[at : at + parameter.numel()]
        is_last = parameter.dim() == 4 and parameter.is_contiguous(
            memory_format=torch.channels_last
        )
        parameter.grad = (
            part.as_strided(parameter.size(), parameter.stride())
            if is_last
            else part.view_as(parameter)
        )
        at += parameter.numel()
    return at - start
