"""The roofline of a machine: seconds of operations from their floating-point operations and the bytes that they move.

Williams, Waterman, Patterson 2009: a kernel takes at least its operations over the machine's peak, and at least its
bytes over the memory's bandwidth. Each operation of the layer is one kernel that reads its operands and writes its
results once; a view takes no time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from gems.autograd.recompute.matmul_outputs import is_matmul
from gems.config.schema import MachineConfig
from gems.errors import ConfigError
from gems.profile.profilers.chain import Times
from gems.profile.profilers.layer_run import Loss, Run
from gems.profile.profilers.live_bytes import tensors_in

_CONV_BACKWARD = torch.ops.aten.convolution_backward


@dataclass(frozen=True, slots=True)
class Rates:
    """What a machine does in a second on one dtype: floating-point operations, and bytes of device memory moved."""

    flops_per_s: float
    memory_bytes_per_s: float

    def seconds(self, flops: float, moved_bytes: float) -> float:
        """Return the time of one kernel in seconds."""
        return max(flops / self.flops_per_s, moved_bytes / self.memory_bytes_per_s)


def rates_of(machine: MachineConfig, dtype: torch.dtype) -> Rates:
    """Return the rates of a configured machine: the datasheet's, times the share that kernels reach.

    Raises:
        ConfigError: no rate for bfloat16 is given.
    """
    peak = machine.flops_per_s
    if dtype is torch.bfloat16:
        if machine.bfloat16_flops_per_s is None:
            raise ConfigError(
                "machine.bfloat16_flops_per_s", "null", f"must be given, machine {machine.name} has none",
                "give it, or train.dtype=float32",
            )  # fmt: skip
        peak = machine.bfloat16_flops_per_s
    if dtype is torch.float64:
        peak = machine.float64_flops_per_s or peak / 2
    return Rates(peak * machine.efficiency, machine.memory_bytes_per_s * machine.efficiency)


class Roofline(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Adds up what the operations inside a `with` block take: flops, bytes moved, seconds, and those of products."""

    def __init__(self, rates: Rates) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._rates = rates
        self.flops = 0
        self.moved_bytes = 0
        self.seconds = 0.0
        self.product_seconds = 0.0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if _is_view(func):
            return result
        packet = func._overloadpacket
        if packet is _CONV_BACKWARD:
            for flops, moved in _conv_backward_parts(args, result):
                self._add(flops, moved)
            return result
        flops = flop_registry[packet](*args, **kwargs, out_val=result) if packet in flop_registry else 0
        seconds = self._add(flops, _moved_bytes([args, *kwargs.values(), result]))
        if is_matmul(func):
            self.product_seconds += seconds
        return result

    def _add(self, flops: int, moved_bytes: int) -> float:
        seconds = self._rates.seconds(flops, moved_bytes)
        self.flops += flops
        self.moved_bytes += moved_bytes
        self.seconds += seconds
        return seconds


def roofline_times(
    module: nn.Module, inputs: Sequence[Tensor], is_first: bool, loss: Loss | None, rates: Rates
) -> Times:
    """Return the times of a layer on inputs, fake ones best: nothing is timed.

    The weight gradient's is what the whole backward takes beyond that of a layer whose parameters need none.
    """
    forward, backward_s = _both(module, inputs, is_first, loss, rates)
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    for parameter in parameters:
        parameter.requires_grad_(False)
    _, input_grad_s = _both(module, inputs, is_first, loss, rates)
    for parameter in parameters:
        parameter.requires_grad_(True)
    weight_grad_s = max(0.0, backward_s - input_grad_s)
    cheap_s = forward.seconds - forward.product_seconds
    return Times(forward.seconds, input_grad_s, weight_grad_s, forward.seconds, cheap_s)


def _both(
    module: nn.Module, inputs: Sequence[Tensor], is_first: bool, loss: Loss | None, rates: Rates
) -> tuple[Roofline, float]:
    """Return the operations of forward, and the seconds of backward."""
    run = Run(module, inputs, is_first)
    with Roofline(rates) as forward:
        outputs = run.forward(loss)
    end = run.take(outputs)
    with Roofline(rates) as backward:
        run.backward(end)
    return forward, backward.seconds


def _conv_backward_parts(args: tuple[Any, ...], result: Sequence[Tensor | None]) -> Iterator[tuple[int, int]]:
    """Yield flops and bytes of each of a convolution's gradients: they are kernels of their own."""
    gradient, x, weight, *rest, wanted = args
    for number, operand in enumerate((weight, x)):
        if wanted[number]:
            only = [place == number for place in range(3)]
            flops = flop_registry[_CONV_BACKWARD](gradient, x, weight, *rest, only, out_val=result)
            yield int(flops), _moved_bytes([gradient, operand, result[number]])
    if wanted[2]:
        yield 0, _moved_bytes([gradient])


def _moved_bytes(operands: Sequence[Any]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors_in(operands))


def _is_view(func: Any) -> bool:
    infos = [value.alias_info for value in func._schema.returns]
    return any(info is not None and not info.is_write for info in infos)
