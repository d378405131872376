"""CUDA graphs of some layers: captured once, compared with the layers, and then replayed.

One replay launches all kernels of an action, where eager torch waits for Python between small ones.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, saved_tensors_hooks

from gems.autograd.mixed import Mixed, low_copies, mixed_of
from gems.autograd.outputs import map_tensors, tensors_in
from gems.autograd.split_backward.deferred import DeferredGradients
from gems.autograd.storages import storage_addresses, storage_sizes, tensor_over
from gems.autograd.torch_internals import copy_all, end_capture_memory, storage_at
from gems.engine.offload.host_copies import as_bytes
from gems.engine.stage import Loss, Tensors
from gems.engine.stages.segment_input import SegmentInput
from gems.engine.stages.whole import WholeStage, gradient_edges, run_backward
from gems.schedule.action import Kind
from gems.streaming.compare import TOLERANCES

LOW_TOLERANCE = 5e-2  # of 16 bits, beside the tolerances of wider types

Gradients = Sequence[Tensor | None]
Sizes = dict[int, int]  # the bytes of storages by address


class NotCapturedError(RuntimeError):
    """Layers cannot run as CUDA graphs; the text is the reason."""


@dataclass(slots=True)
class Pass:
    """A forward of a stage's layers, without a loss, and its backward.

    Attributes:
        run: Runs the layers, and returns their outputs in any structure of tensors.
        wanted: Whether each input gets a gradient.
        is_complete: Whether an input without a gradient gets zeros, as those of a stage do.
        is_split: Whether weight gradients are computed apart, by `backward_weight`.
        may_leave: Tells whether a memory policy may move what is saved now.
        flags: Whether each output has a gradient.
        deferred: What `backward_weight` will run.
    """

    stage: WholeStage
    run: Callable[[Tensors], Any]
    wanted: Sequence[bool]
    is_complete: bool = True
    is_split: bool = False
    may_leave: Callable[[], bool] = lambda: True
    flags: tuple[bool, ...] = ()
    deferred: DeferredGradients | None = None
    _entry: SegmentInput | None = None
    _edges: tuple[GradientEdge | None, ...] = ()

    def forward(self, inputs: Sequence[Tensor]) -> Any:
        """Run the layers, which may change the inputs, and return their outputs, detached."""
        self._entry, values = SegmentInput.enter(inputs, self.wanted)
        self.deferred = DeferredGradients() if self.is_split else None
        with self.stage.deferring_to(self.deferred):
            outputs = self.run(values)
        tensors = list(tensors_in(outputs))
        self.flags = tuple(tensor.requires_grad for tensor in tensors)
        self._edges = gradient_edges(tensors)
        return map_tensors(Tensor.detach, outputs)

    def backward(self, gradients: Gradients) -> Gradients:
        """Take the gradients of floating-point outputs, and return those of the inputs."""
        assert self._entry is not None
        with self.stage.deferring_to(self.deferred):
            run_backward(self._edges, gradients)
        return self._entry.gradients(self.is_complete)

    def backward_weight(self) -> None:
        """Add the weight gradients that were deferred."""
        assert self.deferred is not None
        self.deferred.run(self.stage.poll)


@dataclass(frozen=True, slots=True)
class LossPass:
    """A loss on the outputs of graphs; it runs eagerly, for it may read values on the host.

    Attributes:
        value: The loss, detached.
    """

    value: Tensor
    _entry: SegmentInput
    _edges: tuple[GradientEdge | None, ...]

    @classmethod
    def forward(cls, loss: Loss, outputs: Any, flags: Sequence[bool]) -> LossPass:
        """Run a loss; `flags` say which outputs want a gradient."""
        entry, values = SegmentInput.enter(list(tensors_in(outputs)), flags)
        rest = iter(values)
        value = loss(map_tensors(lambda _: next(rest), outputs))
        return cls(value.detach(), entry, gradient_edges((value,)))

    def backward(self, gradients: Sequence[Tensor]) -> Gradients:
        """Return the gradients of the floating-point outputs."""
        run_backward(self._edges, gradients)
        return self._entry.gradients(is_first=False)


@dataclass(slots=True)
class LayerGraphs:
    """The graphs of F and of B, or of I and W, with the tensors that they read and write.

    Graphs of one memory pool must not be replayed while another of the pool has to keep its
    tensors: micro-batches in flight have pools of their own, or their tensors are moved out.

    Attributes:
        source: The pass that is captured.
        pool: The handle of the memory pool.
        inputs: What F reads.
        outputs: What it writes, in the structure that the layers return.
        output_gradients: What B or I reads.
        input_gradients: What it writes.
        saved: The storages that F leaves for the backward.
        movable: Those of them that a memory policy may move.
        read_by_weights: Those that I leaves for W.
        is_unchanged: Whether the layers leave each input as it is.
        num_bytes: The bytes of all of these.
        memory: After `disown`, the saved storages and those that W reads, as bytes by address.
    """

    source: Pass
    pool: Any
    inputs: Tensors = ()
    outputs: Any = None
    output_gradients: Gradients = ()
    input_gradients: Gradients = ()
    saved: Sizes = field(default_factory=dict)
    movable: set[int] = field(default_factory=set)
    read_by_weights: Sizes = field(default_factory=dict)
    is_unchanged: tuple[bool, ...] = ()
    num_bytes: int = 0
    memory: dict[int, Tensor] = field(default_factory=dict)
    _graphs: dict[Kind, torch.cuda.CUDAGraph] = field(default_factory=dict)
    _mixed: list[Mixed] = field(default_factory=list)

    @classmethod
    def capture(cls, source: Pass, sample: Sequence[Tensor], pool: Any) -> LayerGraphs:
        """Capture the actions for inputs like `sample`, and compare them with the layers.

        The layers run once eagerly on the sample before the capture, and once by a replay after it.
        Then buffers and gradients are what they were before.

        Raises:
            NotCapturedError: An action cannot be captured, or its replay differs.
        """
        modules = source.stage.modules
        graphs = cls(source, pool, _mixed=mixed_layers(source.stage))
        buffers = list(modules.buffers())
        gradients = [tensor.grad for tensor in modules.parameters() if tensor.grad is not None]
        before = copies([*buffers, *gradients])

        def play(layers: Pass | LayerGraphs) -> tuple[list[Tensor], list[Tensor]]:
            for gradient in gradients:
                gradient.data.zero_()
            outputs = layers.forward([tensor.detach().clone() for tensor in sample])
            forward = copies([*tensors_in(outputs), *buffers])
            input_grads = layers.backward([ramp(tensor) for tensor in floating(outputs)])
            if source.is_split:
                layers.backward_weight()
            backward = copies(
                [*(tensor for tensor in input_grads if tensor is not None), *gradients]
            )
            restore([*buffers, *gradients], before)
            return forward, backward

        eager = play(source)
        torch.cuda.empty_cache()  # no capture can, and the pool needs what eager runs have freed
        graphs._capture_all(sample)
        replayed = play(graphs)
        for name, value, wanted in zip(("F", graphs._backward_kind), replayed, eager, strict=True):
            compare(name, value, wanted)
        graphs.is_unchanged = tuple(map(torch.equal, graphs.inputs, sample))
        return graphs

    def forward(self, inputs: Sequence[Tensor]) -> Any:
        """Replay F, and return copies of its outputs; an input that is passed on is no copy."""
        fill(self.inputs, inputs)
        for mixed in self._mixed:
            mixed.refresh()
        self._replay(Kind.F)
        inputs_by_place = {
            address_of(static): tensor
            for static, tensor, is_same in zip(self.inputs, inputs, self.is_unchanged, strict=False)
            if is_same and static.stride() == tensor.stride() and tensor.numel()
        }
        passed_on = {
            id(tensor): inputs_by_place[address_of(tensor)]
            for tensor in tensors_in(self.outputs)
            if address_of(tensor) in inputs_by_place
        }
        new = iter(_cloned([t for t in tensors_in(self.outputs) if id(t) not in passed_on]))

        def copy(tensor: Tensor) -> Tensor:
            if id(tensor) not in passed_on:
                return next(new)
            original = passed_on[id(tensor)]
            offset = original.storage_offset() + tensor.storage_offset()
            return original.detach().as_strided(tensor.size(), tensor.stride(), offset)

        return map_tensors(copy, self.outputs)

    def backward(self, gradients: Gradients) -> Gradients:
        """Replay B or I, and return copies of the gradients of the inputs."""
        pairs = zip(self.output_gradients, gradients, strict=True)
        received = []
        for static, gradient in pairs:
            if static is not None and gradient is None:
                static.zero_()
            elif static is not None and gradient is not None:
                received.append((static, gradient))
        fill([static for static, _ in received], [gradient for _, gradient in received])
        self._replay(self._backward_kind)
        new = iter(_cloned([tensor for tensor in self.input_gradients if tensor is not None]))
        return tuple(None if gradient is None else next(new) for gradient in self.input_gradients)

    def backward_weight(self) -> None:
        """Replay W."""
        self._replay(Kind.W)

    def disown(self) -> None:
        """Give the memory back to the pool, whose next graphs will use it too.

        Tensors stay where they are, and are valid until another graph of the pool is replayed.
        """
        device = self.inputs[0].device
        for address, num_bytes in (self.saved | self.read_by_weights).items():
            self.memory[address] = as_bytes(storage_at(address, num_bytes, device))
        self.inputs = tuple(map(_unowned, self.inputs))
        self.outputs = map_tensors(_unowned, self.outputs)
        self.output_gradients = [
            None if gradient is None else _unowned(gradient) for gradient in self.output_gradients
        ]
        self.input_gradients = [
            None if gradient is None else _unowned(gradient) for gradient in self.input_gradients
        ]

    @property
    def flags(self) -> Sequence[bool]:
        """Return which outputs have a gradient."""
        return self.source.flags

    @property
    def _backward_kind(self) -> Kind:
        return Kind.I if self.source.is_split else Kind.B

    def _replay(self, kind: Kind) -> None:
        if kind in self._graphs:  # layers without gradients have only F
            self._graphs[kind].replay()

    def _capture_all(self, sample: Sequence[Tensor]) -> None:
        source = self.source
        modules = source.stage.modules
        fixed = [*modules.parameters(), *modules.buffers(), *low_copies(modules)]
        known = storage_addresses(fixed)
        for_weights: list[Tensor] = []  # held, so that I writes nothing to their addresses

        def save(tensor: Tensor) -> Tensor:
            is_own = tensor.numel() and not tensor._is_zerotensor()
            if is_own and address_of(tensor) not in known:
                self.saved |= storage_sizes([tensor])
                if source.may_leave():
                    self.movable.add(address_of(tensor))
                if source.is_split:
                    for_weights.append(tensor)
            return tensor

        stage, pool = source.stage, self.pool
        with (
            capturing(stage, pool, Kind.F) as self._graphs[Kind.F],
            saved_tensors_hooks(save, lambda tensor: tensor),
        ):
            self.inputs = tuple(torch.empty_like(tensor) for tensor in sample)
            self.outputs = source.forward(self.inputs)
        held_bytes = self.saved | storage_sizes([*self.inputs, *tensors_in(self.outputs)])
        self.num_bytes = sum(held_bytes[where] for where in held_bytes.keys() - known)
        flags = floating_flags(source.flags, self.outputs)
        self.output_gradients = [None] * len(flags)
        has_zeros = source.is_complete and any(source.wanted)
        if not any(flags) and not has_zeros:
            return
        kind = self._backward_kind
        with capturing(stage, pool, kind) as self._graphs[kind]:
            self.output_gradients = [
                torch.empty_like(output) if flag else None
                for flag, output in zip(flags, floating(self.outputs), strict=True)
            ]
            self.input_gradients = source.backward(self.output_gradients)
        received = [gradient for gradient in self.output_gradients if gradient is not None]
        input_grads = [gradient for gradient in self.input_gradients if gradient is not None]
        around = storage_sizes([*received, *input_grads])
        self.num_bytes += sum(around.values())
        if source.deferred is not None and any(flags):
            deferred_bytes = storage_sizes(source.deferred.tensors())
            self.read_by_weights = {
                where: deferred_bytes[where] for where in deferred_bytes.keys() - known
            }
            new = self.read_by_weights.keys() - held_bytes.keys() - around.keys()
            self.num_bytes += sum(deferred_bytes[where] for where in new)
            for_weights.clear()
            with capturing(stage, pool, Kind.W) as self._graphs[Kind.W]:
                source.backward_weight()


@contextmanager
def capturing(stage: WholeStage, pool: Any, kind: Kind) -> Iterator[torch.cuda.CUDAGraph]:
    """Capture what the block does for a stage as a graph, whose memory is in `pool`.

    Raises:
        NotCapturedError: It cannot be captured.
    """
    graph = torch.cuda.CUDAGraph()
    poll, stage.poll = stage.poll, _nothing  # which may ask events
    settings: Any = torch.utils.deterministic
    fills = settings.fill_uninitialized_memory
    settings.fill_uninitialized_memory = False  # a replay would fill what was copied in before it
    is_collecting = gc.isenabled()
    gc.disable()  # finalizers, as of pinned memory, may synchronize, which ends a capture
    graph.capture_begin(pool=pool, capture_error_mode="thread_local")
    try:
        yield graph
    except RuntimeError as error:
        with suppress(RuntimeError):  # which names no reason
            graph.capture_end()
        end_capture_memory(torch.device("cuda", torch.cuda.current_device()), pool)
        reason = str(error).splitlines()[0]
        raise NotCapturedError(f"{kind} cannot be captured: {reason}") from error
    finally:
        stage.poll = poll
        settings.fill_uninitialized_memory = fills
        if is_collecting:
            gc.enable()
    graph.capture_end()


def compare(name: str, replayed: Sequence[Tensor], eager: Sequence[Tensor]) -> None:
    """Compare what a replay of an action gave with what an eager run gave, up to rounding.

    Raises:
        NotCapturedError: They differ.
    """
    if not all(map(_is_close, replayed, eager)):
        raise NotCapturedError(f"the replay of {name} differs from the same action run eagerly")


def floating_flags(flags: Sequence[bool], outputs: Any) -> list[bool]:
    """Return the flags of those outputs that are of a floating-point type."""
    pairs = zip(flags, tensors_in(outputs), strict=True)
    return [flag for flag, tensor in pairs if tensor.is_floating_point()]


def layouts_of(tensors: Iterable[Tensor]) -> tuple[Any, ...]:
    """Return what tensors must have in common to be the inputs of the same graphs."""
    return tuple((tensor.shape, tensor.stride(), tensor.dtype) for tensor in tensors)


def address_of(tensor: Tensor) -> int:
    """Return the address of a tensor's storage."""
    return tensor.untyped_storage().data_ptr()


