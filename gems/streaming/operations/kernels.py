"""Operations on one block of a map; only the edges of the map are padded."""

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
    """One axis of the block that an operation computes, in dimension `dim` of its output.

    Outputs [first, last) of `size` are computed from inputs [begin, end) of `size_in`. The window
    may reach outside the map; the input tensor has the inputs of the span `there`.
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
        """The number of outputs of the block."""
        return self.last - self.first

    @property
    def outside(self) -> tuple[int, int]:
        """The number of missing inputs before and after the input tensor."""
        if self.there[0] == self.there[1]:
            return self.end - self.begin, 0
        return self.there[0] - self.begin, self.end - self.there[1]


@dataclass(frozen=True, slots=True)
class Call:
    """A call of one operation on one block.

    Attributes:
        along: The axes that the output has.
        summed: The axis that is summed or averaged, if any.
        seeded: A context that seeds the random numbers of the block, or of one of its rows.
        carried: The partial sums of earlier blocks, or the state of a reduction over all positions.
        is_again: The block is recomputed, so running statistics must not move.
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
    """Run the operation on the block as on a whole map."""
    with call.seeded(None):
        return call.target(*call.args, **call.kwargs)


def linear(call: Call) -> Tensor:
    """Run a linear map; its weight gradient may be deferred."""
    x, weight, bias = weights(call)
    deferred_output = (
        None if call.deferred is None else linear_map(call.deferred, call.name, x, weight, bias)
    )
    return functional.linear(x, weight, bias) if deferred_output is None else deferred_output


def weights(call: Call) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the input, the weight and the bias of a call."""
    x, weight, *more = call.args
    bias = more[0] if more else call.kwargs.get("bias")
    return x, weight, bias


def batch_norm(call: Call) -> Any:
    """Apply batch norm.

    In training, normalize by the statistics of the block; they move the running statistics by the
    block's share of the map.
    """
    x, weight, bias, mean, variance, is_training, momentum, *more = call.args
    if is_training:
        momentum *= math.prod(span.num / span.size for span in call.along)
        mean, variance = (None, None) if call.is_again else (mean, variance)
    return call.target(x, weight, bias, mean, variance, is_training, momentum, *more)


def run_of(operation: str) -> Run:
    """Return the function that runs an operation without padding."""
    return _OWN.get(operation, plain)


_OWN: dict[str, Run] = {"linear": linear, "batch_norm": batch_norm}


def reshape(call: Call) -> Tensor:
    """Reshape to the sizes of the block."""
    return call.args[0].reshape(block_shape(call, call.state["shape"]))  # type: ignore[no-any-return]


def block_shape(call: Call, shape: Sequence[int]) -> list[int]:
    """Return `shape` with the sizes of the block along its axes."""
    sizes = list(shape)
    for span in call.along:
        sizes[span.dim] = span.num
    return sizes


def drop_rows(call: Call) -> Tensor:
    """Apply dropout with a mask that is drawn row by row.

    Each row has its own seed and is drawn whole, so every division of the map has the same mask.
    """
    x, p = call.args[:2]
    rows, *others = call.along
    shape = list(call.state["shape"])
    del shape[rows.dim]
    mask = torch.empty_like(x, requires_grad=False)
    for row in range(rows.num):
        with call.seeded(rows.first + row):
            row_mask = torch.empty(shape, dtype=x.dtype, device=x.device).bernoulli_(1 - p)
        for span in others:
            row_mask = row_mask.narrow(span.dim - 1, span.first, span.num)
        mask.select(rows.dim, row).copy_(row_mask)
    return x * mask.div_(1 - p)  # type: ignore[no-any-return]


def pixel_shuffle(call: Call) -> Tensor:
    """Shuffle channels into rows and columns, and cut the result to the block."""
    factor = call.state["factor"]
    shuffled = functional.pixel_shuffle(call.args[0], factor)
    for span in call.along:
        shuffled = shuffled.narrow(span.dim, span.first - span.there[0] * factor, span.num)
    return shuffled


def step_rows(call: Call) -> Tensor:
    """Keep every n-th row."""
    rows: Tensor = aten.slice.Tensor(call.args[0], call.state["dim"], 0, None, call.state["every"])
    return rows


def paddings(call: Call) -> list[int]:
    """Return the padding of the block, in the order of `torch.nn.functional.pad`."""
    amounts = [0] * (2 * (call.args[0].dim() - 2))
    for span in call.along:
        place = 2 * (call.args[0].dim() - 1 - span.dim)
        amounts[place : place + 2] = span.outside
    return amounts


class _MaxPool(Function):
    """Max pooling that pads with -inf and saves only the indices of the maxima."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, outside: list[int], options: tuple[Any, ...]) -> Tensor:
        ctx.inside = list(enumerate(x.shape))[2:]
        if any(outside):
            lowest = float("-inf") if x.is_floating_point() else torch.iinfo(x.dtype).min
            x = functional.pad(x, outside, value=lowest)
        pool, _ = _MAX_POOL[x.dim() - 2]
        maxima, places = pool(x, *options)
        ctx.save_for_backward(places)
        ctx.before = outside[-2::-2]
        ctx.options = options
        ctx.like = (x.shape, x.dtype)
        return maxima  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (places,) = ctx.saved_tensors
        shape, dtype = ctx.like
        # the kernel reads only the shape of its input
        like = torch.empty(shape, dtype=dtype, device=gradient.device)
        _, pool_backward = _MAX_POOL[len(shape) - 2]
        input_grad = pool_backward(gradient, like, *ctx.options, places)
        for (dim, size), begin in zip(ctx.inside, ctx.before, strict=True):
            input_grad = input_grad.narrow(dim, begin, size)
        return input_grad, None, None


