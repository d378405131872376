"""A chain: layers metered one by one, each on what the one before passes on, and joined by the memory they share.

Memory is followed by name, not by address: a tensor that is carried through layers, or seen by a view, is one storage
from where it is made to its last use, and so is a gradient on its way back. So it is known which layer is the first to
save a storage, and what a carried gradient keeps alive. Equal layers on equal inputs are measured once: a ResNet-1001
has few distinct ones.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn

from gems.models import Layer
from gems.profile.model_profile import LayerProfile
from gems.profile.profilers.layer_run import Loss, training_loss
from gems.profile.profilers.meter import BackwardMeter, LayerMeter
from gems.profile.profilers.tensor_slots import Gradient
from gems.profile.saved_storages import Saved, counted, product_bytes_of, stash_of

Gradients = tuple[Gradient | None, ...]
_DATA = -1  # the maker of the model's inputs


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds of one layer on one micro-batch."""

    forward_s: float = 0.0
    input_grad_s: float = 0.0
    weight_grad_s: float = 0.0
    recompute_s: float = 0.0
    cheap_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Probe:
    """One layer to be measured; its module and inputs are made when they are needed."""

    build: Callable[[], nn.Module]
    inputs: Callable[[], list[Tensor]]
    is_first: bool
    loss: Loss | None


@dataclass(frozen=True, slots=True)
class Instruments:
    """Functions that measure a layer: bytes and times, and the bytes of its backward for given gradients."""

    forward: Callable[[Probe], tuple[LayerMeter, Times]]
    backward: Callable[[Probe, Gradients], BackwardMeter]


@dataclass(slots=True)
class _Storage:
    num_bytes: int
    maker: int
    savers: list[int] = field(default_factory=list)
    last_use: int = 0
    is_product: bool = False
    weight_readers: list[int] = field(default_factory=list)

    def seen_from_its_maker(self) -> Saved:
        savers, readers = (
            tuple(layer - self.maker for layer in layers) for layers in (self.savers, self.weight_readers)
        )
        return Saved(self.num_bytes, savers, self.last_use - self.maker, 1, self.is_product, readers)


