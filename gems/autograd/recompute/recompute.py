"""Recompute: layers whose forward is run a second time, right before backward, instead of keeping what it saved."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from gems.autograd.recompute.layer_state import LayerState, RandomState, State
from gems.autograd.recompute.matmul_outputs import KeepProducts, Products, UseProducts
from gems.models.build import as_tuple

Run = Callable[[tuple[Tensor, ...]], tuple[Tensor, ...]]


@dataclass(slots=True)
class Kept:
    """What the first run of one micro-batch leaves for the second, besides the inputs, which the caller holds.

    `random` is the state that random numbers were drawn from, None where none were; `state` what the forward changed
    in its layers, as it was before; `products` what a cheap run does not compute again.
    """

    random: tuple[Tensor, ...] | None = None
    state: State = ()
    products: Products | None = None

    def tensors(self) -> Iterator[Tensor]:
        """Return the tensors of activation size that are kept: what products gave. Each is let go where `again` uses it."""
        return iter(()) if self.products is None else self.products.tensors()

    def drop(self) -> None:
        """Let go of all that is kept, where no second run will come."""
        self.random, self.state, self.products = None, (), None


class Rerun:
    """Runs neighbouring layers twice: without keeping a graph, and later again with one (Chen et al. 2016, section 3).

    Both runs give the same to the bit, and all is as after one run: random numbers are drawn once and the same,
    running statistics and counters advance once. With `is_cheap`, what convolutions and matrix products gave is kept
    and only what lies between them is computed again. Micro-batches may be in flight in any order; what is theirs is
    in their `Kept`.

    Both runs record a graph, so that no kernel is chosen by whether one is; that of the first keeps no tensor, and is
    gone at its end.
    """

    def __init__(self, modules: nn.ModuleList, is_cheap: bool = False) -> None:
        self.modules = modules
        self.is_cheap = is_cheap
        self._state = LayerState(modules)
        self._random: RandomState | None = None

    def forward(self, inputs: Sequence[Tensor], run: Run | None = None) -> tuple[tuple[Tensor, ...], Kept]:
        """Run the layers and keeps nothing of what autograd saves.

        Args:
            inputs: as they will be given to `again`; those whose gradient will be wanted require it here too.
            run: what runs the layers, such as with a loss behind them; by default one behind the other.

        Returns:
            The outputs, detached, and what `again` needs of this run.

        Raises:
            RuntimeError: a layer changes an input in place, which so could not be given to it again.
        """
        random = self._random_of(inputs)
        kept = Kept(random.now(), (), Products() if self.is_cheap else None)
        versions = [tensor._version for tensor in inputs]
        changed = self._state.before()
        keeping: AbstractContextManager[object] = (
            nullcontext() if kept.products is None else KeepProducts(kept.products, random)
        )
        with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(_drop, _refuse), keeping:
            made = (run or self._run)(tuple(inputs))
        outputs = tuple(tensor.detach() for tensor in made)
        for number, (tensor, version) in enumerate(zip(inputs, versions, strict=True)):
            if tensor._version != version:
                raise RuntimeError(
                    f"input {number} of shape {tuple(tensor.shape)} is changed in place by the layers that are to run "
                    "again with it: keep what these layers save, or let them write to a new tensor"
                )
        kept.state = changed()
        assert kept.random is not None
        if not random.moved(kept.random):
            kept.random = None
        return outputs, kept

    def again(self, inputs: Sequence[Tensor], kept: Kept, run: Run | None = None) -> tuple[Tensor, ...]:
        """Run the layers as `forward` did, with a graph; hooks on saved tensors that are in use outside see it.

        Args:
            inputs: equal to those of the first run.
            kept: what the first run left; it is used up.
            run: as given to `forward`.

        Returns:
            The outputs with their graph.

        Raises:
            RuntimeError: the layers do something else than the first time.
        """
        random = self._random_of(inputs)
        using: AbstractContextManager[object] = (
            nullcontext() if kept.products is None else UseProducts(kept.products, random)
        )
        try:
            with torch.enable_grad(), self._state.again(kept.state), random.again(kept.random), using:
                return (run or self._run)(tuple(inputs))
        finally:
            kept.drop()

    def _run(self, values: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        for module in self.modules:
            values = as_tuple(module(*values))
        return values

    def _random_of(self, inputs: Sequence[Tensor]) -> RandomState:
        if self._random is None:
            self._random = RandomState(self.modules, inputs[0].device)
        return self._random


def _drop(tensor: Tensor) -> None:
    """Keep nothing of a tensor that autograd saves."""


def _refuse(nothing: None) -> Tensor:
    raise RuntimeError("a backward inside of a forward that is run again: nothing was saved for it")
