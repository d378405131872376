"""Training: the loop over steps, evaluation, and what a rank leaves in the run folder."""

from __future__ import annotations

import socket
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import h5py
import numpy as np
import torch
from mpi4py import __version__ as mpi4py_version

from gems import __version__
from gems.config.resolve import global_batch
from gems.config.run_id import run_id
from gems.config.schema import RunSpec
from gems.data import labels_per_sample, labels_per_step, open_dataset
from gems.engine.batch_loader import Feed
from gems.engine.checkpoint import weights
from gems.engine.checkpoint.host_copy import PipelineSource
from gems.engine.checkpoint.resume import beginning_of
from gems.engine.checkpoint.saver import Asks, Saver
from gems.engine.checkpoint.state import owners_of, read_losses, restore_state
from gems.engine.device import DTYPES
from gems.engine.optimizer import state_bytes
from gems.engine.pipeline import Pipeline, build_pipeline
from gems.engine.supervision.memory_report import Findings, findings_of
from gems.engine.supervision.monitor import Monitor
from gems.engine.supervision.progress import Progress
from gems.engine.transport.clock import measure_offset
from gems.engine.transport.mpi import Comm, library
from gems.runs.folder import RunFolder
from gems.runs.heartbeat import Heartbeat
from gems.trace import TracePart, part_path, root_attributes
from gems.utils.atomic_io import write_json


@dataclass(frozen=True, slots=True)
class Accuracy:
    """Share of validation labels told right, beside the share of the commonest class; the loss is the mean over them.

    An image has one label, a sequence one for each token. `num_validation` counts images or sequences.
    """

    validation_accuracy: float
    validation_majority: float
    validation_loss: float
    num_validation: int


def train(
    spec: RunSpec, folder: RunFolder, comm: Comm, device: torch.device, heartbeat: Heartbeat, stop: Asks | None = None
) -> None:
    """Run a whole training on one rank: set-up, steps, evaluation, weights, trace part; collective.

    It begins where an earlier attempt saved its state. When `stop` of any rank has a reason, all save theirs behind the same
    step and end, with neither evaluation nor result.
    """
    part = TracePart(part_path(folder.path, comm.rank), comm.rank, _attributes(spec, comm, device))
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
        )
        beginning = beginning_of(spec, folder, comm)
        losses: list[float] = []
        if beginning.found is not None:
            at = beginning.found.folder, beginning.found.manifest
            restore_state(pipeline, *at)
            pipeline.recorder.hold(state_bytes(pipeline.optimizer))
            losses = read_losses(*at) if comm.rank == 0 else []
        elif spec.train.initial_checkpoint is not None:
            weights.restore(pipeline, weights.load(Path(spec.train.initial_checkpoint)))
        part.set_attributes(beginning.attributes() | measure_offset(comm).attributes("clock"))
        reads = bool(pipeline.images_of or pipeline.labels_of)
        dataset = open_dataset(spec.data, spec.seed) if reads else None
        class_counts = comm.bcast(dataset.class_counts("validation") if dataset and not comm.rank else None)
        feed = Feed(
            spec,
            dataset,
            pipeline.replica,
            pipeline.images_of,
            pipeline.labels_of,
            DTYPES[spec.train.dtype],
            device,
            beginning.step,
        )
        saver = Saver(
            folder, spec.train, pipeline.control,
            beginning.about(spec, pipeline.schedule, pipeline.cuts, owners_of(pipeline)),
            heartbeat, PipelineSource(pipeline), stop,
        )  # fmt: skip
        monitor = Monitor(device, spec.train.sample_interval_s)
        try:
            stops = _steps(
                spec, pipeline, feed, part, monitor, heartbeat, folder.progress_json, saver, beginning.step, losses
            )
            pipeline.control.barrier()
            part.set_attributes(measure_offset(comm).attributes("clock_end") | _allocator_peaks(device))
            if stops:
                return
            findings = findings_of(pipeline, folder.profile_json)
            if comm.rank == 0 and findings.unsplit_layers:
                names = ", ".join(findings.unsplit_layers)
                print(f"gems: full backward at I, because it cannot be split: {names}", file=sys.stderr)
            accuracy = evaluate(pipeline, feed, class_counts) if spec.train.evaluate else None
            saver.finish()
        finally:
            saver.close()
            feed.close()
        heartbeat.beat(spec.train.steps, "checkpoint")
        weights.save(pipeline, folder.checkpoint)
        energy_j = comm.gather(monitor.energy_j())
        if energy_j is not None:
            _write_result(folder, pipeline, losses, accuracy, findings, energy_j)
    finally:
        part.close()


