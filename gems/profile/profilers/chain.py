"""A chain: layers that are metered one by one, each on the output of the one before.

The results are joined by the memory that the layers share. Memory is tracked by name instead of by
address: a tensor that is carried through layers, or seen through a view, is one storage from its
creation to its last use, and so is a gradient on its way back. So it is known which layer first
saves a storage, and which memory a carried gradient keeps alive. Equal layers on equal inputs are
measured once: a ResNet-1001 has few distinct ones.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from gems.config.schema import DataConfig, MachineConfig, ModelConfig
from gems.models import Layer, layers_of, title_of
from gems.models.build import input_spec
from gems.models.mixed import Precision
from gems.profile.model_profile import (
    LayerProfile,
    ModelProfile,
    Saved,
    counted,
    product_bytes_of,
    stash_of,
)
from gems.profile.profilers.layer_run import (
    Gradient,
    Gradients,
    LayerCall,
    Layout,
    Loss,
    Times,
    task_loss,
    training_loss,
)
from gems.profile.profilers.live_bytes import Workspace
from gems.profile.profilers.meter import BackwardMeter, LayerMeter, Output, meter, meter_backward
from gems.profile.store import versions
from gems.profile.subject import layer_keys

_DATA = -1  # the maker of the model's inputs


@dataclass(frozen=True, slots=True)
class Lab:
    """The setup for measuring layers.

    `build` makes the module of a layer from its index; `mode` is active while it runs.
    """

    build: Callable[[Layer, int], nn.Module]
    device: torch.device
    workspace: Workspace | None = None
    times: Callable[[LayerCall], Times] = lambda _: Times()
    mode: AbstractContextManager[Any] = field(default_factory=nullcontext)

    def call(
        self, layer: Layer, index: int, slots: Sequence[_Slot], loss: Loss | None
    ) -> LayerCall:
        """Build a layer and its inputs."""
        module = self.build(layer, index)
        with self.mode:
            return LayerCall(module, _tensors(slots, self.device), index == 0, loss)


@dataclass(slots=True)
class _Storage:
    num_bytes: int
    maker: int
    savers: list[int] = field(default_factory=list)
    last_use: int = 0
    is_product: bool = False
    weight_readers: list[int] = field(default_factory=list)
    conv_savers: list[int] = field(default_factory=list)


@dataclass(slots=True)
class _Slot:
    """A tensor at a boundary; slots with the same `name` are the same tensor."""

    layout: Layout
    storage: _Storage
    name: object = field(default_factory=object)


@dataclass(slots=True)
class _Kind:
    """Equal layers on equal inputs."""

    lab: Lab
    call: Callable[[], LayerCall]
    meter: LayerMeter
    times: Times
    backwards: dict[Gradients, BackwardMeter] = field(default_factory=dict)

    def backward(self, gradients: Gradients) -> BackwardMeter:
        if gradients not in self.backwards:
            call = self.call()
            with self.lab.mode:
                self.backwards[gradients] = meter_backward(call, gradients, self.lab.workspace)
        return self.backwards[gradients]


@dataclass(slots=True)
class _Placed:
    """A layer in the chain.

    `made` is the memory that it passes on. `unsaved` is its input memory that no layer has saved
    yet, by the distance to its maker. `backward` maps the end of its stage to its peak, and to the
    bytes that a stage beginning with it passes on and makes as gradients of its inputs, and those
    that a later segment of a stage makes.
    """

    layer: Layer
    kind: _Kind
    made: list[_Storage] = field(default_factory=list)
    unsaved: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    backward: dict[int, tuple[int, int, int, int]] = field(default_factory=dict)


def profile_model(
    model: ModelConfig,
    data: DataConfig,
    micro_batch_size: int,
    dtype: str,
    lab: Lab,
    device: str,
    source: str,
    facts: dict[str, Any],
) -> ModelProfile:
    """Return the profile of a model on micro-batches of one shape."""
    inputs = given_tensors(
        data, micro_batch_size, Precision.of(dtype).compute, torch.device("meta")
    )
    layers = profile_chain(layers_of(model, data), inputs, lab, task_loss(data))
    input_bytes = sum(tensor.nbytes for tensor in inputs)
    facts = {**facts, "subject": layer_keys(model, data, micro_batch_size, dtype)}
    return ModelProfile(
        model=title_of(model),
        **data.sides,
        micro_batch_size=micro_batch_size,
        dtype=dtype,
        device=device,
        source=source,
        layers=layers,
        input_bytes=input_bytes,
        versions=versions(),
        facts=facts,
    )


def machine_device(machine: MachineConfig) -> torch.device:
    """Return the device that a rank of the machine uses; for `auto`, the GPU if torch sees one."""
    is_cuda = machine.device == "cuda" or (machine.device == "auto" and torch.cuda.is_available())
    return torch.device("cuda" if is_cuda else "cpu")


def given_tensors(
    data: DataConfig, micro_batch_size: int, dtype: torch.dtype, device: torch.device
) -> list[Tensor]:
    """Return the model's inputs for one micro-batch, without their values."""
    spec = input_spec(data, micro_batch_size, dtype)
    return [torch.empty(spec.shape, dtype=spec.dtype, device=device)]