@dataclass(slots=True)
class _Slot:
    """A tensor at a boundary; slots with the same `name` are the same tensor."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    storage: _Storage
    name: object = field(default_factory=object)


@dataclass(slots=True)
class _Kind:
    """Equal layers on equal inputs."""

    probe: Probe
    meter: LayerMeter
    times: Times
    backwards: dict[Gradients, BackwardMeter] = field(default_factory=dict)

    def backward(self, gradients: Gradients, measure: Callable[[Probe, Gradients], BackwardMeter]) -> BackwardMeter:
        if gradients not in self.backwards:
            self.backwards[gradients] = measure(self.probe, gradients)
        return self.backwards[gradients]

    def given_gradients(self) -> Gradients:
        """Those of a stage that ends here: each a tensor of its own, which the stage holds."""
        return tuple(
            Gradient.like(output, number, True) if output.grad_bytes else None
            for number, output in enumerate(self.meter.outputs)
        )


def profile_chain(
    layers: Sequence[Layer],
    given: Sequence[Tensor],
    build: Callable[[Layer, int], nn.Module],
    measure: Instruments,
    device: torch.device,
    has_loss: bool = True,
) -> tuple[LayerProfile, ...]:
    """Return the profile of each layer of a model.

    Args:
        layers: the model, first to last.
        given: its inputs, none sharing memory; only their shapes, strides and dtypes are used.
        build: makes the module of a layer with its index.
        measure: measures one layer alone.
        device: where inputs are made.
        has_loss: the last layer's one output goes into the loss of training, as on the last stage of a run.
    """
    slots = [_slot_of(tensor) for tensor in given]
    known: dict[object, _Kind] = {}
    kinds: list[_Kind] = []
    joined = _Joined()
    for index, layer in enumerate(layers):
        loss = training_loss if has_loss and index == len(layers) - 1 else None
        key = (layer.target, layer.options, index == 0, loss is not None, _pattern(slots))
        if key not in known:
            probe = Probe(partial(build, layer, index), partial(_tensors, slots, device), index == 0, loss)
            try:
                known[key] = _Kind(probe, *measure.forward(probe))
            except Exception as error:
                error.add_note(f"layer {layer.name} took {', '.join(str(slot.shape) for slot in slots)}")
                raise
        kinds.append(known[key])
        slots = joined.add(index, slots, known[key].meter)
    backwards = _backwards(kinds, measure.backward)
    return tuple(
        _layer_profile(layer, kind, joined, index, backwards[index])
        for index, (layer, kind) in enumerate(zip(layers, kinds, strict=True))
    )


class _Joined:
    """What layers share: who saves what another one made, and what is given but not yet saved."""

    def __init__(self) -> None:
        self.handed_on: dict[int, list[_Storage]] = defaultdict(list)
        self.unsaved: dict[int, dict[int, int]] = defaultdict(lambda: defaultdict(int))

    def add(self, index: int, slots: Sequence[_Slot], meter: LayerMeter) -> list[_Slot]:
        """Put a layer after those before, and return what it passes on."""
        for storage in _unique(slot.storage for slot in slots):
            storage.last_use = index
            if not storage.savers and storage.maker != _DATA:
                self.unsaved[index][index - storage.maker] += storage.num_bytes
        for storage in _unique(slots[number].storage for number in meter.saved_inputs):
            storage.savers.append(index)
        for storage in _unique(slots[number].storage for number in meter.held_inputs):
            storage.weight_readers.append(index)
        made: dict[int, _Storage] = {}
        names: dict[int, object] = {}
        handed = []
        for output in meter.outputs:
            if output.made is None:
                assert output.given is not None
                storage = slots[output.given].storage
            else:
                if output.made not in made:
                    savers = [index] if output.is_saved else []
                    made[output.made] = _Storage(output.storage_bytes, index, savers, index, output.is_product)
                    self.handed_on[index].append(made[output.made])
                storage = made[output.made]
            slot = _Slot(output.shape, output.strides, output.offset, output.dtype, storage)
            if output.same_as is not None:
                slot.name = slots[output.same_as].name
            else:
                slot.name = names.setdefault(output.number, slot.name)
            handed.append(slot)
        return handed

    def storages(self, index: int, meter: LayerMeter) -> tuple[Saved, ...]:
        """Return the memory that a layer makes and that is saved or used beyond it."""
        handed = [storage.seen_from_its_maker() for storage in self.handed_on[index] if storage.num_bytes]
        kept = (storage for storage in handed if storage.savers or storage.last_use or storage.is_product)
        return counted((*meter.inner, *kept))


@dataclass(slots=True)
class _Backward:
    """A layer's backward, by the end of its stage: its peak, and what a stage that begins with it passes on."""

    peaks: dict[int, int] = field(default_factory=dict)
    passed: dict[int, int] = field(default_factory=dict)


def _backwards(kinds: Sequence[_Kind], measure: Callable[[Probe, Gradients], BackwardMeter]) -> list[_Backward]:
    """Return, for each layer, its backward in all stages that it may be in.

    Of a gradient that the stage was given nothing is counted. From an end on the way back is walked only until the
    gradients lie as they did on the way from the next end.
    """
    num = len(kinds)
    found = [_Backward() for _ in kinds]
    before: list[Gradients | None] = [None] * num
    for end in range(num, 0, -1):
        gradients = kinds[end - 1].given_gradients()
        for index in range(end - 1, -1, -1):
            if before[index] == gradients:
                for lower in found[: index + 1]:
                    lower.peaks[end] = lower.peaks[end + 1]
                    lower.passed[end] = lower.passed[end + 1]
                break
            before[index] = gradients
            meter = kinds[index].backward(gradients, measure)
            gradients = meter.input_gradients
            found[index].peaks[end] = meter.peak_bytes
            found[index].passed[end] = sum(lies.num_bytes for lies in gradients if lies and lies.is_untouched)
    return found


