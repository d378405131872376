"""Operations that change the shape, and where in it the axes are."""

from __future__ import annotations

from gems.streaming.axis_rules import Lookup, Rule
from gems.streaming.buffers import Dims
from gems.streaming.operations.kernels import plain, reshape
from gems.streaming.operations.operation import Info, Known, Operation, arguments
from gems.streaming.trace import Step


def permute(known: Known, step: Step) -> Operation:
    """Return the change of order of the dimensions."""
    info = known.first(step)
    ndim = info.value.dim()
    order = list(range(ndim))
    options = arguments(step)
    if step.operation == "permute":
        order = [dim % ndim for dim in options["dims"]]
    else:
        one, two = (options[key] % ndim for key in ("dim0", "dim1"))
        order[one], order[two] = order[two], order[one]
    dims = tuple(None if dim is None else order.index(dim) for dim in info.dims)
    return Operation(step, info.moved(step.value, dims), plain)


def view(known: Known, step: Step) -> Operation:
    """Return a change of shape, in blocks along the axes that stay dimensions."""
    info = known.first(step)
    shape = step.value.shape
    dims: list[int | None] = []
    for axis, dim in enumerate(info.dims):
        outer = None if dim is None else info.value.shape[:dim].numel()
        dims.append(None)
        reached = 1
        for place, size in enumerate(shape):
            if reached == outer and size == info.size(axis) and place not in dims:
                dims[axis] = place
                break
            reached *= size
    return _without_axes(info, step, tuple(dims))


def unsqueeze(known: Known, step: Step) -> Operation:
    """Return the operation that adds a dimension."""
    info = known.first(step)
    new = arguments(step)["dim"] % step.value.dim()
    dims = tuple(None if dim is None else dim + (new <= dim) for dim in info.dims)
    return Operation(step, info.moved(step.value, dims), plain)


def squeeze(known: Known, step: Step) -> Operation:
    """Return the operation that removes dimensions of size 1."""
    info = known.first(step)
    ndim = info.value.dim()
    dims = arguments(step).get("dim")
    candidates = range(ndim) if dims is None else [dims] if isinstance(dims, int) else dims
    squeezed = {dim % ndim for dim in candidates if info.value.shape[dim] == 1}
    dims_left = tuple(
        None
        if axis_dim is None or axis_dim in squeezed
        else axis_dim - sum(dim < axis_dim for dim in squeezed)
        for axis_dim in info.dims
    )
    if any(axis_dim in squeezed for axis_dim in info.dims):
        return _without_axes(info, step, dims_left)
    return Operation(step, info.moved(step.value, dims_left), plain)


def item(known: Known, step: Step) -> Operation:
    """Return the operation that selects one output of several."""
    info = known.first(step)
    return Operation(step, info.moved(step.value, info.dims), plain)


def _without_axes(info: Info, step: Step, dims: Dims) -> Operation:
    """Return the operation that waits for the whole map along the axes that it removes."""
    rules: tuple[Rule | None, ...] = tuple(
        Lookup((0,), (info.size(axis),)) if dim is None and info.dims[axis] is not None else None
        for axis, dim in enumerate(dims)
    )
    output = info.moved(step.value, dims)
    run = plain if all(dim is None for dim in dims) or step.operation == "squeeze" else reshape
    state = {"shape": tuple(step.value.shape)}
    return Operation(step, output, run, rules=rules if any(rules) else (), state=state)
