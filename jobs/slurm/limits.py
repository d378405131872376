"""What a site allows, checked before anything is queued: a node's CPUs and memory, job size, walltime, jobs in the queue."""

from __future__ import annotations

from gems.config.cluster import QueueLimit, num_bound
from gems.config.schema import ClusterConfig, RunSpec
from gems.errors import ConfigError
from jobs.slurm.jobs import num_queued
from jobs.slurm.resources import JobSpec

IF_CHANGED = "where the site has changed it, set cluster.limits=[]"


def check_limits(spec: RunSpec, job: JobSpec) -> None:
    """Check a job of SLURM's against its preset.

    Raises:
        ConfigError: more than the site allows, with the limit.
    """
    if not job.is_batch:
        return
    _check_node(spec, job)
    _check_binding(job)
    limit = limit_of(spec.cluster, job.nodes)
    if limit is not None and limit.minutes is not None and job.minutes > limit.minutes:
        raise ConfigError(
            "cluster.minutes", job.minutes,
            f"cluster {spec.cluster.name} allows at most {limit.minutes} to {_scope(limit)}",
            f"ask for less; {IF_CHANGED}",
        )  # fmt: skip


def check_queue(spec: RunSpec, job: JobSpec) -> None:
    """Check that the site takes one more job of this user's; where the queue cannot be asked, SLURM will.

    Raises:
        ConfigError: as many as it allows are queued.
    """
    limit = limit_of(spec.cluster, job.nodes)
    if limit is None or limit.queued_jobs is None:
        return
    queued = num_queued(limit.partition, limit.qos)
    if queued is not None and queued >= limit.queued_jobs:
        raise ConfigError(
            "cluster", spec.cluster.name,
            f"{queued} jobs are queued, and {limit.queued_jobs} are allowed to {_scope(limit)}",
            f"wait for one to end; {IF_CHANGED}",
        )  # fmt: skip


def limit_of(cluster: ClusterConfig, nodes: int) -> QueueLimit | None:
    """Return the first limit that fits a job on so many nodes; None where the preset knows none of its partition and qos.

    Raises:
        ConfigError: limits of its partition and qos are known, and none allows so many nodes.
    """
    qos = cluster.sbatch.get("qos")
    rows = [row for row in cluster.limits if row.partition in (None, cluster.partition) and row.qos in (None, qos)]
    for row in rows:
        if row.min_nodes <= nodes and (row.max_nodes is None or nodes <= row.max_nodes):
            return row
    if not rows:
        return None
    raise ConfigError(
        "cluster.nodes", nodes, f"cluster {cluster.name} allows " + " or ".join(_scope(row) for row in rows),
        f"change the ranks, cluster.partition or cluster.sbatch.qos; {IF_CHANGED}",
    )  # fmt: skip


def _check_node(spec: RunSpec, job: JobSpec) -> None:
    cluster = spec.cluster
    cpus, usable = job.tasks_per_node * job.cpus_per_task, cluster.usable_cpus_per_node
    if usable is not None and cpus > usable:
        raise ConfigError(
            "cluster.cpus_per_rank", job.cpus_per_task,
            f"times {job.tasks_per_node} ranks a node is {cpus}, and jobs may use {usable} CPUs of a node",
            f"use at most {usable // job.tasks_per_node}, or fewer cluster.ranks_per_node"
            if usable >= job.tasks_per_node
            else "use fewer cluster.ranks_per_node",
        )  # fmt: skip
    host, memory = spec.machine.host_bytes, cluster.node_memory_bytes
    if host is not None and memory is not None and host > memory:
        raise ConfigError(
            "machine.host_bytes", host, f"must be at most cluster.node_memory_bytes={memory}, what a node has"
        )


def _check_binding(job: JobSpec) -> None:
    places = num_bound(job.cpu_bind)
    if places is not None and places < job.tasks_per_node:
        raise ConfigError(
            "cluster.cpu_bind", job.cpu_bind, f"names {places} places for {job.tasks_per_node} ranks of a node",
            "name one for each: ranks would share CPUs",
        )  # fmt: skip


def _scope(limit: QueueLimit) -> str:
    """Describe the jobs that a limit is for: 3 to 512 nodes of partition normal."""
    nodes = f"{limit.min_nodes} " + ("or more" if limit.max_nodes is None else f"to {limit.max_nodes}")
    where = [f"{word} {name}" for word, name in (("partition", limit.partition), ("qos", limit.qos)) if name]
    return f"{nodes} nodes" + (f" of {', '.join(where)}" if where else "")
