"""One run of a layer as inside a stage, between two ends.

The first end feeds its inputs, the second takes its outputs. In a chain, a gradient dies when it
has been consumed, and a layer's output when the next layer is done. So the first end drops the
gradients of the inputs, and the second creates those of the outputs within backward. Parameters
already have gradients, as in a run, where they are views of one buffer.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn import functional

from gems.autograd.mixed import low_copies
from gems.autograd.outputs import as_tuple, tensors_in
from gems.config.schema import DataConfig
from gems.data import task_of
from gems.profile.profilers.live_bytes import storage_of

Loss = Callable[[Any], Tensor]
_OF_VALUES: dict[str, Callable[..., Tensor]] = {
    "multi_label": functional.binary_cross_entropy_with_logits,
    "regression": functional.mse_loss,
}
T = TypeVar("T")


class Layout(NamedTuple):
    """The layout of a tensor in its memory; it begins `offset` elements after the start."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor) -> Layout:
        """Return the layout of a tensor."""
        return cls(
            tuple(tensor.shape), tuple(tensor.stride()), int(tensor.storage_offset()), tensor.dtype
        )

    @classmethod
    def contiguous(cls, shape: Sequence[int], dtype: torch.dtype) -> Layout:
        """Return the layout of a contiguous tensor in memory of its own."""
        return cls(
            tuple(shape),
            tuple(math.prod(shape[place + 1 :]) for place in range(len(shape))),
            0,
            dtype,
        )

    @property
    def num_bytes(self) -> int:
        """The size of the tensor's data in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize

    def view(self, memory: Tensor) -> Tensor:
        """Return a tensor of this layout in a flat memory."""
        return memory.view(self.dtype).as_strided(self.shape, self.strides, self.offset)


@dataclass(frozen=True, slots=True)
class Gradient:
    """A gradient; gradients with the same `storage` share its memory.

    `is_given` means that the stage received the memory and holds it until its backward ends; other
    memory is freed when it has been read. `is_untouched` means that it is the received tensor
    itself.
    """

    layout: Layout
    storage: int
    storage_bytes: int
    is_given: bool = False
    is_untouched: bool = False

    @classmethod
    def fresh(
        cls, shape: Sequence[int], dtype: torch.dtype, storage: int, is_given: bool = False
    ) -> Gradient:
        """Return a contiguous gradient in memory of its own."""
        layout = Layout.contiguous(shape, dtype)
        return cls(layout, storage, layout.num_bytes, is_given, is_given)

    def memory(self, device: torch.device) -> Tensor:
        """Allocate its memory."""
        dtype = self.layout.dtype
        return torch.zeros(self.storage_bytes // dtype.itemsize, dtype=dtype, device=device)


Gradients = tuple[Gradient | None, ...]


@dataclass(frozen=True, slots=True)
class Times:
    """The times of one layer for one micro-batch, in seconds."""

    forward_s: float = 0.0
    input_grad_s: float = 0.0
    weight_grad_s: float = 0.0
    recompute_s: float = 0.0
    cheap_s: float = 0.0
    split_s: float = 0.0


@dataclass(frozen=True, slots=True)
class LayerCall:
    """A layer and its inputs; a tensor that occurs twice is the same tensor to the layer.

    A layer that `is_first` computes no input gradient. The last layer has a `loss`, which computes
    a scalar from its output instead of passing that on.
    """

    module: nn.Module
    inputs: Sequence[Tensor]
    is_first: bool = False
    loss: Loss | None = None

    @property
    def device(self) -> torch.device:
        """The device on which the layer runs."""
        return self.inputs[0].device

    def static_tensors(self) -> list[Tensor]:
        """Return the tensors that exist without a run.

        These are inputs, parameters, their gradients and buffers.
        """
        return [*self.inputs, *static_tensors(self.module)]

    def forward_and_backward(self, watch: Callable[[Callable[[], object]], T]) -> tuple[T, T]:
        """Run the layer, and return the results of `watch` for its forward and for its backward."""
        run = Run(self)
        outputs: list[Tensor] = []
        forward = watch(lambda: outputs.extend(run.forward()))
        end = run.take(outputs)
        outputs.clear()
        return forward, watch(lambda: run.backward(end))

    @contextmanager
    def without_weight_gradients(self) -> Iterator[None]:
        """Disable the gradients of all parameters."""
        parameters = [
            parameter for parameter in self.module.parameters() if parameter.requires_grad
        ]
        for parameter in parameters:
            parameter.requires_grad_(False)
        yield
        for parameter in parameters:
            parameter.requires_grad_(True)


def given_memory(gradients: Sequence[Gradient | None], device: torch.device) -> dict[int, Tensor]:
    """Allocate the memory of the gradients that the stage holds, by storage number."""
    return {
        gradient.storage: gradient.memory(device)
        for gradient in gradients
        if gradient is not None and gradient.is_given
    }


def training_loss(output: Any, task: str = "classification") -> Tensor:
    """Return the task's loss of a model's output, as the engine computes it.

    If it has several tensors, their losses are added. Labels are class 0 for each sample, place or
    pixel, or values 0.
    """
    total: Tensor | None = None
    for scores in tensors_in(output):
        wide = scores.float() if scores.dtype in (torch.bfloat16, torch.float16) else scores
        if task in _OF_VALUES:
            loss = _OF_VALUES[task](wide, torch.zeros_like(wide), reduction="sum")
        else:
            labels = torch.zeros(
                scores.shape[:1] + scores.shape[2:], dtype=torch.int64, device=scores.device
            )
            loss = functional.cross_entropy(wide, labels, reduction="sum")
        total = loss if total is None else total + loss
    assert total is not None
    return total


def task_loss(data: DataConfig) -> Loss:
    """Return the loss for the task of the data."""
    return partial(training_loss, task=task_of(data))


def give_gradients(module: nn.Module) -> None:
    """Give zero gradients to parameters without a gradient."""
    for parameter in module.parameters():
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)


def static_tensors(module: nn.Module) -> list[Tensor]:
    """Return the tensors that a layer holds without a run.

    These are parameters, their gradients and low copies, and buffers.
    """
    gradients = [parameter.grad for parameter in module.parameters() if parameter.grad is not None]
    return [*module.parameters(), *gradients, *module.buffers(), *low_copies(module)]


class Run:
    """One forward and backward of a layer between two ends.

    A whole stage has leaves instead of the first end. A leaf keeps its gradient, as a copy if
    another object holds it.
    """

    def __init__(self, call: LayerCall, has_leaves: bool = False) -> None:
        self._call = call
        leaves = {
            id(tensor): (
                tensor.detach().requires_grad_(tensor.is_floating_point() and not call.is_first)
            )
            for tensor in call.inputs
        }
        floats = {key: leaf for key, leaf in leaves.items() if leaf.requires_grad}
        self._leaves = leaves if has_leaves else {}
        self._arrived: list[tuple[int, Gradient] | None] = []
        self._untouched: list[Tensor] = []
        self._places = [list(floats).index(id(t)) if id(t) in floats else None for t in call.inputs]
        if floats and not has_leaves:
            leaves |= zip(
                floats, _start(self._arrived, self._untouched, *floats.values()), strict=True
            )
        self.values = [leaves[id(tensor)] for tensor in call.inputs]

    def forward(self) -> tuple[Tensor, ...]:
        """Run the layer, and the loss on its output."""
        output = self._call.module(*self.values)
        return as_tuple(output) if self._call.loss is None else (self._call.loss(output),)

    def take(
        self,
        outputs: Sequence[Tensor],
        gradients: Sequence[Gradient | None] | None = None,
        memory: dict[int, Tensor] | None = None,
    ) -> Tensor | None:
        """Put the second end after the outputs, to create their gradients in backward.

        Return None if there are no gradients. Without `gradients` each is a separate tensor;
        `memory` is the memory of existing storages.
        """
        pairs = zip(
            outputs, fresh_gradients(outputs) if gradients is None else gradients, strict=True
        )
        wanted = [
            (gradient, tensor) for tensor, gradient in pairs if tensor.requires_grad and gradient
        ]
        self.values.clear()
        if not wanted:
            return None
        return _end(
            [gradient for gradient, _ in wanted],
            memory or {},
            self._untouched,
            *(tensor for _, tensor in wanted),
        )

    def backward(self, end: Tensor | None) -> None:
        """Create the outputs' gradients and run backward."""
        if end is not None:
            torch.autograd.backward([end], [torch.empty_like(end)])

    def input_gradients(self, known: set[int]) -> Gradients:
        """Return the layout of the inputs' gradients.

        A tensor that is passed twice gets one gradient, at its first position. `given` are the
        storages that existed before backward.
        """
        numbers: dict[int, int] = {}
        arrived = dict(enumerate(self._arrived))
        gradients: list[Gradient | None] = []
        for place in self._places:
            storage, gradient = (None if place is None else arrived.pop(place, None)) or (0, None)
            if gradient is not None:
                number = numbers.setdefault(storage, len(numbers))
                gradient = replace(gradient, storage=number, is_given=storage in known)
            gradients.append(gradient)
        return tuple(gradients)


