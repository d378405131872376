"""The incremental profile of mCAP (Dreuning, Bal, van Nieuwpoort, Euro-Par 2022, section 3).

Layers are added one by one to a device, and each time its peak in training is measured:
`isolated[l]` is the peak of a device with layer l alone, and `added[l]` is the increase of the peak
of the device to which layer l was added. A device is full when it has its share of the layers, or
when the next one would exceed its memory; then the next device begins. mCAP's predictor adds these
up, including a transient peak for each layer, so it is neither an upper nor a lower bound.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from gems.autograd.outputs import as_tuple
from gems.config.schema import DataConfig, MachineConfig, ModelConfig
from gems.models import layers_of
from gems.models.build import TensorSpec, boundary_shapes, input_spec
from gems.models.mixed import Precision
from gems.profile.model_profile import ModelProfile
from gems.profile.profilers.fake import fake_lab
from gems.profile.profilers.layer_run import (
    LayerCall,
    Run,
    fresh_gradients,
    give_gradients,
    given_memory,
    task_loss,
)
from gems.profile.profilers.live_bytes import AllocatedBytes, LiveBytes, Workspace, unique_bytes
from gems.profile.profilers.measured import device_lab


def incremental_profile(
    base: ModelProfile,
    peak_of: Callable[[int, int], int],
    layers_per_device: int | None = None,
    device_bytes: int | None = None,
) -> ModelProfile:
    """Return a profile with mCAP's statistics, `isolated` and `added` bytes per layer, in `facts`.

    The first layer on a device is added to nothing, so its `added` is its peak alone. `base` has
    the figures of the layers, and `peak_of` returns the peak of a device that trains layers a up to
    e. As many layers share a device as `layers_per_device` and `device_bytes` allow; None means no
    limit.
    """
    num = base.num_layers
    isolated = [peak_of(layer, layer + 1) for layer in range(num)]
    added: list[int] = []
    first = 0
    before = 0
    for layer in range(num):
        is_full = layers_per_device is not None and layer - first >= layers_per_device
        peak = isolated[layer] if is_full or layer == first else peak_of(first, layer + 1)
        if layer > first and (is_full or (device_bytes is not None and peak > device_bytes)):
            first = layer
            before = 0
            peak = isolated[layer]
        added.append(peak - before)
        before = peak
    facts = {**base.facts, "isolated": isolated, "added": added, "taken_on": base.source}
    return replace(base, source="incremental", facts=facts)


class McapDevices:
    """A trainer of spans of layers, each alone on a device, that returns their peaks.

    A peak is that of one micro-batch in flight: parameters, gradients and `optimizer_states`
    additional copies, buffers, inputs, activations, gradients and workspaces of kernels.
    """

    def __init__(
        self,
        model: ModelConfig,
        data: DataConfig,
        micro_batch_size: int,
        dtype: str,
        machine: MachineConfig,
        is_fake: bool,
        optimizer_states: int = 1,
    ) -> None:
        kind = Precision.of(dtype)
        self._layers, self._loss = layers_of(model, data), task_loss(data)
        self._copies = 2 + optimizer_states
        images = input_spec(data, micro_batch_size, kind.compute)
        self._given = [(images,), *boundary_shapes(self._layers, images.shape, kind, images.dtype)]
        self._lab = fake_lab(machine, kind) if is_fake else device_lab(machine, kind)
        self._known: dict[object, int] = {}

    def peak_bytes(self, first: int, end: int) -> int:
        """Return the peak of a device that trains layers first up to end.

        Equal spans are trained once.
        """
        layers = tuple((layer.target, layer.options) for layer in self._layers[first:end])
        inputs_key = tuple((spec.shape, spec.dtype) for spec in self._given[first])
        key = (layers, inputs_key, first == 0, end == len(self._layers))
        if key not in self._known:
            stage = _Layers(
                [self._lab.build(self._layers[index], index) for index in range(first, end)]
            )
            with self._lab.mode:
                inputs = [self._input(spec) for spec in self._given[first]]
                loss = self._loss if end == len(self._layers) else None
                moving = trained_peak_bytes(
                    LayerCall(stage, inputs, first == 0, loss), self._lab.workspace
                )
                static = self._copies * unique_bytes(stage.parameters()) + unique_bytes(
                    stage.buffers()
                )
                self._known[key] = static + unique_bytes(inputs) + moving
        return self._known[key]

    def _input(self, spec: TensorSpec) -> Tensor:
        make = torch.randn if spec.dtype.is_floating_point else torch.zeros
        return make(spec.shape, dtype=spec.dtype, device=self._lab.device)


def trained_peak_bytes(call: LayerCall, workspace: Workspace | None = None) -> int:
    """Return the most that a forward and backward of a stage hold at once.

    It is counted or, on a GPU, measured by the allocator. It does not include inputs, parameters,
    their gradients, and buffers. It includes the gradients of the outputs, which are held
    throughout.
    """
    give_gradients(call.module)
    is_cuda = call.device.type == "cuda"
    with AllocatedBytes() if is_cuda else LiveBytes(call.static_tensors(), workspace) as live:
        run = Run(call, has_leaves=True)
        outputs = run.forward()
        forward_peak = live.peak_bytes
        gradients = fresh_gradients(outputs, is_given=True)
        memory = given_memory(gradients, call.device)
        end = run.take(outputs, gradients, memory)
        del outputs
        live.restart()
        run.backward(end)
        return max(forward_peak, live.peak_bytes)


class _Layers(nn.Module):
    """Layers in sequence, with all the tensors between them."""

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, *values: Tensor) -> Any:
        """Return the output of the last layer."""
        output: Any = values
        for layer in self.layers:
            output = layer(*as_tuple(output))
        return output
