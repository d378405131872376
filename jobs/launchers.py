"""How ranks are started, by name: from a job's resources to a command line."""

from __future__ import annotations

import sys
from collections.abc import Callable

from gems.ranks import mpiexec_argv
from gems.runfolder import RunFolder
from jobs.spec import SIMULATED, JobSpec

Launcher = Callable[[JobSpec, RunFolder], list[str]]


def command(job: JobSpec, folder: RunFolder) -> list[str]:
    """Gives the command line that runs all ranks of a job.

    Raises:
        ConfigError: the launcher is not there.
    """
    return LAUNCHERS[job.launcher](job, folder)


def rank_program(job: JobSpec, folder: RunFolder) -> list[str]:
    """Gives the command line of one rank."""
    return [*job.python, "-m", "gems.engine.run", str(folder.path)]


def by_mpiexec(job: JobSpec, folder: RunFolder) -> list[str]:
    """Gives the command line for ranks on this machine, each with a witness of its end.

    Raises:
        ConfigError: there is no mpiexec.
    """
    witness = [sys.executable, "-m", "gems.witness", str(folder.path)]
    return mpiexec_argv(job.tasks, [*witness, *rank_program(job, folder)])


def by_srun(job: JobSpec, folder: RunFolder) -> list[str]:
    """Gives the command line for one step of all ranks inside a SLURM allocation.

    Tasks a node are said because a block distribution would fill the first nodes, CPUs a task because srun
    does not take sbatch's since 22.05. All GPUs of a node are visible to each of its ranks, which choose by
    local rank: with GPUs bound to tasks, CUDA IPC between ranks fails. One bad rank ends the step.
    """
    return [
        "srun",
        *_shape(job, job.tasks_per_node),
        f"--cpus-per-task={job.cpus_per_task}",
        *([f"--mpi={job.mpi}"] if job.mpi else []),
        "--kill-on-bad-exit=1",
        "--wait=60",
        "--label",
        "--unbuffered",
        *([f"--gpus-per-node={job.gpus_per_node}", "--gpu-bind=none"] if job.gpus_per_node else []),
        *job.srun,
        *rank_program(job, folder),
    ]


def by_simulator(job: JobSpec, folder: RunFolder) -> list[str]:
    """Gives the command line of the one process that simulates all ranks."""
    return [*job.python, "-m", "gems.simulated", str(folder.path)]


def sweep_by_srun(job: JobSpec) -> list[str]:
    """Gives the command line that removes stale shared-memory files on every node of an allocation."""
    return [
        "srun",
        *_shape(job, 1),
        "--cpus-per-task=1",
        "--mpi=none",
        *job.python,
        "-m",
        "gems.shared_memory",
    ]


def _shape(job: JobSpec, tasks_per_node: int) -> list[str]:
    tasks = job.nodes * tasks_per_node
    return [f"--nodes={job.nodes}", f"--ntasks={tasks}", f"--ntasks-per-node={tasks_per_node}"]


LAUNCHERS: dict[str, Launcher] = {"mpiexec": by_mpiexec, "srun": by_srun, SIMULATED: by_simulator}
