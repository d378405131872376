"""What a run asks of the machine: nodes, tasks, GPUs, minutes, and how its ranks are started."""

from __future__ import annotations

import shlex
import sys
from dataclasses import dataclass

from gems.config import RunSpec
from gems.errors import ConfigError

SIMULATED = "simulated"


@dataclass(frozen=True, slots=True)
class JobSpec:
    """The resources of one run, one task a rank; `python` is the words that start the ranks' interpreter.

    A simulated run has no ranks: it is one process here, whatever the cluster.
    """

    name: str
    launcher: str
    nodes: int
    tasks: int
    tasks_per_node: int
    cpus_per_task: int
    gpus_per_node: int
    minutes: int
    mpi: str | None
    srun: tuple[str, ...]
    python: tuple[str, ...]

    @property
    def gpus(self) -> int:
        """Number of GPUs of the whole allocation, idle ones too: that is what a site charges."""
        return self.nodes * self.gpus_per_node

    @property
    def gpu_hours(self) -> float:
        """GPU-hours when the job takes all its minutes."""
        return self.gpus * self.minutes / 60

    def summary(self) -> str:
        """Gives the resources in one line."""
        return (
            f"nodes {self.nodes}, tasks {self.tasks}, tasks per node {self.tasks_per_node}, "
            f"CPUs per task {self.cpus_per_task}, GPUs {self.gpus}, minutes {self.minutes}, "
            f"GPU-hours {self.gpu_hours:g}"
        )


def job_spec(spec: RunSpec) -> JobSpec:
    """Derives the resources of a resolved run.

    Raises:
        ConfigError: more than one node for mpiexec, or a cluster.python that is not a command line.
    """
    cluster = spec.cluster
    nodes = cluster.nodes or 1
    if spec.machine.kind == SIMULATED:
        return JobSpec(
            name=spec.name, launcher=SIMULATED, nodes=1, tasks=1, tasks_per_node=1, cpus_per_task=1,
            gpus_per_node=0, minutes=cluster.minutes, mpi=None, srun=(), python=(sys.executable,),
        )  # fmt: skip
    if cluster.launcher == "mpiexec" and nodes > 1:
        raise ConfigError(
            "cluster.nodes", nodes, "must be 1 with cluster.launcher=mpiexec, which starts ranks here",
            "use cluster=slurm",
        )  # fmt: skip
    return JobSpec(
        name=spec.name,
        launcher=cluster.launcher,
        nodes=nodes,
        tasks=spec.world_size,
        tasks_per_node=cluster.ranks_per_node or spec.world_size,
        cpus_per_task=cluster.cpus_per_rank,
        gpus_per_node=cluster.gpus_per_node,
        minutes=cluster.minutes,
        mpi=cluster.mpi,
        srun=tuple(cluster.srun),
        python=_python_words(cluster.python),
    )


def _python_words(command: str | None) -> tuple[str, ...]:
    if command is None:
        return (sys.executable,)
    try:
        words = tuple(shlex.split(command))
    except ValueError as error:
        raise ConfigError("cluster.python", command, f"is no command line ({error})") from error
    if not words:
        raise ConfigError("cluster.python", repr(command), "must name an interpreter", "or leave it out")
    return words
