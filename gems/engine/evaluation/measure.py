"""Evaluation of a rank's weights on the validation samples."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from gems.data import task_of
from gems.engine.batch_loader import BatchLoader
from gems.engine.evaluation.chosen_metrics import open_metrics
from gems.engine.evaluation.metrics import Metric, Values, compute, metrics_of
from gems.engine.rank import Rank
from gems.engine.reading.strip_requests import strip_reads
from gems.engine.transport.mpi import allgather


def validation_metrics(rank: Rank) -> list[Metric]:
    """Return the metrics of the task and the further metrics that the run asks for."""
    spec = rank.plan.spec
    task = task_of(spec.data)
    num_classes = spec.data.num_classes
    loss = rank.training.loss
    return [
        *metrics_of(task, num_classes, loss),
        *open_metrics(spec.metrics, task, num_classes, loss.scores),
    ]


def evaluate(rank: Rank, loader: BatchLoader, more: Sequence[Metric] = ()) -> Values:
    """Run the validation samples through direction 0 of every replica; collective.

    The result is the same on all ranks. `more` metrics get only the outputs of this rank.

    Returns:
        The figures by name, and `num_validation`.
    """
    metrics = validation_metrics(rank)
    measure(rank, loader, metrics, more)
    return {**compute(metrics), "num_validation": loader.num_validation}


def measure(
    rank: Rank, loader: BatchLoader, metrics: Sequence[Metric], more: Sequence[Metric] = ()
) -> None:
    """Run the validation samples like `evaluate`; collective.

    `metrics` combine the outputs of all ranks; `more` metrics get only the outputs of this rank.
    """
    executor = rank.evaluate
    executor.measure_with([*metrics, *more])
    rank.stages.set_training(False)
    rank.recorder.is_on = False
    batches = loader.validation(
        executor.schedule.num_whole,
        rank.has_in_evaluation(0),
        rank.has_in_evaluation(executor.schedule.num_stages - 1),
        strip_reads(executor.schedule, executor.rank),
        rank.mask_parts(executor),
    )
    with torch.no_grad(), rank.update.averaged():
        for batch in batches:
            # the heartbeat shows it as after the last step
            executor.run(rank.plan.spec.train.steps, batch)
    rank.recorder.is_on = True
    rank.stages.set_training(True)
    executor.measure_with(())
    states = allgather(rank.comm, [metric.state() for metric in metrics])
    for metric, of_ranks in zip(metrics, zip(*states, strict=True), strict=True):
        metric.join(of_ranks)
