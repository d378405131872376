"""Recompute a forward right before its backward, instead of keeping what it saved."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from gems.autograd.outputs import as_tuple
from gems.autograd.recompute.layer_state import ChangedState, LayerState, RandomState
from gems.autograd.recompute.matmul_outputs import MatmulOutputs, RecordMatmuls, ReplayMatmuls

Run = Callable[[tuple[Tensor, ...]], tuple[Tensor, ...]]


@dataclass(slots=True)
class RecomputeContext:
    """The state that the first forward of a micro-batch leaves for its recomputation.

    `random` is the state from which random numbers were drawn, or None if none were drawn. `state`
    is the state of the layers before the forward changed it. `matmuls` are the outputs that
    selective recomputation does not compute again. The inputs are kept elsewhere.
    """

    random: tuple[Tensor, ...] | None = None
    state: ChangedState = ()
    matmuls: MatmulOutputs | None = None

    def tensors(self) -> Iterator[Tensor]:
        """Yield the kept tensors of activation size, which are outputs of matrix products.

        Each is freed when used.
        """
        return iter(()) if self.matmuls is None else self.matmuls.tensors()

    def drop(self) -> None:
        """Free everything that is kept."""
        self.random = None
        self.state = ()
        self.matmuls = None


class Recomputation:
    """Adjacent layers that run first without a graph, and later again with one.

    Source: Chen et al. 2016, section 3. Both runs return the same bits, and leave everything as
    after one run: random numbers are drawn once, and running statistics and counters advance once.
    The first run records no graph if that gave the same bits for the first micro-batch; otherwise
    it drops what the graph would keep. If `is_selective`, the outputs of convolutions and matrix
    products are kept, and only the operations between them are recomputed. Micro-batches may be in
    flight in any order.
    """

    def __init__(self, modules: nn.ModuleList, is_selective: bool = False) -> None:
        self.modules = modules
        self.is_selective = is_selective
        self._state = LayerState(modules)
        self._random: RandomState | None = None
        # whether a first run records a graph too; None until it is known
        self._has_graph: bool | None = True if is_selective else None

    def forward(
        self, inputs: Sequence[Tensor], run: Run | None = None
    ) -> tuple[tuple[Tensor, ...], RecomputeContext]:
        """Run the layers, drop what autograd saves, and return the outputs and a context.

        The outputs are detached; `recompute` needs the context. `inputs` are the same as for
        `recompute`; those that need a gradient require it here too. `run` runs the layers, for
        example followed by a loss; by default the layers run one after the other.

        Raises:
            RuntimeError: A layer changes an input in place, so it could not be used again.
        """
        random = self._random_state(inputs)
        drawn_from = random.get()
        context = RecomputeContext(matmuls=MatmulOutputs() if self.is_selective else None)
        versions = [tensor._version for tensor in inputs]
        changed = self._state.record()
        recording: AbstractContextManager[object] = (
            nullcontext() if context.matmuls is None else RecordMatmuls(context.matmuls, random)
        )
        with (
            torch.set_grad_enabled(self._has_graph is not False),
            saved_tensors_hooks(id, _refuse),  # keeps no tensor
            recording,
        ):
            results = (run or self._run)(tuple(inputs))
        outputs = tuple(tensor.detach() for tensor in results)
        for number, (tensor, version) in enumerate(zip(inputs, versions, strict=True)):
            if tensor._version != version:
                raise RuntimeError(
                    f"input {number} of shape {tuple(tensor.shape)} is changed in place by layers"
                    " that are to be recomputed from it: keep what these layers save, or let them"
                    " write to a new tensor"
                )
        context.state = changed()
        if random.has_advanced(drawn_from):
            context.random = drawn_from
        if self._has_graph is None:
            self._has_graph = not self._is_equal_without_graph(inputs, context)
        return outputs, context

    def recompute(
        self, inputs: Sequence[Tensor], context: RecomputeContext, run: Run | None = None
    ) -> tuple[Tensor, ...]:
        """Run the layers as `forward` did, with a graph that the caller's saved-tensor hooks see.

        The inputs must equal those of the first run. The content of `context` is used up.

        Raises:
            RuntimeError: The layers call other matrix products than in the first run.
        """
        random = self._random_state(inputs)
        replaying: AbstractContextManager[object] = (
            nullcontext() if context.matmuls is None else ReplayMatmuls(context.matmuls, random)
        )
        try:
            with (
                torch.enable_grad(),
                self._state.replay(context.state),
                random.replay(context.random),
                replaying,
            ):
                return (run or self._run)(tuple(inputs))
        finally:
            context.drop()

    def _is_equal_without_graph(self, inputs: Sequence[Tensor], context: RecomputeContext) -> bool:
        """Run the layers with and without a graph, and return whether they give the same bits.

        Kernels may depend on whether there is a graph, and a layer may ask for it.
        """
        results = []
        for has_graph in (True, False):
            copies = tuple(tensor.clone() for tensor in inputs)
            try:
                with (
                    torch.set_grad_enabled(has_graph),
                    saved_tensors_hooks(id, _refuse),
                    self._state.replay(context.state),
                    self._random_state(inputs).replay(context.random),
                ):
                    results.append([tensor.detach() for tensor in self._run(copies)])
            except Exception:
                return False
        return all(map(torch.equal, *results))

    def _run(self, values: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        for module in self.modules:
            values = as_tuple(module(*values))
        return values

    def _random_state(self, inputs: Sequence[Tensor]) -> RandomState:
        if self._random is None:
            self._random = RandomState(self.modules, inputs[0].device)
        return self._random


def _refuse(dropped: int) -> Tensor:
    raise RuntimeError(
        "a backward inside of a forward that is to be recomputed: nothing was saved for it"
    )
