"""Run operations on the block of a map.

Only the edges of the map are padded.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional

from gems.autograd.split_backward.deferred import DeferredGradients
from gems.autograd.split_backward.linear import linear_map

aten = torch.ops.aten


class Along(NamedTuple):
    """An operation along one axis of the map, in dimension `dim` of what it gives.

    Outputs first to last of `size` are made from inputs begin to end of `size_in`. Inputs may be
    outside the map; `there` is the span of those in the tensor.
    """

    dim: int
    first: int
    last: int
    begin: int
    end: int
    size: int
    size_in: int
    there: tuple[int, int]

    @property
    def num(self) -> int:
        """The number of outputs that are made."""
        return self.last - self.first

    @property
    def outside(self) -> tuple[int, int]:
        """The numbers of inputs that are read before and after those in the tensor."""
        if self.there[0] == self.there[1]:
            return self.end - self.begin, 0
        return self.there[0] - self.begin, self.end - self.there[1]


@dataclass(frozen=True, slots=True)
class Call:
    """One operation in one block.

    `along` are the axes that what it gives has. `seeded` gives its random numbers, `carried` is its
    sum so far, to which it adds along `summed`, or the state of a reduction over all positions. In
    a block that runs again (`is_again`) it leaves running statistics alone.
    """

    name: str
    target: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    along: tuple[Along, ...]
    summed: Along | None
    state: dict[str, Any]
    seeded: Callable[[int | None], AbstractContextManager[None]]
    deferred: DeferredGradients | None
    carried: Any
    is_again: bool = False


Run = Callable[[Call], Any]


def plain(call: Call) -> Any:
    """Run the operation as it is."""
    with call.seeded(None):
        return call.target(*call.args, **call.kwargs)


def linear(call: Call) -> Tensor:
    """Run a linear map; its weight gradient may be deferred."""
    x, weight, bias = weights(call)
    made = None if call.deferred is None else linear_map(call.deferred, call.name, x, weight, bias)
    return functional.linear(x, weight, bias) if made is None else made


def weights(call: Call) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the input, the weight and the bias of a call."""
    x, weight, *more = call.args
    bias = more[0] if more else call.kwargs.get("bias")
    return x, weight, bias


def batch_norm(call: Call) -> Any:
    """Normalize by batch norm.

    In training it uses the statistics of the strip's rows, which move the running statistics by
    their share of all rows.
    """
    x, weight, bias, mean, variance, is_training, momentum, *more = call.args
    if is_training:
        momentum *= math.prod(each.num / each.size for each in call.along)
        mean, variance = (None, None) if call.is_again else (mean, variance)
    return call.target(x, weight, bias, mean, variance, is_training, momentum, *more)


def run_of(operation: str) -> Run:
    """Return the function that runs an operation, without padding, on rows or on whole tensors.

    Most operations run as they are.
    """
    return _OWN.get(operation, plain)


_OWN: dict[str, Run] = {"linear": linear, "batch_norm": batch_norm}


def reshape(call: Call) -> Tensor:
    """Change the shape to one with the sizes of the block."""
    return call.args[0].reshape(block_shape(call, call.state["shape"]))  # type: ignore[no-any-return]


def block_shape(call: Call, shape: Sequence[int]) -> list[int]:
    """Return a shape with the sizes of the block along the axes."""
    found = list(shape)
    for each in call.along:
        found[each.dim] = each.num
    return found


def drop_rows(call: Call) -> Tensor:
    """Apply dropout with a mask that is drawn row by row.

    Each row has a seed of its own and is drawn whole, so that any division draws the same mask.
    """
    x, p = call.args[:2]
    rows, *others = call.along
    shape = list(call.state["shape"])
    del shape[rows.dim]
    mask = torch.empty_like(x, requires_grad=False)
    for row in range(rows.num):
        with call.seeded(rows.first + row):
            drawn = torch.empty(shape, dtype=x.dtype, device=x.device).bernoulli_(1 - p)
        for each in others:
            drawn = drawn.narrow(each.dim - 1, each.first, each.num)
        mask.select(rows.dim, row).copy_(drawn)
    return x * mask.div_(1 - p)  # type: ignore[no-any-return]


def pixel_shuffle(call: Call) -> Tensor:
    """Make several rows and columns of each one, and cut those that are not wanted."""
    factor = call.state["factor"]
    made = functional.pixel_shuffle(call.args[0], factor)
    for each in call.along:
        made = made.narrow(each.dim, each.first - each.there[0] * factor, each.num)
    return made


