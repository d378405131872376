"""Finds where a loss or gradient stopped being finite: the step runs again with watched layers."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn

from gems.engine.executor import Batch
from gems.engine.optimization.parameter_groups import NumberedLayer
from gems.engine.rank import Rank
from gems.engine.transport.mpi import allgather
from gems.errors import RankFailedError


class Finding(NamedTuple):
    """A value that was not finite; the smallest finding of all ranks is the first in the model."""

    order: int  # outputs before gradients
    place: int
    rank: int
    what: str


def raise_nonfinite(rank: Rank, step: int, batch: Batch) -> NoReturn:
    """Raise the error of a step that was not finite, on the rank at fault; collective.

    The other ranks wait for the end of the job.

    Raises:
        RankFailedError: The error names the step, the rank and the layer.
    """
    finding = find_nonfinite(rank, step, batch)
    if rank.comm.rank == finding.rank:
        norm = rank.update.grad_norm
        raise RankFailedError(
            f"step {step} is not finite (gradient norm {norm:g}) at rank {finding.rank}:"
            f" {finding.what}; no weight has changed since the step before; lower the learning rate,"
            " or set train.max_grad_norm or train.on_nonfinite=skip"
        )
    rank.connections.control.barrier()
    raise RankFailedError(f"step {step} is not finite, as rank {finding.rank} reports")


def find_nonfinite(rank: Rank, step: int, batch: Batch) -> Finding:
    """Run a step again without changing weights, and return the layer at fault; collective.

    This is the first layer whose output is not finite; if all outputs are finite, the last layer
    with a gradient that is not.
    """
    findings: list[Finding] = []
    number = rank.comm.rank
    rank.recorder.is_on = False
    with ExitStack() as watches, rank.update.repeated():
        for layer in rank.stages.layers:
            hook = layer.module.register_forward_hook(
                partial(_watch, findings, layer, number), always_call=False
            )
            watches.callback(hook.remove)
        for stage in rank.train.stages.values():
            watches.enter_context(
                stage.watched(partial(_watch_strips, findings, rank.stages.layers, number))
            )
        rank.train.run(step, batch)
    for layer in rank.stages.layers:
        if not all(_is_finite(p.grad) for p in layer.module.parameters() if p.grad is not None):
            findings.append(
                Finding(
                    1,
                    -layer.place,
                    number,
                    f"all outputs are finite, the gradient of {layer.name} is not",
                )
            )
    nothing = Finding(
        2, 0, 0, "the loss, though all outputs and gradients of a second try are finite"
    )
    return min(min(of_rank, default=nothing) for of_rank in allgather(rank.comm, findings))


def _watch(
    findings: list[Finding],
    layer: NumberedLayer,
    rank: int,
    module: nn.Module,
    inputs: Any,
    outputs: Any,
) -> None:
    if _is_finite(outputs):
        return
    if layer.place == 0 and not _is_finite(inputs):
        what = "samples of the batch are not finite"
    else:
        what = f"the first output that is not finite is that of layer {layer.name}"
    findings.append(Finding(0, layer.place, rank, what))


def _watch_strips(
    findings: list[Finding],
    layers: Sequence[NumberedLayer],
    rank: int,
    name: str,
    outputs: tuple[Any, ...],
) -> None:
    """Watch an operation of the module `name`.

    It belongs to the layer with the longest name that begins the module's name.
    """
    layer = max(
        (candidate for candidate in layers if f"{name}.".startswith(f"{candidate.name}.")),
        key=lambda candidate: len(candidate.name),
    )
    _watch(findings, layer, rank, layer.module, None, outputs)


def _is_finite(values: Any) -> bool:
    if isinstance(values, Tensor):
        return not values.is_floating_point() or bool(torch.isfinite(values).all())
    inner = values.values() if isinstance(values, dict) else values
    return not isinstance(values, dict | list | tuple) or all(map(_is_finite, inner))
