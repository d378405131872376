"""Training: a run's steps on one rank, evaluation, and the rank's files in the run folder."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import asdict
from pathlib import Path

import torch

from gems.config.resolve import global_batch
from gems.config.schema import RunSpec
from gems.data import Dataset, open_dataset, task_of
from gems.engine.batch_loader import BatchLoader
from gems.engine.checkpoint import weights
from gems.engine.checkpoint.resume import find_start
from gems.engine.checkpoint.saver import Saver
from gems.engine.checkpoint.state import PipelineState, layer_owners, restore_state
from gems.engine.checkpoint.state_dict import restore
from gems.engine.device import DTYPES
from gems.engine.evaluation.chosen_metrics import open_metrics
from gems.engine.evaluation.picture import Predictions, write_picture
from gems.engine.evaluation.validator import Validator
from gems.engine.metrics import Metric, Values, compute, metrics_of
from gems.engine.optimization.nonfinite import raise_nonfinite
from gems.engine.pipeline import Pipeline, build_pipeline
from gems.engine.step_loop import (
    StepResult,
    measure_offset,
    run_steps,
    schedule_record,
    trace_attributes,
)
from gems.engine.supervision.loggers import Loggers, open_loggers
from gems.engine.supervision.memory_report import memory_report
from gems.engine.supervision.monitor import Monitor
from gems.engine.supervision.stop_request import StopListener
from gems.engine.transport.mpi import Comm, allgather, broadcast
from gems.engine.transport.polling import WaitState
from gems.runs.folder import RunFolder
from gems.runs.heartbeat import Heartbeat
from gems.trace import TracePart, part_path
from gems.utils.atomic_io import write_json

# the columns of metrics.csv before those of validation
LOGGED = ("train_loss", "step_s", "grad_norm", "learning_rate")
_log = logging.getLogger(__name__)


def train(
    spec: RunSpec,
    folder: RunFolder,
    comm: Comm,
    device: torch.device,
    heartbeat: Heartbeat,
    stop: StopListener | None = None,
    wait_state: WaitState | None = None,
) -> None:
    """Run a whole training on one rank: set-up, steps, evaluation, weights, trace part; collective.

    The training continues from the state that an earlier attempt saved. If `stop` of any rank has a
    reason, all ranks save their state after the same step and end, without evaluation and result.
    """
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    attributes = trace_attributes(
        "measured", folder.run_id(spec), comm, name, torch=torch.__version__
    )
    part = TracePart(part_path(folder.path, comm.rank), comm.rank, attributes)
    try:
        pipeline = build_pipeline(
            spec,
            comm,
            device,
            part,
            heartbeat,
            folder.read_schedule(),
            folder.read_boundaries(),
            folder.read_memory_plan(),
            wait_state,
        )
        start = find_start(spec, folder, comm)
        losses: list[float] = []
        if start.checkpoint is not None:
            losses = restore_state(pipeline, *start.checkpoint)
            pipeline.recorder.optimizer.count_bytes(pipeline.update.state_bytes())
        elif spec.train.initial_checkpoint is not None:
            match = restore(pipeline, Path(spec.train.initial_checkpoint))
            if comm.rank == 0:
                _log.info("starts with %s", match.describe(spec.train.initial_checkpoint))
        part.set_attributes(start.attributes() | measure_offset(comm, "clock"))
        loader, num_validation, num_train = open_loader(pipeline, start.step)
        manifest = start.manifest(
            spec, pipeline.schedule, pipeline.stage_modules.boundaries, layer_owners(pipeline)
        )
        saver = Saver(
            folder, spec.train, pipeline.control, manifest, heartbeat, PipelineState(pipeline), stop
        )
        monitor = Monitor(device, spec.train.sample_interval_s)
        recorder = pipeline.recorder

        def run_step(step: int) -> StepResult:
            start_ns = time.perf_counter_ns()
            heartbeat.beat(step, "load")
            batch = loader.batch(step)
            if loader.reads:
                recorder.waited(step, start_ns, time.perf_counter_ns())
            loss_sum = pipeline.train.run(step, batch)
            if pipeline.update.stops:
                saver.finish(retries=False)
                raise_nonfinite(pipeline, step, batch)
            del batch
            if step == 0:  # later steps have it from the start
                recorder.optimizer.count_bytes(pipeline.update.state_bytes())
            recorder.synchronize()
            end_ns = time.perf_counter_ns()
            recorder.end_step()
            total = pipeline.control.sum_to_first([loss_sum, pipeline.step_weight.mine])
            for sample in monitor.take():
                part.add("samples", (comm.rank, *sample))
            loss = float("nan") if total is None else pipeline.loss.mean(*total)
            return StepResult(
                start_ns, end_ns, loss, pipeline.update.grad_norm, pipeline.update.learning_rate
            )

        def measure() -> dict[str, float]:
            heartbeat.beat(spec.train.steps, "validate")
            picture.maps.clear()
            measured.append(
                evaluate(pipeline, loader, num_validation, [picture] if has_maps else ())
            )
            return {name: value for name, value in measured[-1].items() if isinstance(value, float)}

        def save(path: Path) -> None:
            with pipeline.update.averaged():  # which were measured
                weights.save(pipeline, path)

        measured: list[Values] = []
        picture = Predictions(pipeline.loss.scores)
        has_maps = task_of(spec.data) == "segmentation"
        steps_per_epoch = max(1, num_train // global_batch(spec))
        validator = Validator(
            spec.train, folder, comm, steps_per_epoch, start.step, part, measure, save
        )
        known = compute(validation_metrics(pipeline))
        logged = (*LOGGED, *(name for name, value in known.items() if isinstance(value, float)))
        loggers = open_loggers(spec, folder, logged, start.step) if comm.rank == 0 else Loggers(())
        with closing(loader), closing(saver), closing(loggers):
            pipeline.set_training(True)
            try:
                stops = run_steps(
                    spec,
                    comm.rank,
                    part,
                    folder.progress_json,
                    saver,
                    start.step,
                    run_step,
                    losses,
                    loggers,
                    validator,
                )
            finally:
                for sample in monitor.close():
                    part.add("samples", (comm.rank, *sample))
                if (energy_j := monitor.energy_j()) is not None:
                    part.set_attributes({"energy_j": energy_j})
            pipeline.control.barrier()
            part.set_attributes(measure_offset(comm, "clock_end"))
            if device.type == "cuda":  # peaks of torch's allocator, within actions too
                part.set_attributes(
                    {
                        "peak_allocated_bytes": torch.cuda.max_memory_allocated(device),
                        "peak_reserved_bytes": torch.cuda.max_memory_reserved(device),
                    }
                )
            if stops:
                return
            report = memory_report(pipeline, folder.profile_json)
            if comm.rank == 0 and report["unsplit_layers"]:
                _log.info(
                    "full backward at I, because it cannot be split: %s",
                    ", ".join(report["unsplit_layers"]),
                )
            if spec.train.evaluate:
                validator.validate()
            if picture.maps and pipeline.replica == 0 and loader.dataset is not None:
                write_picture(folder.predictions_png, loader.dataset, picture.maps)
            saver.finish()
        heartbeat.beat(spec.train.steps, "checkpoint")
        weights.save(pipeline, folder.checkpoint)
        with pipeline.update.averaged() as is_averaged:
            if is_averaged:
                weights.save(pipeline, folder.average)
        energies_j = comm.gather(energy_j)
        if energies_j is not None:
            write_json(
                folder.result_json,
                {
                    "num_steps": len(losses),
                    "first_loss": losses[0],
                    "last_loss": losses[-1],
                    **schedule_record(pipeline.schedule),
                    "energy_j": energies_j,
                    **report,
                    **(measured[-1] if measured else {}),
                    **({} if validator.best is None else {"best": asdict(validator.best)}),
                },
            )
        pipeline.close()
    finally:
        part.close()


def open_loader(
    pipeline: Pipeline,
    first_step: int = 0,
    view: Callable[[Dataset], Dataset] = lambda dataset: dataset,
) -> tuple[BatchLoader, int, int]:
    """Open the data of a run, if this rank reads any, and load the `view` of it; collective.

    Returns:
        The loader, and the numbers of validation and training samples, on all ranks.
    """
    spec = pipeline.spec
    comm = pipeline.comm
    reads = bool(pipeline.image_micro_batches or pipeline.label_micro_batches)
    dataset = view(open_dataset(spec.data, spec.seed)) if reads else None
    counts = (dataset.num_validation, dataset.num_train) if dataset and not comm.rank else None
    num_validation, num_train = broadcast(comm, counts)
    loader = BatchLoader(
        spec,
        dataset,
        pipeline.replica,
        pipeline.image_micro_batches,
        pipeline.label_micro_batches,
        DTYPES[spec.train.compute_dtype],
        pipeline.device,
        first_step,
        pipeline.strip_order,
    )
    return loader, num_validation, num_train


def validation_metrics(pipeline: Pipeline) -> list[Metric]:
    """Return the metrics of the task and the further metrics that the run asks for."""
    spec = pipeline.spec
    task = task_of(spec.data)
    num_classes = spec.data.num_classes
    loss = pipeline.loss
    return [
        *metrics_of(task, num_classes, loss),
        *open_metrics(spec.metrics, task, num_classes, loss.scores),
    ]


def evaluate(
    pipeline: Pipeline, loader: BatchLoader, num_validation: int, more: Sequence[Metric] = ()
) -> Values:
    """Run the validation samples through direction 0 of every replica; collective.

    The result is the same on all ranks. `more` metrics get only the outputs of this rank.

    Returns:
        The figures by name, and `num_validation`.
    """
    metrics = validation_metrics(pipeline)
    measure(pipeline, loader, num_validation, metrics, more)
    return {**compute(metrics), "num_validation": num_validation}


def measure(
    pipeline: Pipeline,
    loader: BatchLoader,
    num_validation: int,
    metrics: Sequence[Metric],
    more: Sequence[Metric] = (),
) -> None:
    """Run the validation samples like `evaluate`; collective.

    `metrics` combine the outputs of all ranks; `more` metrics get only the outputs of this rank.
    """
    last = pipeline.schedule.num_stages - 1
    executor = pipeline.evaluate
    executor.metrics = [*metrics, *more]
    pipeline.set_training(False)
    pipeline.recorder.is_on = False
    batches = loader.validation(
        num_validation,
        executor.schedule.num_whole,
        pipeline.has_in_evaluation(0),
        pipeline.has_in_evaluation(last),
        executor.schedule.num_strips,
    )
    with torch.no_grad(), pipeline.update.averaged():
        for batch in batches:
            executor.run(
                pipeline.spec.train.steps, batch
            )  # which the heartbeat shows as after the last step
    pipeline.recorder.is_on = True
    pipeline.set_training(True)
    executor.metrics = ()
    states = allgather(pipeline.comm, [metric.state() for metric in metrics])
    for metric, of_ranks in zip(metrics, zip(*states, strict=True), strict=True):
        metric.join(of_ranks)
