"""The tensors that hold the blocks of a value.

Written once, shared by all that reads them, with what is carried from earlier blocks beside it. All
readers of a value in a block get aliases of one tensor, from one function of autograd that adds
their gradients up. What is saved for backward is that tensor, once: what a block keeps is copied to
the next, and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from gems.streaming.block_plan import Box

# Of activations that save what they give: what computes them into a tensor, and the input gradient
# of a given gradient.
_FROM_OUTPUT: dict[str, tuple[Callable[..., Tensor], Callable[[Tensor, Tensor], Tensor]]] = {
    "relu": (
        lambda x, out: torch.clamp_min(x, 0, out=out),
        lambda gradient, made: torch.ops.aten.threshold_backward.default(gradient, made, 0),
    ),
    "sigmoid": (
        lambda x, out: torch.sigmoid(x, out=out),
        lambda gradient, made: torch.ops.aten.sigmoid_backward.default(gradient, made),
    ),
    "tanh": (
        lambda x, out: torch.tanh(x, out=out),
        lambda gradient, made: torch.ops.aten.tanh_backward.default(gradient, made),
    ),
}


Dims = tuple[int | None, ...]  # the dimension of each axis, or None
Sizes = tuple[int, ...]  # along each streamed axis, like the offsets below


class Patch(NamedTuple):
    """A part of a tensor: where it begins along each axis, and its sizes."""

    offsets: Sizes
    sizes: Sizes


@dataclass(frozen=True, slots=True)
class Write:
    """What to write at a patch and a channel: `how`, and the sources.

    A source is its number and the offsets of what is taken of it. "copy" and "cat" take one source,
    "add" adds two, others are an activation of one.
    """

    how: str
    sources: tuple[tuple[int, Sizes], ...]
    patch: Patch
    channel: int | None = None


@dataclass(frozen=True, slots=True)
class Layout:
    """A tensor: its shape, dimensions of the axes and of channels, writes, and aliases.

    `inside` is the patch inside the map; the rest is zeros.
    """

    shape: tuple[int, ...]
    dims: tuple[int, ...]
    channel_dim: int
    writes: tuple[Write, ...]
    aliases: tuple[Patch, ...]
    inside: Patch

    @property
    def whole(self) -> Patch:
        """The patch that is all of the tensor."""
        return Patch((0,) * len(self.dims), tuple(self.shape[dim] for dim in self.dims))

    def cut(self, tensor: Tensor, patch: Patch) -> Tensor:
        """Return a patch of a tensor with the same dimensions."""
        for dim, offset, size in zip(self.dims, *patch, strict=True):
            if tensor.shape[dim] != size:
                tensor = tensor.narrow(dim, offset, size)
        return tensor


class _Blocks(Function):
    """Write a tensor and return the aliases."""

    @staticmethod
    def forward(ctx: Any, layout: Layout, *sources: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.layout, ctx.shapes = layout, tuple(source.shape for source in sources)
        whole = _as_it_is(layout, sources)
        if whole is None:
            like = sources[-1]
            order = torch.channels_last if _is_channels_last(like) else torch.contiguous_format
            whole = torch.empty(
                layout.shape, dtype=_dtype(sources), device=like.device, memory_format=order
            )
            _fill_outside(layout, whole)
            for write in layout.writes:
                _write(write, whole, sources, layout)
        acted = [write for write in layout.writes if write.how in _FROM_OUTPUT]
        ctx.save_for_backward(*([whole] if acted else []))
        return tuple(layout.cut(whole, patch).detach() for patch in layout.aliases)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        layout: Layout = ctx.layout
        total = _sum(layout, gradients)
        if total is None:
            return (None,) * (1 + len(ctx.shapes))
        whole = ctx.saved_tensors[0] if ctx.saved_tensors else None
        by_source: list[list[tuple[Sizes, Tensor]]] = [[] for _ in ctx.shapes]
        for write in layout.writes:
            part = layout.cut(total, write.patch)
            if write.how in _FROM_OUTPUT:
                assert whole is not None
                part = _FROM_OUTPUT[write.how][1](part, layout.cut(whole, write.patch))
            for source, taken in write.sources:
                part_grad = part
                if write.channel is not None:
                    channels = ctx.shapes[source][layout.channel_dim]
                    part_grad = part.narrow(layout.channel_dim, write.channel, channels)
                by_source[source].append((taken, part_grad))
        needed = ctx.needs_input_grad[1:]
        return (
            None,
            *(
                _joined(layout, parts, shape) if is_needed else None
                for parts, shape, is_needed in zip(by_source, ctx.shapes, needed, strict=True)
            ),
        )


_apply: Callable[..., tuple[Tensor, ...]] = _Blocks.apply


def write_blocks(layout: Layout, sources: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Return the aliases of a tensor that is written as `layout` says."""
    return _apply(layout, *sources)


