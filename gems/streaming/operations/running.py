"""Reductions over all positions of a map that comes in blocks.

Each block updates a state, which is passed to the next; autograd returns the gradient along the
same path, so no block has to stay for the others. The maximum that a softmax subtracts is treated
as a constant, because the result does not depend on it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from gems.streaming.operations.kernels import Along, Call, Run, wide_dtype
from gems.streaming.operations.operation import (
    WHOLE,
    Info,
    Known,
    Operation,
    arguments,
    map_refs,
    refs,
)
from gems.streaming.trace import Step

State = tuple[Tensor, ...]


def over_positions(known: Known, step: Step, over: Sequence[int]) -> Operation:
    """Return a reduction of the step's first argument over dimensions that include all axes."""
    named = arguments(step)
    name = step.operation
    whole = known.first(step).value.shape
    state: dict[str, Any] = {
        "over": tuple(over),
        "is_least": name in ("min", "amin") or not named.get("largest", True),
        "sizes": tuple(whole[dim] for dim in over),
    }
    if name == "logsumexp":
        return _operation(known, step, _add_exponentials, _log, **state)
    if name == "topk":
        return _operation(known, step, _add_largest, _sorted, **state, k=named["k"])
    if isinstance(step.value, tuple | list):
        return _operation(known, step, _add_first, _placed, **state)
    if name in ("sum", "mean"):
        count = state["sizes"] if name == "mean" else ()
        return _operation(known, step, _add_sum, _divided, **state, count=torch.Size(count).numel())
    return _operation(known, step, _add_extreme, _shared, **state)


REDUCTIONS = frozenset(("amax", "amin", "max", "min", "sum", "mean", "logsumexp", "topk"))


def attention(
    known: Known,
    step: Step,
    groups: Sequence[tuple[int, int]],
    combine: Callable[[Tensor, Tensor], Tensor],
) -> Operation:
    """Return an attention pooling: values summed over positions, weighted by softmax(scores).

    The step's arguments are the scores and the values. For each of them, `groups` has the first
    dimension of the positions and the number of such dimensions. `combine(weights, values)` sums
    products over positions that were flattened to one dimension.
    """
    values = known.infos[step.args[1].number].value.shape
    first, count = groups[1]
    return _operation(
        known,
        step,
        _add_weighted,
        _normalized,
        groups=tuple(groups),
        combine=combine,
        one=(*values[:first], 1, *values[first + count :]),
    )


def _operation(
    known: Known, step: Step, run: Run, finish: Callable[..., Any], **state: Any
) -> Operation:
    infos = known.infos
    args = map_refs(lambda ref: infos[ref.number].first, step.args)
    info = known.first(step)
    along = tuple(
        Along(dim, 0, size, 0, size, size, size, (0, size))
        for dim, size in ((dim, info.value.shape[dim]) for dim in info.axes)
    )
    call = Call(
        step.name,
        step.target,
        args,
        step.kwargs,
        along,
        None,
        state,
        lambda _: nullcontext(),
        None,
        None,
    )
    with torch.no_grad():
        state["kept"] = tuple((tuple(part.shape), part.dtype) for part in run(call))
    state["value"] = step.value
    output = Info(WHOLE, step.value, (None,) * len(info.dims))
    reads = tuple(ref.number for ref in refs(step))
    return Operation(step, output, run, reads, finish=finish, state=state)


def _add_sum(call: Call) -> State:
    x: Tensor = call.args[0]
    total = x.to(wide_dtype(x.dtype)).sum(call.state["over"], keepdim=True)
    return (total if call.carried is None else total + call.carried[0],)


def _divided(state: dict[str, Any], total: Tensor) -> Tensor:
    like = state["value"]
    return (
        (total / state["count"] if state["count"] > 1 else total).reshape(like.shape).to(like.dtype)
    )


