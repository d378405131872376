"""The resources of a run: nodes, tasks, GPUs, minutes, and how its ranks are started."""

from __future__ import annotations

import shlex
import sys
from dataclasses import dataclass

from gems.config.schema import ClusterConfig, RunSpec
from gems.errors import ConfigError

SIMULATED = "simulated"
PROBE = "probe"
BATCH = ("srun", "ibrun")  # launchers that work inside an allocation


@dataclass(frozen=True, slots=True)
class Container:
    """An image that ranks run in, the runtime that opens it, and the runtime's own options."""

    runtime: str
    image: str
    options: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class JobSpec:
    """The resources of one run, one task per rank; `python` is the command that starts the ranks' interpreter.

    A simulated run has no ranks: it is one process here, whatever the cluster. With `is_probe` ranks only report their
    placement. With `snapshot` everything is started from the code's archive in the run folder.
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
    gpu_request: str = "none"
    gpu_bind: str | None = None
    cpu_bind: str | None = None
    container: Container | None = None
    charge_per: str | None = None
    charge_rate: float | None = None
    charge_unit: str | None = None
    snapshot: bool = False
    is_probe: bool = False

    @property
    def is_batch(self) -> bool:
        """Whether it is a job of SLURM's."""
        return self.launcher in BATCH

    @property
    def gpu_option(self) -> tuple[str, str] | None:
        """The option, the same for sbatch and srun, that asks for the GPUs, and its value."""
        if not self.gpus_per_node or self.gpu_request == "none":
            return None
        values = {"gpus-per-task": "1", "gres": f"gpu:{self.gpus_per_node}"}
        return self.gpu_request, values.get(self.gpu_request, str(self.gpus_per_node))

    @property
    def gpus(self) -> int:
        """Number of GPUs of the whole allocation, idle ones too: that is what a site charges."""
        return self.nodes * self.gpus_per_node

    @property
    def gpu_hours(self) -> float:
        """GPU-hours if the job takes all its minutes."""
        return self.gpus * self.minutes / 60

    @property
    def charge(self) -> float | None:
        """The site's charge if the job takes all its minutes, in its own unit; None if the rate is not known."""
        if self.charge_rate is None:
            return None
        hours = self.gpu_hours if self.charge_per == "gpu-hour" else self.nodes * self.minutes / 60
        return hours * self.charge_rate

    def summary(self) -> str:
        """Return the resources in one line."""
        charge = "" if self.charge is None else f", charge {self.charge:g} {self.charge_unit or ''}".rstrip()
        return (
            f"nodes {self.nodes}, tasks {self.tasks}, tasks per node {self.tasks_per_node}, "
            f"CPUs per task {self.cpus_per_task}, GPUs {self.gpus}, minutes {self.minutes}, "
            f"GPU-hours {self.gpu_hours:g}{charge}"
        )


def job_spec(spec: RunSpec) -> JobSpec:
    """Derive the resources of a resolved run.

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
        python=_python_words(cluster.python, default="python3" if cluster.container_image else sys.executable),
        gpu_request=cluster.gpu_request,
        gpu_bind=cluster.gpu_bind,
        cpu_bind=cluster.cpu_bind,
        container=_container(cluster),
        charge_per=cluster.charge_per,
        charge_rate=cluster.charge_rate,
        charge_unit=cluster.charge_unit,
        snapshot=cluster.archive_code and cluster.launcher in BATCH,
        is_probe=spec.machine.kind == PROBE,
    )


def _container(cluster: ClusterConfig) -> Container | None:
    if cluster.container_image is None:
        return None
    return Container(cluster.container, cluster.container_image, tuple(cluster.container_options))


def _python_words(command: str | None, default: str) -> tuple[str, ...]:
    if command is None:
        return (default,)
    try:
        words = tuple(shlex.split(command))
    except ValueError as error:
        raise ConfigError("cluster.python", command, f"is not a command line ({error})") from error
    if not words:
        raise ConfigError("cluster.python", repr(command), "must name an interpreter", "or leave it out")
    return words