_MAX_POOL: dict[int, tuple[Callable[..., Any], Callable[..., Tensor]]] = {
    2: (aten.max_pool2d_with_indices.default, aten.max_pool2d_with_indices_backward.default),
    3: (aten.max_pool3d_with_indices.default, aten.max_pool3d_with_indices_backward.default),
}
_apply_max_pool: Callable[..., Tensor] = _MaxPool.apply


def max_pool(call: Call) -> Tensor:
    """Max-pool a block, padded below every value."""
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
    row = _apply_max_pool(  # one row of two dimensions
        x.unsqueeze(2),
        [*outside, 0, 0],
        tuple(
            (blank, *option) if isinstance(option, tuple) else option
            for blank, option in zip((1, 1, 0, 1, None), options, strict=True)
        ),
    )
    return row.squeeze(2)


def average_pool(call: Call) -> Tensor:
    """Average-pool a zero-padded block, with the divisors of the whole map."""
    state = call.state
    kernel = state["kernel"]
    averages: Tensor = _AVERAGE_POOL[len(kernel)](
        call.args[0],
        kernel,
        state["stride"],
        state["sides"],
        state["ceil_mode"],
        state["count_include_pad"],
        *([state["override"]] if len(kernel) > 1 else []),
    )
    dtype = averages.dtype
    for span in call.along:
        size = kernel[span.dim - 2]
        counts = state["counts"][span.dim][span.first : span.last]
        if all(count == size for count in counts):
            continue
        averages = averages.to(wide_dtype(dtype))
        factors = _constant(call, [size / count for count in counts], averages.dtype)
        averages = averages * _spread(factors, averages, span.dim)
    return averages.to(dtype)


_AVERAGE_POOL: dict[int, Callable[..., Tensor]] = {
    1: functional.avg_pool1d,
    2: functional.avg_pool2d,
    3: functional.avg_pool3d,
}


def _spread(values: Tensor, like: Tensor, dim: int) -> Tensor:
    """View a vector along dimension `dim`, to broadcast over the others."""
    return values.view([-1 if axis == dim else 1 for axis in range(like.dim())])


def pad_rows(call: Call) -> Tensor:
    """Pad the edges of the map with a value."""
    x = call.args[0]
    amounts = list(call.state["amounts"])
    amounts += [0] * (2 * x.dim() - len(amounts))
    for span in call.along:
        place = 2 * (x.dim() - 1 - span.dim)
        amounts[place : place + 2] = span.outside
    while amounts and not any(amounts[-2:]):
        del amounts[-2:]
    return functional.pad(x, amounts, value=call.state["value"])


