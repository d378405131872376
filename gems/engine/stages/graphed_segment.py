"""Segments whose actions are CUDA graphs, and whose saved tensors are in the activation store.

All segments of a rank share the memory of one slot. Like registers, it is spilled: what a forward
saves is moved to the store, where memory policies find it, and is moved back for the backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gems.autograd.outputs import as_tuple, tensors_in
from gems.autograd.recompute.matmul_outputs import (
    MatmulOutput,
    MatmulOutputs,
    RecordMatmuls,
    ReplayMatmuls,
)
from gems.autograd.recompute.recompute import RecomputeContext
from gems.autograd.split_backward.deferred import DeferredGradients
from gems.autograd.torch_internals import copy_all
from gems.engine.offload.activation_store import ActivationStore
from gems.engine.offload.saved_tensor_table import Saved, SavedTensor
from gems.engine.stage import Loss, Tensors
from gems.engine.stages.graphed import Captures
from gems.engine.stages.layer_graphs import (
    Gradients,
    LayerGraphs,
    LossPass,
    Pass,
    address_of,
    copies,
    floating,
    last_output,
    layouts_of,
    restore,
)
from gems.engine.stages.stored import PendingRecompute, StoredSegment
from gems.engine.stages.whole import Stash

Pair = tuple[Tensor, Tensor]  # of the slot, and the same values elsewhere


class SharedSlot:
    """The memory in which the graphs of all segments of a rank run, one after the other."""

    def __init__(self, store: ActivationStore) -> None:
        self.pool = torch.cuda.graph_pool_handle()
        self._store = store
        self._num_bytes = 0
        self._holder: object = None
        self._spill: Callable[[], None] | None = None

    def grow(self, num_bytes: int) -> None:
        """Count the bytes of the graphs of a segment: the slot is as large as the largest."""
        self._store.activations.count_bytes(max(0, num_bytes - self._num_bytes))
        self._num_bytes = max(num_bytes, self._num_bytes)

    def hold(self, holder: object, spill: Callable[[], None]) -> None:
        """Leave the tensors of `holder` in the slot until another takes it, which will `spill`."""
        self._holder, self._spill = holder, spill

    def take(self, holder: object = None) -> bool:
        """Take the slot, and return whether the tensors of `holder` are still in it."""
        is_held = self._spill is not None and holder is self._holder
        if self._spill is not None and not is_held:
            self._spill()
        self.empty()
        return is_held

    def empty(self) -> None:
        """Forget what is in the slot."""
        self._holder = self._spill = None


@dataclass(eq=False, slots=True)
class SpilledReplay:
    """What a replayed forward leaves: the graphs, and the slot's tensors with their saved form."""

    graphs: LayerGraphs
    slot: SharedSlot
    store: ActivationStore
    saved: list[tuple[Tensor, Saved]] = field(default_factory=list)
    loss: LossPass | None = None

    def keep(self, inputs: Sequence[Tensor], outputs: Any, save: Callable[..., Saved]) -> None:
        """Put what the forward left in the slot into the store by `save`.

        New storages are copied there when another takes the slot; not those of the first outputs,
        which are there already.
        """
        graphs = self.graphs
        tensors = {
            address_of(static): (static, live)
            for static, live in zip(tensors_in(graphs.outputs), tensors_in(outputs), strict=False)
            if static.nbytes == static.untyped_storage().nbytes()
        }
        tensors |= {
            address_of(static): (static, live)
            for static, live, is_same in zip(
                graphs.inputs, inputs, graphs.is_unchanged, strict=True
            )
            if is_same
        }
        spilled: list[Pair] = []
        for address in graphs.saved:
            if address not in tensors:
                static = graphs.memory[address]
                tensors[address] = static, torch.empty_like(static)
                spilled.append(tensors[address])
            static, live = tensors[address]
            self.saved.append((static, save(live.detach(), address in graphs.movable)))
        if graphs.source.is_split:  # W needs them too
            _spill(spilled)
            spilled = []
        self.slot.hold(self, partial(_spill, spilled))

    def backward(self, gradients: Gradients, deferred: DeferredGradients | None) -> Gradients:
        """Replay B or I, after what it reads is in the slot; I leaves the rest to `deferred`."""
        loaded = [(static, self.store.load(saved)) for static, saved in self.saved]
        if not self.slot.take(self):
            _fill(loaded)
        input_grads = self.graphs.backward(gradients)
        if isinstance(deferred, ReplayedWeights):
            pairs = self._read_by_weights(loaded, gradients)
            deferred.keep(pairs, partial(self._replay_weights, pairs))
        return input_grads

    def _read_by_weights(self, loaded: Sequence[Pair], gradients: Gradients) -> list[Pair]:
        graphs = self.graphs
        received = zip(graphs.output_gradients, gradients, strict=True)
        pairs = [
            *loaded,
            *(
                (static, live)
                for static, live in received
                if static is not None and live is not None
            ),
        ]
        known = {address_of(static): (static, live) for static, live in pairs}
        for address in graphs.read_by_weights:
            if address not in known:
                static = graphs.memory[address]
                known[address] = static, static.clone()
        return [known[address] for address in graphs.read_by_weights]

    def _replay_weights(self, pairs: Sequence[Pair]) -> None:
        self.slot.take()
        _fill(pairs)
        self.graphs.backward_weight()


