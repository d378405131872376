"""The profile without a device.

Fake tensors determine the bytes at any resolution, and the machine's roofline the times. Source:
Williams, Waterman, Patterson 2009: a kernel takes at least its operations divided by the machine's
peak, and at least its bytes divided by the memory bandwidth. Each operation of the layer is one
kernel that reads its operands and writes its results once; a view takes no time.

If the machine's launch costs are known, a kernel also takes a least time, few channels slow it
down, and a pass of a layer takes the host at least the time to launch its operators. If its
multiprocessors are known too, kernels of few thread blocks compute at a lower rate
(`kernel_work.py`), and a batch norm reads its inputs twice: for the statistics, and with them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import flop_registry

from gems.autograd.elsewhere import cuda_elsewhere
from gems.autograd.mixed import Elsewhere
from gems.autograd.outputs import as_tuple, tensors_in
from gems.autograd.recompute.matmul_outputs import is_matmul
from gems.autograd.torch_internals import FakeTensorMode, TorchDispatchMode, mem_tracker
from gems.config.schema import DataConfig, MachineConfig, ModelConfig
from gems.errors import ConfigError
from gems.models import Layer, layers_of
from gems.models.build import Dtype, as_precision, build_layer
from gems.models.mixed import Precision, compute_in
from gems.profile.kernel_work import FULL, KernelWork, convolution_work, weight_gradient_work
from gems.profile.model_profile import ModelProfile
from gems.profile.profilers.chain import Lab, given_tensors, machine_device, profile_model
from gems.profile.profilers.layer_run import LayerCall, Times, give_gradients, task_loss
from gems.profile.profilers.live_bytes import device_workspace
from gems.profile.work import LayerWork, Operator, Rates

_CONV_BACKWARD = torch.ops.aten.convolution_backward
_ATEN = torch.ops.aten
# position of the weight
_NORMS = {_ATEN.native_batch_norm: 1, _ATEN.native_group_norm: 1, _ATEN.native_layer_norm: 2}


# positions of the images of which each channel is computed or summed by itself
_IMAGES = {
    _ATEN.convolution: (0,),
    _CONV_BACKWARD: (0, 1),
    _ATEN.native_batch_norm: (0,),
    _ATEN.native_batch_norm_backward: (0, 1),
}
# Operators that launch no kernel in a run. Zeros are labels, and gradients that a run gets from the
# next layer.
_NOT_LAUNCHED = (
    torch.ops.prim.device,
    *(_ATEN.empty, _ATEN.empty_like, _ATEN.new_empty, _ATEN.empty_strided, _ATEN.zeros),
)


def machine_rates(machine: MachineConfig, dtype: Dtype) -> Rates:
    """Return the rates of a configured machine: datasheet rates times the share that kernels reach.

    In mixed precision, a machine without a rate for 16 bits has that of float32.

    Raises:
        ConfigError: No rate for bfloat16 is given.
    """
    parameters, dtype = as_precision(dtype)
    if parameters is not dtype and machine.bfloat16_flops_per_s is None:
        dtype = parameters
    peak = machine.flops_per_s
    if dtype in (torch.bfloat16, torch.float16):  # devices compute both at the same rate
        if machine.bfloat16_flops_per_s is None:
            raise ConfigError(
                "machine.bfloat16_flops_per_s",
                "null",
                f"must be given, machine {machine.name} has none",
                "give it, or train.precision=float32",
            )
        peak = machine.bfloat16_flops_per_s
    if dtype is torch.float64:
        peak = machine.float64_flops_per_s or peak / 2
    if machine.launch_s is None:
        return Rates(peak * machine.efficiency, machine.memory_bytes_per_s * machine.efficiency)
    share = machine.operator_efficiency or machine.efficiency
    launch_s, channels = machine.launch_costs(dtype in (torch.bfloat16, torch.float16))
    memory_share = machine.memory_efficiency or share
    return Rates(
        peak * share,
        machine.memory_bytes_per_s * memory_share,
        launch_s,
        machine.operator_s,
        channels,
        machine.multiprocessors,
        machine.winograd and dtype is torch.float32,
    )


class Roofline(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A recorder of the operators inside a `with` block, and of their costs."""

    def __init__(self, rates: Rates) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._rates = rates
        self.operators: list[Operator] = []

    @property
    def flops(self) -> float:
        """Floating-point operations of all operators."""
        return sum(operator.flops for operator in self.operators)

    @property
    def moved_bytes(self) -> float:
        """Bytes of device memory that all operators move."""
        return sum(operator.moved_bytes for operator in self.operators)

    @property
    def seconds(self) -> float:
        """Time of all operators."""
        return self._rates.pass_s(self.operators)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        packet = func._overloadpacket
        # Without launch costs, times stay as they were when they were compared with runs.
        is_launched = self._rates.launch_s is None or packet not in _NOT_LAUNCHED
        if _is_view(func) or not is_launched:
            return result
        channels = _channels(packet, args, result)
        if packet is _CONV_BACKWARD:
            works = _backward_works(args, self._rates.has_winograd)
            for flops, moved, work in _conv_backward_parts(args, result, works):
                self.operators.append(Operator(flops, moved, channels, work=work))
            return result
        flops = (
            flop_registry[packet](*args, **kwargs, out_val=result) if packet in flop_registry else 0
        )
        moved = _moved_bytes([args, *kwargs.values(), result])
        work = FULL
        if packet is _ATEN.convolution:
            weight = args[1].shape
            work = convolution_work(
                result.shape, weight[0], weight[2:], args[3], self._rates.has_winograd
            )
        elif packet in _IMAGES and self._rates.multiprocessors is not None:
            moved += _moved_bytes([args[place] for place in _IMAGES[packet]])
        self.operators.append(Operator(flops, moved, channels, is_matmul(func), work))
        return result