def profile_chain(
    layers: Sequence[Layer], given: Sequence[Tensor], lab: Lab, loss: Loss = training_loss
) -> tuple[LayerProfile, ...]:
    """Return the profile of each layer of a model, in order.

    `given` are its inputs, which must not share memory; only their layout is used. The single
    output of the last layer goes into the training loss, as on the last stage of a run.
    """
    slots = [
        _Slot(Layout.of(tensor), _Storage(tensor.untyped_storage().nbytes(), _DATA))
        for tensor in given
    ]
    known: dict[object, _Kind] = {}
    chain: list[_Placed] = []
    for index, layer in enumerate(layers):
        of_layer = loss if index == len(layers) - 1 else None
        key = (layer.target, layer.options, index == 0, of_layer is not None, _pattern(slots))
        if key not in known:
            make = partial(lab.call, layer, index, slots, of_layer)
            try:
                call = make()
                with lab.mode:
                    times = lab.times(call)
                    known[key] = _Kind(lab, make, meter(call, lab.workspace), times)
            except Exception as error:
                error.add_note(
                    f"layer {layer.name} took {', '.join(str(slot.layout.shape) for slot in slots)}"
                )
                raise
        chain.append(_Placed(layer, known[key]))
        slots = _join(chain[-1], index, slots)
    _add_backwards(chain)
    grad_bytes = [
        sum(output.grad_bytes for output in placed.kind.meter.outputs) for placed in chain
    ]
    return tuple(
        _layer_profile(placed, index, given)
        for index, (placed, given) in enumerate(zip(chain, [0, *grad_bytes], strict=False))
    )


def _join(placed: _Placed, index: int, slots: Sequence[_Slot]) -> list[_Slot]:
    """Append a layer to the chain, and return its outputs."""
    meter = placed.kind.meter
    for storage in _unique(slot.storage for slot in slots):
        storage.last_use = index
        if not storage.savers and storage.maker != _DATA:
            placed.unsaved[index - storage.maker] += storage.num_bytes
    for storage in _unique(slots[number].storage for number in meter.saved_inputs):
        storage.savers.append(index)
    for storage in _unique(slots[number].storage for number in meter.held_inputs):
        storage.weight_readers.append(index)
    for storage in _unique(slots[number].storage for number in meter.conv_inputs):
        storage.conv_savers.append(index)
    names: dict[int, object] = {}
    handed = []
    for output in meter.outputs:
        if output.made is None:
            assert output.given is not None
            storage = slots[output.given].storage
        else:
            if output.made == len(placed.made):
                savers = [index] if output.is_saved else []
                convs = [index] if output.is_conv_input else []
                placed.made.append(
                    _Storage(
                        output.storage_bytes,
                        index,
                        savers,
                        index,
                        output.is_product,
                        conv_savers=convs,
                    )
                )
            storage = placed.made[output.made]
        slot = _Slot(output.layout, storage)
        if output.same_as is not None:
            slot.name = slots[output.same_as].name
        else:
            slot.name = names.setdefault(output.number, slot.name)
        handed.append(slot)
    return handed


def _add_backwards(chain: Sequence[_Placed]) -> None:
    """Measure each layer's backward in all stages that may contain it.

    Gradients that the stage receives are not counted. For each end, the chain is walked backwards
    only until the gradients are the same as on the walk from the next end.
    """
    before: list[Gradients | None] = [None] * len(chain)
    for end in range(len(chain), 0, -1):
        # gradients of the stage that ends here: separate tensors, which the stage holds
        gradients: Gradients = tuple(
            (
                Gradient.fresh(output.layout.shape, output.layout.dtype, number, True)
                if output.grad_bytes
                else None
            )
            for number, output in enumerate(chain[end - 1].kind.meter.outputs)
        )
        for index in range(end - 1, -1, -1):
            if before[index] == gradients:
                for lower in chain[: index + 1]:
                    lower.backward[end] = lower.backward[end + 1]
                break
            before[index] = gradients
            measured = chain[index].kind.backward(gradients)
            gradients = measured.input_gradients
            passed = sum(
                gradient.layout.num_bytes
                for gradient in gradients
                if gradient and gradient.is_untouched
            )
            inputs = chain[index - 1].kind.meter.outputs if index else ()
            grad_bytes, as_segment = (
                _made_bytes(gradients, inputs, is_first) for is_first in (True, False)
            )
            chain[index].backward[end] = measured.peak_bytes, passed, grad_bytes, as_segment


