"""A segment of a stage: neighbouring layers whose saved tensors are in the activation store."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from gems.autograd.memory_counter import storages_of
from gems.autograd.recompute.recompute import Kept as Left
from gems.autograd.recompute.recompute import Rerun
from gems.autograd.split_backward.deferred import Deferred
from gems.autograd.split_backward.layers import SplitLayers
from gems.engine.activation_store.segment_input import Entrance
from gems.engine.activation_store.store import ActivationStore, Kept, Place
from gems.engine.stage import Loss, Stage, edges_of, run_backward


@dataclass(frozen=True, slots=True)
class _Graph:
    """What is left of a forward with a graph; the graph holds no memory but the store's handles."""

    entrance: Entrance
    edges: tuple[GradientEdge | None, ...]
    later: Deferred | None


@dataclass(frozen=True, slots=True)
class _FirstRun:
    """What is left of a forward that will be run again."""

    inputs: tuple[Kept, ...]
    wanted: tuple[bool, ...]
    left: Left
    is_split: bool


class StoredSegment(Stage):
    """Runs some layers of a stage as a `Stage` does, with a graph that holds no memory itself: the store does.

    Of the inputs nothing stays but what the layers save. An output tells by `requires_grad` whether its gradient is
    wanted, so that the gradients of a stage are those of its uncut graph. With `run_again` to come a forward keeps its
    inputs alone, and with `is_cheap` what its products gave.
    """

    def __init__(
        self,
        whole: Stage,
        modules: nn.ModuleList,
        held: tuple[int, int],
        number: int,
        is_last: bool,
        store: ActivationStore,
        poll: Callable[[], None],
        is_cheap: bool = False,
    ) -> None:
        """Take the layers `modules` of the stage `whole`.

        Args:
            whole: the stage.
            modules: its layers that are in this segment.
            held: direction and stage.
            number: the segment's place in the stage, from 0.
            is_last: whether it is the stage's last.
            store: keeps what is saved.
            poll: lets messages move.
            is_cheap: what a forward that is run again does not compute twice.
        """
        super().__init__(modules, whole.is_first and number == 0, poll)
        self._whole, self._held, self._number, self._is_last = whole, held, number, is_last
        self._store = store
        self._rerun = Rerun(modules, is_cheap)
        self._graphs: dict[int, _Graph] = {}
        self._first_runs: dict[int, _FirstRun] = {}
        self._given: dict[int, tuple[Tensor, ...]] = {}
        self._anchor: Tensor | None = None
        self._changed: frozenset[int] | None = None

    def split_layers(self) -> SplitLayers:
        """Return those of the whole stage."""
        return self._whole.split_layers()

    def forward(
        self, micro_batch: int, inputs: Sequence[Tensor], loss: Loss | None = None, is_split: bool = False
    ) -> tuple[Tensor, ...]:
        """Run the layers; what autograd saves goes to the store. Arguments and result are those of `Stage`."""
        place = self._begin(micro_batch, inputs)
        outputs = self._record(
            micro_batch, inputs, self._wanted(inputs), is_split, lambda values: self._run(values, loss)
        )
        return self._handed_on(place, outputs, [tensor.requires_grad for tensor in outputs])

    def first_run(
        self, micro_batch: int, inputs: Sequence[Tensor], loss: Loss | None = None, is_split: bool = False
    ) -> tuple[Tensor, ...]:
        """Run the layers and keeps only their inputs, for `run_again`. Arguments and result are those of `Stage`."""
        place = self._begin(micro_batch, inputs)
        wanted = self._wanted(inputs)
        kept = tuple(self._store.keep(place, self._number, tensor) for tensor in inputs)
        _, values = Entrance.enter(inputs, wanted, self._anchor_for(inputs))
        with self._leaving_to(Deferred() if is_split else None):
            outputs, left = self._rerun.forward(values, lambda given: self._run_first(given, loss))
        self._put_away(place, left)
        self._first_runs[micro_batch] = _FirstRun(kept, wanted, left, is_split)
        gives = any(wanted) or any(parameter.requires_grad for parameter in self.modules.parameters())
        return self._handed_on(place, outputs, [gives and tensor.is_floating_point() for tensor in outputs])

    def run_again(self, micro_batch: int, loss: Loss | None = None) -> None:
        """Run the layers a second time, now keeping in the store what backward needs.

        Args:
            micro_batch: as given to `first_run`.
            loss: on the last stage, what makes a scalar of its one output.

        Raises:
            RuntimeError: an input was changed in place meanwhile.
        """
        first = self._first_runs.pop(micro_batch)
        inputs = [self._store.read(kept) for kept in first.inputs]
        self._take_out(first.left)
        self._record(
            micro_batch,
            inputs,
            first.wanted,
            first.is_split,
            lambda values: self._rerun.again(values, first.left, lambda given: self._run(self._fresh(given), loss)),
        )

    def backward(self, micro_batch: int, gradients: Sequence[Tensor]) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """Add to the parameters' gradients; what only this segment needed is free then.

        Returns:
            The gradients of the floating-point inputs (inside of a stage None where there is none), and on the first
            segment what the stage was given, which nothing reads any more.
        """
        found = self._backward_of(self._graphs.pop(micro_batch), gradients)
        self._store.done(self._place(micro_batch), self._number)
        return found, self._given.pop(micro_batch, ())

    def backward_input(
        self, micro_batch: int, gradients: Sequence[Tensor]
    ) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """Compute the input gradients; of what was saved only what the weight gradients need stays, on the device."""
        graph = self._graphs.pop(micro_batch)
        assert graph.later is not None
        with self._leaving_to(graph.later):
            found = self._backward_of(graph, gradients)
        self._later[micro_batch] = graph.later
        received = storages_of(gradients) if self._is_last else set()
        later = [t for t in graph.later.tensors() if t.untyped_storage().data_ptr() not in received]
        self._store.done(self._place(micro_batch), self._number, later)
        return found, self._given.pop(micro_batch, ())

    def backward_weight(self, micro_batch: int) -> None:
        """Add the weight gradients that `backward_input` left, and frees what it kept."""
        super().backward_weight(micro_batch)
        self._store.done_weights(self._place(micro_batch), self._number)

    def forget(self) -> None:
        """Drop all micro-batches in flight; the store is to forget them too."""
        super().forget()
        self._graphs.clear()
        self._first_runs.clear()
        self._given.clear()

    @property
    def num_in_flight(self) -> int:
        """Micro-batches whose backward, or the rest of it, is still to come."""
        return len(self._graphs) + len(self._first_runs) + len(self._later)

    def _place(self, micro_batch: int) -> Place:
        return (*self._held, micro_batch)

    def _begin(self, micro_batch: int, inputs: Sequence[Tensor]) -> Place:
        place = self._place(micro_batch)
        if self._number == 0:
            self._store.open(place, inputs)
            self._given[micro_batch] = tuple(inputs)
        return place

    def _wanted(self, inputs: Sequence[Tensor]) -> tuple[bool, ...]:
        if self._number:
            return tuple(tensor.requires_grad for tensor in inputs)
        return tuple(tensor.is_floating_point() and not self.is_first for tensor in inputs)

    def _anchor_for(self, inputs: Sequence[Tensor]) -> Tensor:
        if self._anchor is None:
            self._anchor = torch.zeros(1, device=inputs[0].device, requires_grad=True)
        return self._anchor

    def _record(
        self,
        micro_batch: int,
        inputs: Sequence[Tensor],
        wanted: tuple[bool, ...],
        is_split: bool,
        run: Callable[[tuple[Tensor, ...]], tuple[Tensor, ...]],
    ) -> tuple[Tensor, ...]:
        """Run the layers with a graph, of which the edges are kept."""
        later = Deferred() if is_split else None
        entrance, values = Entrance.enter(inputs, wanted, self._anchor_for(inputs))
        with self._leaving_to(later), self._store.saving(self._place(micro_batch), self._number):
            outputs = run(values)
        self._graphs[micro_batch] = _Graph(entrance, edges_of(outputs), later)
        return outputs

    def _handed_on(self, place: Place, outputs: Sequence[Tensor], wanted: Sequence[bool]) -> tuple[Tensor, ...]:
        self._store.note_outputs(place, self._number, outputs)
        made = tuple(tensor.detach() for tensor in outputs)
        if self._is_last:
            return made
        return tuple(tensor.requires_grad_(is_wanted) for tensor, is_wanted in zip(made, wanted, strict=True))

    def _backward_of(self, graph: _Graph, gradients: Sequence[Tensor]) -> tuple[Tensor, ...]:
        run_backward(graph.edges, gradients)
        # inside of a stage some may be None, which the segment before expects
        return cast("tuple[Tensor, ...]", graph.entrance.gradients(is_whole=self._number == 0))

    def _run_first(self, given: tuple[Tensor, ...], loss: Loss | None) -> tuple[Tensor, ...]:
        """Run the layers on copies of the inputs that they change in place; the first time that is found out."""
        if self._changed is not None:
            return self._run(self._fresh(given), loss)
        copies = tuple(tensor.clone() for tensor in given)
        versions = [tensor._version for tensor in copies]
        outputs = self._run(copies, loss)
        changed = {
            place
            for place, (tensor, version) in enumerate(zip(copies, versions, strict=True))
            if tensor._version != version
        }
        self._changed = frozenset(changed)
        originals = {
            copy.untyped_storage()._cdata: tensor
            for place, (copy, tensor) in enumerate(zip(copies, given, strict=True))
            if place not in changed and copy.stride() == tensor.stride()
        }
        return tuple(_lying_in(originals.get(tensor.untyped_storage()._cdata), tensor) for tensor in outputs)

    def _fresh(self, given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        changed = self._changed or frozenset()
        return tuple(tensor.clone() if place in changed else tensor for place, tensor in enumerate(given))

    def _put_away(self, place: Place, left: Left) -> None:
        """Return the store what products gave, so that it may leave with a copy that takes it."""
        for product in () if left.products is None else left.products.entries:
            product.outputs = tuple(
                self._store.keep(place, self._number, value) if isinstance(value, Tensor) else value
                for value in product.outputs
            )

    def _take_out(self, left: Left) -> None:
        for product in () if left.products is None else left.products.entries:
            kept = [value for value in product.outputs if isinstance(value, Kept)]
            # what a layer behind has changed is computed again
            is_whole = all(self._store.is_unchanged(value) for value in kept)
            product.outputs = tuple(
                self._store.read(value) if isinstance(value, Kept) else value
                for value in (product.outputs if is_whole else ())
            )


def _lying_in(original: Tensor | None, tensor: Tensor) -> Tensor:
    """Return a part of a copy as the same part of what was copied."""
    if original is None or original.dtype is not tensor.dtype:
        return tensor
    offset = original.storage_offset() + tensor.storage_offset()
    return original.as_strided(tensor.size(), tensor.stride(), offset)
