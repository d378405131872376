"""Operations by position: elementwise ones, operations along channels, and reductions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

from gems.streaming.operations.kernels import drop_rows, plain, run_of
from gems.streaming.operations.operation import Info, Known, Operation, arguments
from gems.streaming.operations.running import REDUCTIONS, over_positions
from gems.streaming.operations.spatial import running_sum
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
    """Return an elementwise operation on the values `reads`."""
    infos = [known.infos[number] for number in reads]
    behind = {
        tuple(None if dim is None else info.value.dim() - dim for dim in info.dims)
        for info in infos
    }
    sizes = {tuple(info.size(axis) for axis in range(len(info.dims))) for info in infos}
    if len(behind) > 1 or len(sizes) > 1:
        refuse_gate(known, step)
    dims = tuple(
        None if distance is None else step.value.dim() - distance for distance in behind.pop()
    )
    output = infos[0].moved(step.value, dims)
    if step.operation in ("cat", "concat"):
        along = arguments(step)["dim"] % step.value.dim()
        if along in output.axes:
            known.refuse(step, "puts maps on top of each other")
        # a part that depends on no input, such as coordinates
        has_fixed = len(reads) < len(step.args[0])
        how = "copy" if has_fixed else "cat"
        state = {"channel_dim": along}
        return Operation(step, output, plain, reads, how=how, is_elementwise=has_fixed, state=state)
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
        state = {"shape": tuple(step.value.shape)}
        return Operation(step, output, drop_rows, reads, state=state)
    elif step.operation == "alpha_dropout" and arguments(step)["train"]:
        known.refuse(step, "draws its mask for the whole image")
    is_elementwise = step.operation not in ("batch_norm", "prelu")  # whose weights are by channel
    run = run_of(step.operation)
    return Operation(step, output, run, reads, how=how, is_elementwise=is_elementwise)


def refuse_gate(known: Known, step: Step) -> NoReturn:
    """Refuse a step that reads a map and a value of the whole image."""
    why = "joins a map with what is pooled over the whole image (squeeze-and-excitation)"
    known.refuse(step, why)


def reduce(known: Known, step: Step) -> Operation:
    """Return a reduction, as a running one if it reduces axes."""
    info = known.first(step)
    ndim = info.first.dim()
    over = reduced(step, ndim)
    axes = [dim for dim in over if dim in info.axes]
    if not axes:
        return _over_other_dims(step, info, over)
    is_mean = step.operation in ("mean", "sum") and over[0] >= 2
    if len(axes) == len(info.axes) and step.operation in REDUCTIONS and not is_mean:
        return over_positions(known, step, over)
    if not is_mean or len(axes) > 1:
        known.refuse(step, "needs all rows of the map at once")
    is_kept = arguments(step).get("keepdim")
    dims = tuple(
        None if dim is None or dim in over else dim - (0 if is_kept else _before(over, dim))
        for dim in info.dims
    )
    return running_sum(info, step, axes[0], info.axes[axes[0]], info.moved(step.value, dims))


def reduced(step: Step, ndim: int) -> list[int]:
    """Return the dimensions that a step reduces, in order."""
    dims = arguments(step).get("dim")
    listed = [dims] if isinstance(dims, int) else dims or range(ndim)
    return sorted({dim % ndim for dim in listed})


def _before(over: Sequence[int], dim: int) -> int:
    return sum(other < dim for other in over)


def _over_other_dims(step: Step, info: Info, over: Sequence[int]) -> Operation:
    value = step.value[0] if isinstance(step.value, tuple) else step.value
    is_kept = value.dim() == info.first.dim()
    dims = tuple(
        None if dim is None else dim - (0 if is_kept else _before(over, dim)) for dim in info.dims
    )
    return Operation(step, info.moved(step.value, dims), plain)


def along(known: Known, step: Step) -> Operation:
    """Return an operation along dimensions that are no axes."""
    info = known.first(step)
    options = arguments(step)
    ndim = info.first.dim()
    if "normalized_shape" in options:
        reached = range(ndim - len(options["normalized_shape"]), ndim)
    elif step.operation in ("linear", "matmul"):
        reached = range(ndim - 1, ndim)
    else:
        reached = range(options["dim"] % ndim, options["dim"] % ndim + 1)
    if any(dim in reached for dim in info.axes):
        known.refuse(step, "reaches over all rows of the map")
    dims = info.dims
    if step.operation in ("unbind", "select"):
        dims = tuple(None if dim is None else dim - (reached[0] < dim) for dim in dims)
    return Operation(step, info.moved(step.value, dims), run_of(step.operation))


def leaves_axes(info: Info, step: Step) -> bool:
    """Return whether a 3-D pooling has no window along the axes, as in local response norm."""
    options = arguments(step)
    for dim in info.axes:
        place = dim - (info.first.dim() - 3)
        if place < 0 or any(
            list(options[key] or [wanted] * 3)[place] != wanted
            for key, wanted in (("kernel_size", 1), ("stride", 1), ("padding", 0))
        ):
            return False
    return True
