"""The code that real and emulated runs share: first checks, the loop over steps, trace facts."""

from __future__ import annotations

import contextlib
import math
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import h5py
import numpy as np
from mpi4py import __version__ as mpi4py_version

from gems import __version__
from gems.config.resolve import global_batch
from gems.config.schema import RunSpec
from gems.engine.checkpoint.saver import Saver
from gems.engine.evaluation.validator import Validator
from gems.engine.supervision.loggers import Loggers
from gems.engine.supervision.progress import Progress
from gems.engine.transport.mpi import Comm, allgather, library
from gems.errors import ConfigError
from gems.schedule.schedule import Schedule
from gems.trace import TracePart, root_attributes

CLOCK_ROUNDS = 10
CLOCK_POLL_S = 0.001


class StepResult(NamedTuple):
    """Begin and end of a step, and what is known of it on a rank: the loss on rank 0."""

    start_ns: int
    end_ns: int
    loss: float = math.nan
    grad_norm: float = math.nan
    learning_rate: float = math.nan


Step = Callable[[int], StepResult]


def check_ranks(spec: RunSpec, schedule: Schedule, comm: Comm) -> None:
    """Check the number of ranks and the digest of their schedule; collective.

    Raises:
        ConfigError: There are not partitions x replicas ranks, or two ranks have different
            schedules.
    """
    if comm.size != spec.world_size:
        raise ConfigError(
            "parallel",
            f"{spec.parallel.partitions} partitions x {spec.parallel.replicas} replicas",
            f"needs {spec.world_size} ranks and was started with {comm.size}",
            f"start {spec.world_size} ranks",
        )
    digests = allgather(comm, schedule.digest())
    for rank, digest in enumerate(digests):
        if digest != digests[0]:
            raise ConfigError(
                "schedule",
                schedule.name,
                f"rank {rank} has another schedule than rank 0 ({digest[:8]}, not"
                f" {digests[0][:8]})",
                "use the same code and run.yaml on all ranks",
            )


def run_steps(
    spec: RunSpec,
    rank: int,
    part: TracePart,
    progress_json: Path,
    saver: Saver,
    first_step: int,
    run_step: Step,
    losses: list[float] | None = None,
    loggers: Loggers | None = None,
    validator: Validator | None = None,
) -> bool:
    """Run the steps from `first_step` on, and return whether the run stops on request; collective.

    Rank 0 shows the progress, appends each loss to `losses` and hands it to `loggers` with the
    metrics of a validation; an emulated run has none, and returns NaN.
    """
    images = global_batch(spec)
    num_steps = spec.train.steps
    progress = (
        Progress(spec.name, num_steps, images, progress_json, first_step) if rank == 0 else None
    )
    with contextlib.nullcontext() if progress is None else contextlib.closing(progress):
        for step in range(first_step, num_steps):
            saver.begin()
            done = run_step(step)
            is_warmup = step - first_step < spec.benchmark.skip_steps
            recipe = {"grad_norm": done.grad_norm, "learning_rate": done.learning_rate}
            span = done.start_ns, done.end_ns
            part.add(
                "rank_steps", (rank, step, *span, images, done.loss, is_warmup, *recipe.values())
            )
            part.flush()
            metrics = {} if validator is None else validator.after(step + 1)
            if progress is not None:
                if losses is not None:
                    losses.append(done.loss)
                if loggers is not None:
                    step_s = (done.end_ns - done.start_ns) / 1e9
                    loggers.log(
                        step + 1, {"train_loss": done.loss, "step_s": step_s, **recipe, **metrics}
                    )
                progress.show(step + 1, done.loss, done.learning_rate)
            if saver.end(step + 1, losses or (), None if progress is None else progress.show_error):
                return True
            if validator is not None and validator.is_over:
                break
    return False


def trace_attributes(
    source: str, signature: str, comm: Comm, device: str, **versions: str
) -> dict[str, object]:
    """Return the root attributes of a rank's trace part; `versions` are those of more libraries."""
    versions = {
        "gems": __version__,
        **versions,
        "mpi4py": mpi4py_version,
        "mpi": library(),
        "h5py": h5py.__version__,
        "numpy": np.__version__,
    }
    return root_attributes(
        source,
        signature,
        comm.size,
        hostname=socket.gethostname(),
        device=device,
        versions=[f"{key} {value}" for key, value in versions.items()],
        clock="perf_counter_ns",
    )


def schedule_record(schedule: Schedule) -> dict[str, object]:
    """Return the entries of result.json about the schedule."""
    return {
        "schedule_sha256": schedule.digest(),
        "schedule_rows": [" ".join(map(str, row)) for row in schedule.rows],
    }


def measure_offset(comm: Comm, prefix: str) -> dict[str, int]:
    """Measure this rank's clock minus rank 0's; collective.

    The fastest of some round trips counts, and half of it bounds the error (Cristian 1989). The
    offset is measured at the start and at the end of a run, since clocks drift.

    Returns:
        Attributes of a trace part: the offset, its error, and the time of this rank's clock.
    """
    offset = 0
    error = 0
    if comm.rank == 0:
        for rank in range(1, comm.size):
            best = (1 << 62, 0)
            for _ in range(CLOCK_ROUNDS):
                asked = time.perf_counter_ns()
                comm.send(None, rank, 1)
                theirs = comm.recv(source=rank, tag=1)
                trip = time.perf_counter_ns() - asked
                best = min(best, (trip, theirs - (asked + trip // 2)))
            comm.send(best, rank, 2)
    else:
        while not comm.Iprobe(
            source=0, tag=1
        ):  # ranks that spin here would keep others from their cores
            time.sleep(CLOCK_POLL_S)
        for _ in range(CLOCK_ROUNDS):
            comm.recv(source=0, tag=1)
            comm.send(time.perf_counter_ns(), 0, 1)
        trip, offset = comm.recv(source=0, tag=2)
        error = trip // 2
    return {
        f"{prefix}_offset_ns": offset,
        f"{prefix}_error_ns": error,
        f"{prefix}_at_ns": time.perf_counter_ns(),
    }
