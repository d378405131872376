"""The profile of this device: every distinct layer runs here, alone, and is timed; the medians count.

Times are those of a forward, of a whole backward, and of a backward in which no parameter needs a gradient: the last
is the input gradient's, and what the whole takes beyond it the weight gradient's. To recompute is to run forward
again; a selective recompute is timed as the engine runs it. On a processor bytes are counted as for fake tensors; on a
GPU the allocator's own peaks are taken.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from gems.autograd.recompute.recompute import Recomputation
from gems.config.schema import DataConfig, MachineConfig, ModelConfig
from gems.errors import ConfigError
from gems.models import layers_of, title_of
from gems.models.build import build_layer
from gems.profile.identity import subject, versions
from gems.profile.model_profile import ModelProfile
from gems.profile.profilers.chain import Gradients, Instruments, Probe, Times, profile_chain
from gems.profile.profilers.kernel_workspaces import workspace_of
from gems.profile.profilers.layer_run import Loss, Run, fresh_gradients, give_gradients, given_memory
from gems.profile.profilers.meter import BackwardMeter, LayerMeter, meter, meter_backward
from gems.profile.profilers.whole_model import given_tensors
from gems.utils.host_memory import keep_freed_memory

WARM_UP_RUNS = 2
# small layers run more often than they are asked to: until they took so long, and at most so many times
MIN_TIMED_S, MAX_RUNS = 0.05, 50
_SEED = 0


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
        ConfigError: machine.device=cuda where torch sees no GPU, or a layer that does not fit the device.
    """
    kind: torch.dtype = getattr(torch, dtype)
    device = open_device(machine)
    given = given_tensors(data, micro_batch_size, kind, torch.device("meta"))
    workspace = workspace_of(device)

    def forward(probe: Probe) -> tuple[LayerMeter, Times]:
        module, inputs = probe.build(), probe.inputs()
        give_gradients(module)
        times = measured_times(module, inputs, probe.is_first, probe.loss, repetitions)
        found = meter(module, inputs, probe.is_first, probe.loss, workspace)
        if device.type == "cuda":
            peak = _allocated_forward(module, inputs, probe.is_first, probe.loss)
            found = replace(found, forward_peak_bytes=max(found.left_bytes, peak))
        return found, times

    def backward(probe: Probe, gradients: Gradients) -> BackwardMeter:
        module, inputs = probe.build(), probe.inputs()
        found = meter_backward(module, inputs, gradients, probe.is_first, probe.loss, workspace)
        if device.type == "cuda":
            peak = _allocated_backward(module, inputs, gradients, probe.is_first, probe.loss)
            found = replace(found, peak_bytes=peak)
        return found

    def build(layer: object, index: int) -> nn.Module:
        return build_layer(layers[index], index, _SEED, kind, device)

    layers = layers_of(model, data)
    try:
        profiles = profile_chain(layers, given, build, Instruments(forward, backward), device)
    except torch.OutOfMemoryError as error:
        where = "; ".join(getattr(error, "__notes__", ()))
        raise ConfigError(
            "profile", "measured", f"{where}: it does not fit this device", "use profile=fake, or a smaller image"
        ) from error
    return ModelProfile(
        model=title_of(model),
        height_px=data.height_px,
        width_px=data.width_px,
        micro_batch_size=micro_batch_size,
        dtype=dtype,
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        source="measured",
        layers=profiles,
        input_bytes=sum(tensor.numel() * tensor.element_size() for tensor in given),
        versions=versions(),
        facts={"repetitions": repetitions, "subject": subject(model, data, micro_batch_size, dtype)},
    )


def open_device(machine: MachineConfig) -> torch.device:
    """Return the device to measure on: the first GPU if there is one.

    Raises:
        ConfigError: machine.device=cuda where torch sees no GPU.
    """
    if machine.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            "machine.device", "cuda", "torch sees no GPU here", "use profile=fake, or take the profile on a GPU"
        )
    if machine.device != "cpu" and torch.cuda.is_available():
        return torch.device("cuda", 0)
    keep_freed_memory()  # as the ranks of a run
    return torch.device("cpu")


