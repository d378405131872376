"""The code that real and emulated runs share: first checks, the loop over steps, trace facts."""

from __future__ import annotations

import contextlib
import math
import socket
import time
from abc import ABC, abstractmethod
from typing import NamedTuple

import h5py
import numpy as np
from mpi4py import __version__ as mpi4py_version

from gems import __version__
from gems.engine.checkpoint.resume import find_start
from gems.engine.checkpoint.saver import Saver
from gems.engine.progress import Progress
from gems.engine.transport.mpi import Comm, allgather, library
from gems.errors import ConfigError
from gems.plan.rank_plan import RankPlan
from gems.runs.folder import RunFolder
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


def check_ranks(plan: RankPlan, comm: Comm) -> None:
    """Check the number of ranks and the digest of their schedule; collective.

    Raises:
        ConfigError: There are not partitions x replicas ranks, or two ranks have different
            schedules.
    """
    spec = plan.spec
    schedule = plan.schedule
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


class SteppedRun(ABC):
    """A run on one rank, real or emulated: its steps are traced, shown and saved.

    Attributes:
        start: Where this attempt begins.
        losses: On rank 0, the loss of each step; NaN if the run is emulated.
        saver: Opened by the subclass.
        is_over: No further step is needed.
    """

    saver: Saver
    is_over = False

    def __init__(self, plan: RankPlan, folder: RunFolder, comm: Comm, part: TracePart) -> None:
        """Find the checkpoint to continue from; collective.

        Raises:
            ConfigError: The run cannot continue from what is there.
        """
        self.plan = plan
        self.folder = folder
        self.comm = comm
        self.part = part
        self.start = find_start(plan.spec, folder, comm)
        self.losses: list[float] = []

    @abstractmethod
    def step(self, step: int) -> StepResult:
        """Run one step; collective."""

    def after(self, num_steps: int, done: StepResult) -> None:  # noqa: B027, emulated: nothing
        """Act on the result of a step when `num_steps` are done; collective."""

    def run_steps(self) -> bool:
        """Run the steps that are left; return whether the run stops on request; collective."""
        spec = self.plan.spec
        images = spec.parallel.global_batch
        first = self.start.step
        with contextlib.ExitStack() as stack:
            progress = None
            if self.comm.rank == 0:
                progress = Progress(
                    spec.name, spec.train.steps, images, self.folder.progress_json, first
                )
                stack.callback(progress.close)
            for step in range(first, spec.train.steps):
                self.saver.begin()
                done = self.step(step)
                is_warmup = step - first < spec.benchmark.skip_steps
                self.part.add(
                    "rank_steps",
                    (
                        self.comm.rank,
                        step,
                        done.start_ns,
                        done.end_ns,
                        images,
                        done.loss,
                        is_warmup,
                        done.grad_norm,
                        done.learning_rate,
                    ),
                )
                self.part.flush()
                self.after(step + 1, done)
                if progress is not None:
                    self.losses.append(done.loss)
                    progress.show(step + 1, done.loss, done.learning_rate)
                show_error = None if progress is None else progress.show_error
                if self.saver.end(step + 1, self.losses, show_error):
                    return True
                if self.is_over:
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
        "schedule_rows": [" ".join(map(str, actions)) for actions in schedule.rank_schedules],
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
                sent_ns = time.perf_counter_ns()
                comm.send(None, rank, 1)
                theirs = comm.recv(source=rank, tag=1)
                trip = time.perf_counter_ns() - sent_ns
                best = min(best, (trip, theirs - (sent_ns + trip // 2)))
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
