"""Run operations on the rows of a strip.

Only the top and bottom of the image are padded.
"""

from __future__ import annotations

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


class Rows(NamedTuple):
    """Output rows first to last of `height`, made from input rows begin to end of `height_in`.

    Rows that are read may be outside the map; `there` is the span of the rows in the tensor.
    """

    first: int
    last: int
    begin: int
    end: int
    height: int
    height_in: int
    there: tuple[int, int]

    @property
    def num(self) -> int:
        """The number of rows that are made."""
        return self.last - self.first

    @property
    def outside(self) -> tuple[int, int]:
        """The numbers of rows that are read above and below the rows of the tensor."""
        if self.there[0] == self.there[1]:
            return self.end - self.begin, 0
        return self.there[0] - self.begin, self.end - self.there[1]


@dataclass(frozen=True, slots=True)
class Call:
    """One operation in one strip.

    `seeded` gives its random numbers, `carried` is its sum so far. In a strip that runs again
    (`is_again`) it leaves running statistics alone.
    """

    name: str
    target: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    rows: Rows
    state: dict[str, Any]
    seeded: Callable[[int | None], AbstractContextManager[None]]
    deferred: DeferredGradients | None
    carried: Tensor | None
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
        momentum *= call.rows.num / call.rows.height if call.rows.height else 1.0
        mean, variance = (None, None) if call.is_again else (mean, variance)
    return call.target(x, weight, bias, mean, variance, is_training, momentum, *more)


def run_of(operation: str) -> Run:
    """Return the function that runs an operation, without padding, on rows or on whole tensors.

    Most operations run as they are.
    """
    return _OWN.get(operation, plain)


_OWN: dict[str, Run] = {"linear": linear, "batch_norm": batch_norm}


def reshape(call: Call) -> Tensor:
    """Change the shape to one with the rows of the strip."""
    x = call.args[0]
    shape = list(call.state["shape"])
    shape[call.state["dim"]] = call.rows.num
    return x.reshape(shape)  # type: ignore[no-any-return]


def drop_rows(call: Call) -> Tensor:
    """Apply dropout with a mask that is drawn row by row.

    Each row has a seed of its own, so that any division into strips draws the same mask.
    """
    x, p = call.args[:2]
    dim = call.state["dim"]
    mask = torch.empty_like(x, requires_grad=False)
    for row in range(call.rows.num):
        with call.seeded(call.rows.first + row):
            mask.select(dim, row).copy_(torch.empty_like(x.select(dim, row)).bernoulli_(1 - p))
    return x * mask.div_(1 - p)  # type: ignore[no-any-return]


def pixel_shuffle(call: Call) -> Tensor:
    """Make several rows from each one, and cut those that are not wanted."""
    factor = call.state["factor"]
    rows = call.rows
    made = functional.pixel_shuffle(call.args[0], factor)
    return made.narrow(2, rows.first - rows.there[0] * factor, rows.num)


def step_rows(call: Call) -> Tensor:
    """Take every `step`-th row."""
    made: Tensor = aten.slice.Tensor(call.args[0], call.state["dim"], 0, None, call.state["step"])
    return made