def measured_times(
    module: nn.Module, inputs: Sequence[Tensor], is_first: bool, loss: Loss | None, repetitions: int
) -> Times:
    """Time a layer on its device: medians over `repetitions` or more, after runs that warm up."""
    clock = clock_of(inputs[0].device)

    def both() -> tuple[float, float]:
        return _both(module, inputs, is_first, loss, clock)

    forward_s, backward_s = medians_s(both, repetitions)
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    for parameter in parameters:
        parameter.requires_grad_(False)
    input_grad_s = min(backward_s, medians_s(both, repetitions)[1])
    for parameter in parameters:
        parameter.requires_grad_(True)
    (cheap_s,) = medians_s(lambda: (_cheap(module, inputs, is_first, loss, clock),), repetitions)
    return Times(forward_s, input_grad_s, backward_s - input_grad_s, forward_s, cheap_s)


def medians_s(run: Callable[[], tuple[float, ...]], repetitions: int) -> tuple[float, ...]:
    """Return the medians of what a run's parts take, in seconds."""
    for _ in range(WARM_UP_RUNS):
        run()
    taken: list[tuple[float, ...]] = []
    begin = time.perf_counter()
    while len(taken) < repetitions or (len(taken) < MAX_RUNS and time.perf_counter() - begin < MIN_TIMED_S):
        taken.append(run())
    return tuple(map(statistics.median, zip(*taken, strict=True)))


def clock_of(device: torch.device) -> Callable[[Callable[[], object]], float]:
    """Return a function that times another one on a device: by events of the GPU's stream, or by the clock."""

    def by_clock(run: Callable[[], object]) -> float:
        begin = time.perf_counter()
        run()
        return time.perf_counter() - begin

    def by_events(run: Callable[[], object]) -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        run()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3

    return by_events if device.type == "cuda" else by_clock


def _both(
    module: nn.Module,
    inputs: Sequence[Tensor],
    is_first: bool,
    loss: Loss | None,
    clock: Callable[[Callable[[], object]], float],
) -> tuple[float, float]:
    """Return the seconds of one forward and one backward."""
    run = Run(module, inputs, is_first)
    outputs: list[Tensor] = []
    forward_s = clock(lambda: outputs.extend(run.forward(loss)))
    end = run.take(outputs)
    outputs.clear()
    return forward_s, clock(lambda: run.backward(end))


def _cheap(
    module: nn.Module,
    inputs: Sequence[Tensor],
    is_first: bool,
    loss: Loss | None,
    clock: Callable[[Callable[[], object]], float],
) -> float:
    """Return the seconds of a second forward that has what convolutions and matrix products gave in the first."""
    recomputation = Recomputation(nn.ModuleList([module]), is_selective=True)
    run = Run(module, inputs, is_first)
    values = tuple(run.values)

    def again(_: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return run.forward(loss)

    outputs, kept = recomputation.forward(values, again)
    del outputs
    return clock(lambda: recomputation.recompute(values, kept, again))


def _allocated_forward(module: nn.Module, inputs: Sequence[Tensor], is_first: bool, loss: Loss | None) -> int:
    """Return the most that the GPU's allocator gave out during a forward, beyond what was there."""
    run = Run(module, inputs, is_first)
    before = _restart()
    outputs = run.forward(loss)
    peak = torch.cuda.max_memory_allocated() - before
    del outputs
    return peak


def _allocated_backward(
    module: nn.Module, inputs: Sequence[Tensor], gradients: Gradients, is_first: bool, loss: Loss | None
) -> int:
    """Return the most that the GPU's allocator gave out during a backward, beyond what was there."""
    memory = given_memory(gradients, inputs[0].device)
    run = Run(module, inputs, is_first)
    end = run.forward_to_end(loss, gradients, memory)
    before = _restart()
    run.backward(end)
    return max(0, torch.cuda.max_memory_allocated() - before)


def allocated_peak_bytes(stage: nn.Module, inputs: Sequence[Tensor], is_first: bool, loss: Loss | None = None) -> int:
    """Return the most that the GPU's allocator gave out during a forward and backward of a stage.

    Inputs, parameters, their gradients and buffers are not in it; the gradients of the outputs are, and held
    throughout.
    """
    give_gradients(stage)
    before = _restart()
    run = Run(stage, inputs, is_first, has_leaves=True)
    outputs = run.forward(loss)
    forward_peak = torch.cuda.max_memory_allocated() - before
    gradients = fresh_gradients(outputs, is_given=True)
    end = run.take(outputs, gradients, memory := given_memory(gradients, inputs[0].device))
    del outputs
    _restart()
    run.backward(end)
    peak = max(forward_peak, torch.cuda.max_memory_allocated() - before)
    memory.clear()
    return peak


def _restart() -> int:
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated()
