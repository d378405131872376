"""The resources of a run: nodes, tasks, GPUs, minutes, and how its ranks are started."""

from __future__ import annotations

import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, Self

from gems.config.cluster import STAGED
from gems.config.schema import ClusterConfig, RunSpec
from gems.errors import ConfigError
from gems.runs.owner import own_job_id

SIMULATED = "simulated"
MPIEXEC = "mpiexec"
SITE_MPIEXECS = ("hydra", "pals")  # they find the nodes of a PBS or Flux job
CODE, IMAGE = STAGED
# launchers that only work in jobs of one batch system
OF_SYSTEM = {"srun": "slurm", "ibrun": "slurm", "flux": "flux"}
# environment variable of a job with the token of its submission
TOKEN_VARIABLE = "GEMS_SUBMISSION"


class Work(Protocol):
    """The work of a batch script: launch the runs of `run_folders` one after another."""

    @property
    def run_folders(self) -> tuple[str, ...]:
        """The run folders."""

    def __call__(self) -> None:
        """Run the job."""

    def with_token(self, token: str) -> Self:
        """Return the same work for the submission with this token."""


@dataclass(frozen=True, slots=True)
class JobSpec:
    """The resources of one run, with one task per rank.

    A simulated run has no ranks: it is one process here, for every cluster.

    Attributes:
        runs_dir: The folder of run folders, as the user gave it.
        python: The command that starts the ranks' interpreter.
        snapshot: Whether everything is started from the code archive in the run folder.
        checks_placement: Whether ranks only report their placement.
        after: The number of a job that must have ended, in any state, before this one starts.
        staged: The files of which each node has a copy.
        nodelist: The nodes of the allocation that the ranks run on; if empty, SLURM chooses.
    """

    name: str
    runs_dir: str
    launcher: str
    cluster: ClusterConfig
    nodes: int
    tasks: int
    tasks_per_node: int
    cpus_per_task: int
    gpus_per_node: int
    python: tuple[str, ...]
    minutes: int
    snapshot: bool = False
    checks_placement: bool = False
    after: str | None = None
    staged: tuple[str, ...] = ()
    nodelist: tuple[str, ...] = ()

    def stage_path(self, what: str) -> str:
        """Return the path of a copy on each node; it contains the number of this job."""
        suffix = ".zip" if what == CODE else Path(self.cluster.container_image or "").suffix
        return f"{self.cluster.stage_dir.rstrip('/')}/gems-{own_job_id()}-{what}{suffix}"

    @property
    def is_batch(self) -> bool:
        """Whether it is a job of a batch system, not a run on this machine."""
        return _is_batch(self.launcher, self.cluster)

    @property
    def gpu_option(self) -> tuple[str, str] | None:
        """The option of sbatch and srun that requests GPUs, with its value, or None."""
        request = self.cluster.gpu_request
        if not self.gpus_per_node or request == "none":
            return None
        values = {"gpus-per-task": "1", "gres": f"gpu:{self.gpus_per_node}"}
        return request, values.get(request, str(self.gpus_per_node))

    @property
    def cpus_per_node(self) -> int:
        """The CPUs that the ranks of a node use."""
        return self.tasks_per_node * self.cpus_per_task

    @property
    def requested_gpus(self) -> int:
        """The GPUs of a node that an option requests."""
        return self.gpus_per_node if self.gpu_option is not None else 0

    @property
    def allocated_nodes(self) -> int:
        """The nodes of the allocation: those of the ranks and the spare ones."""
        return self.nodes + self.cluster.spare_nodes

    @property
    def allocated_tasks_per_node(self) -> int:
        """The tasks of a node for which the allocation has CPUs.

        They are enough for the ranks on the smallest number of nodes.
        """
        fewest = min([self.nodes, *self.cluster.smaller_nodes(self.nodes)])
        return max(
            self.tasks_per_node, min(-(-self.tasks // fewest), self.cluster.max_ranks_per_node)
        )

    @property
    def gpus(self) -> int:
        """The GPUs of the whole allocation, including idle ones, which sites charge too."""
        return self.allocated_nodes * self.gpus_per_node

    @property
    def gpu_hours(self) -> float:
        """The GPU-hours if the job uses all its minutes."""
        return self.gpus * self.minutes / 60

    @property
    def charge(self) -> float | None:
        """The site's charge if the job uses all its minutes, or None if the rate is unknown."""
        if self.cluster.charge_rate is None or self.launcher == SIMULATED:
            return None
        hours = (
            self.gpu_hours
            if self.cluster.charge_per == "gpu-hour"
            else self.allocated_nodes * self.minutes / 60
        )
        return hours * self.cluster.charge_rate

    @property
    def charge_unit(self) -> str | None:
        """The unit of the site's charge."""
        return self.cluster.charge_unit if self.launcher != SIMULATED else None

    @property
    def has_early_signal(self) -> bool:
        """Whether the signal before the end would come in the second half of the job."""
        return 0 < 2 * self.cluster.signal_before_end_s <= 60 * self.minutes

    def summary(self) -> str:
        """Return the resources in one line."""
        charge = (
            ""
            if self.charge is None
            else f", charge {self.charge:g} {self.charge_unit or ''}".rstrip()
        )
        spare = f" and {self.cluster.spare_nodes} spare" if self.cluster.spare_nodes else ""
        return (
            f"nodes {self.nodes}{spare}, tasks {self.tasks}, tasks per node {self.tasks_per_node}, "
            f"CPUs per task {self.cpus_per_task}, GPUs {self.gpus}, minutes {self.minutes}, "
            f"GPU-hours {self.gpu_hours:g}{charge}"
        )


def _is_batch(launcher: str, cluster: ClusterConfig) -> bool:
    """Return whether a launcher's ranks run in a job.

    cluster.scheduler=slurm alone does not mean a job: it is the default of every preset.
    """
    return launcher != SIMULATED and (
        cluster.scheduler != "slurm" or OF_SYSTEM.get(launcher) == "slurm"
    )


def _python(cluster: ClusterConfig) -> tuple[str, ...]:
    """Return the command that starts the ranks' interpreter; raise ConfigError if it is invalid."""
    if cluster.python is None:
        return (sys.executable,) if cluster.container_image is None else ("python3",)
    try:
        words = tuple(shlex.split(cluster.python))
    except ValueError as error:
        text = f"is not a command line ({error})"
        raise ConfigError("cluster.python", cluster.python, text) from error
    if not words:
        text = "must name an interpreter"
        raise ConfigError("cluster.python", repr(cluster.python), text, "or leave it out")
    return words


def job_spec(spec: RunSpec) -> JobSpec:
    """Return the resources of a run.

    Raises:
        ConfigError: Local ranks on several nodes, or an invalid cluster.python.
    """
    cluster = spec.cluster
    nodes = cluster.nodes or 1
    if not spec.machine.has_ranks:
        here = (sys.executable,)
        return JobSpec(
            spec.name, spec.runs_dir, SIMULATED, cluster, 1, 1, 1, 1, 0, here, cluster.minutes
        )
    system = OF_SYSTEM.get(cluster.launcher, cluster.scheduler)
    if system != cluster.scheduler:
        text = (
            f"starts ranks in jobs of cluster.scheduler={system} alone, and this one's is"
            f" {cluster.scheduler}"
        )
        raise ConfigError("cluster.launcher", cluster.launcher, text, "change one of them")
    is_batch = _is_batch(cluster.launcher, cluster)
    if nodes > 1 and (
        cluster.launcher == MPIEXEC or (cluster.launcher in SITE_MPIEXECS and not is_batch)
    ):
        text = f"must be 1 with cluster.launcher={cluster.launcher}, which starts ranks here"
        advice = (
            "cluster=slurm"
            if cluster.launcher == MPIEXEC
            else "cluster.launcher=srun, or cluster.scheduler=pbs"
        )
        raise ConfigError("cluster.nodes", nodes, text, f"use {advice}")
    tasks = spec.world_size
    return JobSpec(
        spec.name,
        spec.runs_dir,
        cluster.launcher,
        cluster,
        nodes,
        tasks,
        cluster.ranks_per_node or tasks,
        cluster.cpus_per_rank,
        cluster.gpus_per_node,
        _python(cluster),
        cluster.minutes,
        snapshot=cluster.archive_code and is_batch,
        checks_placement=spec.machine.is_probe,
    )