class _PendingReplay(NamedTuple):
    """What remains of a replayed forward that will be run again, from its inputs and products."""

    graphs: LayerGraphs
    saved: tuple[SavedTensor, ...]


class _NoDraws:
    """The state of random generators from which captured layers do not draw."""

    def get(self) -> tuple[Tensor, ...]:
        """Return nothing."""
        return ()

    def set(self, state: tuple[Tensor, ...]) -> None:
        """Do nothing."""


@dataclass(slots=True)
class _FirstPass(Pass):
    """A first run of layers that are recomputed except for matrix products.

    Its outputs are those of the layers, and the products that are no outputs.

    Attributes:
        products: The calls, without the tensors that they gave.
        places: For each product, its output with the layout in it, or None if it is none.
    """

    products: Sequence[MatmulOutput] = ()
    places: Sequence[tuple[int, Any] | None] = ()

    def forward(self, inputs: Sequence[Tensor]) -> Any:
        """Run the layers, and keep no graph."""
        kept = MatmulOutputs()
        with RecordMatmuls(kept, _NoDraws()):
            # `super()` would look for the class from before slots were added
            outputs = Pass.forward(self, inputs)
        tensors = list(tensors_in(outputs))
        wholes = {
            address_of(tensor): place
            for place, tensor in enumerate(tensors)
            if tensor.nbytes == tensor.untyped_storage().nbytes()
        }
        products = list(kept.tensors())
        self.places = [
            (wholes[address_of(tensor)], _layout_of(tensor))
            if address_of(tensor) in wholes
            else None
            for tensor in products
        ]
        self.products = [
            replace(entry, outputs=tuple(isinstance(value, Tensor) for value in entry.outputs))
            for entry in kept
        ]
        pairs = zip(products, self.places, strict=True)
        results = outputs, [tensor for tensor, place in pairs if place is None]
        self.flags = (False,) * len(list(tensors_in(results)))
        self._edges = (None,) * len(floating(results))
        return results

    def whole_products(self, outputs: Any, products: Sequence[Tensor]) -> list[Tensor]:
        """Return all products of a run from what it returned."""
        tensors = [tensor.detach() for tensor in tensors_in(outputs)]
        rest = iter(products)
        return [
            next(rest) if place is None else tensors[place[0]].as_strided(*place[1])
            for place in self.places
        ]

    def given(self, products: Iterable[Tensor]) -> MatmulOutputs:
        """Return the calls with the tensors that they give when they run again."""
        rest = iter(products)
        entries = MatmulOutputs()
        for entry in self.products:
            values = tuple(next(rest) if flag else None for flag in entry.outputs)
            versions = tuple(value._version for value in values if value is not None)
            entries.append(replace(entry, outputs=values, versions=versions))
        return entries


@dataclass(slots=True)
class _SecondPass(Pass):
    """A run of layers that takes the matrix products of the first among its inputs."""

    num_inputs: int = 0  # of a floating-point type

    def backward(self, gradients: Gradients) -> Gradients:
        """Return the gradients of the inputs; products have none."""
        return Pass.backward(self, gradients)[: self.num_inputs]