def resample(call: Call) -> Tensor:
    """Resample along each axis by index or by linear interpolation, then along other dimensions.

    16-bit values are interpolated in float32.
    """
    resampled = call.args[0]
    dtype = resampled.dtype
    state = call.state
    for span in call.along:
        lower, upper, share = state["places"][span.dim]
        rows = resampled.index_select(span.dim, _places(call, lower, span))
        if share is not None:
            wide = wide_dtype(dtype)
            shares = _constant(call, share[span.first : span.last], wide)
            shares = _spread(shares, resampled, span.dim)
            after = resampled.index_select(span.dim, _places(call, upper, span))
            rows = rows.to(wide) * (1 - shares) + after.to(wide) * shares
        resampled = rows
    return state["sides"](resampled, block_shape(call, state["shape"])).to(dtype)  # type: ignore[no-any-return]


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the accumulation type: float32 for 16-bit types."""
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype


def _places(call: Call, numbers: Sequence[int], along: Along) -> Tensor:
    rows = [row - along.there[0] for row in numbers[along.first : along.last]]
    return _constant(call, rows, torch.int64)


def _constant(call: Call, numbers: Sequence[float], dtype: torch.dtype) -> Tensor:
    """Return numbers as a cached tensor: a copy would wait, which no CUDA graph may."""
    constants = call.state.setdefault("constants", {})
    key = tuple(numbers), dtype, call.args[0].device
    if key not in constants:
        constants[key] = torch.tensor(numbers, dtype=dtype, device=key[-1])
    return constants[key]  # type: ignore[no-any-return]


def add_up(call: Call) -> Tensor:
    """Add a block to the sums or averages along an axis.

    Return all that have begun, finished ones first. Sums over several blocks accumulate in at least
    32 bits; a map in one block is left to the operation itself.
    """
    x: Tensor = call.args[0]
    along = call.summed
    assert along is not None
    state = call.state
    if along.there == (0, along.size_in) and not call.along:
        output: Tensor = call.target(*call.args, **call.kwargs)
        return output.reshape([*x.shape[:2], *state["bins"]])
    x = x.to(state["dtype"])
    begun = min(along.size, state["rule"].begun(along.end))
    kind = {"dtype": x.dtype, "device": x.device}
    sums = x
    for dim in reversed(range(2, x.dim())):
        bins = state["bins"][dim - 2]
        span, there = (along.first, begun), (along.begin, along.end)
        if dim != along.dim:
            if dim not in state["others"]:
                continue
            span, there = (0, bins), (0, x.shape[dim])
        whole = along.size_in if dim == along.dim else x.shape[dim]
        sums = _along(sums, dim, _shares(span, whole, bins, there, state["is_sum"], kind))
    carried: Tensor | None = call.carried
    if carried is None or not carried.shape[along.dim]:
        return sums
    count = carried.shape[along.dim]
    if count == sums.shape[along.dim]:
        return sums + carried
    first = sums.narrow(along.dim, 0, count) + carried
    return torch.cat(
        [first, sums.narrow(along.dim, count, sums.shape[along.dim] - count)], along.dim
    )


def _along(x: Tensor, dim: int, shares: Tensor) -> Tensor:
    """Multiply a map by a matrix along a dimension."""
    if dim == x.dim() - 1:
        product: Tensor = x.matmul(shares.t())
    elif dim == x.dim() - 2:
        product = shares.matmul(x)
    else:
        product = shares.matmul(x.transpose(dim, -2)).transpose(dim, -2)
    return product


def _shares(
    span: tuple[int, int],
    size: int,
    bins: int,
    there: tuple[int, int],
    is_sum: bool,
    kind: dict[str, Any],
) -> Tensor:
    """Return the weight of each row in each bin of a span, of shape (bins, rows there)."""
    first, last = span
    matrix = torch.zeros((last - first, there[1] - there[0]), **kind)
    for row in range(first, last):
        begin = row * size // bins
        end = -(-(row + 1) * size // bins)
        rows = slice(max(begin, there[0]) - there[0], max(min(end, there[1]) - there[0], 0))
        matrix[row - first, rows] = 1.0 if is_sum else 1.0 / (end - begin)
    return matrix
