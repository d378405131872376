"""Operations that read windows of a map: poolings, resampling, padding and crops."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from gems.streaming.axis_rules import Bins, Lookup, Rule, Transposed, Window
from gems.streaming.operations import kernels
from gems.streaming.operations.kernels import Run, plain
from gems.streaming.operations.operation import MAP, Info, Known, Operation, arguments
from gems.streaming.operations.running import over_positions
from gems.streaming.trace import Step

aten = torch.ops.aten


def each_of(value: Any, count: int, default: int = 0) -> tuple[int, ...]:
    """Return one value per dimension of a map; torch also accepts one value, or none."""
    values = [value] if isinstance(value, int) else list(value)
    return tuple(values if len(values) == count else (values or [default]) * count)


def check_image(known: Known, step: Step) -> Info:
    """Return the input; refuse the step unless the axes come after (N, C), in order."""
    info = known.first(step)
    if (
        info.kind != MAP
        or any(dim < 2 for dim in info.axes)
        or list(info.axes) != sorted(info.axes)
    ):
        known.refuse(step, "reads rows that are not the third dimension of (N, C, H, W)")
    return info


def on_map(
    info: Info,
    step: Step,
    run: Run,
    rules: Mapping[int, Rule],
    has_zeros: bool = False,
    **state: Any,
) -> Operation:
    """Return an operation from map to map with a rule per dimension."""
    return Operation(
        step,
        Info(MAP, step.value, info.dims),
        run,
        rules=tuple(None if dim is None else rules.get(dim) for dim in info.dims),
        has_zeros=has_zeros,
        state=state,
    )


def _pooling(info: Info, step: Step) -> tuple[dict[int, Rule], dict[str, Any]]:
    """Return the rules of a pooling and the options of its kernel, which must not pad the axes."""
    options = arguments(step)
    count = info.value.dim() - 2
    kernel = each_of(options["kernel_size"], count)
    stride = each_of(options["stride"], count) if options["stride"] else kernel
    padding = each_of(options["padding"], count)
    dilation = each_of(options.get("dilation", 1), count)
    rules: dict[int, Rule] = {
        dim: Window(kernel[dim - 2], stride[dim - 2], padding[dim - 2], dilation[dim - 2])
        for dim in info.axes
    }
    sides = tuple(0 if place + 2 in rules else side for place, side in enumerate(padding))
    return rules, {
        "kernel": kernel,
        "stride": stride,
        "sides": sides,
        "dilation": dilation,
        "ceil_mode": options["ceil_mode"],
    }


def max_pool(known: Known, step: Step) -> Operation:
    """Return the max pooling."""
    info = check_image(known, step)
    rules, state = _pooling(info, step)
    return on_map(info, step, kernels.max_pool, rules, **state)


def average_pool(known: Known, step: Step) -> Operation:
    """Return the average pooling, with the divisors of all outputs along each axis."""
    info = check_image(known, step)
    options = arguments(step)
    rules, state = _pooling(info, step)
    override = options.get("divisor_override")
    counts: dict[int, tuple[int, ...]] = {}
    for dim, rule in rules.items():
        size = info.value.shape[dim]
        kernel, padding = (
            state["kernel"][dim - 2],
            each_of(options["padding"], info.value.dim() - 2),
        )
        spans = [rule.reads(row, row + 1) for row in range(step.value.shape[dim])]
        if override:
            counts[dim] = (kernel,) * len(spans)
        elif options["count_include_pad"]:
            counts[dim] = tuple(min(end, size + padding[dim - 2]) - begin for begin, end in spans)
        else:
            counts[dim] = tuple(min(end, size) - max(begin, 0) for begin, end in spans)
    state |= {
        "override": override,
        "count_include_pad": options["count_include_pad"],
        "counts": counts,
    }
    return on_map(info, step, kernels.average_pool, rules, True, **state)


def pixel_shuffle(known: Known, step: Step) -> Operation:
    """Return the pixel shuffle: from channels to rows and columns."""
    info = check_image(known, step)
    factor = arguments(step)["upscale_factor"]
    rules = dict.fromkeys(info.axes, Transposed(factor, factor))
    return on_map(info, step, kernels.pixel_shuffle, rules, factor=factor)


def pixel_unshuffle(known: Known, step: Step) -> Operation:
    """Return the pixel unshuffle: from rows and columns to channels."""
    info = check_image(known, step)
    factor = arguments(step)["downscale_factor"]
    return on_map(info, step, plain, dict.fromkeys(info.axes, Window(factor, factor)))


def adaptive_average(known: Known, step: Step) -> Operation:
    """Return the adaptive average over one axis as a running sum.

    Dimensions that are no axes are averaged by the same operation.
    """
    info = check_image(known, step)
    dim = [*info.axes, *changed_axes(info, step)][-1]
    return running_sum(info, step, dim, info.axes[dim], Info(MAP, step.value, info.dims))


def adaptive_max(known: Known, step: Step) -> Operation:
    """Return the maximum over the whole map; other adaptive max poolings are refused."""
    info = check_image(known, step)
    over = range(2, info.value.dim())
    if step.value[0].numel() > math.prod(info.value.shape[:2]):
        known.refuse(step, "divides the map into parts, of which it takes the maxima")
    return over_positions(known, step, over)


def changed_axes(info: Info, step: Step) -> list[int]:
    """Return the dimensions of the axes whose size a step changes."""
    return [dim for dim in info.axes if info.value.shape[dim] != step.value.shape[dim]]


def running_sum(info: Info, step: Step, dim: int, axis: int, output: Info) -> Operation:
    """Return the sum or average along one axis, as a running sum over its parts."""
    bins = list(info.value.shape[2:])
    over = arguments(step).get("dim")
    shape = step.value.shape
    for place in range(len(bins)):
        if over is None:
            bins[place] = shape[place + 2]
        elif place + 2 in {each % info.value.dim() for each in _listed(over)}:
            bins[place] = 1
    rule = Bins(info.size(axis), bins[dim - 2])
    state = {
        "bins": tuple(bins),
        "others": {
            place + 2
            for place, count in enumerate(bins)
            if count != info.value.shape[place + 2] and place + 2 not in info.axes
        },
        "is_sum": step.operation == "sum",
        "rule": rule,
        "dtype": kernels.wide_dtype(step.value.dtype),
        "shape": tuple(shape),
    }
    rules = tuple(rule if each == axis else None for each in range(len(info.dims)))
    return Operation(step, output, kernels.add_up, rules=rules, summed=axis, state=state)


def take_slice(known: Known, step: Step) -> Operation:
    """Return the slice of a map, with any step."""
    info = known.first(step)
    options = arguments(step)
    dim = options["dim"] % info.first.dim()
    if dim not in info.axes:
        return Operation(step, info.moved(step.value, info.dims), plain)
    size = info.first.shape[dim]
    start = options["start"] or 0
    start = min(max(start + size if start < 0 else start, 0), size)
    rules = {dim: Window(1, options["step"], -start)}
    return on_map(info, step, kernels.step_rows, rules, dim=dim, every=options["step"])


def pad(known: Known, step: Step) -> Operation:
    """Return the padding by a value, or by rows and columns of the map (reflect, replicate)."""
    info = known.first(step)
    options = arguments(step)
    ndim = info.first.dim()
    amounts = list(options["pad"]) + [0] * (2 * ndim - len(options["pad"]))
    sides = {dim: amounts[2 * (ndim - 1 - dim) :][:2] for dim in info.axes}
    mode = options.get("mode", "constant")
    if mode == "constant":
        rules = {dim: Window(1, 1, before) for dim, (before, _) in sides.items()}
        value = float(options.get("value") or 0.0)
        return on_map(info, step, kernels.pad_rows, rules, amounts=tuple(amounts), value=value)
    if not any(map(any, sides.values())):
        return Operation(step, info.moved(step.value, info.dims), plain)
    if mode == "circular":
        known.refuse(step, "pads the top with rows of the bottom")
    places = {}
    for dim, (before, after) in sides.items():
        ramp = _ramp(info, dim).reshape(1, 1, -1)
        lower = aten.pad.default(ramp, [before, after], mode).flatten().long().tolist()
        places[dim] = lower, None
        amounts[2 * (ndim - 1 - dim) : 2 * (ndim - dim)] = [0, 0]

    def resample_others(x: Tensor, shape: Sequence[int]) -> Tensor:
        others = amounts[: len(options["pad"])]
        padded: Tensor = aten.pad.default(x, others, mode) if any(others) else x
        return padded

    return _resampling(info, step, places, resample_others)


def upsample(known: Known, step: Step) -> Operation:
    """Return the resampling, nearest or linear, as a lookup that the operation itself defines."""
    info = check_image(known, step)
    options = arguments(step)
    scales = options.get("scale_factors")
    more = {"align_corners": options["align_corners"]} if "align_corners" in options else {}
    target = step.target
    count = info.value.dim() - 2
    places: dict[int, tuple[list[int], list[float] | None]] = {}
    for dim in info.axes:
        ones = [1] * count
        ones[dim - 2] = -1
        size = [1] * count
        size[dim - 2] = step.value.shape[dim]
        scale_factors = [1.0] * count
        if scales:
            scale_factors[dim - 2] = scales[dim - 2]
        position = target(
            _ramp(info, dim).reshape(1, 1, *ones),
            None if scales else size,
            scale_factors=scale_factors if scales else None,
            **more,
        ).flatten()
        lower = position.floor().clamp(0, info.value.shape[dim] - 1).long()
        places[dim] = lower.tolist(), (position - lower).tolist() if more else None

    def resample_others(x: Tensor, shape: Sequence[int]) -> Tensor:
        if len(places) == count:
            return x
        scale_factors = (
            [1.0 if place + 2 in places else scales[place] for place in range(count)]
            if scales
            else None
        )
        resampled: Tensor = target(
            x, None if scales else list(shape[2:]), scale_factors=scale_factors, **more
        )
        return resampled

    return _resampling(info, step, places, resample_others)


def _ramp(info: Info, dim: int) -> Tensor:
    return torch.arange(info.value.shape[dim], dtype=torch.float64, device="cpu")


def _listed(dims: Any) -> list[int]:
    return [dims] if isinstance(dims, int) else list(dims)


def _resampling(
    info: Info,
    step: Step,
    places: Mapping[int, tuple[list[int], list[float] | None]],
    sides: Callable[[Tensor, Sequence[int]], Tensor],
) -> Operation:
    """Return a lookup along each axis: by index, or linear between two indices by share.

    `sides` resamples the dimensions that are no axes.
    """
    rules: dict[int, Rule] = {}
    state: dict[int, tuple[list[int], list[int], list[float] | None]] = {}
    for dim, (lower, share) in places.items():
        last = info.value.shape[dim] - 1
        upper = [min(row + 1, last) if share and share[at] else row for at, row in enumerate(lower)]
        begins = list(_running(min, reversed(lower)))[::-1]
        ends = [row + 1 for row in _running(max, upper)]
        rules[dim] = Lookup(tuple(begins), tuple(ends))
        state[dim] = lower, upper, share
    shape = tuple(step.value.shape)
    return on_map(info, step, kernels.resample, rules, places=state, sides=sides, shape=shape)


def _running(function: Callable[[int, int], int], values: Iterable[int]) -> Iterator[int]:
    latest: int | None = None
    for value in values:
        latest = value if latest is None else function(latest, value)
        yield latest