class _Start(Function):
    """A node that feeds tensors; their gradients end here, and the layout of these is recorded."""

    @staticmethod
    def forward(
        ctx: Any,
        arrived: list[tuple[int, Gradient] | None],
        untouched: list[Tensor],
        *tensors: Tensor,
    ) -> Any:
        ctx.set_materialize_grads(False)
        ctx.arrived = arrived
        ctx.untouched = untouched
        return tuple(tensor.detach() for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        for gradient in gradients:
            if gradient is None:
                ctx.arrived.append(None)
                continue
            is_untouched = any(gradient is received for received in ctx.untouched)
            recorded = Gradient(
                Layout.of(gradient),
                0,
                gradient.untyped_storage().nbytes(),
                is_untouched=is_untouched,
            )
            ctx.arrived.append((storage_of(gradient), recorded))
        ctx.untouched.clear()
        return (None,) * (2 + len(gradients))


class _End(Function):
    """A node that takes outputs, and creates their gradients in backward."""

    @staticmethod
    def forward(
        ctx: Any,
        gradients: list[Gradient],
        memory: dict[int, Tensor],
        untouched: list[Tensor],
        *tensors: Tensor,
    ) -> Any:
        ctx.gradients, ctx.memory, ctx.untouched, ctx.device = (
            gradients,
            memory,
            untouched,
            tensors[0].device,
        )
        return tensors[0].new_empty(0)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Any:
        memory: dict[int, Tensor] = dict(ctx.memory)
        uses = Counter(gradient.storage for gradient in ctx.gradients)
        tensors = []
        for gradient in ctx.gradients:
            shape = gradient.layout.shape
            dtype = gradient.layout.dtype
            if gradient.storage not in memory:
                is_whole = gradient.layout.strides == Layout.contiguous(shape, dtype).strides
                if (
                    is_whole
                    and gradient.storage_bytes == gradient.layout.num_bytes
                    and uses[gradient.storage] == 1
                ):
                    # not a view, because the engine may add to it in place
                    tensors.append(torch.zeros(shape, dtype=dtype, device=ctx.device))
                    continue
                memory[gradient.storage] = gradient.memory(ctx.device)
            tensors.append(gradient.layout.view(memory[gradient.storage]))
            if gradient.is_untouched:
                ctx.untouched.append(tensors[-1])
        return (None, None, None, *tensors)


_start: Callable[..., tuple[Tensor, ...]] = _Start.apply
_end: Callable[..., Tensor] = _End.apply


def fresh_gradients(outputs: Sequence[Tensor], is_given: bool = False) -> Gradients:
    """Return separate gradient tensors; outputs without a gradient get None."""
    return tuple(
        (
            Gradient.fresh(tensor.shape, tensor.dtype, number, is_given)
            if tensor.requires_grad and tensor.is_floating_point()
            else None
        )
        for number, tensor in enumerate(outputs)
    )