def mixed_layers(stage: WholeStage) -> list[Mixed]:
    """Return the layers of a stage in mixed precision; their low copies are no part of a graph."""
    mixed = map(mixed_of, stage.modules.modules())
    return [layer for layer in mixed if layer is not None]


def last_output(stage: WholeStage, values: Tensors) -> Any:
    """Run the layers of a stage, and return what the last one returns."""
    outputs: list[Any] = []

    def keep(output: Any) -> Tensor:
        outputs.append(output)
        return next(tensors_in(output))

    stage.run_layers(values, keep)
    return outputs[0]


def _nothing() -> None:
    pass


def floating(outputs: Any) -> list[Tensor]:
    """Return the tensors of outputs that are of a floating-point type."""
    return [tensor for tensor in tensors_in(outputs) if tensor.is_floating_point()]


def ramp(like: Tensor) -> Tensor:
    """Return a gradient for a comparison; layers of a norm have none for equal values."""
    values = torch.linspace(-1, 1, like.numel(), device=like.device)
    return values.view(like.shape).to(like.dtype)


def _unowned(tensor: Tensor) -> Tensor:
    memory = tensor.untyped_storage()
    storage = storage_at(memory.data_ptr(), memory.nbytes(), tensor.device)
    where = int(tensor.storage_offset()), tensor.size(), tensor.stride()
    return tensor_over(storage, tensor.dtype, *where)


