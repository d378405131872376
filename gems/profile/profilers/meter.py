"""Meter a layer: run it as inside a stage, and count the bytes that it makes, saves and needs."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack, closing
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from gems.autograd.convolutions import ConvolutionWatch
from gems.autograd.outputs import tensors_in
from gems.autograd.recompute.layer_state import RandomState
from gems.autograd.recompute.matmul_outputs import MatmulOutputs, RecordMatmuls, ReplayMatmuls
from gems.autograd.split_backward.deferred import DeferredGradients
from gems.autograd.split_backward.layers import SplitLayers
from gems.profile.model_profile import LayerProfile, Saved, counted
from gems.profile.profilers.layer_run import (
    Gradients,
    LayerCall,
    Layout,
    Run,
    fresh_gradients,
    give_gradients,
    given_memory,
    static_tensors,
)
from gems.profile.profilers.live_bytes import (
    AllocatedBytes,
    LiveBytes,
    SavedStorages,
    Workspace,
    storage_of,
    unique_bytes,
)


@dataclass(frozen=True, slots=True)
class Output:
    """One tensor that a layer passes on.

    `number` distinguishes the layer's tensors: a tensor that is passed on twice has one number.
    `same_as` is the input that equals this tensor, and `given` the input whose memory it uses. If
    `given` is None, the layer made the memory, and `made` is its number. `is_saved` means that the
    layer itself saves the tensor, `is_conv_input` that a convolution in it does, and `is_product`
    that a convolution or a matrix product made it.
    """

    layout: Layout
    number: int
    same_as: int | None
    given: int | None
    made: int | None
    storage_bytes: int
    is_saved: bool
    is_conv_input: bool
    is_product: bool

    @property
    def grad_bytes(self) -> int:
        """The size of its gradient in bytes, 0 for a tensor of integers."""
        return self.layout.num_bytes if self.layout.dtype.is_floating_point else 0


@dataclass(frozen=True, slots=True)
class LayerMeter:
    """The bytes of a layer, independent of its neighbours.

    `layer` has the fields that do not depend on them. `saved_inputs` are the inputs whose memory
    the layer saves, `conv_inputs` those that a convolution in it saves, and `held_inputs` those
    that its weight gradients read. `left_bytes` is the size of stash and outputs after its forward.
    `inner` is the memory that it makes and does not pass on: saved tensors, and results of
    products.
    """

    layer: LayerProfile
    outputs: tuple[Output, ...]
    saved_inputs: tuple[int, ...]
    conv_inputs: tuple[int, ...]
    held_inputs: tuple[int, ...]
    left_bytes: int
    inner: tuple[Saved, ...]


@dataclass(frozen=True, slots=True)
class BackwardMeter:
    """The peak of a layer's backward and its gradients.

    The peak does not include saved tensors and received gradients. `input_gradients` has an entry
    for each input, or None if it gets no gradient.
    """

    peak_bytes: int
    input_gradients: Gradients


def meter(call: LayerCall, workspace: Workspace | None = None) -> LayerMeter:
    """Run a layer forward on tensors, real or fake, and return its bytes.

    Its running statistics change. `workspace` returns the bytes that kernels use internally. On a
    GPU the peak of forward is the allocator's.
    """
    give_gradients(call.module)
    known = call.static_tensors()
    names = {storage_of(tensor) for tensor in known}
    inner, products = _inner(call, names)
    with LiveBytes(known, workspace) as live:
        run = Run(call)
        with closing(ConvolutionWatch(call.module)) as watch, SavedStorages(watch) as saved:
            outputs = run.forward()
        forward_peak = live.peak_bytes
        described = _describe(outputs, run.values, saved, products)
    own_outputs = {output.made: output for output in described if output.made is not None}
    stash = sum(num_bytes for name, num_bytes in saved.num_bytes.items() if name not in names)
    left_bytes = stash + sum(
        output.storage_bytes for output in own_outputs.values() if not output.is_saved
    )
    forward_peak = max(forward_peak, sum(output.storage_bytes for output in own_outputs.values()))
    del run, outputs
    if call.device.type == "cuda":
        forward_peak = max(left_bytes, _forward_peak(call, AllocatedBytes()))

    def recomputed_peak(*keeping: AbstractContextManager[object]) -> int:
        """Return the peak of a forward of which only `keeping` keeps anything."""
        hooks = torch.autograd.graph.saved_tensors_hooks(_drop, _drop)
        return _forward_peak(call, LiveBytes(known, workspace), hooks, *keeping)

    held_bytes, held_inputs, held_gradient, made_gradients = _held_for_weights(call)
    layer = LayerProfile(
        name="",
        kind="",
        param_bytes=unique_bytes(call.module.parameters()),
        buffer_bytes=unique_bytes(call.module.buffers()),
        stash_bytes=stash,
        forward_peak_bytes=forward_peak,
        **_loss_bytes(call, names),
        held_for_weights_bytes=held_bytes,
        held_input_bytes=unique_bytes(call.inputs[number] for number in held_inputs),
        held_output_grad_bytes=held_gradient,
        held_grad_bytes=made_gradients,
        plain_peak_bytes=recomputed_peak(),
        cheap_first_peak_bytes=recomputed_peak(
            RecordMatmuls(MatmulOutputs(), RandomState(call.module, call.device))
        ),
        cheap_peak_bytes=_cheap_peak(call, workspace),
    )
    saved_inputs, conv_inputs = (
        tuple(number for number, tensor in enumerate(call.inputs) if storage_of(tensor) in storages)
        for storages in (saved.num_bytes, saved.by_convolutions)
    )
    return LayerMeter(layer, described, saved_inputs, conv_inputs, held_inputs, left_bytes, inner)


def meter_backward(
    call: LayerCall, gradients: Gradients, workspace: Workspace | None = None
) -> BackwardMeter:
    """Run a layer forward and backward, and return the bytes of its backward.

    `gradients` are the gradients of the outputs, or None for an output that is not read later.
    Weight gradients are added to existing ones. On a GPU the peak is the allocator's.
    """
    give_gradients(call.module)
    memory = given_memory(gradients, call.device)

    def peak(live: LiveBytes | AllocatedBytes) -> tuple[int, Run]:
        with live:
            run = Run(call)
            end = run.take(run.forward(), gradients, memory)
            start_bytes = live.restart()
            run.backward(end)
        return live.peak_bytes - start_bytes, run

    peak_bytes, run = peak(LiveBytes([*call.static_tensors(), *memory.values()], workspace))
    if call.device.type == "cuda":
        peak_bytes, _ = peak(AllocatedBytes())
    return BackwardMeter(
        peak_bytes, run.input_gradients({storage_of(tensor) for tensor in memory.values()})
    )


def _describe(
    outputs: Sequence[Tensor],
    inputs: Sequence[Tensor],
    saved: SavedStorages,
    products: set[int | None],
) -> tuple[Output, ...]:
    """Return the outputs; `products` are the numbers of the storages that products made."""
    input_of: dict[int, int] = {}
    same: dict[int, int] = {}
    for number, tensor in enumerate(inputs):
        input_of.setdefault(storage_of(tensor), number)
        same.setdefault(id(tensor), number)
    made_here: dict[int, int] = {}
    numbers: dict[int, int] = {}
    described = []
    for tensor in outputs:
        name = storage_of(tensor)
        number = numbers.setdefault(id(tensor), len(numbers))
        place = None if name in input_of else made_here.setdefault(name, len(made_here))
        described.append(
            Output(
                Layout.of(tensor),
                number,
                same.get(id(tensor)),
                input_of.get(name),
                place,
                tensor.untyped_storage().nbytes(),
                name in saved.num_bytes,
                name in saved.by_convolutions,
                place is not None and place in products,
            )
        )
    return tuple(described)


def _inner(call: LayerCall, static: set[int]) -> tuple[tuple[Saved, ...], set[int | None]]:
    """Return the memory that a layer keeps to itself, and the product memory that it passes on."""
    run = Run(call)
    products = MatmulOutputs()
    state = RandomState(call.module, call.device)
    with (
        RecordMatmuls(products, state),
        closing(ConvolutionWatch(call.module)) as watch,
        SavedStorages(watch) as saved,
    ):
        outputs = run.forward()
    product_bytes = {
        storage_of(tensor): tensor.untyped_storage().nbytes() for tensor in products.tensors()
    }
    described = _describe(outputs, run.values, saved, set())
    passed_on = {
        storage_of(tensor): output.made for tensor, output in zip(outputs, described, strict=True)
    }
    inner = [
        Saved(
            num_bytes,
            (0,) if name in saved.num_bytes else (),
            is_product=name in product_bytes,
            conv_savers=(0,) if name in saved.by_convolutions else (),
        )
        for name, num_bytes in (saved.num_bytes | product_bytes).items()
        if num_bytes and name not in static and name not in passed_on
    ]
    return counted(inner), {passed_on[name] for name in product_bytes if name in passed_on}


def _loss_bytes(call: LayerCall, static: set[int]) -> dict[str, Any]:
    """Return the fields with the bytes of the inputs and saved tensors of the last layer's loss."""
    loss = call.loss
    if loss is None:
        return {}
    scores: list[Tensor] = []
    known = set(static)

    def watched(output: Any) -> Tensor:
        scores.extend(tensors_in(output))
        known.update(saved.num_bytes)
        return loss(output)

    with SavedStorages() as saved:
        Run(replace(call, loss=watched)).forward()
    return {
        "score_bytes": unique_bytes(tensor for tensor in scores if storage_of(tensor) not in known),
        "loss_bytes": sum(saved.num_bytes[name] for name in saved.num_bytes.keys() - known),
        "score_grad_bytes": sum(tensor.nbytes for tensor in scores if tensor.requires_grad),
    }


