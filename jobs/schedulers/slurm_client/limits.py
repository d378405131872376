"""Check a job against what the site's SLURM answers now, before anything is queued."""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from functools import cache, partial

from gems.config.schema import ClusterConfig
from gems.errors import ConfigError, TryLaterError, nearest
from jobs.batch.command import (
    CommandResult,
    SchedulerRefusedError,
    SchedulerUnavailableError,
    run_command,
)
from jobs.batch.resources import JobSpec
from jobs.schedulers.scheduler import Outcome
from jobs.schedulers.slurm_client.environment import submission_environment
from jobs.schedulers.slurm_client.site import (
    UP,
    Accounts,
    Partition,
    query_accounts,
    query_partitions,
)

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
CLOSED = ("DRAIN", "INACTIVE")  # states of partitions that take no jobs


def site_checks(job: JobSpec, script: str, clusters: str) -> dict[str, Callable[[], Outcome]]:
    """Return the checks of whether this SLURM takes a job, by name."""
    cluster = job.cluster
    partitions = cache(partial(query_partitions, cluster.partition, clusters))

    def check_partition() -> Outcome:
        text = check_partitions(job, partitions())
        short_of = shortage(job, partitions())
        if short_of is None:
            return text
        return False, f"{text}; the job would wait in the queue: {short_of}"

    def check_sbatch() -> Outcome:
        short_of = None
        with contextlib.suppress(ConfigError, SchedulerUnavailableError):
            short_of = shortage(job, partitions())
        return check_script(cluster.name, script, short_of)

    return {
        "partition": check_partition,
        "account": lambda: check_account(cluster, query_accounts()),
        "sbatch": check_sbatch,
    }


def check_partitions(job: JobSpec, partitions: Sequence[Partition]) -> str:
    """Check a job against the partitions that it may run in, and describe those that would take it.

    A quality of service may lift a partition's limits on minutes and nodes. If the job has one,
    these limits are left to SLURM.

    Raises:
        ConfigError: No partition would ever start the job; it has the reason of the first.
    """
    refusals = [next(_refusals(job, partition), None) for partition in partitions]
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
    for partition in partitions:
        states = sorted({kind.state for kind in partition.kinds if kind.state not in UP})
        num_up = partition.count(job.cpus_per_node, job.requested_gpus, (*UP, ""))
        if partition.state == "DOWN":
            reasons.append(f"partition {partition.name} is down")
        elif partition.kinds and num_up < job.allocated_nodes:
            others = f" (others: {', '.join(states)})" if states else ""
            few = f"{num_up} of {job.allocated_nodes} nodes"
            reasons.append(f"{few} of partition {partition.name} are up{others}")
        else:
            return None
    return "; ".join(reasons) or None


def check_account(cluster: ClusterConfig, accounts: Accounts) -> str:
    """Describe the account and quality of service of a run.

    Raises:
        ConfigError: SLURM would refuse one of them.
    """
    account = cluster.full_account
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
    qos = cluster.sbatch.get("qos")
    allowed = accounts.qos[known[account.lower()]]
    if qos is not None and allowed and str(qos) not in allowed and accounts.is_enforced:
        text = f"account {account} may use {', '.join(allowed)}"
        raise ConfigError(
            "cluster.sbatch.qos", qos, text, f"nearest: {nearest(str(qos), allowed, 1)[0]}"
        )
    return f"{account}{f', qos {qos}' if qos else ''}"


def _refusals(job: JobSpec, partition: Partition) -> Iterator[ConfigError]:
    """Yield the reasons why a partition refuses a job, the simplest first."""
    where = f"partition {partition.name}"
    qos = job.cluster.sbatch.get("qos")
    if partition.state in CLOSED:
        text = f"takes no jobs now (state {partition.state})"
        yield TryLaterError("cluster.partition", partition.name, text, OTHER[3:])
    account = job.cluster.full_account
    if account is not None:
        allowed, denied = (
            [name.lower() for name in names]
            for names in (partition.accounts, partition.denied_accounts)
        )
        if (allowed and account.lower() not in allowed) or account.lower() in denied:
            to = f"open to {', '.join(partition.accounts)}" if allowed else f"closed to {account}"
            yield ConfigError("cluster.account", account, f"{where} is {to}", OTHER)
    if qos is not None and partition.qos and str(qos) not in partition.qos:
        yield ConfigError(
            "cluster.sbatch.qos", qos, f"{where} takes {', '.join(partition.qos)}", OTHER
        )
    for wanted, limit, key, reason, advice in _size_limits(
        job, partition, is_lifted=qos is not None
    ):
        if limit is not None and wanted > limit:
            value = job.cpus_per_task if key == "cpus_per_rank" else wanted
            yield ConfigError(f"cluster.{key}", value, reason, f"{advice}, {OTHER}")


def _size_limits(
    job: JobSpec, partition: Partition, *, is_lifted: bool
) -> list[tuple[int, int | None, str, str, str]]:
    """Return what a job asks for and may have, the key, the reason and the advice.

    With `is_lifted`, a quality of service lifts the partition's own limits.
    """
    where = f"partition {partition.name}"
    nodes = job.allocated_nodes
    cpus = job.cpus_per_node
    gpus = job.requested_gpus
    max_gpus = max((kind.gpus for kind in partition.kinds), default=None)
    max_cpus = max((kind.cpus for kind in partition.kinds), default=None)
    most = f"a node of {where} has at most"
    times = f"times {job.tasks_per_node} ranks a node is {cpus}, and {most} {max_cpus} CPUs"
    fewer = "use fewer ranks"
    fitting = partition.count(cpus, gpus) if partition.kinds else None
    suffix = f" and {gpus} GPUs" if job.gpu_option is not None else ""
    fit = f"{where} has {fitting} nodes of {cpus} CPUs{suffix} or more"
    limits = [
        (gpus, max_gpus, "gpus_per_node", f"{most} {max_gpus} GPUs", "ask for fewer"),
        (cpus, max_cpus, "cpus_per_rank", times, "use fewer of either"),
        (nodes, partition.num_nodes, "nodes", f"{where} has {partition.num_nodes} nodes", fewer),
        (nodes, fitting, "nodes", fit, fewer),
    ]
    if is_lifted:
        return limits
    size = f"{where} allows a job at most {partition.max_nodes} nodes"
    time = f"{where} allows at most {partition.minutes} minutes"
    return [
        *limits,
        (nodes, partition.max_nodes, "nodes", size, fewer),
        (job.minutes, partition.minutes, "minutes", time, "ask for less"),
    ]


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
    if (estimate := ESTIMATE.search(text)) is not None:
        with contextlib.suppress(ValueError):
            return datetime.fromisoformat(estimate["start"]), estimate["nodes"] or ""
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