def _made_bytes(gradients: Gradients, inputs: Sequence[Output], is_first: bool) -> int:
    """Return the bytes that the first or a later segment makes as gradients of its inputs.

    In the first they are complete and in the layouts of the inputs. One that shares the memory of a
    gradient of the segment's outputs is not made.
    """
    sizes: dict[object, int] = {}
    for gradient, tensor in zip(gradients, inputs, strict=False):
        is_other = gradient is None or gradient.layout.strides != tensor.layout.strides
        if is_first and is_other:
            sizes[tensor] = tensor.grad_bytes
        elif gradient is not None and not gradient.is_given:
            sizes[gradient.storage] = gradient.storage_bytes
    return sum(sizes.values())


def _layer_profile(placed: _Placed, index: int, given_grad_bytes: int) -> LayerProfile:
    meter = placed.kind.meter
    unsaved = placed.unsaved
    handed = [
        Saved(
            storage.num_bytes,
            tuple(layer - index for layer in storage.savers),
            storage.last_use - index,
            1,
            storage.is_product,
            *(
                tuple(layer - index for layer in layers)
                for layers in (storage.weight_readers, storage.conv_savers)
            ),
        )
        for storage in placed.made
        if storage.num_bytes and (storage.savers or storage.last_use > index or storage.is_product)
    ]
    storages = counted((*meter.inner, *handed))
    saved = tuple(storage for storage in storages if storage.savers)
    grad_bytes = sum(output.grad_bytes for output in meter.outputs)
    peaks = {end - index - 1: peak for end, (peak, *_) in sorted(placed.backward.items())}
    usual = peaks[max(peaks)] + (grad_bytes if len(peaks) == 1 else 0)

    def at_ends(place: int, usual: int) -> tuple[tuple[int, int], ...]:
        """Return a figure of the backward by the end of the stage, unless it is the usual one."""
        return tuple(
            (end - index - 1, figures[place])
            for end, figures in sorted(placed.backward.items())
            if figures[place] != usual
        )

    return replace(
        meter.layer,
        name=placed.layer.name,
        kind=placed.layer.kind,
        **asdict(placed.kind.times),
        saved_later=stash_of(saved)[1],
        output_bytes=sum(output.layout.num_bytes for output in meter.outputs),
        output_grad_bytes=grad_bytes,
        unsaved_input_bytes=sum(unsaved.values()),
        unsaved_from=tuple(pair for pair in sorted(unsaved.items()) if pair[0] > 1),
        workspace_bytes=max(
            0, meter.layer.forward_peak_bytes - meter.left_bytes, usual - grad_bytes
        ),
        backward_peak_bytes=usual,
        backward_peak_at=tuple(
            (ahead, peak) for ahead, peak in peaks.items() if not ahead or peak != usual
        ),
        passed_at=at_ends(1, 0),
        input_grads_at=at_ends(2, given_grad_bytes),
        segment_grads_at=at_ends(3, given_grad_bytes),
        cheap_bytes=product_bytes_of(storages),
        saved=saved,
        passing=tuple(storage for storage in storages if not storage.savers),
    )


def _unique(storages: Iterable[_Storage]) -> list[_Storage]:
    return list({id(storage): storage for storage in storages}.values())


def _pattern(slots: Sequence[_Slot]) -> object:
    """Return a key that is equal for inputs that a layer cannot distinguish.

    It consists of their layout and shared memory.
    """
    storages: dict[int, int] = {}
    names: dict[int, int] = {}
    return tuple(
        (
            slot.layout,
            slot.storage.num_bytes,
            storages.setdefault(id(slot.storage), len(storages)),
            names.setdefault(id(slot.name), len(names)),
        )
        for slot in slots
    )


def _tensors(slots: Sequence[_Slot], device: torch.device) -> list[Tensor]:
    """Create tensors that share memory like the slots: random numbers, or zeros for integers."""
    memory: dict[int, Tensor] = {}
    tensors: dict[int, Tensor] = {}
    for slot in slots:
        key = id(slot.storage)
        dtype = slot.layout.dtype
        if key not in memory:
            make = torch.randn if dtype.is_floating_point else torch.zeros
            memory[key] = make(slot.storage.num_bytes // dtype.itemsize, dtype=dtype, device=device)
        if id(slot.name) not in tensors:
            tensors[id(slot.name)] = slot.layout.view(memory[key])
    return [tensors[id(slot.name)] for slot in slots]
