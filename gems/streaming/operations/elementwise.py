"""Operations that make each row from one row.

These are elementwise operations, operations along channels, and sums over rows.
"""

from __future__ import annotations

from collections.abc import Sequence

from gems.streaming.operations.kernels import adaptive_average, drop_rows, plain, run_of, wide_dtype
from gems.streaming.operations.operation import (
    PARTS,
    ROWS,
    WHOLE,
    Info,
    Known,
    Operation,
    arguments,
)
from gems.streaming.row_rules import Bins
from gems.streaming.trace import Step

_NAMES = """
relu sigmoid tanh gelu silu mish hardswish hardsigmoid hardtanh relu6 leaky_relu elu selu celu softplus threshold
prelu log_sigmoid exp expm1 log log1p sqrt rsqrt square pow abs neg sign reciprocal erf sin cos clamp clamp_min
clamp_max add sub rsub mul div true_divide maximum minimum where lerp addcmul addcdiv to _to_copy type_as contiguous
clone detach alias lift_fresh cat concat dropout feature_dropout alpha_dropout batch_norm eq ne lt gt le ge logical_not
zeros_like ones_like
"""
ROW_FOR_ROW = frozenset(_NAMES.split())


def row_for_row(known: Known, step: Step, reads: tuple[int, ...]) -> Operation:
    """Return the operation that makes each row from the same row of each of `reads`."""
    infos = [known.infos[number] for number in reads]
    behind = {info.value.dim() - info.dim for info in infos}
    heights = {info.height for info in infos}
    if len(behind) > 1 or len(heights) > 1:
        known.refuse(
            step,
            "joins maps whose rows do not match, such as one that is pooled over the whole image",
        )
    dim = step.value.dim() - behind.pop()
    if step.operation in ("cat", "concat"):
        along = arguments(step)["dim"] % step.value.dim()
        if along == dim:
            known.refuse(step, "puts maps on top of each other")
        # a part that depends on no input, such as coordinates
        has_fixed = len(reads) < len(step.args[0])
        how = "copy" if has_fixed else "cat"
        state = {"channel_dim": along}
        return Operation(
            step,
            Info(ROWS, step.value, dim),
            plain,
            reads,
            how=how,
            is_elementwise=has_fixed,
            state=state,
        )
    how = "copy"
    shapes = {tuple(info.value.shape) for info in infos}
    if step.operation in ("relu", "sigmoid", "tanh"):
        how = step.operation
    elif (
        step.operation == "add"
        and len(reads) == 2
        and len(shapes) == 1
        and arguments(step).get("alpha") == 1
    ):
        how = "add"
    elif step.operation == "dropout" and arguments(step)["train"] and arguments(step)["p"]:
        return Operation(step, Info(ROWS, step.value, dim), drop_rows, reads, state={"dim": dim})
    elif step.operation == "alpha_dropout" and arguments(step)["train"]:
        known.refuse(step, "draws its mask for the whole image")
    is_elementwise = step.operation not in ("batch_norm", "prelu")  # whose weights are by channel
    run = run_of(step.operation)
    return Operation(
        step, Info(ROWS, step.value, dim), run, reads, how=how, is_elementwise=is_elementwise
    )


def reduce(known: Known, step: Step) -> Operation:
    """Return a sum or mean: a running one over rows, a row-for-row one over other dimensions."""
    info = known.first(step)
    dims = arguments(step).get("dim")
    ndim = info.value.dim()
    over = sorted(
        {dim % ndim for dim in ([dims] if isinstance(dims, int) else dims or range(ndim))}
    )
    if info.dim not in over:
        return _over_other_dims(step, info, over)
    if (
        step.operation not in ("mean", "sum")
        or ndim != 4
        or info.dim != 2
        or over not in ([2], [2, 3])
    ):
        known.refuse(step, "needs all rows of the map at once")
    columns = 1 if 3 in over else info.value.shape[3]
    state = {
        "columns": columns,
        "width": info.value.shape[3],
        "is_sum": step.operation == "sum",
        "dtype": wide_dtype(step.value.dtype),
        "shape": tuple(step.value.shape),
        "rule": Bins(info.height, 1),
    }
    return Operation(
        step,
        Info(WHOLE, step.value),
        adaptive_average,
        rule=state["rule"],
        is_summed=True,
        is_late=True,
        state=state,
    )


def _over_other_dims(step: Step, info: Info, over: Sequence[int]) -> Operation:
    ndim = info.value.dim()
    value = step.value[0] if isinstance(step.value, tuple) else step.value
    dim = info.dim if value.dim() == ndim else info.dim - sum(each < info.dim for each in over)
    kind = PARTS if isinstance(step.value, tuple | list) else ROWS
    return Operation(step, Info(kind, step.value, dim), plain)


def along(known: Known, step: Step) -> Operation:
    """Return the operation along one dimension, or several last ones, that are not the rows."""
    info = known.first(step)
    given = arguments(step)
    if "normalized_shape" in given:
        reached = range(info.value.dim() - len(given["normalized_shape"]), info.value.dim())
    elif step.operation in ("linear", "matmul"):
        reached = range(info.value.dim() - 1, info.value.dim())
    else:
        reached = range(given["dim"] % info.value.dim(), given["dim"] % info.value.dim() + 1)
    if info.dim in reached:
        known.refuse(step, "reaches over all rows of the map")
    kind = PARTS if isinstance(step.value, tuple | list) else ROWS
    dim = info.dim
    if step.operation in ("unbind", "select"):
        dim -= reached[0] < info.dim
    return Operation(step, Info(kind, step.value, dim), run_of(step.operation))


def average_over_channels(known: Known, step: Step) -> Operation:
    """Return the pooling over three dimensions that leaves rows alone.

    Local response normalisation uses it.
    """
    info = known.first(step)
    given = arguments(step)
    axis = info.dim - (info.value.dim() - 3)
    if axis < 0 or any(
        list(given[key] or [wanted] * 3)[axis] != wanted
        for key, wanted in (("kernel_size", 1), ("stride", 1), ("padding", 0))
    ):
        known.refuse(step, "pools rows in three dimensions")
    return Operation(step, Info(ROWS, step.value, info.dim), plain)
