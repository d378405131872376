"""Metering: one layer run forward and backward as inside a stage, and the bytes that it makes, saves and needs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from gems.autograd.recompute.layer_state import RandomState
from gems.autograd.recompute.matmul_outputs import MatmulOutputs, RecordMatmuls, ReplayMatmuls
from gems.autograd.split_backward.deferred import DeferredGradients
from gems.autograd.split_backward.layers import SplitLayers
from gems.profile.profilers.kernel_workspaces import Workspace
from gems.profile.profilers.layer_run import Loss, Run, fresh_gradients, give_gradients, given_memory, static_tensors
from gems.profile.profilers.live_bytes import LiveBytes, storage_of, unique_bytes
from gems.profile.profilers.tensor_slots import Gradient, Output
from gems.profile.saved_storages import Saved, counted


@dataclass(frozen=True, slots=True)
class LayerMeter:
    """The bytes of a layer, whatever its neighbours; fields as in `LayerProfile`.

    `saved_inputs` are the inputs whose memory it saves, `held_inputs` those that its weight gradients read.
    `left_bytes` is what its forward leaves: stash and outputs. `inner` is the memory that it makes and does not pass
    on: what it saves, and what products gave.
    """

    param_bytes: int
    buffer_bytes: int
    outputs: tuple[Output, ...]
    saved_inputs: tuple[int, ...]
    stash_bytes: int
    left_bytes: int
    forward_peak_bytes: int
    held_for_weights_bytes: int
    held_inputs: tuple[int, ...]
    held_input_bytes: int
    held_output_grad_bytes: int
    plain_peak_bytes: int = 0
    cheap_first_peak_bytes: int = 0
    cheap_peak_bytes: int = 0
    inner: tuple[Saved, ...] = ()


@dataclass(frozen=True, slots=True)
class BackwardMeter:
    """The peak of a layer's backward beyond what is saved and what its stage was given, and its gradients.

    `input_gradients` has an entry an input, None if none comes.
    """

    peak_bytes: int
    input_gradients: tuple[Gradient | None, ...]


def meter(
    module: nn.Module,
    inputs: Sequence[Tensor],
    is_first: bool = False,
    loss: Loss | None = None,
    workspace: Workspace | None = None,
) -> LayerMeter:
    """Run a layer forward on tensors, real or fake, and return its bytes.

    Args:
        module: the layer; its running statistics move.
        inputs: what it is given; a tensor that stands twice is the same tensor to the layer.
        is_first: no input gradient will be computed.
        loss: for the last layer, what makes a scalar of its one output, in place of handing that on.
        workspace: tells what kernels use within themselves.
    """
    give_gradients(module)
    known = [*inputs, *static_tensors(module)]
    names = {storage_of(tensor) for tensor in known}
    with LiveBytes(known, workspace) as live:
        run = Run(module, inputs, is_first)
        saved: dict[int, int] = {}
        with _noting(saved):
            outputs = run.forward(loss)
        forward_peak = live.peak_bytes
        described = _describe(outputs, run.values, saved)
    made = {output.made: output.storage_bytes for output in described if output.made is not None}
    unsaved = {
        output.made: output.storage_bytes for output in described if not output.is_saved and output.made is not None
    }
    stash = sum(num_bytes for name, num_bytes in saved.items() if name not in names)
    inner, handed_products = _inner(module, inputs, is_first, loss)
    described = tuple(
        replace(output, is_product=output.made in handed_products) if output.made is not None else output
        for output in described
    )
    held, held_inputs, held_gradient = _held_for_weights(module, inputs, is_first, loss)
    return LayerMeter(
        param_bytes=unique_bytes(module.parameters()),
        buffer_bytes=unique_bytes(module.buffers()),
        outputs=described,
        saved_inputs=tuple(k for k, tensor in enumerate(inputs) if storage_of(tensor) in saved),
        stash_bytes=stash,
        left_bytes=stash + sum(unsaved.values()),
        forward_peak_bytes=max(forward_peak, sum(made.values())),
        held_for_weights_bytes=held,
        held_inputs=held_inputs,
        held_input_bytes=unique_bytes(inputs[number] for number in held_inputs),
        held_output_grad_bytes=held_gradient,
        plain_peak_bytes=_first_run_peak_bytes(module, inputs, is_first, loss, workspace, nullcontext()),
        cheap_first_peak_bytes=_first_run_peak_bytes(
            module,
            inputs,
            is_first,
            loss,
            workspace,
            RecordMatmuls(MatmulOutputs(), RandomState(module, inputs[0].device)),
        ),
        cheap_peak_bytes=_cheap_peak_bytes(module, inputs, is_first, loss, workspace),
        inner=inner,
    )


def meter_backward(
    module: nn.Module,
    inputs: Sequence[Tensor],
    gradients: Sequence[Gradient | None],
    is_first: bool = False,
    loss: Loss | None = None,
    workspace: Workspace | None = None,
) -> BackwardMeter:
    """Run a layer forward and backward, and return the bytes of its backward.

    Args:
        module: as in `meter`; weight gradients are added to what is there.
        inputs: as in `meter`.
        gradients: how the gradient of each output lies, None for an output that nothing after it reads.
        is_first: as in `meter`.
        loss: as in `meter`.
        workspace: as in `meter`.
    """
    give_gradients(module)
    memory = given_memory(gradients, inputs[0].device)
    with LiveBytes([*inputs, *static_tensors(module), *memory.values()], workspace) as live:
        run = Run(module, inputs, is_first)
        end = run.forward_to_end(loss, gradients, memory)
        kept = live.restart()
        run.backward(end)
    given = {storage_of(tensor) for tensor in memory.values()}
    return BackwardMeter(live.peak_bytes - kept, run.input_gradients(given))


@contextmanager
def _noting(saved: dict[int, int]) -> Iterator[None]:
    """Record the storages that autograd saves inside, with their bytes."""

    def pack(tensor: Tensor) -> Tensor:
        saved[storage_of(tensor)] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield


def _describe(outputs: Sequence[Tensor], inputs: Sequence[Tensor], saved: dict[int, int]) -> tuple[Output, ...]:
    given: dict[int, int] = {}
    same: dict[int, int] = {}
    for number, tensor in enumerate(inputs):
        given.setdefault(storage_of(tensor), number)
        same.setdefault(id(tensor), number)
    made: dict[int, int] = {}
    numbers: dict[int, int] = {}
    found = []
    for tensor in outputs:
        name, number = storage_of(tensor), numbers.setdefault(id(tensor), len(numbers))
        if name not in given:
            made.setdefault(name, len(made))
        found.append(
            Output(
                tuple(tensor.shape), tuple(tensor.stride()), int(tensor.storage_offset()), tensor.dtype,
                tensor.requires_grad, number, same.get(id(tensor)), given.get(name), made.get(name),
                tensor.untyped_storage().nbytes(), name in saved,
            )
        )  # fmt: skip
    return tuple(found)


def _inner(
    module: nn.Module, inputs: Sequence[Tensor], is_first: bool, loss: Loss | None
) -> tuple[tuple[Saved, ...], set[int | None]]:
    """Return the memory that a layer makes and keep to itself, and which memory that it passes on products gave."""
    static = {storage_of(tensor) for tensor in (*inputs, *static_tensors(module))}
    run = Run(module, inputs, is_first)
    saved: dict[int, int] = {}
    products = MatmulOutputs()
    with RecordMatmuls(products, RandomState(module, inputs[0].device)), _noting(saved):
        outputs = run.forward(loss)
    given = {storage_of(tensor): tensor.untyped_storage().nbytes() for tensor in products.tensors()}
    made = {
        storage_of(tensor): output.made
        for tensor, output in zip(outputs, _describe(outputs, run.values, saved), strict=True)
    }
    inner = [
        Saved(num_bytes, (0,) if name in saved else (), is_product=name in given)
        for name, num_bytes in (saved | given).items()
        if num_bytes and name not in static and name not in made
    ]
    return counted(inner), {made[name] for name in given if name in made}


def _first_run_peak_bytes(
    module: nn.Module,
    inputs: Sequence[Tensor],
    is_first: bool,
    loss: Loss | None,
    workspace: Workspace | None,
    keeping: AbstractContextManager[object],
) -> int:
    """Return the most that a forward makes at once of which nothing is kept but by `keeping`: it will be recomputed."""

    def drop(_: Tensor) -> Any:
        return None

    run = Run(module, inputs, is_first)
    live = LiveBytes([*inputs, *static_tensors(module)], workspace)
    with live, torch.autograd.graph.saved_tensors_hooks(drop, drop), keeping:
        run.forward(loss)
    return live.peak_bytes


def _cheap_peak_bytes(
    module: nn.Module, inputs: Sequence[Tensor], is_first: bool, loss: Loss | None, workspace: Workspace | None
) -> int:
    """Return the most that a selective recompute makes at once, beside what the first one kept for it."""
    run = Run(module, inputs, is_first)
    products, random = MatmulOutputs(), RandomState(module, inputs[0].device)
    with RecordMatmuls(products, random):
        run.forward(loss)
    live = LiveBytes([*inputs, *static_tensors(module), *products.tensors()], workspace)
    with live, ReplayMatmuls(products, random):
        run.forward(loss)
    return live.peak_bytes


def _held_for_weights(
    module: nn.Module, inputs: Sequence[Tensor], is_first: bool, loss: Loss | None
) -> tuple[int, tuple[int, ...], int]:
    """Return what the engine's split backward keeps of the layer between I and W, by running its I.

    Returns:
        Bytes of all that is kept, which inputs are among it, and bytes of the gradients of the outputs among it.
    """
    later = DeferredGradients()
    with SplitLayers(nn.ModuleList([module])).defer_to(later):
        run = Run(module, inputs, is_first)
        outputs = run.forward(loss)
        gradients = fresh_gradients(outputs, is_given=True)
        memory = given_memory(gradients, inputs[0].device)
        end = run.take(outputs, gradients, memory)
        del outputs
        run.backward(end)
    static = {storage_of(tensor) for tensor in static_tensors(module)}
    kept = [tensor for tensor in later.tensors() if storage_of(tensor) not in static]
    names = {storage_of(tensor) for tensor in kept}

    held_inputs = tuple(number for number, tensor in enumerate(inputs) if storage_of(tensor) in names)
    held_gradient = unique_bytes(tensor for tensor in memory.values() if storage_of(tensor) in names)
    return unique_bytes(kept), held_inputs, held_gradient