def _steps(
    spec: RunSpec,
    pipeline: Pipeline,
    feed: Feed,
    part: TracePart,
    monitor: Monitor,
    heartbeat: Heartbeat,
    progress_json: Path,
    saver: Saver,
    first_step: int,
    losses: list[float],
) -> bool:
    """Run the steps from `first_step` on and appends each loss to `losses`, on rank 0; gives whether the run stops early."""
    comm, recorder, num_steps = pipeline.comm, pipeline.recorder, spec.train.steps
    images, labels = global_batch(spec), labels_per_step(spec)
    progress = Progress(spec.name, num_steps, images, progress_json, first_step) if comm.rank == 0 else None
    stops = False
    pipeline.set_training(True)
    try:
        for step in range(first_step, num_steps):
            saver.begin()
            start_ns = time.perf_counter_ns()
            heartbeat.beat(step, "load")
            batch = feed.batch(step)
            if feed.reads:
                recorder.waited(step, start_ns, recorder.now())
            score = pipeline.train.run(step, batch)
            del batch
            if step == 0:  # later ones hold it from the start
                recorder.hold(state_bytes(pipeline.optimizer))
            recorder.settle()
            end_ns = time.perf_counter_ns()
            recorder.end_step()
            total = pipeline.control.sum_to_first([score.loss_sum])
            loss = total[0] / labels if total is not None else float("nan")
            part.add(
                "rank_steps",
                (comm.rank, step, start_ns, end_ns, images, loss, step - first_step < spec.train.warmup_steps),
            )
            for sample in monitor.take():
                part.add("samples", (comm.rank, *sample))
            part.flush()
            if progress is not None:
                losses.append(loss)
                progress.show(step + 1, loss)
            stops = saver.end(step + 1, losses)
            if stops:
                break
    finally:
        for sample in monitor.close():
            part.add("samples", (comm.rank, *sample))
        energy_j = monitor.energy_j()
        if energy_j is not None:
            part.set_attributes({"energy_j": energy_j})
        if progress is not None:
            progress.close()
    return stops


def evaluate(pipeline: Pipeline, feed: Feed, class_counts: tuple[int, ...]) -> Accuracy:
    """Run the validation images forward through direction 0 of every replica; collective, the same on all ranks.

    `class_counts` are the numbers of validation labels of each class.
    """
    per_sample = labels_per_sample(pipeline.spec.data)
    last = pipeline.schedule.num_stages - 1
    executor = pipeline.evaluate
    pipeline.set_training(False)
    pipeline.recorder.is_on = False
    sums = np.zeros(3)
    batches = feed.validation(
        sum(class_counts) // per_sample,
        executor.schedule.num_micro_batches,
        pipeline.has_in_evaluation(0),
        pipeline.has_in_evaluation(last),
    )
    for batch in batches:
        score = executor.run(pipeline.spec.train.steps, batch)  # the heartbeat says: behind the last step
        sums += (score.loss_sum, score.num_correct, score.num_labels)
    pipeline.recorder.is_on = True
    pipeline.set_training(True)
    loss_sum, num_correct, num_labels = np.sum(pipeline.comm.allgather(sums), axis=0)
    return Accuracy(
        validation_accuracy=float(num_correct / num_labels),
        validation_majority=max(class_counts) / sum(class_counts),
        validation_loss=float(loss_sum / num_labels),
        num_validation=int(num_labels) // per_sample,
    )


def _allocator_peaks(device: torch.device) -> dict[str, int]:
    """Return the most bytes that torch's allocator had in use and had taken from the GPU, within actions too."""
    if device.type != "cuda":
        return {}
    return {
        "peak_allocated_bytes": torch.cuda.max_memory_allocated(device),
        "peak_reserved_bytes": torch.cuda.max_memory_reserved(device),
    }


def _attributes(spec: RunSpec, comm: Comm, device: torch.device) -> dict[str, object]:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    versions = {
        "gems": __version__,
        "torch": torch.__version__,
        "mpi4py": mpi4py_version,
        "mpi": library(),
        "h5py": h5py.__version__,
        "numpy": np.__version__,
    }
    return root_attributes(
        "measured", run_id(spec), comm.size, hostname=socket.gethostname(), device=name,
        versions=[f"{key} {value}" for key, value in versions.items()], clock="perf_counter_ns",
    )  # fmt: skip


def _write_result(
    folder: RunFolder,
    pipeline: Pipeline,
    losses: list[float],
    accuracy: Accuracy | None,
    findings: Findings,
    energy_j: list[float | None],
) -> None:
    result: dict[str, object] = {
        "num_steps": len(losses),
        "first_loss": losses[0],
        "last_loss": losses[-1],
        "schedule_sha256": pipeline.schedule.digest(),
        "schedule_rows": [" ".join(map(str, row)) for row in pipeline.schedule.rows],
        "energy_j": energy_j,
        **asdict(findings),
    }
    if accuracy is not None:
        result |= {
            "validation_accuracy": accuracy.validation_accuracy,
            "validation_majority": accuracy.validation_majority,
            "validation_loss": accuracy.validation_loss,
            "num_validation": accuracy.num_validation,
        }
    write_json(folder.result_json, result)
