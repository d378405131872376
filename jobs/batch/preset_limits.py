"""Check a job against the limits of its preset, before anything is queued."""

from __future__ import annotations

from collections.abc import Callable
from fnmatch import fnmatchcase

from gems.config.cluster import QueueLimit, num_bound
from gems.config.cluster_presets import host_names
from gems.config.schema import ClusterConfig
from gems.errors import ConfigError, TryLaterError
from gems.runs.owner import own_job_id
from jobs.batch.resources import JobSpec

IF_CHANGED = "if the site has changed it, set cluster.limits=[]"
# counts the jobs of this user in a partition and a qos
NumQueued = Callable[[str | None, str | None], int | None]


def check_limits(job: JobSpec, host_bytes: int | None) -> None:
    """Raise ConfigError if a job exceeds a limit of its preset.

    The limits are a node's CPUs and memory, and the job's size and time. `host_bytes` is the host
    memory that offloaded activations of a node may take.
    """
    if not job.is_batch:
        return
    cluster = job.cluster
    cpus = job.cpus_per_node
    usable = cluster.usable_cpus_per_node
    if usable is not None and cpus > usable:
        text = (
            f"times {job.tasks_per_node} ranks a node is {cpus}, and jobs may use {usable} CPUs of"
            " a node"
        )
        fitting = (
            f"at most {usable // job.tasks_per_node}, or " if usable >= job.tasks_per_node else ""
        )
        advice = f"use {fitting}fewer cluster.ranks_per_node"
        raise ConfigError("cluster.cpus_per_rank", job.cpus_per_task, text, advice)
    memory = cluster.node_memory_bytes
    if host_bytes is not None and memory is not None and host_bytes > memory:
        text = f"must be at most cluster.node_memory_bytes={memory}, the memory of a node"
        raise ConfigError("machine.host_bytes", host_bytes, text)
    places = num_bound(cluster.cpu_bind)
    if places is not None and places < job.tasks_per_node:
        text = f"names {places} places for {job.tasks_per_node} ranks of a node"
        raise ConfigError(
            "cluster.cpu_bind", cluster.cpu_bind, text, "name one for each: ranks would share CPUs"
        )
    nodes = job.allocated_nodes
    limit = queue_limit(cluster, nodes)
    if limit is None:
        return
    hours = nodes * job.minutes / 60
    text = ""
    if limit.minutes is not None and job.minutes > limit.minutes:
        most = f"at most {limit.minutes} minutes for jobs of {_scope(limit)}"
        text = f"cluster {cluster.name} allows {most}"
    elif limit.node_hours is not None and hours > limit.node_hours:
        most = f"{_scope(limit)} take at most {limit.node_hours:g}"
        text = f"times {nodes} nodes is {hours:g} node-hours, and {most}"
    if text:
        raise ConfigError("cluster.minutes", job.minutes, text, f"ask for less; {IF_CHANGED}")


def is_on_site(cluster: ClusterConfig) -> bool:
    """Return whether this machine's batch system is the one of the preset.

    A preset that names no hosts matches any machine, and so does every preset inside a job.
    """
    patterns = [pattern.lower() for pattern in cluster.hosts]
    is_named = any(fnmatchcase(name, pattern) for name in host_names() for pattern in patterns)
    return not patterns or is_named or own_job_id() is not None


def check_queue(job: JobSpec, num_queued: NumQueued) -> None:
    """Raise TryLaterError if this user already has as many queued jobs as the preset allows.

    If the queue does not answer, nothing is raised.
    """
    limits = [
        queue_limit(job.cluster, job.allocated_nodes),
        *(row for row in _rows(job.cluster) if not row.is_of_size),
    ]
    for limit in limits:
        if limit is None or limit.queued_jobs is None:
            continue
        queued = num_queued(limit.partition, limit.qos)
        if queued is None or queued < limit.queued_jobs:
            continue
        text = (
            f"{queued} jobs are queued, and at most {limit.queued_jobs} are allowed of"
            f" {_scope(limit)}"
        )
        advice = f"wait for one to end; {IF_CHANGED}"
        raise TryLaterError("cluster", job.cluster.name, text, advice)


def _rows(cluster: ClusterConfig) -> list[QueueLimit]:
    qos = cluster.sbatch.get("qos")
    return [
        row
        for row in cluster.limits
        if row.partition in (None, cluster.partition) and row.qos in (None, qos)
    ]


def queue_limit(cluster: ClusterConfig, nodes: int) -> QueueLimit | None:
    """Return the preset's first limit for a job on so many nodes.

    Return None if the preset has no limit for the partition and qos. Rows that only count queued
    jobs apply to jobs of any size.

    Raises:
        ConfigError: The partition and qos have limits, but none allows so many nodes.
    """
    rows = _rows(cluster)
    rows = [row for row in rows if row.is_of_size] or rows
    for row in rows:
        if row.min_nodes <= nodes and (row.max_nodes is None or nodes <= row.max_nodes):
            return row
    if not rows:
        return None
    text = f"cluster {cluster.name} allows jobs of " + " or ".join(map(_scope, rows))
    advice = f"change the ranks, cluster.partition or cluster.sbatch.qos; {IF_CHANGED}"
    raise ConfigError("cluster.nodes", nodes, text, advice)


def _scope(limit: QueueLimit) -> str:
    """Describe the jobs that a limit applies to, such as `3-512 nodes in partition normal`."""
    nodes = (
        f"{limit.min_nodes} or more"
        if limit.max_nodes is None
        else f"{limit.min_nodes}-{limit.max_nodes}"
    )
    where = [
        f"{word} {name}"
        for word, name in (("partition", limit.partition), ("qos", limit.qos))
        if name
    ]
    return f"{nodes} nodes" + (f" in {' and '.join(where)}" if where else "")
