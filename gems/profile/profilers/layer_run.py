"""One run of a layer as inside a stage, between a node that feeds its inputs and one that takes its outputs.

In a chain a gradient dies when it has been consumed, and a layer's output when the next layer is done. So the first end
drops the gradients of the inputs, and the second makes those of the outputs within backward. Parameters have their
gradients already, as in a run, where they are views of one buffer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn import functional

from gems.models.build import as_tuple
from gems.profile.profilers.live_bytes import storage_of
from gems.profile.profilers.tensor_slots import Gradient

Loss = Callable[[Tensor], Tensor]


def given_memory(gradients: Sequence[Gradient | None], device: torch.device) -> dict[int, Tensor]:
    """Make the memory of those gradients that the stage holds, by its number."""
    return {lies.storage: _memory(lies, device) for lies in gradients if lies is not None and lies.is_given}


def training_loss(logits: Tensor) -> Tensor:
    """Return the loss as the engine computes it, of logits (N, classes, ...) against the class 0."""
    wide = logits.float() if logits.dtype in (torch.bfloat16, torch.float16) else logits
    labels = torch.zeros(logits.shape[:1] + logits.shape[2:], dtype=torch.int64, device=logits.device)
    return functional.cross_entropy(wide, labels, reduction="sum")


def give_gradients(module: nn.Module) -> None:
    """Give parameters without a gradient one of zeros."""
    for parameter in module.parameters():
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)


def static_tensors(module: nn.Module) -> list[Tensor]:
    """Return what a layer holds without running: parameters, their gradients, buffers."""
    gradients = [parameter.grad for parameter in module.parameters() if parameter.grad is not None]
    return [*module.parameters(), *gradients, *module.buffers()]


class Run:
    """One forward and backward of a layer between two ends; a whole stage has leaves in place of the first.

    A leaf keeps its gradient, in a copy where somebody else holds it.
    """

    def __init__(self, module: nn.Module, inputs: Sequence[Tensor], is_first: bool, has_leaves: bool = False) -> None:
        self._module = module
        leaves = {
            id(tensor): tensor.detach().requires_grad_(tensor.is_floating_point() and not is_first) for tensor in inputs
        }
        floats = {key: leaf for key, leaf in leaves.items() if leaf.requires_grad}
        self._leaves = leaves if has_leaves else {}
        self._arrived: list[tuple[int, Gradient] | None] = []
        self._untouched: list[Tensor] = []
        self._places = [list(floats).index(id(t)) if id(t) in floats else None for t in inputs]
        is_open = bool(floats) and not has_leaves
        handed = (
            dict(zip(floats, _start(self._arrived, self._untouched, *floats.values()), strict=True)) if is_open else {}
        )
        self.values = [handed.get(id(tensor), leaves[id(tensor)]) for tensor in inputs]

    def forward(self, loss: Loss | None = None) -> tuple[Tensor, ...]:
        """Run the layer, and the loss on its first output."""
        outputs = as_tuple(self._module(*self.values))
        return outputs if loss is None else (loss(outputs[0]),)

    def take(
        self,
        outputs: Sequence[Tensor],
        gradients: Sequence[Gradient | None] | None = None,
        memory: dict[int, Tensor] | None = None,
    ) -> Tensor | None:
        """Put the second end after the outputs, to make their gradients in backward; None if there are none.

        Without `gradients` each is a tensor of its own; `memory` is that of storages that are there already.
        """
        lying = gradients if gradients is not None else fresh_gradients(outputs)
        wanted = [(tensor, lies) for tensor, lies in zip(outputs, lying, strict=True) if tensor.requires_grad and lies]
        self.values.clear()
        return (
            _end([lies for _, lies in wanted], memory or {}, self._untouched, *(tensor for tensor, _ in wanted))
            if wanted
            else None
        )

    def forward_to_end(
        self,
        loss: Loss | None = None,
        gradients: Sequence[Gradient | None] | None = None,
        memory: dict[int, Tensor] | None = None,
    ) -> Tensor | None:
        """Run the layer and put the second end after it; its outputs are not kept."""
        return self.take(self.forward(loss), gradients, memory)

    def backward(self, end: Tensor | None) -> None:
        """Make the outputs' gradients and run backward."""
        if end is not None:
            torch.autograd.backward([end], [torch.empty_like(end)])

    def input_gradients(self, given: set[int]) -> tuple[Gradient | None, ...]:
        """Return how the inputs' gradients lay; a tensor that is given twice gets one, at its first place.

        `given` names the storages that were there before backward.
        """
        numbers: dict[int, int] = {}
        seen: set[int] = set()
        found: list[Gradient | None] = []
        for place in self._places:
            arrived = None if place is None or not self._arrived or place in seen else self._arrived[place]
            if place is None or arrived is None:
                found.append(None)
                continue
            seen.add(place)
            storage, lies = arrived
            number = numbers.setdefault(storage, len(numbers))
            found.append(lies.renamed(number, storage in given))
        return tuple(found)


class _Start(Function):
    """Feeds tensors; their gradients end here, and their layout is recorded."""

    @staticmethod
    def forward(ctx: Any, arrived: list[tuple[int, Gradient] | None], untouched: list[Tensor], *tensors: Tensor) -> Any:
        ctx.set_materialize_grads(False)
        ctx.arrived, ctx.untouched = arrived, untouched
        return tuple(tensor.detach() for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        for gradient in gradients:
            if gradient is None:
                ctx.arrived.append(None)
                continue
            lies = Gradient.of(gradient)
            is_untouched = any(gradient is given for given in ctx.untouched)
            ctx.arrived.append((storage_of(gradient), lies.untouched() if is_untouched else lies))
        ctx.untouched.clear()
        return (None,) * (2 + len(gradients))


class _End(Function):
    """Takes outputs, and makes their gradients in backward."""

    @staticmethod
    def forward(
        ctx: Any, lying: list[Gradient], memory: dict[int, Tensor], untouched: list[Tensor], *tensors: Tensor
    ) -> Any:
        ctx.lying, ctx.memory, ctx.untouched, ctx.device = lying, memory, untouched, tensors[0].device
        return tensors[0].new_empty(0)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Any:
        memory: dict[int, Tensor] = dict(ctx.memory)
        uses = Counter(lies.storage for lies in ctx.lying)
        made = []
        for lies in ctx.lying:
            if lies.is_whole and uses[lies.storage] == 1 and lies.storage not in memory:
                # no view: the engine may add to it in place
                made.append(torch.zeros(lies.shape, dtype=lies.dtype, device=ctx.device))
                continue
            if lies.storage not in memory:
                memory[lies.storage] = _memory(lies, ctx.device)
            made.append(memory[lies.storage].as_strided(lies.shape, lies.strides, lies.offset))
            if lies.is_untouched:
                ctx.untouched.append(made[-1])
        return (None, None, None, *made)


_start: Callable[..., tuple[Tensor, ...]] = _Start.apply
_end: Callable[..., Tensor] = _End.apply


def fresh_gradients(outputs: Sequence[Tensor], is_given: bool = False) -> list[Gradient | None]:
    """Return gradients that are each a tensor of its own, None for outputs that have none."""
    return [
        Gradient.like(tensor, number, is_given) if tensor.requires_grad and tensor.is_floating_point() else None
        for number, tensor in enumerate(outputs)
    ]


def _memory(lies: Gradient, device: torch.device) -> Tensor:
    return torch.zeros(lies.storage_bytes // lies.dtype.itemsize, dtype=lies.dtype, device=device)