def roofline_times(call: LayerCall, rates: Rates) -> Times:
    """Return the times of a layer on inputs, preferably fake ones, because nothing is timed.

    The time of the weight gradient is the difference between the whole backward and the backward of
    a layer whose parameters need no gradient.
    """
    return Times(**layer_work(call, rates).times(rates))


def layer_work(call: LayerCall, rates: Rates) -> LayerWork:
    """Return the operators of a layer on inputs, which are run once.

    `rates` decide which operators count: launches, reads of norms, Winograd's algorithm.
    """

    def count(run: Callable[[], object]) -> tuple[Operator, ...]:
        roofline = Roofline(rates)
        with roofline:
            run()
        return tuple(roofline.operators)

    if rates.launch_s is not None:
        give_gradients(call.module)  # a run adds to them, with an operator for each parameter
    forward, backward = call.forward_and_backward(count)
    with call.without_weight_gradients():
        input_grad = call.forward_and_backward(count)[1]
    return LayerWork(forward, backward, input_grad)


def _channels(packet: Any, args: tuple[Any, ...], result: Any) -> float:
    """Return the least number of channels of a convolution's or batch norm's images."""
    images = [args[place] for place in _IMAGES.get(packet, ())]
    if packet is _ATEN.convolution:
        images.append(result)
    return min((image.shape[1] for image in images), default=math.inf)


def _conv_backward_parts(
    args: tuple[Any, ...], result: Sequence[Tensor | None], works: Sequence[KernelWork]
) -> Iterator[tuple[int, int, KernelWork]]:
    """Yield the work of a convolution's gradients, each of them a separate kernel."""
    gradient, x, weight, *rest, wanted = args
    for number, operand in enumerate((weight, x)):
        if wanted[number]:
            only = [place == number for place in range(3)]
            flops = flop_registry[_CONV_BACKWARD](gradient, x, weight, *rest, only, out_val=result)
            yield int(flops), _moved_bytes([gradient, operand, result[number]]), works[number]
    if wanted[2]:
        yield 0, _moved_bytes([gradient]), FULL


def _backward_works(args: tuple[Any, ...], has_winograd: bool) -> tuple[KernelWork, KernelWork]:
    """Return the work of the gradients of a convolution's input and weight."""
    _, x, weight, _, stride, *_ = args
    kernel = weight.shape[2:]
    return (
        convolution_work(x.shape, weight.shape[1], kernel, stride, has_winograd),
        weight_gradient_work(kernel, stride, has_winograd),
    )


def _moved_bytes(operands: Sequence[Any]) -> int:
    return sum(tensor.nbytes for tensor in tensors_in(operands))


def _is_view(func: Any) -> bool:
    infos = [value.alias_info for value in func._schema.returns]
    return any(info is not None and not info.is_write for info in infos)


# a CPU build of torch has no autograd for fake tensors of a GPU
_HOST = torch.device("cpu")