def _layer_profile(layer: Layer, kind: _Kind, joined: _Joined, index: int, backward: _Backward) -> LayerProfile:
    meter, times, peaks = kind.meter, kind.times, backward.peaks
    unsaved, storages = joined.unsaved[index], joined.storages(index, meter)
    saved = tuple(storage for storage in storages if storage.savers)
    _, saved_later = stash_of(saved)
    grad_bytes = sum(output.grad_bytes for output in meter.outputs)
    usual = peaks[max(peaks)] + (grad_bytes if len(peaks) == 1 else 0)
    rare = {end - index - 1: peak for end, peak in sorted(peaks.items()) if end == index + 1 or peak != usual}
    return LayerProfile(
        name=layer.name,
        kind=layer.kind,
        forward_s=times.forward_s,
        input_grad_s=times.input_grad_s,
        weight_grad_s=times.weight_grad_s,
        recompute_s=times.recompute_s,
        cheap_s=times.cheap_s,
        param_bytes=meter.param_bytes,
        buffer_bytes=meter.buffer_bytes,
        stash_bytes=meter.stash_bytes,
        saved_later=saved_later,
        output_bytes=sum(output.num_bytes for output in meter.outputs),
        output_grad_bytes=grad_bytes,
        unsaved_input_bytes=sum(unsaved.values()),
        unsaved_from=tuple(pair for pair in sorted(unsaved.items()) if pair[0] > 1),
        workspace_bytes=max(0, meter.forward_peak_bytes - meter.left_bytes, usual - grad_bytes),
        forward_peak_bytes=meter.forward_peak_bytes,
        backward_peak_bytes=usual,
        backward_peak_at=tuple(rare.items()),
        passed_at=tuple((end - index - 1, size) for end, size in sorted(backward.passed.items()) if size),
        held_for_weights_bytes=meter.held_for_weights_bytes,
        held_input_bytes=meter.held_input_bytes,
        held_output_grad_bytes=meter.held_output_grad_bytes,
        cheap_bytes=product_bytes_of(storages),
        plain_peak_bytes=meter.plain_peak_bytes,
        cheap_first_peak_bytes=meter.cheap_first_peak_bytes,
        cheap_peak_bytes=meter.cheap_peak_bytes,
        saved=saved,
        passing=tuple(storage for storage in storages if not storage.savers),
    )


def _slot_of(tensor: Tensor) -> _Slot:
    storage = _Storage(tensor.untyped_storage().nbytes(), _DATA)
    return _Slot(tuple(tensor.shape), tuple(tensor.stride()), int(tensor.storage_offset()), tensor.dtype, storage)


def _unique(storages: Iterable[_Storage]) -> list[_Storage]:
    return list({id(storage): storage for storage in storages}.values())


def _pattern(slots: Sequence[_Slot]) -> object:
    """Return a key that is equal for inputs that a layer cannot distinguish: layout and shared memory."""
    storages: dict[int, int] = {}
    names: dict[int, int] = {}
    return tuple(
        (
            slot.shape, slot.strides, slot.offset, slot.dtype, slot.storage.num_bytes,
            storages.setdefault(id(slot.storage), len(storages)), names.setdefault(id(slot.name), len(names)),
        )
        for slot in slots
    )  # fmt: skip


def _tensors(slots: Sequence[_Slot], device: torch.device) -> list[Tensor]:
    """Make tensors that share memory as the slots do: random numbers, or zeros for integers."""
    memory: dict[int, Tensor] = {}
    made: dict[int, Tensor] = {}
    for slot in slots:
        key = id(slot.storage)
        if key not in memory:
            size = slot.storage.num_bytes // slot.dtype.itemsize
            make = torch.randn if slot.dtype.is_floating_point else torch.zeros
            memory[key] = make(size, dtype=slot.dtype, device=device)
        if id(slot.name) not in made:
            flat = memory[key].view(slot.dtype)
            made[id(slot.name)] = flat.as_strided(slot.shape, slot.strides, slot.offset)
    return [made[id(slot.name)] for slot in slots]