def join(parts: Sequence[tuple[Box, Tensor]], dims: Dims) -> Tensor:
    """Return tensors of neighbouring boxes in one, along the dimension of each axis."""
    for axis, dim in reversed(list(enumerate(dims))):
        rows: dict[Box, list[Tensor]] = {}
        for box, part in parts:
            rows.setdefault(box[:axis], []).append(part)
        if dim is not None:
            parts = [
                (box, neighbours[0] if len(neighbours) == 1 else torch.cat(neighbours, dim))
                for box, neighbours in rows.items()
            ]
    return parts[0][1]


def _as_it_is(layout: Layout, sources: Sequence[Tensor]) -> Tensor | None:
    """Return a source that is all of the tensor already."""
    if len(layout.writes) == 1 and layout.writes[0].how == "copy":
        write = layout.writes[0]
        source = sources[write.sources[0][0]]
        if write.patch == layout.whole and source.shape == torch.Size(layout.shape):
            return source
    return None


def _write(write: Write, whole: Tensor, sources: Sequence[Tensor], layout: Layout) -> None:
    into = layout.cut(whole, write.patch)
    taken = [
        layout.cut(sources[source], Patch(offsets, write.patch.sizes))
        for source, offsets in write.sources
    ]
    if write.channel is not None:
        into = into.narrow(layout.channel_dim, write.channel, taken[0].shape[layout.channel_dim])
    if write.how == "add":
        torch.add(taken[0], taken[1], out=into)
    elif write.how in _FROM_OUTPUT:
        _FROM_OUTPUT[write.how][0](taken[0], out=into)
    else:
        into.copy_(taken[0])


def _fill_outside(layout: Layout, whole: Tensor) -> None:
    """Set what is outside the map to zero: slabs before and after it along each axis."""
    for dim, begin, size in zip(layout.dims, *layout.inside, strict=True):
        for first, last in ((0, begin), (begin + size, layout.shape[dim])):
            if first < last:
                whole.narrow(dim, first, last - first).zero_()


def _sum(layout: Layout, gradients: Sequence[Tensor | None]) -> Tensor | None:
    """Return the sum of the aliases' gradients, each at its patch."""
    parts = [
        (patch, gradient)
        for patch, gradient in zip(layout.aliases, gradients, strict=True)
        if gradient is not None and gradient.numel()
    ]
    if not parts:
        return None
    parts.sort(key=lambda part: -part[1].numel())
    patch, first = parts[0]
    if patch == layout.whole:
        if len(parts) == 1:
            return first
        total = first.clone()
        parts = parts[1:]
    else:
        total = first.new_zeros(layout.shape)
    for patch, gradient in parts:
        layout.cut(total, patch).add_(gradient)
    return total


def _joined(
    layout: Layout, parts: Sequence[tuple[Sizes, Tensor]], shape: Sequence[int]
) -> Tensor | None:
    """Return the gradient of a source from those of its parts; what nothing reads has none."""
    if not parts:
        return None
    like = parts[0][1]
    if len(parts) == 1 and like.shape == shape:
        return like
    total = like.new_zeros(shape)
    for offsets, part in parts:
        sizes = tuple(part.shape[dim] for dim in layout.dims)
        layout.cut(total, Patch(offsets, sizes)).add_(part)
    return total


def _dtype(sources: Sequence[Tensor]) -> torch.dtype:
    dtype = sources[0].dtype
    for source in sources[1:]:
        dtype = torch.promote_types(dtype, source.dtype)
    return dtype


def _is_channels_last(tensor: Tensor) -> bool:
    return (
        tensor.dim() == 4
        and not tensor.is_contiguous()
        and tensor.is_contiguous(memory_format=torch.channels_last)
    )
