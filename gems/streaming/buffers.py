"""The tensors that hold rows.

Written once, shared by all that reads them, with the rows carried in front.
All readers of a value's rows in a strip get aliases of one tensor, from one function of autograd
that adds their gradients up. What is saved for backward is that tensor, once: the rows that a strip
keeps are copied to the next, and no others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

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


@dataclass(frozen=True, slots=True)
class Write:
    """Rows to write at a row and channel: `how`, and the sources.

    A source is its number and the first of its rows. "copy" and "cat" take one source, "add" adds
    two, others are an activation of one.
    """

    how: str
    sources: tuple[tuple[int, int], ...]
    row: int
    rows: int
    channel: int | None = None


@dataclass(frozen=True, slots=True)
class Layout:
    """A tensor of rows: its shape, dimensions of rows and channels, writes, and aliases.

    An alias is (row, rows). Rows that nothing is written to are zeros.
    """

    shape: tuple[int, ...]
    dim: int
    channel_dim: int
    writes: tuple[Write, ...]
    aliases: tuple[tuple[int, int], ...]


class _Rows(Function):
    """Write rows and return the aliases."""

    @staticmethod
    def forward(ctx: Any, layout: Layout, *sources: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.layout, ctx.rows = layout, tuple(source.shape[layout.dim] for source in sources)
        ctx.channels = tuple(source.shape[layout.channel_dim] for source in sources)
        dim = layout.dim
        whole = _as_it_is(layout, sources)
        if whole is None:
            order = (
                torch.channels_last if _is_channels_last(sources[-1]) else torch.contiguous_format
            )
            like = sources[-1]
            whole = torch.empty(
                layout.shape, dtype=_dtype(sources), device=like.device, memory_format=order
            )
            written = 0
            for write in layout.writes:
                _write(write, whole, sources, layout)
                written += write.rows if not write.channel else 0
            if written < layout.shape[dim]:
                _fill_rest(layout, whole)
        acted = [write for write in layout.writes if write.how in _FROM_OUTPUT]
        ctx.save_for_backward(*([whole] if acted else []))
        return tuple(whole.narrow(dim, row, rows).detach() for row, rows in layout.aliases)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        layout: Layout = ctx.layout
        total = _sum(layout, gradients)
        if total is None:
            return (None,) * (1 + len(ctx.rows))
        whole = ctx.saved_tensors[0] if ctx.saved_tensors else None
        found: list[list[tuple[int, Tensor]]] = [[] for _ in ctx.rows]
        for write in layout.writes:
            part = total.narrow(layout.dim, write.row, write.rows)
            if write.how in _FROM_OUTPUT:
                assert whole is not None
                part = _FROM_OUTPUT[write.how][1](
                    part, whole.narrow(layout.dim, write.row, write.rows)
                )
            for source, row in write.sources:
                own = part
                if write.channel is not None:
                    own = part.narrow(layout.channel_dim, write.channel, ctx.channels[source])
                found[source].append((row, own))
        needed = ctx.needs_input_grad[1:]
        return (
            None,
            *(
                _joined(parts, rows, layout.dim) if is_needed else None
                for parts, rows, is_needed in zip(found, ctx.rows, needed, strict=True)
            ),
        )


_apply: Callable[..., tuple[Tensor, ...]] = _Rows.apply


def write_rows(layout: Layout, sources: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Return the aliases of a tensor that is written as `layout` says."""
    return _apply(layout, *sources)


def _as_it_is(layout: Layout, sources: Sequence[Tensor]) -> Tensor | None:
    """Return a source that is all of the tensor already."""
    if len(layout.writes) == 1 and layout.writes[0].how == "copy":
        source = sources[layout.writes[0].sources[0][0]]
        if layout.writes[0].rows == layout.shape[layout.dim] == source.shape[layout.dim]:
            return source
    return None


def _write(write: Write, whole: Tensor, sources: Sequence[Tensor], layout: Layout) -> None:
    into = whole.narrow(layout.dim, write.row, write.rows)
    taken = [sources[source].narrow(layout.dim, row, write.rows) for source, row in write.sources]
    if write.channel is not None:
        into = into.narrow(layout.channel_dim, write.channel, taken[0].shape[layout.channel_dim])
    if write.how == "add":
        torch.add(taken[0], taken[1], out=into)
    elif write.how in _FROM_OUTPUT:
        _FROM_OUTPUT[write.how][0](taken[0], out=into)
    else:
        into.copy_(taken[0])


def _fill_rest(layout: Layout, whole: Tensor) -> None:
    spans = sorted({(write.row, write.row + write.rows) for write in layout.writes})
    at = 0
    for begin, end in [*spans, (layout.shape[layout.dim],) * 2]:
        if begin > at:
            whole.narrow(layout.dim, at, begin - at).zero_()
        at = max(at, end)


def _sum(layout: Layout, gradients: Sequence[Tensor | None]) -> Tensor | None:
    """Return the sum of the aliases' gradients, each at its rows."""
    parts = [
        (row, rows, gradient)
        for (row, rows), gradient in zip(layout.aliases, gradients, strict=True)
        if gradient is not None and rows
    ]
    if not parts:
        return None
    parts.sort(key=lambda part: -part[1])
    _, rows, first = parts[0]
    if rows == layout.shape[layout.dim]:
        if len(parts) == 1:
            return first
        total = first.clone()
        parts = parts[1:]
    else:
        total = first.new_zeros(layout.shape)
    for row, rows, gradient in parts:
        total.narrow(layout.dim, row, rows).add_(gradient)
    return total


def _joined(parts: Sequence[tuple[int, Tensor]], rows: int, dim: int) -> Tensor | None:
    """Return the gradient of a source from those of its rows; rows that nothing reads have none."""
    if not parts:
        return None
    if len(parts) == 1 and parts[0][1].shape[dim] == rows:
        return parts[0][1]
    shape = list(parts[0][1].shape)
    shape[dim] = rows
    total = parts[0][1].new_zeros(shape)
    for row, part in parts:
        total.narrow(dim, row, part.shape[dim]).add_(part)
    return total


def _dtype(sources: Sequence[Tensor]) -> torch.dtype:
    found = sources[0].dtype
    for source in sources[1:]:
        found = torch.promote_types(found, source.dtype)
    return found


def _is_channels_last(tensor: Tensor) -> bool:
    return (
        tensor.dim() == 4
        and not tensor.is_contiguous()
        and tensor.is_contiguous(memory_format=torch.channels_last)
    )
