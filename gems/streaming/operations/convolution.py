"""Convolutions of a block: what they read along each axis, and their computation."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn import functional

from gems.autograd.split_backward.conv import Geometry, convolution
from gems.streaming.axis_rules import Transposed, Window
from gems.streaming.operations.kernels import Call, weights
from gems.streaming.operations.operation import Known, Operation, arguments
from gems.streaming.operations.spatial import check_image, each_of, on_map
from gems.streaming.trace import Ref, Step


def conv(known: Known, step: Step) -> Operation:
    """Return the convolution, whose padding around the map is zeros."""
    info = check_image(known, step)
    options = arguments(step)
    kernel = _shape_of(known, options["weight"])[2:]
    count = len(kernel)
    stride = each_of(options["stride"], count)
    dilation = each_of(options["dilation"], count)
    if options["padding"] == "same":
        totals = [dilation[place] * (kernel[place] - 1) for place in range(count)]
        sides = [(total // 2, total - total // 2) for total in totals]
    else:
        valid = options["padding"] == "valid"
        sides = [(0, 0) if valid else (side, side) for side in each_of(options["padding"], count)]
    rules = {
        dim: Window(kernel[dim - 2], stride[dim - 2], sides[dim - 2][0], dilation[dim - 2])
        for dim in info.axes
    }
    for dim in info.axes:  # their padding is in the tensor already
        sides[dim - 2] = (0, 0)
    is_even = all(before == after for before, after in sides)
    state = {
        "uneven": [] if is_even else [side for pair in reversed(sides) for side in pair],
        "geometry": Geometry(
            stride,
            tuple(before if is_even else 0 for before, _ in sides),
            dilation,
            False,
            (0,) * count,
            options["groups"],
        ),
    }
    return on_map(info, step, _convolve, rules, True, **state)


def conv_transposed(known: Known, step: Step) -> Operation:
    """Return the transposed convolution."""
    info = check_image(known, step)
    options = arguments(step)
    kernel = _shape_of(known, options["weight"])[2:]
    count = len(kernel)
    stride = each_of(options["stride"], count)
    dilation = each_of(options["dilation"], count)
    padding = each_of(options["padding"], count)
    rules = {
        dim: Transposed(kernel[dim - 2], stride[dim - 2], padding[dim - 2], dilation[dim - 2])
        for dim in info.axes
    }
    more = [
        0 if place + 2 in info.axes else side
        for place, side in enumerate(each_of(options["output_padding"], count))
    ]
    geometry = Geometry(stride, padding, dilation, True, tuple(more), options["groups"])
    return on_map(info, step, _convolve_transposed, rules, geometry=geometry, kernel=kernel)


def _shape_of(known: Known, weight: Any) -> tuple[int, ...]:
    tensor = known.infos[weight.number].value if isinstance(weight, Ref) else weight.get()
    return tuple(tensor.shape)


def _convolve(call: Call) -> Tensor:
    """Convolve a block that already has the padding along the axes."""
    x, weight, bias = weights(call)
    if call.state["uneven"]:
        x = functional.pad(x, call.state["uneven"])
    return convolution(call.deferred, call.name, x, weight, bias, call.state["geometry"])


def _convolve_transposed(call: Call) -> Tensor:
    """Run a transposed convolution and crop its output to the block."""
    x, weight, bias = weights(call)
    geometry: Geometry = call.state["geometry"]
    padding = list(geometry.padding)
    surplus = []  # for each axis: its dimension and the surplus outputs before and after
    for span in call.along:
        place = span.dim - 2
        stride, dilation = geometry.stride[place], geometry.dilation[place]
        before = span.first - (span.there[0] * stride - padding[place])
        reach = (span.there[1] - span.there[0] - 1) * stride
        reach += dilation * (call.state["kernel"][place] - 1) + 1
        after = reach - before - span.num
        # padding crops equally on both sides, so crop as much of the surplus by it as possible
        padding[place] = max(0, min(before, after))
        surplus.append((span.dim, before - padding[place], after - padding[place]))
    geometry = geometry._replace(padding=tuple(padding))
    # some outputs get nothing but the bias
    is_short = any(before < 0 or after < 0 for _, before, after in surplus)
    output = convolution(call.deferred, call.name, x, weight, None if is_short else bias, geometry)
    for dim, before, after in surplus:
        if before < 0 or after < 0:
            missing = [0] * (2 * (output.dim() - 1 - dim))
            output = functional.pad(output, [*missing, max(0, -before), max(0, -after)])
        if before > 0 or after > 0:
            rows = output.shape[dim] - max(0, before) - max(0, after)
            output = output.narrow(dim, max(0, before), rows)
    if is_short and bias is not None:
        output = output + bias.view(-1, *[1] * (output.dim() - 2))
    return output