class _Extreme(Function):
    """The running maximum or minimum, and the number of positions that have it."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        over: tuple[int, ...],
        is_least: bool,
        best: Tensor | None,
        count: Tensor | None,
    ) -> State:
        extreme = (torch.amin if is_least else torch.amax)(x, over, keepdim=True)
        if best is not None:
            extreme = (torch.minimum if is_least else torch.maximum)(extreme, best)
        number = (x == extreme).sum(over, keepdim=True)
        if best is not None and count is not None:
            number = number + torch.where(best == extreme, count, 0)
        ctx.save_for_backward(x, best, extreme)
        ctx.mark_non_differentiable(number)
        return extreme, number

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: Any) -> Any:
        x, best, extreme = ctx.saved_tensors
        before = None if best is None else torch.where(best == extreme, gradient, 0)
        return torch.where(x == extreme, gradient, 0), None, None, before, None


class _Shared(Function):
    """A value whose gradient is shared among equal positions, as by `torch.amax`."""

    @staticmethod
    def forward(ctx: Any, best: Tensor, count: Tensor) -> Tensor:
        ctx.save_for_backward(count)
        return best.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (count,) = ctx.saved_tensors
        return gradient / count, None


_extreme: Any = _Extreme.apply
_share: Any = _Shared.apply


def _add_extreme(call: Call) -> State:
    state = call.state
    before = call.carried or (None, None)
    extreme: State = _extreme(call.args[0], state["over"], state["is_least"], *before)
    return extreme


def _shared(state: dict[str, Any], best: Tensor, count: Tensor) -> Tensor:
    shared: Tensor = _share(best, count)
    return shared.reshape(state["value"].shape)


def _positions(call: Call) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """Return a block with its positions flattened to the last dimension.

    Also return a function that turns indices of that dimension into indices of the whole map.
    """
    over: tuple[int, ...] = call.state["over"]
    x: Tensor = call.args[0]
    begins = {span.dim: span.first for span in call.along}
    sizes = [x.shape[dim] for dim in over]

    def places(index: Tensor) -> Tensor:
        place = torch.zeros_like(index)
        factor = 1
        for dim, size, whole in zip(
            reversed(over), reversed(sizes), reversed(call.state["sizes"]), strict=True
        ):
            place = place + (index % size + begins.get(dim, 0)) * factor
            index = index // size
            factor *= whole
        return place

    others = [dim for dim in range(x.dim()) if dim not in over]
    return x.permute(*others, *over).flatten(len(others)), places


def _add_first(call: Call) -> State:
    """Update the running maximum or minimum and its index; the first of equal values wins."""
    x, places = _positions(call)
    is_least = call.state["is_least"]
    extreme, index = (torch.min if is_least else torch.max)(x, -1)
    place = places(index)
    if call.carried is None:
        return extreme, place
    best, before = call.carried
    is_better = extreme < best if is_least else extreme > best
    is_new = is_better | ((extreme == best) & (place < before))
    return torch.where(is_new, extreme, best), torch.where(is_new, place, before)


def _placed(state: dict[str, Any], *tensors: Tensor) -> State:
    return tuple(
        part.reshape(like.shape) for part, like in zip(tensors, state["value"], strict=True)
    )


def _add_largest(call: Call) -> State:
    """Update the k largest or smallest values and their indices."""
    x, places = _positions(call)
    k, is_least = call.state["k"], call.state["is_least"]
    place = places(torch.arange(x.shape[-1], device=x.device)).expand(x.shape)
    if call.carried is not None:
        x = torch.cat([call.carried[0], x], -1)
        place = torch.cat([call.carried[1], place], -1)
    missing = max(0, k - x.shape[-1])
    largest, index = x.topk(k - missing, -1, not is_least)
    place = place.gather(-1, index)
    if missing:  # fewer than k positions so far: pad with values that any other replaces
        worst = torch.finfo(x.dtype).max if x.is_floating_point() else torch.iinfo(x.dtype).max
        largest = torch.nn.functional.pad(
            largest, (0, missing), value=worst if is_least else -worst
        )
        place = torch.nn.functional.pad(place, (0, missing), value=-1)
    return largest, place


def _sorted(state: dict[str, Any], *tensors: Tensor) -> State:
    return tuple(part.movedim(-1, state["over"][0]) for part in tensors)


def _add_exponentials(call: Call) -> State:
    x: Tensor = call.args[0].to(wide_dtype(call.args[0].dtype))
    before = call.carried or (None, None)
    top, scale, weights = _exponentials(x, call.state["over"], before[0])
    total = weights.sum(call.state["over"], keepdim=True)
    return top, total if before[1] is None else total + before[1] * scale


def _log(state: dict[str, Any], top: Tensor, total: Tensor) -> Tensor:
    like = state["value"]
    return (total.log() + top).reshape(like.shape).to(like.dtype)


def _add_weighted(call: Call) -> State:
    state = call.state
    scores, values = (
        part.to(wide_dtype(part.dtype)).flatten(first, first + count - 1)
        for part, (first, count) in zip(call.args, state["groups"], strict=True)
    )
    over, combine = state["groups"][0][0], state["combine"]
    top, scale, weights = _exponentials(scores, over, call.carried and call.carried[0])
    total, weighted = weights.sum(over, keepdim=True), combine(weights, values)
    if call.carried is not None:
        _, total_before, weighted_before = call.carried
        total = total + total_before * scale
        assert scale is not None
        weighted = weighted + weighted_before * _spread(state, scale)
    return top, total, weighted


def _normalized(state: dict[str, Any], _: Tensor, total: Tensor, weighted: Tensor) -> Tensor:
    like = state["value"]
    return (weighted / _spread(state, total)).reshape(like.shape).to(like.dtype)


def _exponentials(
    x: Tensor, over: Any, before: Tensor | None
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Return the running maximum, the factor that rescales earlier sums, and exponentials."""
    top = x.detach().amax(over, keepdim=True).clamp(min=torch.finfo(x.dtype).min)
    if before is None:
        return top, None, (x - top).exp()
    top = torch.maximum(top, before)
    return top, (before - top).exp(), (x - top).exp()


def _spread(state: dict[str, Any], factor: Tensor) -> Tensor:
    """Broadcast one factor per softmax to the shape of the weighted sums."""
    combined: Tensor = state["combine"](factor, factor.new_ones(state["one"]))
    return combined