class ReplayedWeights(DeferredGradients):
    """Weight gradients that a replay computes, after what it reads is back in the slot."""

    def __init__(self) -> None:
        super().__init__()
        self._pairs: list[Pair] = []
        self._replay: Callable[[], None] | None = None

    def keep(self, pairs: list[Pair], replay: Callable[[], None]) -> None:
        """Keep tensors until `run` calls `replay`."""
        self._pairs = pairs
        self._replay = replay

    def tensors(self) -> Iterator[Tensor]:
        """Yield all tensors that are kept."""
        yield from super().tensors()
        yield from (live for _, live in self._pairs)

    def run(self, poll: Callable[[], None]) -> None:
        """Add the gradients, those of an eager backward if there was no replay."""
        super().run(poll)
        if self._replay is not None:
            self._replay()
            poll()


class GraphedSegment(StoredSegment):
    """A segment that replays CUDA graphs of its actions in the slot that all segments share.

    The first micro-batch runs eagerly.
    """

    def use(self, slot: SharedSlot, captures: Captures) -> None:
        """Take the slot, and what captures the layers."""
        self._slot = slot
        self._captures = captures
        self._graphs: dict[Any, LayerGraphs | None] = {}
        # of recomputation that keeps matrix products, by `source` of the graphs that run again
        self._first: dict[int, LayerGraphs] = {}
        self._has_run = False

    def forward(
        self,
        index: int,
        inputs: Sequence[Tensor],
        loss: Loss | None = None,
        is_split: bool = False,
        is_run_again: bool = False,
    ) -> Tensors:
        """Run the layers by a replay, and put what they save into the store; see `StoredSegment`."""
        is_selective = is_run_again and self._recomputation.is_selective
        graphs = self._graphs_for(inputs, is_split, is_selective)
        if graphs is None:
            outputs = super().forward(index, inputs, loss, is_split, is_run_again)
            if not self._captures.is_refused:
                self._store.expect_change(self._key(index))
            return outputs
        self._begin(index, inputs)
        self._slot.take()
        products: Sequence[Tensor] = ()
        if is_selective:
            outputs, products = self._run_first(graphs, inputs)
        else:
            outputs = graphs.forward(inputs)
        if is_run_again:
            key = self._key(index)
            kept = (*inputs, *products)
            saved = tuple(self._store.save(key, self._number, tensor) for tensor in kept)
            self._pending[index] = _PendingReplay(graphs, saved)
            with torch.no_grad():
                value = None if loss is None else loss(outputs)
        else:
            value = self._keep(index, graphs, inputs, outputs, loss)
            self._slot.take()
        flags = graphs.source.flags
        return self._pass_on(index, as_tuple(outputs if value is None else value), flags)

    def recompute(
        self, index: int, loss: Loss | None = None, images: Sequence[Tensor] = ()
    ) -> None:
        """Run the layers again by a replay; see `StoredSegment.recompute`."""
        pending = self._pending[index]
        if not isinstance(pending, _PendingReplay):
            super().recompute(index, loss)
            return
        eager = self._without_changed_products(pending)
        if eager is not None:
            self._pending[index] = eager
            super().recompute(index, loss)
            return
        del self._pending[index]
        inputs = [self._store.load(tensor) for tensor in pending.saved]
        self._slot.take()
        buffers = list(self.modules.buffers())  # norms have counted the first run
        before = copies(buffers)
        outputs = pending.graphs.forward(inputs)
        restore(buffers, before)
        self._keep(index, pending.graphs, inputs, outputs, loss)

    def reset(self) -> None:
        """Drop all micro-batches in flight; the store is reset by its owner."""
        super().reset()
        self._slot.empty()

    def _graphs_for(
        self, inputs: Sequence[Tensor], is_split: bool, is_selective: bool
    ) -> LayerGraphs | None:
        if not self._has_run or self._captures.is_refused or self._whole.is_watched:
            return None
        wanted = self._wanted(inputs)
        layouts = (is_split, is_selective, wanted, *layouts_of(inputs))
        if layouts not in self._graphs:
            self._slot.take()
            capture = self._capture_both if is_selective else self._capture
            graphs = self._graphs[layouts] = capture(inputs, wanted, is_split)
            if graphs is not None:
                graphs.disown()
                self._slot.grow(graphs.num_bytes)
        return self._graphs[layouts]

    def _capture(
        self, inputs: Sequence[Tensor], wanted: Sequence[bool], is_split: bool
    ) -> LayerGraphs | None:
        source = Pass(
            self,
            partial(last_output, self),
            wanted,
            is_complete=self._number == 0,
            is_split=is_split,
            may_leave=self._store.may_leave,
        )
        return self._captures.capture(source, inputs, self._slot.pool)

    def _capture_both(
        self, inputs: Sequence[Tensor], wanted: Sequence[bool], is_split: bool
    ) -> LayerGraphs | None:
        """Capture a first run that keeps matrix products, and the run that takes them."""
        run = partial(last_output, self)
        first = _FirstPass(self, run, [False] * len(inputs), is_split=is_split)
        first_graphs = self._captures.capture(first, inputs, self._slot.pool)
        if first_graphs is None:
            return None
        first_graphs.disown()
        buffers = list(self.modules.buffers())
        before = copies(buffers)
        outputs, products = first_graphs.forward(inputs)
        restore(buffers, before)
        products = first.whole_products(outputs, products)
        num = len(inputs)

        def run_again(values: Tensors) -> Any:
            with ReplayMatmuls(first.given(values[num:]), _NoDraws()):
                return run(values[:num])

        source = _SecondPass(
            self,
            run_again,
            [*wanted, *(False for _ in products)],
            is_complete=self._number == 0,
            is_split=is_split,
            may_leave=self._store.may_leave,
            num_inputs=sum(tensor.is_floating_point() for tensor in inputs),
        )
        graphs = self._captures.capture(source, [*inputs, *products], self._slot.pool)
        self._first[id(source)] = first_graphs
        return graphs

    def _run_first(
        self, graphs: LayerGraphs, inputs: Sequence[Tensor]
    ) -> tuple[Any, Sequence[Tensor]]:
        """Replay the first run that belongs to `graphs`, and return its outputs and products."""
        first = self._first[id(graphs.source)]
        outputs, products = first.forward(inputs)
        assert isinstance(first.source, _FirstPass)
        return outputs, first.source.whole_products(outputs, products)

    def _without_changed_products(self, pending: _PendingReplay) -> PendingRecompute | None:
        """Return how to run eagerly, and all layers, if a later layer has changed a product."""
        source = pending.graphs.source
        first = self._first.get(id(source))
        if first is None:
            return None
        assert isinstance(first.source, _FirstPass)
        num = len(pending.saved) - len(first.source.places)
        if not any(product.is_changed for product in pending.saved[num:]):
            return None
        calls = MatmulOutputs(replace(call, outputs=()) for call in first.source.products)
        wanted = tuple(source.wanted[:num])
        return pending.saved[:num], wanted, RecomputeContext(matmuls=calls), source.is_split

    def _keep(
        self,
        index: int,
        graphs: LayerGraphs,
        inputs: Sequence[Tensor],
        outputs: Any,
        loss: Loss | None,
    ) -> Tensor | None:
        """Put what a forward left in the slot into the store, and return the loss."""
        record = SpilledReplay(graphs, self._slot, self._store)
        with self._store.saved_tensor_hooks(self._key(index), self._number) as save:
            record.keep(inputs, outputs, save)
            if loss is not None:
                record.loss = LossPass.forward(loss, outputs, graphs.source.flags)
        self._stash[index] = Stash(
            record, (), ReplayedWeights() if graphs.source.is_split else None
        )
        return None if record.loss is None else record.loss.value

    def _backward(
        self, index: int, stash: Stash, gradients: Sequence[Tensor]
    ) -> tuple[Gradients, Tensors]:
        record = stash.inputs
        if not isinstance(record, SpilledReplay):
            self._has_run = True
            return super()._backward(index, stash, gradients)
        output_grads: Gradients = (
            gradients if record.loss is None else record.loss.backward(gradients)
        )
        return record.backward(output_grads, stash.deferred), self._inputs.pop(index, ())


def _layout_of(tensor: Tensor) -> tuple[torch.Size, tuple[int, ...], int]:
    return tensor.size(), tensor.stride(), int(tensor.storage_offset())


def _spill(pairs: Sequence[Pair]) -> None:
    # by `data`, since they are saved already and must not count as changed
    copy_all([live.data for _, live in pairs], [static for static, _ in pairs])


def _fill(pairs: Sequence[Pair]) -> None:
    copy_all([static for static, _ in pairs], [live for _, live in pairs])