def copies(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Return copies of tensors."""
    return [tensor.detach().clone() for tensor in tensors]


def apart(tensors: Sequence[Tensor], known: set[int]) -> Tensors:
    """Return tensors, copied if their memory is known, or not theirs alone."""
    own = []
    for tensor in tensors:
        memory = tensor.untyped_storage()
        is_own = memory.nbytes() == tensor.nbytes and memory.data_ptr() not in known
        own.append(tensor if is_own else tensor.clone())
        known.add(memory.data_ptr())
    return tuple(own)


def fill(statics: Sequence[Tensor], tensors: Sequence[Tensor]) -> None:
    """Copy tensors to where graphs read them."""
    # by `data`, for graphs of autograd know neither
    if len(statics) == 1:
        statics[0].data.copy_(tensors[0].detach())
    else:
        copy_all([static.data for static in statics], [tensor.detach() for tensor in tensors])


def _cloned(statics: Sequence[Tensor]) -> list[Tensor]:
    """Return copies of tensors, made by few kernels."""
    if len(statics) == 1:
        return [statics[0].clone()]
    new = list(map(torch.empty_like, statics))
    copy_all(new, list(statics))
    return new


def restore(tensors: Sequence[Tensor], copies: Sequence[Tensor]) -> None:
    """Put the values of copies back."""
    # by `data`, as kernels of norms do, which count no change of their statistics
    copy_all([tensor.data for tensor in tensors], list(copies))


def _is_close(one: Tensor, other: Tensor) -> bool:
    if not other.is_floating_point():
        return torch.equal(one, other)
    wide = other.double()
    difference = (one.double() - wide).abs().nan_to_num(nan=0.0, posinf=0.0)
    is_alike = torch.equal(one.isfinite(), other.isfinite())
    scale = wide.abs().nan_to_num(posinf=0.0).max() if wide.numel() else 0.0
    tolerance = TOLERANCES.get(other.dtype, LOW_TOLERANCE)
    return is_alike and (not wide.numel() or bool(difference.max() <= tolerance * scale))
