"""The cluster preset: how a site starts ranks, what a node of it has, and what it allows. Presets are data in `conf/cluster/`."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

from gems.errors import ConfigError, nearest, one_of


@dataclass(slots=True)
class QueueLimit:
    """What a site allows to jobs of some size: minutes, and jobs that a user may have queued.

    A row counts for jobs of `partition` and `qos` (None: of any) on `min_nodes` to `max_nodes` nodes (None: no end).
    """

    partition: str | None = None
    qos: str | None = None
    min_nodes: int = 1
    max_nodes: int | None = None
    minutes: int | None = None
    queued_jobs: int | None = None


@dataclass(slots=True)
class ClusterConfig:
    """How ranks are started: on this machine by mpiexec, or by SLURM with the site's habits.

    `hosts` are patterns of the names of login nodes, by which `cluster=auto` finds the preset. `usable_cpus_per_node` are
    the CPUs of a node that jobs may use, as the site's SLURM counts them, and `node_memory_bytes` its memory.

    `gpu_request` is the option that asks for GPUs: gpus-per-node, gpus-per-task, gres, or none where they come with the
    queue. `gpu_bind` and `cpu_bind` are srun's. `device_order` gives the GPU of each local rank, among those visible.
    `account_suffix` is added to the account unless it ends so, and `supports_mem_option` says whether the site takes `--mem`.

    `container` is the site's runtime (none, apptainer, singularity, pyxis), used with its own `container_options` once a
    `container_image` is given; then `python` is the interpreter inside. `limits` are read in their order: the first that fits a job counts.
    `charge_rate` is what a `charge_per` (gpu-hour or node-hour) costs, in `charge_unit`. `runs_per_job` is how many points of
    a study, each of one node at most, go into one job, one after another.

    With `archive_code` a job runs the code as it was when it was submitted, from the archive in its run folder; without, the
    code as it lies there by then. `exclude` are nodes not to use. Jobs that may take more than `confirm_above_gpu_hours`
    GPU-hours are submitted after a question only (None: without one). `signal_before_end_s` is how long before the time limit
    the run is asked to save and stop (0: never), and `max_requeues` how often it then starts again by itself.
    """

    name: str = "local"
    launcher: str = "mpiexec"
    hosts: list[str] = field(default_factory=list)
    nodes: int | None = None
    ranks_per_node: int | None = None
    cpus_per_rank: int = 1
    gpus_per_node: int = 0
    usable_cpus_per_node: int | None = None
    node_memory_bytes: int | None = None
    minutes: int = 60
    partition: str | None = None
    account: str | None = None
    account_suffix: str | None = None
    mpi: str | None = None
    python: str | None = None
    gpu_request: str = "gpus-per-node"
    gpu_bind: str | None = "none"
    cpu_bind: str | None = None
    device_order: list[int] = field(default_factory=list)
    supports_mem_option: bool = True
    modules: list[str] = field(default_factory=list)
    setup: list[str] = field(default_factory=list)
    environment: dict[str, str] = field(default_factory=dict)
    sbatch: dict[str, Any] = field(default_factory=dict)
    srun: list[str] = field(default_factory=list)
    container: str = "none"
    container_image: str | None = None
    container_options: list[str] = field(default_factory=list)
    limits: list[QueueLimit] = field(default_factory=list)
    charge_per: str | None = None
    charge_rate: float | None = None
    charge_unit: str | None = None
    archive_code: bool = True
    exclude: list[str] = field(default_factory=list)
    runs_per_job: int = 1
    confirm_above_gpu_hours: float | None = None
    signal_before_end_s: int = 120
    max_requeues: int = 3

    def __post_init__(self) -> None:
        self.limits = [_limit(number, row) for number, row in enumerate(self.limits)]

    @property
    def full_account(self) -> str | None:
        """The account with the site's suffix."""
        suffix = self.account_suffix or ""
        if self.account is None or self.account.endswith(suffix):
            return self.account
        return f"{self.account}{suffix}"


def _limit(number: int, row: QueueLimit | dict[str, Any]) -> QueueLimit:
    """Return a row of `limits`, that is a mapping where a run.yaml was read."""
    if isinstance(row, QueueLimit):
        return row
    key = f"cluster.limits[{number}]"
    if not isinstance(row, dict):
        raise ConfigError(key, row, "must be a mapping of keys to values")
    known = [each.name for each in fields(QueueLimit)]
    for name in row:
        if name not in known:
            raise ConfigError(f"{key}.{name}", row[name], one_of(nearest(str(name), known)))
    return QueueLimit(**row)
