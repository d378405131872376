"""The profile without a device: fake tensors give the bytes of any resolution, a roofline the times."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from gems.config.schema import DataConfig, MachineConfig, ModelConfig
from gems.models import Layer, layers_of, title_of
from gems.models.build import build_layer
from gems.profile.identity import subject, versions
from gems.profile.model_profile import ModelProfile
from gems.profile.profilers.chain import Gradients, Instruments, Probe, Times, profile_chain
from gems.profile.profilers.kernel_workspaces import workspace_of
from gems.profile.profilers.meter import BackwardMeter, LayerMeter, meter, meter_backward
from gems.profile.profilers.roofline import rates_of, roofline_times
from gems.profile.profilers.whole_model import given_tensors, tracked_peak_bytes

_HOST = torch.device("cpu")  # a build without a GPU knows no fake tensors of one


def fake_profile(
    model: ModelConfig,
    data: DataConfig,
    micro_batch_size: int,
    dtype: str,
    machine: MachineConfig,
    has_whole: bool = False,
) -> ModelProfile:
    """Return the profile of a model on a machine that need not be here, by its rates.

    With `has_whole`, `facts` hold `peak_bytes`, that of the unsplit model on one device.

    Raises:
        ConfigError: the model does not exist, or the machine has no rate for the dtype.
    """
    kind: torch.dtype = getattr(torch, dtype)
    rates = rates_of(machine, kind)
    layers = layers_of(model, data)
    given = given_tensors(data, micro_batch_size, kind, torch.device("meta"))
    mode = FakeTensorMode()
    workspace = workspace_of(device_of(machine))

    def forward(probe: Probe) -> tuple[LayerMeter, Times]:
        module = probe.build()
        with mode:
            made_fake(module)
            inputs = probe.inputs()
            times = roofline_times(module, inputs, probe.is_first, probe.loss, rates)
            return meter(module, inputs, probe.is_first, probe.loss, workspace), times

    def backward(probe: Probe, gradients: Gradients) -> BackwardMeter:
        module = probe.build()
        with mode:
            made_fake(module)
            return meter_backward(module, probe.inputs(), gradients, probe.is_first, probe.loss, workspace)

    measure = Instruments(forward, backward)
    profiles = profile_chain(layers, given, lambda layer, _: on_meta(layer, kind), measure, _HOST)
    whole = {"peak_bytes": _whole_peak_bytes(layers, data, micro_batch_size, kind, mode)} if has_whole else {}
    return ModelProfile(
        model=title_of(model),
        height_px=data.height_px,
        width_px=data.width_px,
        micro_batch_size=micro_batch_size,
        dtype=dtype,
        device=machine.name,
        source="fake",
        layers=profiles,
        input_bytes=sum(tensor.numel() * tensor.element_size() for tensor in given),
        versions=versions(),
        facts={
            **whole,
            "flops_per_s": rates.flops_per_s,
            "memory_bytes_per_s": rates.memory_bytes_per_s,
            "subject": subject(model, data, micro_batch_size, dtype),
        },
    )


def _whole_peak_bytes(
    layers: Sequence[Layer], data: DataConfig, micro_batch_size: int, dtype: torch.dtype, mode: FakeTensorMode
) -> int:
    modules = [on_meta(layer, dtype) for layer in layers]
    with mode:
        images = given_tensors(data, micro_batch_size, dtype, _HOST)
        return tracked_peak_bytes([made_fake(module) for module in modules], images)


def device_of(machine: MachineConfig) -> torch.device:
    """Return the device that a rank of the machine will use; for `auto` the GPU if torch sees one."""
    is_cuda = machine.device == "cuda" or (machine.device == "auto" and torch.cuda.is_available())
    return torch.device("cuda" if is_cuda else "cpu")


def on_meta(layer: Layer, dtype: torch.dtype) -> nn.Module:
    """Build a layer without memory; its parameters have no values."""
    return build_layer(layer, 0, 0, dtype, "meta")


def made_fake(module: nn.Module) -> nn.Module:
    """Put fake parameters and buffers into a module of torch's meta device, and return it.

    What the module shares within itself stays shared.
    """
    made: dict[int, torch.Tensor] = {}
    for inner in module.modules():
        for name, parameter in inner._parameters.items():
            if parameter is not None:
                fake = torch.empty(parameter.shape, dtype=parameter.dtype, device=_HOST)
                same = made.setdefault(id(parameter), nn.Parameter(fake, parameter.requires_grad))
                inner._parameters[name] = same  # type: ignore[assignment]
        for name, buffer in inner._buffers.items():
            if buffer is not None:
                fake = torch.empty(buffer.shape, dtype=buffer.dtype, device=_HOST)
                inner._buffers[name] = made.setdefault(id(buffer), fake)
    return module
