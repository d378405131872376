"""Measure the profile of this device: run and time every distinct layer separately.

The times are medians over repetitions: of a forward, of a whole backward, and of a backward in
which no parameter needs a gradient. The last is the time of the input gradient; the rest of the
whole backward is the time of the weight gradient. A split backward computes the two separately,
which takes longer; it is timed as the engine runs it, and so is a selective recompute. A full
recompute takes the time of a forward. On a GPU the runs of a layer queue up as in a step, so a time
is the greater of the card's for the kernels and Python's for their launches. On a CPU, bytes are
counted as for fake tensors; on a GPU, the allocator's own peaks are used.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from functools import cache, partial

import torch
from torch import Tensor, nn

from gems.autograd.kernels import choose_kernels
from gems.autograd.recompute.recompute import Recomputation
from gems.autograd.split_backward.deferred import DeferredGradients
from gems.autograd.split_backward.layers import SplitLayers
from gems.config.schema import DataConfig, MachineConfig, ModelConfig
from gems.errors import ConfigError
from gems.models import Layer
from gems.models.build import build_layer
from gems.models.mixed import Precision
from gems.profile.model_profile import LIBRARY_BYTES, ModelProfile
from gems.profile.profilers.chain import Lab, machine_device, profile_model
from gems.profile.profilers.layer_run import LayerCall, Run, Times, give_gradients
from gems.profile.profilers.live_bytes import device_workspace
from gems.utils.host_memory import keep_freed_memory

WARM_UP_RUNS = 2
# small layers run more often than requested: until the runs took this long, and at most this often
MIN_TIMED_S = 0.05
MAX_RUNS = 50
_SEED = 0

Reading = Callable[[], float]  # seconds, once what they time has ended
Clock = Callable[[Callable[[], object]], Reading]


def measured_profile(
    model: ModelConfig,
    data: DataConfig,
    micro_batch_size: int,
    dtype: str,
    machine: MachineConfig,
    repetitions: int = 5,
) -> ModelProfile:
    """Return the profile of a model on this process's device.

    Raises:
        ConfigError: As in `open_device`, or a layer does not fit the device.
    """
    lab = device_lab(machine, Precision.of(dtype), repetitions)
    num_bytes = library_bytes(lab.device)
    device = torch.cuda.get_device_name(lab.device) if lab.device.type == "cuda" else "cpu"
    facts = {"repetitions": repetitions, LIBRARY_BYTES: num_bytes}
    try:
        return profile_model(model, data, micro_batch_size, dtype, lab, device, "measured", facts)
    except torch.OutOfMemoryError as error:
        where = "; ".join(getattr(error, "__notes__", ()))
        raise ConfigError(
            "profile",
            "measured",
            f"{where}: it does not fit this device",
            "use profile=fake, or a smaller image",
        ) from error


def device_lab(machine: MachineConfig, dtype: Precision, repetitions: int = 1) -> Lab:
    """Return the lab that runs and times layers on this process's device.

    Raises:
        ConfigError: As in `open_device`.
    """
    device = open_device(machine)

    def build(layer: Layer, index: int) -> nn.Module:
        return build_layer(layer, index, _SEED, dtype, device)

    return Lab(
        build, device, device_workspace(device), partial(measured_times, repetitions=repetitions)
    )


@cache
def library_bytes(device: torch.device) -> int:
    """Return the bytes that cuBLAS and cuDNN allocate from torch on first use, and keep.

    autograd runs backward in its own thread, which has its own workspace.
    """
    if device.type == "cpu":
        return 0
    before = torch.cuda.memory_allocated(device)
    image = torch.ones(1, 8, 8, 8, device=device, requires_grad=True)
    weights = [
        torch.ones(*shape, device=device, requires_grad=True) for shape in ((8, 8, 3, 3), (8, 8))
    ]
    torch.autograd.backward((torch.conv2d(image, weights[0], padding=1) @ weights[1]).sum())
    torch.cuda.synchronize(device)
    del image, weights
    return torch.cuda.memory_allocated(device) - before


def open_device(machine: MachineConfig) -> torch.device:
    """Return the device on which to measure.

    Raises:
        ConfigError: machine.device is cuda, but torch sees no GPU.
    """
    if machine.device == "cuda" and not torch.cuda.is_available():
        advice = "use profile=fake, or take the profile on a GPU"
        raise ConfigError("machine.device", "cuda", "torch sees no GPU here", advice)
    device = machine_device(machine)
    if device.type == "cpu":
        keep_freed_memory()  # like the ranks of a run
    else:
        choose_kernels(machine)
    return device


def measured_times(call: LayerCall, repetitions: int) -> Times:
    """Time a layer on its device: medians over `repetitions` or more, after warm-up runs.

    Runs whose times are subtracted from each other are timed in turns, so that they see the same
    machine state.
    """
    give_gradients(call.module)
    clock = _cuda_clock if call.device.type == "cuda" else _clock
    layers = SplitLayers(nn.ModuleList([call.module]))

    def backwards() -> tuple[Reading, ...]:
        """Time a forward, the backward, one without weight gradients, and separate gradients."""
        forward_s, backward_s = call.forward_and_backward(clock)
        with call.without_weight_gradients():
            _, input_grad_s = call.forward_and_backward(clock)
        return forward_s, backward_s, input_grad_s, _apart_s(call, layers, clock)

    forward_s, backward_s, input_grad_s, apart_s = medians_s(backwards, repetitions)
    input_grad_s = min(backward_s, input_grad_s)
    (cheap_s,) = medians_s(lambda: (_cheap(call, clock),), repetitions)
    split_s = max(0.0, apart_s - backward_s)
    return Times(forward_s, input_grad_s, backward_s - input_grad_s, forward_s, cheap_s, split_s)


def medians_s(run: Callable[[], tuple[Reading, ...]], repetitions: int) -> tuple[float, ...]:
    """Return the medians of the times that a run's parts take, in seconds.

    No reading is taken before the last run was launched.
    """
    for _ in range(WARM_UP_RUNS):
        warm = run()
    seconds = max(1e-6, sum(read() for read in warm))
    run()  # the reading emptied the card's queue
    runs = max(repetitions, min(MAX_RUNS, math.ceil(MIN_TIMED_S / seconds)))
    taken = [run() for _ in range(runs)]
    return tuple(
        statistics.median(read() for read in readings) for readings in zip(*taken, strict=True)
    )


def _clock(run: Callable[[], object]) -> Reading:
    begin = time.perf_counter()
    run()
    seconds = time.perf_counter() - begin
    return lambda: seconds


def _cuda_clock(run: Callable[[], object]) -> Reading:
    """Time a run by two events in the card's queue, without waiting for the card.

    If the card is behind, they are apart by the time of the kernels; if Python is, by the time of
    its launches. A wait after every run would add the launch of its first kernel, which the queue
    of a step hides.
    """
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    begin.record()
    run()
    end.record()

    def read() -> float:
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3

    return read


def _apart_s(call: LayerCall, layers: SplitLayers, clock: Clock) -> Reading:
    """Time the input gradient plus the weight gradients in a split backward.

    The backward runs as the engine runs it. It takes 0 s for a layer that cannot be split, so that
    nothing is added to its whole backward.
    """
    later = DeferredGradients()
    with layers.defer_to(later):
        run = Run(call)
        end = run.take(run.forward())
    input_s = clock(lambda: run.backward(end))
    if next(later.tensors(), None) is None:
        return lambda: 0.0
    weights_s = clock(lambda: later.run(lambda: None))
    return lambda: input_s() + weights_s()


def _cheap(call: LayerCall, clock: Clock) -> Reading:
    """Time a second forward that reuses convolutions and matrix products."""
    recomputation = Recomputation(nn.ModuleList([call.module]), is_selective=True)
    run = Run(call)
    values = tuple(run.values)

    def again(_: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return run.forward()

    products = recomputation.forward(values, again)[1]
    return clock(lambda: recomputation.recompute(values, products, again))
