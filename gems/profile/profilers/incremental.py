"""The incremental profile of mCAP (Dreuning, Bal, van Nieuwpoort, Euro-Par 2022, section 3): layers added one by one.

A device is given one layer, then one more, and so on, and each time its peak in training is taken: `isolated[l]` is the
peak of a device that holds layer l alone, `added[l]` how much layer l raised the peak of the device that it was added
to. A device is full when it has its share of the layers, or when the next one would exceed its memory; then the next
device begins. mCAP's predictor adds these up, a transient peak for each layer among them: it is no upper or lower
bound.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from gems.config.schema import DataConfig, MachineConfig, ModelConfig
from gems.models import Layer, layers_of
from gems.models.build import as_tuple, boundary_shapes, build_layer, input_spec
from gems.profile.model_profile import ModelProfile
from gems.profile.profilers.fake import device_of, made_fake, on_meta
from gems.profile.profilers.kernel_workspaces import Workspace, workspace_of
from gems.profile.profilers.layer_run import (
    Run,
    fresh_gradients,
    give_gradients,
    given_memory,
    static_tensors,
    training_loss,
)
from gems.profile.profilers.live_bytes import LiveBytes, unique_bytes
from gems.profile.profilers.measured import allocated_peak_bytes

PeakOf = Callable[[int, int], int]


def incremental_profile(
    base: ModelProfile, peak_of: PeakOf, layers_per_device: int | None = None, device_bytes: int | None = None
) -> ModelProfile:
    """Return a profile with mCAP's statistics in `facts`: `isolated` and `added` bytes of each layer.

    The first layer on a device was added to none, so its `added` is the peak that it alone has.

    Args:
        base: the layers' own figures, measured or fake.
        peak_of: gives the peak of a device that trains layers a up to e.
        layers_per_device: how many layers share a device; None for all that fit.
        device_bytes: the memory of a device; None for no limit.
    """
    num = base.num_layers
    isolated = [peak_of(layer, layer + 1) for layer in range(num)]
    added: list[int] = []
    first, before = 0, 0
    for layer in range(num):
        is_full = layers_per_device is not None and layer - first >= layers_per_device
        peak = isolated[layer] if is_full or layer == first else peak_of(first, layer + 1)
        if layer > first and (is_full or (device_bytes is not None and peak > device_bytes)):
            first, before, peak = layer, 0, isolated[layer]
        added.append(peak - before)
        before = peak
    facts = {**base.facts, "isolated": isolated, "added": added, "taken_on": base.source}
    return replace(base, source="incremental", facts=facts)


class Devices:
    """Trains runs of layers alone, each on a device of its own, and return their peaks.

    A peak is that of one micro-batch in flight: parameters, gradients and `optimizer_states` more copies, buffers,
    inputs, activations, gradients and what kernels need.
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
        self._layers = layers_of(model, data)
        self._dtype: torch.dtype = getattr(torch, dtype)
        self._copies = 2 + optimizer_states
        given = input_spec(data, micro_batch_size, self._dtype)
        shapes = boundary_shapes(self._layers, given.shape, self._dtype, given.dtype)
        self._given = [(given,), *shapes[:-1]]
        self._is_fake = is_fake
        self._mode = FakeTensorMode()
        self._device = torch.device("cpu") if is_fake else device_of(machine)
        self._workspace = workspace_of(device_of(machine))
        self._known: dict[object, int] = {}

    def peak_bytes(self, first: int, end: int) -> int:
        """Return the peak of a device that trains layers first up to end; equal runs are trained once."""
        layers = self._layers[first:end]
        given = [(spec.shape, spec.dtype) for spec in self._given[first]]
        is_last = end == len(self._layers)
        key = (tuple((layer.target, layer.options) for layer in layers), tuple(given), first == 0, is_last)
        if key not in self._known:
            self._known[key] = self._train(layers, first, given, is_last)
        return self._known[key]

    def _train(
        self, layers: Sequence[Layer], first: int, given: list[tuple[tuple[int, ...], torch.dtype]], is_last: bool
    ) -> int:
        loss = training_loss if is_last else None
        if self._is_fake:
            modules = [on_meta(layer, self._dtype) for layer in layers]
            with self._mode:
                stage = _Layers([made_fake(module) for module in modules])
                return self._total(stage, self._inputs(given), first == 0, loss)
        modules = [
            build_layer(layer, first + place, 0, self._dtype, self._device) for place, layer in enumerate(layers)
        ]
        return self._total(_Layers(modules), self._inputs(given), first == 0, loss)

    def _inputs(self, given: list[tuple[tuple[int, ...], torch.dtype]]) -> list[Tensor]:
        return [
            (torch.randn if dtype.is_floating_point else torch.zeros)(shape, dtype=dtype, device=self._device)
            for shape, dtype in given
        ]

    def _total(
        self, stage: nn.Module, inputs: list[Tensor], is_first: bool, loss: Callable[[Tensor], Tensor] | None
    ) -> int:
        static = self._copies * unique_bytes(stage.parameters()) + unique_bytes(stage.buffers())
        if self._device.type == "cuda":
            return static + unique_bytes(inputs) + allocated_peak_bytes(stage, inputs, is_first, loss)
        return static + unique_bytes(inputs) + trained_peak_bytes(stage, inputs, is_first, loss, self._workspace)


def trained_peak_bytes(
    stage: nn.Module,
    inputs: Sequence[Tensor],
    is_first: bool,
    loss: Callable[[Tensor], Tensor] | None = None,
    workspace: Workspace | None = None,
) -> int:
    """Return the most that a forward and backward of a stage hold at once, counted.

    Inputs, parameters, their gradients and buffers are not in it; the gradients of the outputs are, and held
    throughout.
    """
    give_gradients(stage)
    live = LiveBytes([*inputs, *static_tensors(stage)], workspace)
    with live:
        run = Run(stage, inputs, is_first, has_leaves=True)
        outputs = run.forward(loss)
        forward_peak = live.peak_bytes
        gradients = fresh_gradients(outputs, is_given=True)
        memory = given_memory(gradients, inputs[0].device)
        end = run.take(outputs, gradients, memory)
        del outputs
        live.restart()
        run.backward(end)
    return max(forward_peak, live.peak_bytes)


class _Layers(nn.Module):
    """Layers one after the other, with all the tensors between them."""

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, *values: Tensor) -> tuple[Tensor, ...]:
        """Return what the last layer passes on."""
        for layer in self.layers:
            values = as_tuple(layer(*values))
        return values
