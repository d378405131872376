"""Stages in strips whose actions are CUDA graphs, and whose saved tensors are in the store.

Their strips share the slot of the rank, as segments do: they are recomputed, or moved to the host.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from gems.autograd.split_backward.deferred import DeferredGradients
from gems.autograd.storages import storage_addresses
from gems.engine.offload.saved_tensor_table import Saved
from gems.engine.stage import Loss, Tensors
from gems.engine.stages.graphed import Captures
from gems.engine.stages.graphed_segment import ReplayedWeights, SharedSlot, SpilledReplay
from gems.engine.stages.layer_graphs import Gradients, LayerGraphs, Pass, apart, copies, restore
from gems.engine.stages.stored_strips import StoredStrips
from gems.engine.stages.whole import Stash
from gems.streaming.strip_run import RunMode
from gems.streaming.strip_sample import StripOutputs, StripSample
from gems.streaming.trace import Weight


@dataclass(slots=True)
class _StripPass(Pass):
    """A forward of one strip, and its backward."""

    def backward(self, gradients: Gradients) -> Gradients:
        """Return the gradients of the inputs, each in memory of its own."""
        given = [tensor for tensor in gradients if tensor is not None]
        # `super()` would look for the class from before slots were added
        own = [tensor for tensor in Pass.backward(self, gradients) if tensor is not None]
        return apart(own, storage_addresses(given))


class _StripReplay(NamedTuple):
    """A replay of a strip in place of its graph; see `StripGraph`.

    `is_wanted` tells which inputs, and which tensors that were carried, get a gradient.
    """

    replayed: SpilledReplay
    is_wanted: tuple[Sequence[bool], Sequence[bool]]
    deferred: DeferredGradients | None
    has_own_memory: bool = True

    def backward(self, outputs: Gradients, kept: Gradients) -> tuple[Gradients, Gradients]:
        """Replay the backward; see `StripGraph.backward`."""
        given_out, carries = self.replayed.graphs.outputs
        gradients = [
            gradient
            for static, gradient in zip((*given_out, *carries), (*outputs, *kept), strict=True)
            if static is not None and static.is_floating_point()
        ]
        input_grads = iter(self.replayed.backward(gradients, self.deferred))
        spread = [[next(input_grads) if flag else None for flag in part] for part in self.is_wanted]
        return spread[0], spread[1]


class _ReplayedSample(StripSample):
    """An image whose strips are replayed if they have graphs."""

    def __init__(self, stage: GraphedStoredStrips) -> None:
        super().__init__(stage.form, stage.draws, not stage.is_first)
        self._owner = stage

    def run(
        self,
        strip: int,
        inputs: Sequence[Tensor | None],
        carried: Sequence[Tensor],
        deferred: DeferredGradients | None,
        *,
        is_again: bool,
    ) -> StripOutputs:
        """Run a strip by a replay if it has graphs; see `StripSample.run`."""
        buffers = self._buffers if is_again else None
        outputs = self._owner.replay(strip, inputs, carried, deferred, buffers)
        if outputs is not None:
            return outputs
        return super().run(strip, inputs, carried, deferred, is_again=is_again)


class GraphedStoredStrips(StoredStrips):
    """A stage in strips whose saved tensors are in the store, with graphs of each strip.

    They share the slot of the rank, as segments do. The first image runs eagerly.
    """

    def use(self, slot: SharedSlot, captures: Captures) -> None:
        """Take the slot, and what captures the strips."""
        self._slot = slot
        self._captures = captures
        self._graphs: dict[Any, LayerGraphs] = {}
        self._has_run = False
        self._save: Callable[..., Saved] | None = None

    def forward(
        self,
        index: int,
        inputs: Sequence[Tensor],
        loss: Loss | None = None,
        is_split: bool = False,
        is_run_again: bool = False,
    ) -> Tensors:
        """Run a strip by a replay, and put what it saves into the store; see `StoredStrips`."""
        if self._has_run and not self._captures.is_refused and not self.is_watched:
            self._capture(index, inputs, is_split)
        return super().forward(index, inputs, loss, is_split, is_run_again)

    def replay(
        self,
        strip: int,
        inputs: Sequence[Tensor | None],
        carried: Sequence[Tensor],
        deferred: DeferredGradients | None,
        buffers: Mapping[Weight, Tensor] | None,
    ) -> StripOutputs | None:
        """Replay a strip, or return None if it has no graphs.

        If it runs again, `buffers` are those that it changes, with their values before.
        """
        wanted = self._wanted_in_strip(inputs, carried)
        graphs = self._graphs.get((strip, deferred is not None, wanted))
        if graphs is None or self._captures.is_refused or self.is_watched:
            return None
        tensors = [*(tensor for tensor in inputs if tensor is not None), *carried]
        self._slot.take()
        now = list(self.modules.buffers()) if buffers is not None else []
        before = copies(now)  # norms have counted the first run
        for weight, value in (buffers or {}).items():
            weight.get().data.copy_(value)
        outputs, carries = graphs.forward(tensors)
        restore(now, before)
        replayed = SpilledReplay(graphs, self._slot, self._store)
        if self._save is not None:
            replayed.keep(tensors, outputs, self._save)
            if buffers is None:
                self._slot.take()
        own = _own(carries, inputs, carried)
        flags = graphs.flags[len(graphs.flags) - len(own) :]
        kept = tuple(map(Tensor.requires_grad_, own, flags))
        return outputs, kept, _StripReplay(replayed, wanted, deferred)

    def reset(self) -> None:
        """Drop all images in flight; the store is reset by its owner."""
        super().reset()
        self._slot.empty()

    def _capture(self, index: int, inputs: Sequence[Tensor], is_split: bool) -> None:
        """Capture a strip that is about to run, unless it has graphs."""
        image, strip = self._image_of(index)
        rows = self._takes.given(self.rows_of(strip, inputs), strip, self.device)
        carried = image.sample.carried
        wanted = self._wanted_in_strip(rows, carried)
        key = (strip, is_split, wanted)
        if key in self._graphs:
            return
        is_there = [tensor is not None for tensor in rows]

        def run(values: Tensors) -> Any:
            tensors = iter(values)
            given = [next(tensors) if flag else None for flag in is_there]
            return self.form.forward(strip, given, [*tensors], RunMode(None, source.deferred))

        source = _StripPass(
            self,
            run,
            [flag for tensor, flag in zip(rows, wanted[0], strict=True) if tensor is not None]
            + list(wanted[1]),
            is_split=is_split,
            may_leave=self._store.may_leave,
        )
        sample = [tensor.detach() for tensor in (*rows, *carried) if tensor is not None]
        self._slot.take()
        graphs = self._captures.capture(source, sample, self._slot.pool)
        if graphs is not None:
            graphs.disown()
            self._slot.grow(graphs.num_bytes)
            self._graphs[key] = graphs

    def _wanted_in_strip(
        self, inputs: Sequence[Tensor | None], carried: Sequence[Tensor]
    ) -> tuple[tuple[bool, ...], tuple[bool, ...]]:
        """Return which inputs, and which tensors that were carried, get a gradient."""
        is_floating = (tensor is not None and tensor.is_floating_point() for tensor in inputs)
        return (
            tuple(flag and not self.is_first for flag in is_floating),
            tuple(tensor.requires_grad for tensor in carried),
        )

    def _new_sample(self) -> StripSample:
        return _ReplayedSample(self)

    def _new_deferred(self, is_split: bool) -> DeferredGradients | None:
        return ReplayedWeights() if is_split else None

    @contextmanager
    def _hooks(self, index: int) -> Iterator[Any]:
        with super()._hooks(index) as self._save:
            try:
                yield self._save
            finally:
                self._save = None

    def _backward(
        self, index: int, stash: Stash, gradients: Sequence[Tensor]
    ) -> tuple[Tensors, Tensors]:
        results = super()._backward(index, stash, gradients)
        self._has_run |= index % self.form.strips == 0
        return results


def _own(
    carries: Sequence[Tensor], inputs: Sequence[Tensor | None], carried: Sequence[Tensor]
) -> Tensors:
    """Return what a strip keeps, copied if it is in the memory of its inputs.

    A whole tensor that was carried to it may be carried on.
    """
    by_others = {_memory(tensor) for tensor in inputs if tensor is not None}
    by_earlier = set(map(_memory, carried))
    return tuple(
        tensor.clone()
        if _memory(tensor) in by_others
        or (_memory(tensor) in by_earlier and tensor.nbytes < tensor.untyped_storage().nbytes())
        else tensor
        for tensor in carries
    )


def _memory(tensor: Tensor) -> Any:
    return tensor.untyped_storage()._cdata
