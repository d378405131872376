"""Operations that change the shape, and where in it the rows are."""

from __future__ import annotations

from gems.streaming.operations.kernels import plain, reshape
from gems.streaming.operations.operation import ROWS, WHOLE, Info, Known, Operation, arguments
from gems.streaming.row_rules import Lookup
from gems.streaming.trace import Step


def permute(known: Known, step: Step) -> Operation:
    """Return the change of order of the dimensions."""
    info = known.first(step)
    ndim = info.value.dim()
    order = list(range(ndim))
    given = arguments(step)
    if step.operation == "permute":
        order = [dim % ndim for dim in given["dims"]]
    else:
        one, two = (given[key] % ndim for key in ("dim0", "dim1"))
        order[one], order[two] = order[two], order[one]
    return Operation(step, Info(ROWS, step.value, order.index(info.dim)), plain)


def view(known: Known, step: Step) -> Operation:
    """Return a change of shape: by rows if they stay a dimension, else whole in the last strip."""
    info = known.first(step)
    before = info.value.shape
    shape = step.value.shape
    outer = before[: info.dim].numel()
    reached = 1
    for dim, size in enumerate(shape):
        if reached == outer and size == info.height:
            return Operation(
                step,
                Info(ROWS, step.value, dim),
                reshape,
                state={"dim": dim, "shape": tuple(shape)},
            )
        reached *= size
    rule = Lookup((0,), (info.height,))
    return Operation(step, Info(WHOLE, step.value), plain, rule=rule, is_late=True)


def unsqueeze(known: Known, step: Step) -> Operation:
    """Return the operation that adds a dimension."""
    info = known.first(step)
    dim = arguments(step)["dim"] % step.value.dim()
    return Operation(step, Info(ROWS, step.value, info.dim + (dim <= info.dim)), plain)


def squeeze(known: Known, step: Step) -> Operation:
    """Return the operation that takes dimensions of size 1 away."""
    info = known.first(step)
    ndim = info.value.dim()
    dims = arguments(step).get("dim")
    given = range(ndim) if dims is None else [dims] if isinstance(dims, int) else dims
    gone = {dim % ndim for dim in given if info.value.shape[dim] == 1}
    if info.dim in gone:
        return Operation(
            step, Info(WHOLE, step.value), plain, rule=Lookup((0,), (info.height,)), is_late=True
        )
    return Operation(
        step, Info(ROWS, step.value, info.dim - sum(dim < info.dim for dim in gone)), plain
    )


def item(known: Known, step: Step) -> Operation:
    """Return the operation that takes one of several parts."""
    info = known.first(step)
    return Operation(step, Info(ROWS, step.value, info.dim), plain)