def _forward_peak(
    call: LayerCall, live: LiveBytes | AllocatedBytes, *around: AbstractContextManager[object]
) -> int:
    """Return the peak bytes of a forward within the contexts `around`."""
    run = Run(call)
    with ExitStack() as stack:
        for context in (live, *around):
            stack.enter_context(context)
        run.forward()
    return live.peak_bytes


def _drop(_: Tensor) -> Any:
    return None


def _cheap_peak(call: LayerCall, workspace: Workspace | None) -> int:
    """Return the peak bytes of a selective recompute, without the kept products."""
    products = MatmulOutputs()
    random = RandomState(call.module, call.device)
    with RecordMatmuls(products, random):
        Run(call).forward()
    # keep them until the end, so that other memory does not get the address of a dropped product
    tensors = list(products.tensors())
    live = LiveBytes([*call.static_tensors(), *tensors], workspace)
    return _forward_peak(call, live, ReplayMatmuls(products, random))


def _held_for_weights(call: LayerCall) -> tuple[int, tuple[int, ...], int, int]:
    """Return the bytes that a split backward keeps of a layer between I and W, by running its I.

    Returns:
        All kept bytes, the inputs among them, the bytes of output gradients among them, and the
            bytes that forward has not saved.
    """
    later = DeferredGradients()
    saved: list[Tensor] = []  # kept to the end, so that no gradient gets the ID of one
    loss = call.loss

    def save(tensor: Tensor) -> Tensor:
        if not tensor._is_zerotensor():
            saved.append(tensor)
        return tensor

    def watched(output: Any) -> Tensor:
        """Run the loss; the layers receive the gradients of its inputs."""
        assert loss is not None
        for tensor in tensors_in(output):
            if tensor.requires_grad:
                tensor.register_hook(saved.append)  # type: ignore[no-untyped-call]
        return loss(output)

    if loss is not None:
        call = replace(call, loss=watched)

    with SplitLayers(nn.ModuleList([call.module])).defer_to(later):
        run = Run(call)
        with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
            outputs = run.forward()
        gradients = fresh_gradients(outputs, is_given=True)
        memory = given_memory(gradients, call.device)
        end = run.take(outputs, gradients, memory)
        del outputs
        run.backward(end)
    static = {storage_of(tensor) for tensor in static_tensors(call.module)}
    tensors = [tensor for tensor in later.tensors() if storage_of(tensor) not in static]
    names = {storage_of(tensor) for tensor in tensors}
    held_inputs = tuple(
        number for number, tensor in enumerate(call.inputs) if storage_of(tensor) in names
    )
    held_gradient = unique_bytes(
        tensor for tensor in memory.values() if storage_of(tensor) in names
    )
    by_forward = {storage_of(tensor) for tensor in saved}
    new = [tensor for tensor in tensors if storage_of(tensor) not in by_forward]
    return unique_bytes(tensors), held_inputs, held_gradient, unique_bytes(new)