def fake_profile(
    model: ModelConfig,
    data: DataConfig,
    micro_batch_size: int,
    dtype: str,
    machine: MachineConfig,
    has_whole: bool = False,
) -> ModelProfile:
    """Return the profile of a model on a machine that need not be present, from its rates.

    With `has_whole`, `facts` contain `peak_bytes`, the peak of the unsplit model on one device.

    Raises:
        ConfigError: The model does not exist, or the machine has no rate for the dtype.
    """
    precision = Precision.of(dtype)
    rates = machine_rates(machine, precision)
    lab = fake_lab(machine, precision)
    whole = (
        {"peak_bytes": _whole_peak_bytes(model, data, micro_batch_size, dtype, lab)}
        if has_whole
        else {}
    )
    facts = {
        **whole,
        "flops_per_s": rates.flops_per_s,
        "memory_bytes_per_s": rates.memory_bytes_per_s,
    }
    return profile_model(model, data, micro_batch_size, dtype, lab, machine.name, "fake", facts)


class FakeWithNorms(AbstractContextManager[None]):
    """Fake tensors whose norms keep the statistics of 16-bit inputs in float32, like real tensors.

    The statistics are mean and standard deviation.
    """

    class _Norms(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            result = func(*args, **(kwargs or {}))
            place = _NORMS.get(func._overloadpacket)
            if place is not None and args[place] is not None and args[place].dtype is torch.float32:
                return (result[0], *(value.float() for value in result[1:]))
            return result

    def __init__(self) -> None:
        self._modes: tuple[Any, Any] = FakeTensorMode(), self._Norms()  # type: ignore[no-untyped-call]

    def __enter__(self) -> None:
        for mode in self._modes:
            mode.__enter__()

    def __exit__(self, *error: object) -> None:
        for mode in reversed(self._modes):
            mode.__exit__(*error)


def fake_lab(machine: MachineConfig, precision: Precision) -> Lab:
    """Return a lab that runs layers on fake tensors, with the times of a machine.

    Raises:
        ConfigError: As in `machine_rates`.
    """
    mode: Any = FakeWithNorms() if precision.is_mixed else FakeTensorMode()
    elsewhere = autocast_elsewhere(machine, precision)

    def build(layer: Layer, _: int) -> nn.Module:
        module = on_meta(layer, precision.parameters)
        with mode:
            return compute_in(made_fake(module), precision, elsewhere)

    times = partial(roofline_times, rates=machine_rates(machine, precision))
    return Lab(build, _HOST, device_workspace(machine_device(machine)), times, mode)


def autocast_elsewhere(machine: MachineConfig, precision: Precision) -> Elsewhere | None:
    """Return the device whose autocast a run on a machine uses; None for that of fake tensors."""
    return (
        cuda_elsewhere() if precision.is_mixed and machine_device(machine).type == "cuda" else None
    )


def on_meta(layer: Layer, dtype: torch.dtype) -> nn.Module:
    """Build a layer without memory; its parameters have no values."""
    return build_layer(layer, 0, 0, dtype, "meta")


def made_fake(module: nn.Module) -> nn.Module:
    """Put fake parameters and buffers into a module on torch's meta device, and return it.

    Tensors that the module shares internally stay shared.
    """
    known: dict[int, Any] = {}
    for inner in module.modules():
        for values in (inner._parameters, inner._buffers):
            for name, value in values.items():
                if value is not None:
                    fake: Tensor = torch.empty(value.shape, dtype=value.dtype, device=_HOST)
                    if isinstance(value, nn.Parameter):
                        fake = nn.Parameter(fake, value.requires_grad)
                    values[name] = known.setdefault(id(value), fake)
    return module


def _whole_peak_bytes(
    model: ModelConfig, data: DataConfig, micro_batch_size: int, dtype: str, lab: Lab
) -> int:
    """Return the peak of one training step of the unsplit model.

    It includes parameters, gradients, activations and images. It is measured by torch's
    `MemTracker`, without optimizer state and internal memory of kernels.
    """

    class WholePeak(mem_tracker()):  # type: ignore[misc]
        """A tracker of the whole peak only.

        The time to track the peaks of all modules grows with the square of the depth.
        """

        peak_bytes = 0

        def _update_peak_stats(self, peak_state: Any) -> None:
            for snapshot in self.get_tracker_snapshot("current").values():
                self.peak_bytes = max(self.peak_bytes, int(snapshot["Total"]))

    net = nn.ModuleList([lab.build(layer, 0) for layer in layers_of(model, data)])
    with lab.mode:
        images = given_tensors(data, micro_batch_size, Precision.of(dtype).compute, _HOST)
        give_gradients(net)
        tracker = WholePeak()
        tracker.track_external(net, *images)
        with tracker:
            output: Any = tuple(images)
            for module in net:
                output = module(*as_tuple(output))
            loss = task_loss(data)(output)
            del output
            torch.autograd.backward([loss])
    return tracker.peak_bytes
