"""What a site's SLURM has and allows now, checked before anything is queued."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from gems.config.schema import RunSpec
from gems.errors import ConfigError, nearest
from jobs.slurm.resources import JobSpec
from jobs.slurm.site import Accounts, Partition

CLOSED = ("DRAIN", "INACTIVE")  # partitions that take no job


def check_partitions(spec: RunSpec, job: JobSpec, found: Sequence[Partition]) -> str:
    """Check a job against the partitions that it may run in, and says what they have.

    A quality of service may lift a partition's limits of minutes and nodes, so that under one these are left to SLURM.

    Raises:
        ConfigError: none of them would ever start the job, with the reason of the first.
    """
    refusals = [next(_refusals(spec, job, partition), None) for partition in found]
    open_to_us = [partition for partition, refusal in zip(found, refusals, strict=True) if refusal is None]
    if not open_to_us:
        refusal = refusals[0]
        assert refusal is not None
        raise refusal
    return "; ".join(_words(partition) for partition in open_to_us)


def check_account(spec: RunSpec, accounts: Accounts) -> str:
    """Check the account and the quality of service of a run, where SLURM insists on them, and says which they are.

    Raises:
        ConfigError: the user does not belong to that account, or may not use that quality of service.
    """
    account, known = spec.cluster.full_account, {name.lower(): name for name in accounts.qos}
    if account is None:
        return "your default account" if accounts.is_enforced else "none, and none is needed"
    if account.lower() not in known:
        if accounts.is_enforced:
            raise ConfigError(
                "cluster.account", account, f"you may charge {', '.join(sorted(accounts.qos))}",
                f"nearest: {nearest(account.lower(), known, 1)[0]}",
            )  # fmt: skip
        return f"{account}, unknown to SLURM, which does not insist"
    qos, allowed = spec.cluster.sbatch.get("qos"), accounts.qos[known[account.lower()]]
    if qos is not None and allowed and str(qos) not in allowed and accounts.is_enforced:
        raise ConfigError(
            "cluster.sbatch.qos", qos, f"account {account} may use {', '.join(allowed)}",
            f"nearest: {nearest(str(qos), allowed, 1)[0]}",
        )  # fmt: skip
    return f"{account}{f', qos {qos}' if qos else ''}"


def _refusals(spec: RunSpec, job: JobSpec, found: Partition) -> Iterator[ConfigError]:
    """Yield what speaks against a job in a partition, the plainest first."""
    cluster, where = spec.cluster, f"partition {found.name}"
    qos = cluster.sbatch.get("qos")
    other = "or choose another cluster.partition"
    if found.state in CLOSED:
        yield ConfigError("cluster.partition", found.name, f"takes no jobs now (state {found.state})", other[3:])
    yield from _people(spec, found)
    if job.gpu_option is not None and found.kinds:
        gpus = max(kind.gpus for kind in found.kinds)
        if job.gpus_per_node > gpus:
            yield ConfigError(
                "cluster.gpus_per_node", job.gpus_per_node, f"a node of {where} has at most {gpus} GPUs",
                f"ask for fewer, {other}",
            )  # fmt: skip
    cpus = job.tasks_per_node * job.cpus_per_task
    most_cpus = max((kind.cpus for kind in found.kinds), default=cpus)
    if cpus > most_cpus:
        yield ConfigError(
            "cluster.cpus_per_rank", job.cpus_per_task,
            f"times {job.tasks_per_node} ranks a node is {cpus}, and a node of {where} has at most {most_cpus} CPUs",
            f"use fewer of either, {other}",
        )  # fmt: skip
    if job.nodes > found.num_nodes:
        yield ConfigError(
            "cluster.nodes", job.nodes, f"{where} has {found.num_nodes} nodes", f"use fewer ranks, {other}"
        )
    fitting = found.count(cpus, job.gpus_per_node if job.gpu_option is not None else 0)
    if found.kinds and job.nodes > fitting:
        gpus_too = f" and {job.gpus_per_node} GPUs" if job.gpu_option is not None else ""
        yield ConfigError(
            "cluster.nodes", job.nodes, f"{where} has {fitting} nodes of {cpus} CPUs{gpus_too} or more",
            f"use fewer ranks, {other}",
        )  # fmt: skip
    if qos is not None:
        return
    if found.max_nodes is not None and job.nodes > found.max_nodes:
        yield ConfigError(
            "cluster.nodes", job.nodes, f"{where} allows a job at most {found.max_nodes} nodes",
            f"use fewer ranks, {other}",
        )  # fmt: skip
    if found.minutes is not None and job.minutes > found.minutes:
        yield ConfigError(
            "cluster.minutes", job.minutes, f"{where} allows at most {found.minutes}", f"ask for less, {other}"
        )


def _people(spec: RunSpec, found: Partition) -> Iterator[ConfigError]:
    account, qos = spec.cluster.full_account, spec.cluster.sbatch.get("qos")
    if account is not None:
        allowed = [name.lower() for name in found.accounts]
        denied = [name.lower() for name in found.denied_accounts]
        if (allowed and account.lower() not in allowed) or account.lower() in denied:
            said = f"is open to {', '.join(found.accounts)}" if allowed else f"is closed to {account}"
            yield ConfigError(
                "cluster.account", account, f"partition {found.name} {said}", "or choose another cluster.partition"
            )
    if qos is not None and found.qos and str(qos) not in found.qos:
        yield ConfigError(
            "cluster.sbatch.qos", qos, f"partition {found.name} takes {', '.join(found.qos)}",
            "or choose another cluster.partition",
        )  # fmt: skip


def _words(found: Partition) -> str:
    minutes = "no time limit" if found.minutes is None else f"at most {found.minutes} min"
    state = "" if found.state == "UP" else f", state {found.state}"
    return f"{found.name}: {found.num_up} of {found.num_nodes} nodes up, {found.num_idle} idle, {minutes}{state}"
