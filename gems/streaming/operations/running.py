"""Reductions over all positions of the map, of which each block adds to a state.

The state is passed from block to block. Autograd takes the gradient of the result back through it,
so that no block is kept for the others. The maximum that a softmax subtracts is a constant, since
the result does not depend on it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from gems.streaming.operations.kernels import Along, Call, Run, wide_dtype
from gems.streaming.operations.operation import WHOLE, Info, Known, Operation, arguments, each, refs
from gems.streaming.trace import Step

State = tuple[Tensor, ...]


def over_positions(known: Known, step: Step, over: Sequence[int]) -> Operation:
    """Return the reduction of a step's first argument over the dimensions `over`, with all axes."""
    given = arguments(step)
    name = step.operation
    whole = known.first(step).value.shape
    state: dict[str, Any] = {
        "over": tuple(over),
        "is_least": name in ("min", "amin") or not given.get("largest", True),
        "sizes": tuple(whole[dim] for dim in over),
    }
    if name == "logsumexp":
        return _operation(known, step, _add_exponentials, _log, **state)
    if name == "topk":
        return _operation(known, step, _add_largest, _sorted, **state, k=given["k"])
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
    """Return the sum over positions of values times the softmax of scores.

    The step's arguments are the scores and the values; `groups` has the first dimension of the
    positions and their number, for each of them. `combine` sums products of weights and values over
    positions that are in one dimension.
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
    args = each(lambda ref: infos[ref.number].first, step.args)
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
    made = Info(WHOLE, step.value, (None,) * len(info.dims))
    reads = tuple(ref.number for ref in refs(step))
    return Operation(step, made, run, reads, finish=finish, state=state)


def _add_sum(call: Call) -> State:
    x: Tensor = call.args[0]
    made = x.to(wide_dtype(x.dtype)).sum(call.state["over"], keepdim=True)
    return (made if call.carried is None else made + call.carried[0],)


def _divided(state: dict[str, Any], total: Tensor) -> Tensor:
    like = state["value"]
    return (
        (total / state["count"] if state["count"] > 1 else total).reshape(like.shape).to(like.dtype)
    )


class _Extreme(Function):
    """The largest or least value so far, and how many positions have it."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        over: tuple[int, ...],
        is_least: bool,
        best: Tensor | None,
        count: Tensor | None,
    ) -> State:
        made = (torch.amin if is_least else torch.amax)(x, over, keepdim=True)
        if best is not None:
            made = (torch.minimum if is_least else torch.maximum)(made, best)
        number = (x == made).sum(over, keepdim=True)
        if best is not None and count is not None:
            number = number + torch.where(best == made, count, 0)
        ctx.save_for_backward(x, best, made)
        ctx.mark_non_differentiable(number)
        return made, number

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: Any) -> Any:
        x, best, made = ctx.saved_tensors
        before = None if best is None else torch.where(best == made, gradient, 0)
        return torch.where(x == made, gradient, 0), None, None, before, None


class _Shared(Function):
    """A value whose gradient is divided among the positions that have it, as by `torch.amax`."""

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
    made: State = _extreme(call.args[0], state["over"], state["is_least"], *before)
    return made


def _shared(state: dict[str, Any], best: Tensor, count: Tensor) -> Tensor:
    made: Tensor = _share(best, count)
    return made.reshape(state["value"].shape)


def _positions(call: Call) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """Return a block with its positions in the last dimension, and their places in the map."""
    over: tuple[int, ...] = call.state["over"]
    x: Tensor = call.args[0]
    begins = {each.dim: each.first for each in call.along}
    here = [x.shape[dim] for dim in over]

    def places(own: Tensor) -> Tensor:
        found = torch.zeros_like(own)
        factor = 1
        for dim, size, whole in zip(
            reversed(over), reversed(here), reversed(call.state["sizes"]), strict=True
        ):
            found = found + (own % size + begins.get(dim, 0)) * factor
            own = own // size
            factor *= whole
        return found

    others = [dim for dim in range(x.dim()) if dim not in over]
    return x.permute(*others, *over).flatten(len(others)), places


def _add_first(call: Call) -> State:
    """Take the largest or least value and its place, the first one of equal values."""
    x, places = _positions(call)
    is_least = call.state["is_least"]
    made, own = (torch.min if is_least else torch.max)(x, -1)
    place = places(own)
    if call.carried is None:
        return made, place
    best, before = call.carried
    is_better = made < best if is_least else made > best
    is_new = is_better | ((made == best) & (place < before))
    return torch.where(is_new, made, best), torch.where(is_new, place, before)


def _placed(state: dict[str, Any], *found: Tensor) -> State:
    return tuple(part.reshape(like.shape) for part, like in zip(found, state["value"], strict=True))


def _add_largest(call: Call) -> State:
    """Take the k largest or least values and their places."""
    x, places = _positions(call)
    k, is_least = call.state["k"], call.state["is_least"]
    place = places(torch.arange(x.shape[-1], device=x.device)).expand(x.shape)
    if call.carried is not None:
        x = torch.cat([call.carried[0], x], -1)
        place = torch.cat([call.carried[1], place], -1)
    missing = max(0, k - x.shape[-1])
    made, own = x.topk(k - missing, -1, not is_least)
    place = place.gather(-1, own)
    if missing:  # fewer positions so far: values that any other one replaces
        worst = torch.finfo(x.dtype).max if x.is_floating_point() else torch.iinfo(x.dtype).max
        made = torch.nn.functional.pad(made, (0, missing), value=worst if is_least else -worst)
        place = torch.nn.functional.pad(place, (0, missing), value=-1)
    return made, place


def _sorted(state: dict[str, Any], *found: Tensor) -> State:
    return tuple(part.movedim(-1, state["over"][0]) for part in found)


def _add_exponentials(call: Call) -> State:
    x: Tensor = call.args[0].to(wide_dtype(call.args[0].dtype))
    before = call.carried or (None, None)
    top, scale, made = _exponentials(x, call.state["over"], before[0])
    total = made.sum(call.state["over"], keepdim=True)
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
    total, made = weights.sum(over, keepdim=True), combine(weights, values)
    if call.carried is not None:
        _, total_before, made_before = call.carried
        total = total + total_before * scale
        assert scale is not None
        made = made + made_before * _spread(state, scale)
    return top, total, made


def _normalized(state: dict[str, Any], _: Tensor, total: Tensor, made: Tensor) -> Tensor:
    like = state["value"]
    return (made / _spread(state, total)).reshape(like.shape).to(like.dtype)


def _exponentials(
    x: Tensor, over: Any, before: Tensor | None
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Return the largest value so far, the factor of sums until now, and exponentials."""
    top = x.detach().amax(over, keepdim=True).clamp(min=torch.finfo(x.dtype).min)
    if before is None:
        return top, None, (x - top).exp()
    top = torch.maximum(top, before)
    return top, (before - top).exp(), (x - top).exp()


def _spread(state: dict[str, Any], factor: Tensor) -> Tensor:
    """Return a factor of each softmax in the shape of the sums: they are linear in the weights."""
    made: Tensor = state["combine"](factor, factor.new_ones(state["one"]))
    return made