def step_rows(call: Call) -> Tensor:
    """Take every so many rows."""
    made: Tensor = aten.slice.Tensor(call.args[0], call.state["dim"], 0, None, call.state["every"])
    return made


def paddings(call: Call) -> list[int]:
    """Return the numbers of absent inputs around those of a block, as `torch.nn.functional.pad`."""
    found = [0] * (2 * (call.args[0].dim() - 2))
    for each in call.along:
        place = 2 * (call.args[0].dim() - 1 - each.dim)
        found[place : place + 2] = each.outside
    return found


class _MaxPool(Function):
    """Max pooling that pads the edges of the map itself, and saves only the maxima's places."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, outside: list[int], options: tuple[Any, ...]) -> Tensor:
        ctx.inside = list(enumerate(x.shape))[2:]
        if any(outside):
            lowest = float("-inf") if x.is_floating_point() else torch.iinfo(x.dtype).min
            x = functional.pad(x, outside, value=lowest)
        pool, _ = _MAX_POOL[x.dim() - 2]
        made, places = pool(x, *options)
        ctx.save_for_backward(places)
        ctx.before = outside[-2::-2]
        ctx.options = options
        ctx.like = (x.shape, x.dtype)
        return made  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (places,) = ctx.saved_tensors
        shape, dtype = ctx.like
        # the kernel reads only its shape
        like = torch.empty(shape, dtype=dtype, device=gradient.device)
        _, pool_backward = _MAX_POOL[len(shape) - 2]
        found = pool_backward(gradient, like, *ctx.options, places)
        for (dim, size), begin in zip(ctx.inside, ctx.before, strict=True):
            found = found.narrow(dim, begin, size)
        return found, None, None


_MAX_POOL: dict[int, tuple[Callable[..., Any], Callable[..., Tensor]]] = {
    2: (aten.max_pool2d_with_indices.default, aten.max_pool2d_with_indices_backward.default),
    3: (aten.max_pool3d_with_indices.default, aten.max_pool3d_with_indices_backward.default),
}
_apply_max_pool: Callable[..., Tensor] = _MaxPool.apply


def max_pool(call: Call) -> Tensor:
    """Max-pool a block; the padding is below every value."""
    state = call.state
    options = (
        state["kernel"],
        state["stride"],
        state["sides"],
        state["dilation"],
        state["ceil_mode"],
    )
    x, outside = call.args[0], paddings(call)
    if x.dim() > 3:
        return _apply_max_pool(x, outside, options)
    lines = _apply_max_pool(  # one row of two dimensions
        x.unsqueeze(2),
        [*outside, 0, 0],
        tuple(
            (blank, *each) if isinstance(each, tuple) else each
            for blank, each in zip((1, 1, 0, 1, None), options, strict=True)
        ),
    )
    return lines.squeeze(2)


def average_pool(call: Call) -> Tensor:
    """Pool a block and count inputs as the whole map would; those outside the map are zeros."""
    state = call.state
    kernel = state["kernel"]
    made: Tensor = _AVERAGE_POOL[len(kernel)](
        call.args[0],
        kernel,
        state["stride"],
        state["sides"],
        state["ceil_mode"],
        state["count_include_pad"],
        *([state["override"]] if len(kernel) > 1 else []),
    )
    dtype = made.dtype
    for each in call.along:
        own = kernel[each.dim - 2]
        counts = state["counts"][each.dim][each.first : each.last]
        if all(count == own for count in counts):
            continue
        made = made.to(wide_dtype(dtype))
        factors = _constant(call, [own / count for count in counts], made.dtype)
        made = made * _spread(factors, made, each.dim)
    return made.to(dtype)


_AVERAGE_POOL: dict[int, Callable[..., Tensor]] = {
    1: functional.avg_pool1d,
    2: functional.avg_pool2d,
    3: functional.avg_pool3d,
}


def _spread(values: Tensor, like: Tensor, dim: int) -> Tensor:
    """Return values along a dimension, to be broadcast over the others."""
    return values.view([-1 if each == dim else 1 for each in range(like.dim())])


def pad_rows(call: Call) -> Tensor:
    """Pad with a value, at the edges of the map only."""
    x = call.args[0]
    amounts = list(call.state["amounts"])
    amounts += [0] * (2 * x.dim() - len(amounts))
    for each in call.along:
        place = 2 * (x.dim() - 1 - each.dim)
        amounts[place : place + 2] = each.outside
    while amounts and not any(amounts[-2:]):
        del amounts[-2:]
    return functional.pad(x, amounts, value=call.state["value"])


def resample(call: Call) -> Tensor:
    """Take rows by number, or interpolate between two of them by shares, along each axis.

    Then the dimensions that are no axes are resampled. Shares of 16-bit values are computed in
    float32.
    """
    made = call.args[0]
    dtype = made.dtype
    state = call.state
    for each in call.along:
        lower, upper, share = state["places"][each.dim]
        rows = made.index_select(each.dim, _places(call, lower, each))
        if share is not None:
            wide = wide_dtype(dtype)
            shares = _constant(call, share[each.first : each.last], wide)
            shares = _spread(shares, made, each.dim)
            after = made.index_select(each.dim, _places(call, upper, each))
            rows = rows.to(wide) * (1 - shares) + after.to(wide) * shares
        made = rows
    return state["sides"](made, block_shape(call, state["shape"])).to(dtype)  # type: ignore[no-any-return]


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the type in which values of a type are summed: float32 for 16-bit types."""
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype


def _places(call: Call, numbers: Sequence[int], along: Along) -> Tensor:
    rows = [row - along.there[0] for row in numbers[along.first : along.last]]
    return _constant(call, rows, torch.int64)


def _constant(call: Call, numbers: Sequence[float], dtype: torch.dtype) -> Tensor:
    """Return numbers on the device, copied there once: a copy waits, and no CUDA graph has one."""
    kept = call.state.setdefault("constants", {})
    key = tuple(numbers), dtype, call.args[0].device
    if key not in kept:
        kept[key] = torch.tensor(numbers, dtype=dtype, device=key[-1])
    return kept[key]  # type: ignore[no-any-return]


def add_up(call: Call) -> Tensor:
    """Add a block to the sums or averages along an axis that have begun.

    Return all of these, finished ones first. If the whole map is there at once, the operation
    itself computes them; sums of several blocks have at least 32 bits.
    """
    x: Tensor = call.args[0]
    along = call.summed
    assert along is not None
    state = call.state
    if along.there == (0, along.size_in) and not call.along:
        own: Tensor = call.target(*call.args, **call.kwargs)
        return own.reshape([*x.shape[:2], *state["bins"]])
    x = x.to(state["dtype"])
    begun = min(along.size, state["rule"].begun(along.end))
    kind = {"dtype": x.dtype, "device": x.device}
    made = x
    for dim in reversed(range(2, x.dim())):
        bins = state["bins"][dim - 2]
        span, there = (along.first, begun), (along.begin, along.end)
        if dim != along.dim:
            if dim not in state["others"]:
                continue
            span, there = (0, bins), (0, x.shape[dim])
        whole = along.size_in if dim == along.dim else x.shape[dim]
        made = _along(made, dim, _shares(span, whole, bins, there, state["is_sum"], kind))
    before: Tensor | None = call.carried
    if before is None or not before.shape[along.dim]:
        return made
    count = before.shape[along.dim]
    if count == made.shape[along.dim]:
        return made + before
    first = made.narrow(along.dim, 0, count) + before
    return torch.cat(
        [first, made.narrow(along.dim, count, made.shape[along.dim] - count)], along.dim
    )


def _along(x: Tensor, dim: int, shares: Tensor) -> Tensor:
    """Multiply a map with a matrix along a dimension."""
    if dim == x.dim() - 1:
        made: Tensor = x.matmul(shares.t())
    elif dim == x.dim() - 2:
        made = shares.matmul(x)
    else:
        made = shares.matmul(x.transpose(dim, -2)).transpose(dim, -2)
    return made


def _shares(
    span: tuple[int, int],
    size: int,
    bins: int,
    there: tuple[int, int],
    is_sum: bool,
    kind: dict[str, Any],
) -> Tensor:
    """Return the share of each row in each bin of a span, of shape (bins, rows there)."""
    first, last = span
    matrix = torch.zeros((last - first, there[1] - there[0]), **kind)
    for row in range(first, last):
        begin = row * size // bins
        end = -(-(row + 1) * size // bins)
        here = slice(max(begin, there[0]) - there[0], max(min(end, there[1]) - there[0], 0))
        matrix[row - first, here] = 1.0 if is_sum else 1.0 / (end - begin)
    return matrix
