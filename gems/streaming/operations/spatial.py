"""Operations that read windows of rows: poolings, resampling, padding and crops."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from gems.streaming.operations import kernels
from gems.streaming.operations.kernels import Run, plain
from gems.streaming.operations.operation import ROWS, Info, Known, Operation, arguments
from gems.streaming.row_rules import Bins, Lookup, Rule, Transposed, Window
from gems.streaming.trace import Step

aten = torch.ops.aten


def pair(value: Any, default: int = 0) -> tuple[int, int]:
    """Return the values of both dimensions, of which torch may be given one or none."""
    values = [value] if isinstance(value, int) else list(value)
    if not values:
        return default, default
    return values[0], values[-1]


def check_image(known: Known, step: Step) -> Info:
    """Return the input, whose rows must be those of (N, C, H, W)."""
    info = known.first(step)
    if info.kind != ROWS or info.value.dim() != 4 or info.dim != 2:
        known.refuse(step, "reads rows that are not the third dimension of (N, C, H, W)")
    return info


def on_rows(step: Step, run: Run, rule: Rule, has_zeros: bool = False, **state: Any) -> Operation:
    """Return the operation that makes rows of a map by `rule`."""
    return Operation(
        step, Info(ROWS, step.value, 2), run, rule=rule, has_zeros=has_zeros, state=state
    )


def _pooling(
    step: Step,
) -> tuple[tuple[int, int], tuple[int, int], tuple[int, int], dict[str, Any]]:
    given = arguments(step)
    kernel = pair(given["kernel_size"])
    stride = pair(given["stride"]) if given["stride"] else kernel
    return kernel, stride, pair(given["padding"]), given


def max_pool(known: Known, step: Step) -> Operation:
    """Return the max pooling."""
    check_image(known, step)
    kernel, stride, padding, given = _pooling(step)
    dilation = pair(given["dilation"])
    rule = Window(kernel[0], stride[0], padding[0], dilation[0])
    return on_rows(
        step,
        kernels.max_pool,
        rule,
        kernel=kernel,
        stride=stride,
        side=padding[1],
        dilation=dilation,
        ceil_mode=given["ceil_mode"],
    )


def average_pool(known: Known, step: Step) -> Operation:
    """Return the average pooling, with how many rows each of its rows counts."""
    info = check_image(known, step)
    kernel, stride, padding, given = _pooling(step)
    rule = Window(kernel[0], stride[0], padding[0])
    override = given["divisor_override"]
    counts = []
    for row in range(step.value.shape[2]):
        begin, end = rule.reads(row, row + 1)
        inside = min(end, info.height), max(begin, 0)
        padded = min(end, info.height + padding[0]), begin
        rows = padded if given["count_include_pad"] else inside
        counts.append(kernel[0] if override else rows[0] - rows[1])
    return on_rows(
        step,
        kernels.average_pool,
        rule,
        True,
        kernel=kernel,
        stride=stride,
        side=padding[1],
        override=override,
        ceil_mode=given["ceil_mode"],
        count_include_pad=given["count_include_pad"],
        counts=tuple(counts),
    )


def pixel_shuffle(known: Known, step: Step) -> Operation:
    """Return the operation that makes several rows of the channels of one."""
    check_image(known, step)
    factor = arguments(step)["upscale_factor"]
    return on_rows(step, kernels.pixel_shuffle, Transposed(factor, factor), factor=factor)


def pixel_unshuffle(known: Known, step: Step) -> Operation:
    """Return the operation that makes channels of neighbouring rows."""
    check_image(known, step)
    factor = arguments(step)["downscale_factor"]
    return on_rows(step, plain, Window(factor, factor))


def adaptive_average(known: Known, step: Step) -> Operation:
    """Return the average over shares of the rows, as sums that run on."""
    info = check_image(known, step)
    rows, columns = step.value.shape[2:]
    rule = Bins(info.height, rows)
    state = {
        "columns": columns,
        "width": info.value.shape[3],
        "is_sum": False,
        "rule": rule,
        "dtype": kernels.wide_dtype(step.value.dtype),
    }
    return Operation(
        step,
        Info(ROWS, step.value, 2),
        kernels.adaptive_average,
        rule=rule,
        is_summed=True,
        state=state,
    )


def take_slice(known: Known, step: Step) -> Operation:
    """Return the crop, or every so many rows."""
    info = known.first(step)
    given = arguments(step)
    if given["dim"] % info.value.dim() != info.dim:
        return Operation(step, Info(ROWS, step.value, info.dim), plain)
    start = given["start"] or 0
    start = min(max(start + info.height if start < 0 else start, 0), info.height)
    rule = Window(1, given["step"], -start)
    state = {"dim": info.dim, "step": given["step"]}
    return Operation(
        step, Info(ROWS, step.value, info.dim), kernels.step_rows, rule=rule, state=state
    )


def pad(known: Known, step: Step) -> Operation:
    """Return the padding: with a value, or with rows of the map."""
    info = known.first(step)
    given = arguments(step)
    amounts = list(given["pad"])
    place = 2 * (info.value.dim() - 1 - info.dim)
    top, bottom = (amounts[place : place + 2] or [0, 0]) if place < len(amounts) else (0, 0)
    mode = given.get("mode", "constant")
    value = given.get("value") or 0.0
    if mode == "constant":
        state = {"dim": info.dim, "place": place, "amounts": tuple(amounts), "value": float(value)}
        return Operation(
            step,
            Info(ROWS, step.value, info.dim),
            kernels.pad_rows,
            rule=Window(1, 1, top),
            state=state,
        )
    if not top and not bottom:
        return Operation(step, Info(ROWS, step.value, info.dim), plain)
    if mode == "circular":
        known.refuse(step, "pads the top with rows of the bottom")
    ramp = torch.arange(info.height, dtype=torch.float64, device="cpu").reshape(1, 1, -1, 1)
    sources = aten.pad.default(ramp, [0, 0, top, bottom], mode).flatten().long().tolist()
    amounts[place : place + 2] = [0, 0]

    def sides(rows: Tensor, count: int) -> Tensor:
        made: Tensor = aten.pad.default(rows, amounts, mode)
        return made

    return _resampling(known, step, sources, None, sides)


def upsample(known: Known, step: Step) -> Operation:
    """Return the resampling to the nearest row or between two."""
    info = check_image(known, step)
    given = arguments(step)
    scales = given.get("scale_factors")
    more = {"align_corners": given["align_corners"]} if "align_corners" in given else {}
    target = step.target
    ramp = torch.arange(info.height, dtype=torch.float64, device="cpu").reshape(1, 1, -1, 1)
    size = None if scales else [step.value.shape[2], 1]
    places = target(
        ramp, size, scale_factors=[scales[0], 1.0] if scales else None, **more
    ).flatten()
    lower = places.floor().clamp(0, info.height - 1).long()
    share = None if not more else (places - lower).tolist()

    def sides(rows: Tensor, count: int) -> Tensor:
        width = None if scales else [count, step.value.shape[3]]
        made: Tensor = target(
            rows, width, scale_factors=[1.0, scales[1]] if scales else None, **more
        )
        return made

    return _resampling(known, step, lower.tolist(), share, sides)


def _resampling(
    known: Known,
    step: Step,
    lower: list[int],
    share: list[float] | None,
    sides: Callable[[Tensor, int], Tensor],
) -> Operation:
    """Return the operation that takes rows by number, or two of them by shares.

    Then `sides` changes the width.
    """
    height = known.first(step).height
    upper = [
        min(row + 1, height - 1) if share and share[at] else row for at, row in enumerate(lower)
    ]
    begins = list(_running(min, reversed(lower)))[::-1]
    ends = [row + 1 for row in _running(max, upper)]
    state = {"lower": lower, "upper": upper, "share": share, "sides": sides}
    return on_rows(step, kernels.resample, Lookup(tuple(begins), tuple(ends)), False, **state)


def _running(function: Callable[[int, int], int], values: Iterable[int]) -> Iterator[int]:
    kept: int | None = None
    for value in values:
        kept = value if kept is None else function(kept, value)
        yield kept
