"""From traced steps to operations on rows, and what cannot be run by rows."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import replace

import torch

from gems.streaming.operations import convolution, elementwise, shapes, spatial
from gems.streaming.operations.kernels import run_of
from gems.streaming.operations.operation import (
    PARTS,
    ROWS,
    STATIC,
    WHOLE,
    Info,
    Known,
    Operation,
    arguments,
    is_ghost_norm,
    refs,
)
from gems.streaming.trace import Step


def lower(known: Known, step: Step) -> Operation:
    """Return the operation of the next step, and add what it gives to what is known.

    Raises:
        StreamingError: it needs the whole image, or nothing is known of it.
    """
    made = _lower(known, step)
    known.infos.append(made.info)
    return made


def _lower(known: Known, step: Step) -> Operation:
    kinds = [known.infos[ref.number].kind for ref in refs(step)]
    if step.operation in _REFUSED and any(kind != STATIC for kind in kinds):
        _REFUSED[step.operation](known, step)
    if not any(kind in (ROWS, PARTS) for kind in kinds):
        kind = WHOLE if WHOLE in kinds else STATIC
        return Operation(step, Info(kind, step.value), run_of(step.operation))
    if WHOLE in kinds:
        known.refuse(step, "joins rows with what needs the whole image (squeeze-and-excitation)")
    reads = tuple(ref.number for ref in refs(step) if known.infos[ref.number].kind in (ROWS, PARTS))
    if step.operation in elementwise.ROW_FOR_ROW:
        return elementwise.row_for_row(known, step, reads)
    if step.operation not in _LOWER:
        known.refuse(step, "is an operation without a streaming form")
    return replace(_LOWER[step.operation](known, step), reads=reads)


def draws_numbers(operation: Operation) -> bool:
    """Return whether an operation draws random numbers."""
    if operation.step.operation in ("dropout", "feature_dropout", "alpha_dropout"):
        given = arguments(operation.step)
        return bool(given["train"] and given["p"])
    return torch.Tag.nondeterministic_seeded in getattr(operation.step.target, "tags", ())


_NORM_ADVICE = "use a frozen batch norm, a norm by strip (GhostBatchNorm2d) or over channels"


def _refuse_batch_norm(known: Known, step: Step) -> None:
    if arguments(step)["training"] and not is_ghost_norm(step):
        _refuse_norm(known, step, "batch_norm")


def _refuse_norm(known: Known, step: Step, cause: str = "norm") -> None:
    if any(known.infos[ref.number].kind == ROWS for ref in refs(step)):
        known.refuse(step, "needs statistics of the whole image", _NORM_ADVICE, cause)


def _refuse_product(known: Known, step: Step) -> None:
    if sum(known.infos[ref.number].kind != STATIC for ref in refs(step)) > 1:
        _refuse_attention(known, step)


def _refuse_attention(known: Known, step: Step) -> None:
    known.refuse(step, "is attention over the whole image")


_REFUSED: dict[str, Callable[[Known, Step], None]] = {
    "batch_norm": _refuse_batch_norm,
    "group_norm": _refuse_norm,
    "instance_norm": _refuse_norm,
    "scaled_dot_product_attention": _refuse_attention,
    **dict.fromkeys(("matmul", "bmm", "baddbmm", "einsum"), _refuse_product),
    "_native_multi_head_attention": _refuse_attention,
}
_LOWER: dict[str, Callable[[Known, Step], Operation]] = {
    "conv2d": convolution.conv,
    "pixel_shuffle": spatial.pixel_shuffle,
    "pixel_unshuffle": spatial.pixel_unshuffle,
    "conv_transpose2d": convolution.conv_transposed,
    "max_pool2d": spatial.max_pool,
    "avg_pool2d": spatial.average_pool,
    "avg_pool3d": elementwise.average_over_channels,
    "adaptive_avg_pool2d": spatial.adaptive_average,
    **dict.fromkeys(
        ("mean", "sum", "var", "std", "var_mean", "linalg_vector_norm", "amax", "amin", "prod"),
        elementwise.reduce,
    ),
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
        ("upsample_nearest2d", "_upsample_nearest_exact2d", "upsample_bilinear2d"), spatial.upsample
    ),
    operator.getitem.__name__: shapes.item,
}
