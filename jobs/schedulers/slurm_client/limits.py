"""Check a job against a site's limits before anything is queued.

The limits come from the preset, and from what the site's SLURM answers now.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from fnmatch import fnmatchcase

from gems.config.cluster import QueueLimit, num_bound
from gems.config.cluster_presets import host_names
from gems.config.schema import ClusterConfig, RunSpec
from gems.errors import ConfigError, TryLaterError, nearest
from gems.runs.owner import own_job_id
from jobs.batch.command import CommandResult, SchedulerRefusedError, run_command
from jobs.batch.resources import JobSpec
from jobs.schedulers.slurm_client.environment import submission_environment
from jobs.schedulers.slurm_client.jobs import num_queued
from jobs.schedulers.slurm_client.site import UP, Accounts, Partition

IF_CHANGED = "if the site has changed it, set cluster.limits=[]"
OTHER = "or choose another cluster.partition"
TEST_LIMIT_S = 60.0
ESTIMATE = re.compile(
    r"Job \d+ to start at (?P<start>\S+)(?: using (?P<cpus>\d+) processors)?(?: on nodes"
    r" (?P<nodes>\S+))?"
)
# SLURM's names of limits on the number of jobs all contain this, such as
# QOSMaxSubmitJobPerUserLimit and AssocGrpSubmitJobsLimit. The policy is also named for limits of
# size and time; sbatch prints the names of those first.
QUEUE_FULL = re.compile(r"SubmitJob|temporarily unable to accept job")
POLICY = "Job violates accounting/QOS policy"
NAMED_LIMIT = re.compile(r"\b(?:QOS|Assoc|Partition)[A-Z]\w*")
# Messages of sbatch --test-only if nodes are drained, down or reserved. The first also appears if
# no such nodes exist.
NOT_NOW = re.compile(
    r"node configuration is not available|[Nn]odes? .*not available|nodes are busy|DOWN, DRAINED"
)
# counts the jobs of this user in a partition and a qos
NumQueued = Callable[[str | None, str | None], int | None]
CLOSED = ("DRAIN", "INACTIVE")  # states of partitions that take no jobs


def check_limits(spec: RunSpec, job: JobSpec) -> None:
    """Raise ConfigError if a job exceeds a limit of its preset.

    The limits are a node's CPUs and memory, and the job's size and time.
    """
    if not job.is_batch:
        return
    cluster = spec.cluster
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
    host = spec.machine.host_bytes
    memory = cluster.node_memory_bytes
    if host is not None and memory is not None and host > memory:
        text = f"must be at most cluster.node_memory_bytes={memory}, the memory of a node"
        raise ConfigError("machine.host_bytes", host, text)
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


def check_queue(spec: RunSpec, job: JobSpec, num_queued: NumQueued = num_queued) -> None:
    """Raise TryLaterError if this user already has as many queued jobs as the preset allows.

    If the queue does not answer, nothing is raised.
    """
    limits = [
        queue_limit(spec.cluster, job.allocated_nodes),
        *(row for row in _rows(spec.cluster) if not row.is_of_size),
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
        raise TryLaterError(
            "cluster", spec.cluster.name, text, f"wait for one to end; {IF_CHANGED}"
        )


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
        ConfigError: the partition and qos have limits, but none allows so many nodes.
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


def check_partitions(spec: RunSpec, job: JobSpec, partitions: Sequence[Partition]) -> str:
    """Check a job against the partitions that it may run in, and describe those that would take it.

    A quality of service may lift a partition's limits on minutes and nodes. If the job has one,
    these limits are left to SLURM.

    Raises:
        ConfigError: no partition would ever start the job; it has the reason of the first.
    """
    refusals = [next(_refusals(spec, job, partition), None) for partition in partitions]
    usable = [
        partition
        for partition, refusal in zip(partitions, refusals, strict=True)
        if refusal is None
    ]
    if not usable and refusals[0] is not None:
        raise refusals[0]
    return "; ".join(partition.describe() for partition in usable)


def shortage(job: JobSpec, partitions: Sequence[Partition]) -> str | None:
    """Return why none of some partitions could start a job now, though it may run there later.

    Return None if one of them could. A partition may be down, or too few of its nodes may be up
    because the others are drained, down or in maintenance.
    """
    reasons = []
    for found in partitions:
        states = sorted({kind.state for kind in found.kinds if kind.state not in UP})
        num_up = found.count(job.cpus_per_node, job.requested_gpus, (*UP, ""))
        if found.state == "DOWN":
            reasons.append(f"partition {found.name} is down")
        elif found.kinds and num_up < job.allocated_nodes:
            others = f" (others: {', '.join(states)})" if states else ""
            reasons.append(
                f"{num_up} of {job.allocated_nodes} nodes of partition {found.name} are up{others}"
            )
        else:
            return None
    return "; ".join(reasons) or None


def check_account(spec: RunSpec, accounts: Accounts) -> str:
    """Describe the account and quality of service of a run.

    Raises:
        ConfigError: SLURM would refuse one of them.
    """
    account = spec.cluster.full_account
    known = {name.lower(): name for name in accounts.qos}
    if account is None:
        return "your default account" if accounts.is_enforced else "none, and none is needed"
    if account.lower() not in known:
        if accounts.is_enforced:
            advice = f"nearest: {nearest(account.lower(), known, 1)[0]}"
            raise ConfigError(
                "cluster.account",
                account,
                f"you may charge {', '.join(sorted(accounts.qos))}",
                advice,
            )
        return f"{account}, unknown to SLURM, which does not enforce accounts"
    qos = spec.cluster.sbatch.get("qos")
    allowed = accounts.qos[known[account.lower()]]
    if qos is not None and allowed and str(qos) not in allowed and accounts.is_enforced:
        text = f"account {account} may use {', '.join(allowed)}"
        raise ConfigError(
            "cluster.sbatch.qos", qos, text, f"nearest: {nearest(str(qos), allowed, 1)[0]}"
        )
    return f"{account}{f', qos {qos}' if qos else ''}"


def _refusals(spec: RunSpec, job: JobSpec, found: Partition) -> Iterator[ConfigError]:
    """Yield the reasons why a partition refuses a job, the simplest first."""
    where = f"partition {found.name}"
    qos = spec.cluster.sbatch.get("qos")
    if found.state in CLOSED:
        text = f"takes no jobs now (state {found.state})"
        yield TryLaterError("cluster.partition", found.name, text, OTHER[3:])
    account = spec.cluster.full_account
    if account is not None:
        allowed, denied = (
            [name.lower() for name in names] for names in (found.accounts, found.denied_accounts)
        )
        if (allowed and account.lower() not in allowed) or account.lower() in denied:
            to = f"open to {', '.join(found.accounts)}" if allowed else f"closed to {account}"
            yield ConfigError("cluster.account", account, f"{where} is {to}", OTHER)
    if qos is not None and found.qos and str(qos) not in found.qos:
        yield ConfigError("cluster.sbatch.qos", qos, f"{where} takes {', '.join(found.qos)}", OTHER)
    for wanted, limit, key, reason, advice in _size_limits(job, found, is_lifted=qos is not None):
        if limit is not None and wanted > limit:
            value = job.cpus_per_task if key == "cpus_per_rank" else wanted
            yield ConfigError(f"cluster.{key}", value, reason, f"{advice}, {OTHER}")


def _size_limits(
    job: JobSpec, found: Partition, *, is_lifted: bool
) -> list[tuple[int, int | None, str, str, str]]:
    """Return what a job asks for and may have, the key, the reason and the advice.

    With `is_lifted`, a quality of service lifts the partition's own limits.
    """
    where = f"partition {found.name}"
    nodes = job.allocated_nodes
    cpus = job.cpus_per_node
    gpus = job.requested_gpus
    max_gpus = max((kind.gpus for kind in found.kinds), default=None)
    max_cpus = max((kind.cpus for kind in found.kinds), default=None)
    most = f"a node of {where} has at most"
    times = f"times {job.tasks_per_node} ranks a node is {cpus}, and {most} {max_cpus} CPUs"
    fewer = "use fewer ranks"
    fitting = found.count(cpus, gpus) if found.kinds else None
    suffix = f" and {gpus} GPUs" if job.gpu_option is not None else ""
    fit = f"{where} has {fitting} nodes of {cpus} CPUs{suffix} or more"
    limits = [
        (gpus, max_gpus, "gpus_per_node", f"{most} {max_gpus} GPUs", "ask for fewer"),
        (cpus, max_cpus, "cpus_per_rank", times, "use fewer of either"),
        (nodes, found.num_nodes, "nodes", f"{where} has {found.num_nodes} nodes", fewer),
        (nodes, fitting, "nodes", fit, fewer),
    ]
    if is_lifted:
        return limits
    size = f"{where} allows a job at most {found.max_nodes} nodes"
    time = f"{where} allows at most {found.minutes} minutes"
    return [
        *limits,
        (nodes, found.max_nodes, "nodes", size, fewer),
        (job.minutes, found.minutes, "minutes", time, "ask for less"),
    ]


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


def check_script(cluster: str, script: str, short_of: str | None = None) -> tuple[bool, str]:
    """Return whether SLURM would start a script with the nodes that are up, and when.

    Nothing is queued. If too few nodes are up, `sbatch --test-only` refuses the job with the same
    message as if no nodes could ever run it, although sbatch would queue it. `short_of`, the result
    of `shortage`, tells the two apart.

    Raises:
        ConfigError: sbatch refuses the script.
        SchedulerUnavailableError: sbatch is missing, or reaches no SLURM.
    """
    try:
        result = _test(script)
        result.check()
    except SchedulerRefusedError as error:
        if short_of is not None and NOT_NOW.search(error.reason):
            return False, f"it would wait in the queue: {short_of}"
        raise refusal(cluster, error.reason) from error
    return True, describe_start(*parse_estimate(result.stdout + result.stderr), datetime.now())


def _test(script: str) -> CommandResult:
    """Run `sbatch --test-only` in the environment of a real submission."""
    environment = submission_environment(script) | {"LC_ALL": "C"}
    return run_command(["sbatch", "--test-only"], script, TEST_LIMIT_S, environment)


def estimate_wait_h(script: str) -> float | None:
    """Return the hours until SLURM would start a script.

    Return infinity if too few nodes are up, and None if the time is unknown.
    """
    result = _test(script)
    if result.error is not None:
        return math.inf if NOT_NOW.search(result.error.reason) else None
    start, _ = parse_estimate(result.stdout + result.stderr)
    return None if start is None else max(0.0, (start - datetime.now()).total_seconds() / 3600)


def parse_estimate(text: str) -> tuple[datetime | None, str]:
    """Parse the local start time and the nodes in the answer of `sbatch --test-only`.

    An example is `Job 7 to start at 2026-11-21T22:00:00 using 2 processors on nodes n1`.
    """
    if (found := ESTIMATE.search(text)) is not None:
        with contextlib.suppress(ValueError):
            return datetime.fromisoformat(found["start"]), found["nodes"] or ""
    return None, ""


def describe_start(start: datetime | None, nodes: str, now: datetime) -> str:
    """Describe in one line when and where SLURM would start a job if it were submitted now."""
    if start is None:
        return "sbatch accepts it, and estimates no start"
    wait_min = max(0.0, (start - now).total_seconds() / 60)
    hours = wait_min / 60
    span = (
        f"{wait_min:.0f} min"
        if hours < 2
        else f"{hours:.1f} h"
        if hours < 48
        else f"{hours / 24:.1f} days"
    )
    when = "at once" if wait_min < 1 else f"in about {span} ({start.isoformat(' ', 'minutes')})"
    return f"sbatch accepts it, to start {when}" + (f" on {nodes}" if nodes else "")


def refusal(cluster: str, reason: str) -> ConfigError:
    """Return the error for a job that sbatch refuses: a TryLaterError if the queue is full."""
    is_full = QUEUE_FULL.search(reason) or (POLICY in reason and NAMED_LIMIT.search(reason) is None)
    plain = re.sub(r"(sbatch: )?(error: |fatal: )|allocation failure: ", "", reason)
    kind = TryLaterError if is_full else ConfigError
    text = f"sbatch refuses the job: {plain}"
    return kind(
        "cluster",
        cluster,
        text,
        "see cluster.partition, cluster.account, cluster.minutes and cluster.sbatch",
    )
