"""Lower traced steps to operations on blocks, and refuse those that cannot run in blocks."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch

from gems.streaming.operations import convolution, elementwise, shapes, spatial
from gems.streaming.operations.kernels import plain, run_of
from gems.streaming.operations.operation import (
    MAP,
    PARTS,
    STATIC,
    UNTIL_ADVICE,
    WHOLE,
    Info,
    Known,
    Operation,
    arguments,
    is_ghost_norm,
    refs,
)
from gems.streaming.trace import Ref, Step

aten = torch.ops.aten


def lower(known: Known, step: Step) -> list[Operation]:
    """Return the operations of the next step, and append their outputs to `known`.

    A step that sums several axes becomes one operation per axis, the last axis first.

    Raises:
        StreamingError: The step needs the whole image, or has no streaming form.
    """
    operations = []
    for part in _separated(known, _global_mean(known, step)):
        operations.append(_lower(known, part))
        known.infos.append(operations[-1].info)
        step = part
    return operations


def _global_mean(known: Known, step: Step) -> Step:
    """Turn an average pooling over a whole map into a mean, which is a running sum."""
    read = step.args[0] if step.args else None
    if not isinstance(read, Ref) or not step.operation.startswith("avg_pool"):
        return step
    options, info = arguments(step), known.infos[read.number]
    sizes = list(info.first.shape[2:])
    kernel = list(spatial.each_of(options["kernel_size"], len(sizes)))
    padding = spatial.each_of(options["padding"], len(sizes))
    if kernel != sizes or any(padding) or options.get("divisor_override") or info.kind != MAP:
        return step
    args = (read, list(range(2, 2 + len(sizes))), True)
    return replace(step, target=aten.mean.dim, args=args, kwargs={})


def _separated(known: Known, step: Step) -> Iterator[Step]:
    """Split a step that sums several axes into steps along one axis each."""
    name = step.operation
    read = step.args[0] if step.args else None
    is_adaptive = name.startswith("adaptive_avg_pool")
    if isinstance(read, Ref) and (is_adaptive or name in ("mean", "sum")):
        info = known.infos[read.number]
        value = info.first
        if is_adaptive:
            axes = spatial.changed_axes(info, step)
        else:
            over = elementwise.reduced(step, value.dim())
            axes = [dim for dim in over if dim in info.axes and over[0] >= 2]
        for dim in reversed(axes[1:]):
            shape = list(value.shape)
            if is_adaptive:
                shape[dim] = step.value.shape[dim]
                args: tuple[Any, ...] = (read, shape[2:])
                target = step.target
            else:
                shape[dim] = 1
                args = (read, [dim], True)
                target = aten.mean.dim if name == "mean" else aten.sum.dim_IntList
            value = value.new_empty(shape, dtype=step.value.dtype)
            yield replace(step, target=target, args=args, kwargs={}, value=value)
            read = Ref(len(known.infos) - 1)
            step = replace(step, args=(read, *step.args[1:]))
    yield step


def _lower(known: Known, step: Step) -> Operation:
    kinds = [known.infos[ref.number].kind for ref in refs(step)]
    if step.operation in _REFUSED and any(kind != STATIC for kind in kinds):
        _REFUSED[step.operation](known, step)
    if not any(kind in (MAP, PARTS) for kind in kinds):
        kind = WHOLE if WHOLE in kinds else STATIC
        dims = next((info.dims for info in known.infos if info.dims), ())
        info = Info(kind, step.value, (None,) * len(dims) if kind == WHOLE else ())
        return Operation(step, info, run_of(step.operation))
    if WHOLE in kinds:
        elementwise.refuse_gate(known, step)
    reads = tuple(ref.number for ref in refs(step) if known.infos[ref.number].kind in (MAP, PARTS))
    is_binary = getattr(step.target, "_overloadname", "") == "other"  # torch.max of two
    if step.operation in elementwise.ROW_FOR_ROW or is_binary:
        return elementwise.row_for_row(known, step, reads)
    if step.operation not in _LOWER:
        known.refuse(step, "is an operation without a streaming form")
    return replace(_LOWER[step.operation](known, step), reads=reads)


def draws_numbers(operation: Operation) -> bool:
    """Return whether an operation draws random numbers."""
    if operation.step.operation in ("dropout", "feature_dropout", "alpha_dropout"):
        options = arguments(operation.step)
        return bool(options["train"] and options["p"])
    if operation.step.operation == "scaled_dot_product_attention":
        return bool(arguments(operation.step)["dropout_p"])
    return torch.Tag.nondeterministic_seeded in getattr(operation.step.target, "tags", ())


_NORM_ADVICE = (
    "use a frozen batch norm, a norm by strip (GhostBatchNorm2d) or over channels, or"
    f" {UNTIL_ADVICE}"
)


def _refuse_batch_norm(known: Known, step: Step) -> None:
    if arguments(step)["training"] and not is_ghost_norm(step):
        _refuse_norm(known, step, "batch_norm")


def _refuse_norm(known: Known, step: Step, cause: str = "norm") -> None:
    if any(known.infos[ref.number].kind == MAP for ref in refs(step)):
        known.refuse(step, "needs statistics of the whole image", _NORM_ADVICE, cause)


def is_spatial(step: Step) -> bool:
    """Return whether a step may read neighbouring positions of a map."""
    return step.operation.startswith(("conv", "max_pool", "avg_pool", "upsample", "_upsample"))


def _refuse_product(known: Known, step: Step) -> None:
    if sum(known.infos[ref.number].kind != STATIC for ref in refs(step)) > 1:
        _refuse_attention(known, step)


def _refuse_attention(known: Known, step: Step) -> None:
    """Refuse attention over a map, unless it follows the last map as a whole."""
    if not known.is_head or any(known.infos[ref.number].kind == MAP for ref in refs(step)):
        known.refuse(step, "is attention over the whole image")


_REFUSED: dict[str, Callable[[Known, Step], None]] = {
    "batch_norm": _refuse_batch_norm,
    "group_norm": _refuse_norm,
    "instance_norm": _refuse_norm,
    "scaled_dot_product_attention": _refuse_attention,
    **dict.fromkeys(("matmul", "bmm", "baddbmm", "einsum"), _refuse_product),
    "_native_multi_head_attention": _refuse_attention,
}


def _average_pool(known: Known, step: Step) -> Operation:
    info = known.first(step)
    if step.operation == "avg_pool3d" and elementwise.leaves_axes(info, step):
        return Operation(step, info.moved(step.value, info.dims), plain)
    return spatial.average_pool(known, step)


def _any_axes(name: str) -> tuple[str, ...]:
    return tuple(name.format(axes) for axes in (1, 2, 3))


_LOWER: dict[str, Callable[[Known, Step], Operation]] = {
    **dict.fromkeys(_any_axes("conv{}d"), convolution.conv),
    **dict.fromkeys(_any_axes("conv_transpose{}d"), convolution.conv_transposed),
    "pixel_shuffle": spatial.pixel_shuffle,
    "pixel_unshuffle": spatial.pixel_unshuffle,
    **dict.fromkeys(_any_axes("max_pool{}d"), spatial.max_pool),
    **dict.fromkeys(_any_axes("avg_pool{}d"), _average_pool),
    **dict.fromkeys(_any_axes("adaptive_avg_pool{}d"), spatial.adaptive_average),
    **dict.fromkeys(
        (
            "mean",
            "sum",
            "var",
            "std",
            "var_mean",
            "linalg_vector_norm",
            "amax",
            "amin",
            "max",
            "min",
            "topk",
            "logsumexp",
            "prod",
        ),
        elementwise.reduce,
    ),
    **dict.fromkeys(_any_axes("adaptive_max_pool{}d"), spatial.adaptive_max),
    **dict.fromkeys(
        (
            "softmax",
            "log_softmax",
            "layer_norm",
            "rms_norm",
            "linear",
            "matmul",
            "chunk",
            "split",
            "split_with_sizes",
            "unbind",
            "select",
            "glu",
            "cumsum",
        ),
        elementwise.along,
    ),
    **dict.fromkeys(("permute", "transpose"), shapes.permute),
    **dict.fromkeys(("view", "reshape", "flatten", "unflatten", "_unsafe_view"), shapes.view),
    "unsqueeze": shapes.unsqueeze,
    "squeeze": shapes.squeeze,
    "slice": spatial.take_slice,
    **dict.fromkeys(("pad", "constant_pad_nd"), spatial.pad),
    **dict.fromkeys(
        (
            *_any_axes("upsample_nearest{}d"),
            *_any_axes("_upsample_nearest_exact{}d"),
            "upsample_linear1d",
            "upsample_bilinear2d",
            "upsample_trilinear3d",
        ),
        spatial.upsample,
    ),
    operator.getitem.__name__: shapes.item,
}