class _MaxPool(Function):
    """Max pooling of rows that pads top and bottom itself, and saves only the maxima's places."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, outside: tuple[int, int], options: tuple[Any, ...]) -> Tensor:
        if any(outside):
            lowest = float("-inf") if x.is_floating_point() else torch.iinfo(x.dtype).min
            x = functional.pad(x, (0, 0, *outside), value=lowest)
        made, places = aten.max_pool2d_with_indices.default(x, *options)
        ctx.save_for_backward(places)
        ctx.outside = outside
        ctx.options = options
        ctx.like = (x.shape, x.dtype)
        return made  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (places,) = ctx.saved_tensors
        shape, dtype = ctx.like
        # the kernel reads only its shape
        like = torch.empty(shape, dtype=dtype, device=gradient.device)
        found = aten.max_pool2d_with_indices_backward.default(gradient, like, *ctx.options, places)
        above, below = ctx.outside
        return found.narrow(2, above, shape[2] - above - below), None, None


_apply_max_pool: Callable[..., Tensor] = _MaxPool.apply


def max_pool(call: Call) -> Tensor:
    """Max-pool rows; the padding is below every value."""
    state = call.state
    options = (
        state["kernel"],
        state["stride"],
        (0, state["side"]),
        state["dilation"],
        state["ceil_mode"],
    )
    return _apply_max_pool(call.args[0], call.rows.outside, options)


def average_pool(call: Call) -> Tensor:
    """Pool rows and count them as the whole image would; rows outside the map are zeros."""
    state = call.state
    made = functional.avg_pool2d(
        call.args[0],
        state["kernel"],
        state["stride"],
        (0, state["side"]),
        state["ceil_mode"],
        state["count_include_pad"],
        state["override"],
    )
    counts = state["counts"][call.rows.first : call.rows.last]
    if all(count == state["kernel"][0] for count in counts):
        return made
    factors = [state["kernel"][0] / count for count in counts]
    wide = made.to(wide_dtype(made.dtype))
    return (wide * torch.tensor(factors, dtype=wide.dtype, device=made.device).view(-1, 1)).to(
        made.dtype
    )


def pad_rows(call: Call) -> Tensor:
    """Pad with a value, rows at the top and bottom of the map only."""
    amounts = list(call.state["amounts"])
    place = call.state["place"]
    if place < len(amounts):
        amounts[place : place + 2] = call.rows.outside
    return functional.pad(call.args[0], amounts, value=call.state["value"])


def resample(call: Call) -> Tensor:
    """Take rows by number, or interpolate between two of them by shares, and change the width.

    Shares of 16-bit values are computed in float32.
    """
    x = call.args[0]
    rows = call.rows
    state = call.state
    made = x.index_select(2, _places(state["lower"], rows, x.device))
    if state["share"] is not None:
        wide = wide_dtype(x.dtype)
        share = torch.tensor(
            state["share"][rows.first : rows.last], dtype=wide, device=x.device
        ).view(-1, 1)
        upper = x.index_select(2, _places(state["upper"], rows, x.device))
        made = made.to(wide) * (1 - share) + upper.to(wide) * share
    return state["sides"](made, rows.num).to(x.dtype)  # type: ignore[no-any-return]


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the type in which values of a type are summed: float32 for 16-bit types."""
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype


def _places(numbers: Sequence[int], rows: Rows, device: torch.device) -> Tensor:
    return torch.tensor(
        [row - rows.there[0] for row in numbers[rows.first : rows.last]], device=device
    )


def adaptive_average(call: Call) -> Tensor:
    """Add the rows of a strip to the averages that have begun.

    Return all of these averages, finished ones first. If all rows are there at once, the operation
    itself computes them; sums of several strips have at least 32 bits.
    """
    x = call.args[0]
    rows = call.rows
    state = call.state
    if rows.there == (0, rows.height_in):
        own: Tensor = call.target(*call.args, **call.kwargs)
        return own.reshape(*x.shape[:2], rows.height, state["columns"])
    x = x.to(state["dtype"])
    rule = state["rule"]
    columns = state["columns"]
    width = state["width"]
    begun = min(rows.height, rule.begun(rows.end))
    kind = {"dtype": x.dtype, "device": x.device}
    per_row = _shares(
        rows.first,
        begun,
        rows.height_in,
        rows.height,
        (rows.begin, rows.end),
        state["is_sum"],
        kind,
    )
    made = x
    if columns != width:
        made = x.matmul(_shares(0, columns, width, columns, (0, width), state["is_sum"], kind).t())
    made = per_row.matmul(made)
    if call.carried is None or not call.carried.shape[2]:
        return made
    count = call.carried.shape[2]
    if count == made.shape[2]:
        return made + call.carried
    return torch.cat([made[:, :, :count] + call.carried, made[:, :, count:]], 2)


def _shares(
    first: int,
    last: int,
    size: int,
    bins: int,
    there: tuple[int, int],
    is_sum: bool,
    kind: dict[str, Any],
) -> Tensor:
    """Return the share of each row in each bin, of shape (last - first, rows there)."""
    matrix = torch.zeros((last - first, there[1] - there[0]), **kind)
    for row in range(first, last):
        begin = row * size // bins
        end = -(-(row + 1) * size // bins)
        here = slice(max(begin, there[0]) - there[0], max(min(end, there[1]) - there[0], 0))
        matrix[row - first, here] = 1.0 if is_sum else 1.0 / (end - begin)
    return matrix
