"""Convolutions of a strip: the rows that they read, and their computation."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn import functional

from gems.autograd.split_backward.conv import Geometry, convolution
from gems.streaming.operations.kernels import Call, weights
from gems.streaming.operations.operation import Known, Operation, arguments
from gems.streaming.operations.spatial import check_image, on_rows, pair
from gems.streaming.row_rules import Transposed, Window
from gems.streaming.trace import Ref, Step


def conv(known: Known, step: Step) -> Operation:
    """Return the convolution, whose padding above and below the map is rows of zeros."""
    check_image(known, step)
    given = arguments(step)
    kernel = _shape_of(known, given["weight"])[2:]
    stride = pair(given["stride"])
    dilation = pair(given["dilation"])
    if given["padding"] == "same":
        totals = dilation[0] * (kernel[0] - 1), dilation[1] * (kernel[1] - 1)
        top = totals[0] // 2
        sides = (totals[1] // 2, totals[1] - totals[1] // 2)
    else:
        top, left = (0, 0) if given["padding"] == "valid" else pair(given["padding"])
        sides = left, left
    rule = Window(kernel[0], stride[0], top, dilation[0])
    state = {"stride": stride, "sides": sides, "dilation": dilation, "groups": given["groups"]}
    return on_rows(step, _convolve, rule, True, **state)


def conv_transposed(known: Known, step: Step) -> Operation:
    """Return the transposed convolution."""
    check_image(known, step)
    given = arguments(step)
    kernel = _shape_of(known, given["weight"])[2]
    stride = pair(given["stride"])
    dilation = pair(given["dilation"])
    padding = pair(given["padding"])
    rule = Transposed(kernel, stride[0], padding[0], dilation[0])
    return on_rows(
        step,
        _convolve_transposed,
        rule,
        stride=stride,
        dilation=dilation,
        padding=padding,
        output_padding=pair(given["output_padding"]),
        groups=given["groups"],
        kernel=kernel,
    )


def _shape_of(known: Known, weight: Any) -> tuple[int, ...]:
    tensor = known.infos[weight.number].value if isinstance(weight, Ref) else weight.get()
    return tuple(tensor.shape)


def _convolve(call: Call) -> Tensor:
    """Convolve rows that already have the padding of the top and bottom."""
    x, weight, bias = weights(call)
    (left, right), stride = call.state["sides"], call.state["stride"]
    if left != right:
        x = functional.pad(x, (left, right))
    padding = (0, left if left == right else 0)
    geometry = Geometry(
        stride, padding, call.state["dilation"], False, (0, 0), call.state["groups"]
    )
    return convolution(call.deferred, call.name, x, weight, bias, geometry)


def _convolve_transposed(call: Call) -> Tensor:
    """Run a transposed convolution, and cut the rows that are not wanted."""
    x, weight, bias = weights(call)
    state = call.state
    rows = call.rows
    (stride, _), (dilation, _), (top, side) = state["stride"], state["dilation"], state["padding"]
    above = rows.first - (rows.there[0] * stride - top)
    reach = (rows.there[1] - rows.there[0] - 1) * stride + dilation * (state["kernel"] - 1) + 1
    below = reach - above - rows.num
    cut = max(0, min(above, below))  # the rows that the padding of a whole image would cut
    geometry = Geometry(
        state["stride"],
        (cut, side),
        state["dilation"],
        True,
        (0, state["output_padding"][1]),
        state["groups"],
    )
    is_short = above < 0 or below < 0
    made = convolution(call.deferred, call.name, x, weight, None if is_short else bias, geometry)
    if is_short:  # rows that no input reaches
        made = functional.pad(made, (0, 0, max(0, -above), max(0, -below))).narrow(
            2, max(0, above), rows.num
        )
        return made if bias is None else made + bias.view(-1, 1, 1)
    return made if above == below else made.narrow(2, above - cut, rows.num)
