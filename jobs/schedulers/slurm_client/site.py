"""Query what SLURM knows of a site.

This covers partitions and their nodes, the configuration, and the accounts that this user may
charge.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from gems.config.schema import ClusterConfig
from gems.errors import ConfigError, nearest
from gems.utils.units import MIB
from jobs.batch.command import (
    SITE_LIMIT_S,
    CommandResult,
    SchedulerRefusedError,
    SchedulerUnavailableError,
    run_command,
    user_name,
)
from jobs.schedulers.slurm_client.environment import clusters
from jobs.schedulers.slurm_client.jobs import on

MINUTES_PER_DAY = 1440
UNLIMITED = ("UNLIMITED", "INFINITE", "NONE", "")
UP = ("idle", "mixed", "allocated", "completing", "planned", "reserved", "blocked")
EVERYBODY = ("ALL", "(null)", "N/A", "")
STATE_MARKS = "~#@$*%!^+-"  # what sinfo appends to a state
_answers: list[dict[tuple[str, ...], CommandResult]] = []
NODE_LINE = re.compile(r"([^|]+)\|(\d+)\|(\d+)\+?\|(\d+)\+?\|([^|]*)(?:\|(.*))?")


@dataclass(frozen=True, slots=True)
class NodeKind:
    """A group of identical nodes in a partition.

    `memory_bytes` is per node. `state` is empty if it was not queried.
    """

    partition: str
    is_default: bool
    nodes: int
    cpus: int
    memory_bytes: int
    gpus: int
    state: str = ""


@dataclass(frozen=True, slots=True)
class Partition:
    """A partition's resources and limits.

    A limit of None means no limit; an empty tuple of names means everybody.
    """

    name: str
    state: str
    num_nodes: int
    max_nodes: int | None
    minutes: int | None
    kinds: tuple[NodeKind, ...]
    accounts: tuple[str, ...] = ()
    denied_accounts: tuple[str, ...] = ()
    qos: tuple[str, ...] = ()

    def count(self, cpus: int, gpus: int, states: Collection[str] | None = None) -> int:
        """Count the nodes with at least these CPUs and GPUs, in one of `states` if given."""
        fitting = (kind for kind in self.kinds if kind.cpus >= cpus and kind.gpus >= gpus)
        return sum(kind.nodes for kind in fitting if states is None or kind.state in states)

    def describe(self) -> str:
        """Describe the partition in one line."""
        num_up, num_idle = (
            sum(kind.nodes for kind in self.kinds if kind.state in states)
            for states in (UP, UP[:1])
        )
        minutes = "no time limit" if self.minutes is None else f"at most {self.minutes} min"
        state = "" if self.state == "UP" else f", state {self.state}"
        return (
            f"{self.name}: {num_up} of {self.num_nodes} nodes up, {num_idle} idle, {minutes}{state}"
        )


@dataclass(frozen=True, slots=True)
class Accounts:
    """This user's accounts with their qualities of service, and whether SLURM enforces accounts."""

    qos: Mapping[str, tuple[str, ...]]
    is_enforced: bool


@contextlib.contextmanager
def cached_site_queries() -> Iterator[None]:
    """Cache the site's answers inside the block; they are the same for all jobs of a study."""
    _answers.append({})
    try:
        yield
    finally:
        _answers.pop()


def query_site(*argv: str, with_stderr: bool = False) -> str:
    """Return a command's stdout, or stdout and stderr.

    Raises:
        SchedulerUnavailableError: The command fails.
    """
    answers = _answers[-1] if _answers else {}
    result = answers.get(argv) or run_command(argv, limit_s=SITE_LIMIT_S)
    try:
        stdout = result.check()
    except SchedulerRefusedError as error:
        raise SchedulerUnavailableError(argv[0], error.reason, is_own_message=True) from error
    answers[argv] = result
    return stdout + result.stderr if with_stderr else stdout


def query_partitions(names: str | None, clusters: str = "") -> tuple[Partition, ...]:
    """Return the partitions in a comma-separated list, or else the default one.

    `clusters` names the clusters to query, if not the default one.

    Raises:
        ConfigError: SLURM has no such partition.
        SchedulerUnavailableError: SLURM does not answer, or has no default partition.
    """
    rows = parse_partitions(
        query_site("scontrol", *on(clusters), "--all", "--oneliner", "show", "partition")
    )
    kinds = parse_kinds(
        query_site(
            "sinfo", *on(clusters), "--all", "--exact", "--noheader", "--format=%P|%D|%c|%m|%G|%T"
        )
    )
    by_name = {row["PartitionName"]: row for row in rows if "PartitionName" in row}
    defaults = [name for name, row in by_name.items() if row.get("Default") == "YES"]
    wanted = names.split(",") if names else defaults
    if not wanted or not by_name:
        raise SchedulerUnavailableError("scontrol", "names no default partition")
    for name in wanted:
        if name not in by_name:
            advice = (
                f"allowed: {', '.join(sorted(by_name))}; nearest: {nearest(name, by_name, 1)[0]}"
            )
            raise ConfigError("cluster.partition", name, "this SLURM has no such partition", advice)
    return tuple(
        _partition(by_name[name], tuple(kind for kind in kinds if kind.partition == name))
        for name in wanted
    )


def left_nodes(cluster: ClusterConfig) -> tuple[set[str], set[str]]:
    """Return the names of the nodes that are not excluded, and of those that are.

    Both are nodes of the run's partition, or of all partitions if it names none.

    Raises:
        SchedulerUnavailableError: SLURM does not answer.
    """
    chosen = [f"--partition={cluster.partition}"] if cluster.partition else []
    words = [*on(clusters(cluster)), "--all", "--noheader", "--Node", *chosen, "--format=%N"]
    lines = query_site("sinfo", *words).splitlines()
    nodes = {line.strip() for line in lines if line.strip() and not line.startswith("CLUSTER:")}
    excluded = {*expand_nodes(cluster.exclude)}
    return nodes - excluded, nodes & excluded


def expand_nodes(names: Sequence[str]) -> tuple[str, ...]:
    """Expand SLURM's short forms, such as n[1-3], in a list of node names."""
    return (
        tuple(query_site("scontrol", "show", "hostnames", ",".join(names)).split()) if names else ()
    )


def max_nodes(partition: str | None) -> int | None:
    """Return the most nodes that a job in a partition may have; None if SLURM does not answer."""
    try:
        partitions = query_partitions(partition)
    except (ConfigError, SchedulerUnavailableError):
        return None
    return max(min(each.num_nodes, each.max_nodes or each.num_nodes) for each in partitions)


def max_array_tasks() -> int:
    """Return the most tasks that a job array may have.

    Return 1 if the site allows no arrays, or does not answer.
    """
    try:
        size = parse_config(query_site("scontrol", "show", "config")).get("MaxArraySize", "")
    except SchedulerUnavailableError:
        return 1
    return max(1, int(size)) if size.isdecimal() else 1


def query_accounts() -> Accounts:
    """Return this user's accounts.

    Raises:
        SchedulerUnavailableError: SLURM has no account of this user, or does not answer.
    """
    user = user_name("sacctmgr")
    words = [
        "--noheader",
        "--parsable2",
        "show",
        "associations",
        f"user={user}",
        "format=Account,QOS",
    ]
    lines = query_site("sacctmgr", *words).splitlines()
    enforced = parse_config(query_site("scontrol", "show", "config")).get(
        "AccountingStorageEnforce", ""
    )
    accounts: dict[str, tuple[str, ...]] = {}
    for account, _, qos in (line.partition("|") for line in lines):
        if account:
            accounts[account] = accounts.get(account, ()) + tuple(filter(None, qos.split(",")))
    if not accounts:
        raise SchedulerUnavailableError("sacctmgr", f"names no account of {user}")
    return Accounts(accounts, "associations" in enforced)


def parse_kinds(text: str) -> list[NodeKind]:
    """Parse sinfo's lines of nodes.

    The fields are partition, number of nodes, CPUs, memory in MiB, generic resources and, if it was
    queried, state.
    """
    kinds = []
    for fields in filter(None, (NODE_LINE.fullmatch(line.strip()) for line in text.splitlines())):
        name, nodes, cpus, mib, resources, state = fields.groups(default="")
        gpus = sum(int(number) for number in re.findall(r"\bgpu(?::[^:(,]+)?:(\d+)", resources))
        partition = name.strip().rstrip("*")
        is_default = name.strip().endswith("*")
        state = state.strip().rstrip(STATE_MARKS)
        kinds.append(
            NodeKind(partition, is_default, int(nodes), int(cpus), int(mib) * MIB, gpus, state)
        )
    return kinds


def parse_partitions(text: str) -> list[dict[str, str]]:
    """Parse `scontrol --oneliner show partition`."""
    return [dict(re.findall(r"(\w+)=(\S*)", line)) for line in text.splitlines() if line.strip()]


def parse_config(text: str) -> dict[str, str]:
    """Parse `scontrol show config`."""
    return {
        key: value.strip()
        for key, value in re.findall(r"^(\w+)\s*=[ \t]*(.*)$", text, re.MULTILINE)
    }


def parse_mpi_types(text: str) -> tuple[str, ...]:
    """Parse the output of `srun --mpi=list`: a heading, then one type per line.

    Newer releases add a line of versions, which is skipped.
    """
    words = [line.removeprefix("srun:").strip() for line in text.splitlines()]
    return tuple(word for word in words if re.fullmatch(r"[a-z][a-z0-9_]*", word))


def parse_minutes(text: str) -> int | None:
    """Parse a SLURM duration (1-00:00:00, 12:00:00, 30:00, 30) as whole minutes.

    Return None if it is unlimited.
    """
    parts = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", text)
    if parts is None or text.upper() in UNLIMITED:
        return None
    days, first, second = (int(part or 0) for part in parts.groups()[:3])
    is_hours = parts[1] is not None or parts[4] is not None  # else minutes, or minutes:seconds
    return max(1, days * MINUTES_PER_DAY + first * 60 + second if is_hours else first)


def parse_count(text: str) -> int | None:
    """Parse a number of nodes; return None for UNLIMITED and similar words."""
    return int(text) if text.isdecimal() else None


def _partition(row: dict[str, str], kinds: tuple[NodeKind, ...]) -> Partition:
    total, largest = (parse_count(row.get(name, "")) for name in ("TotalNodes", "MaxNodes"))
    num_nodes = total if total is not None else sum(kind.nodes for kind in kinds)
    minutes = parse_minutes(row.get("MaxTime", ""))
    names = ("AllowAccounts", "DenyAccounts", "AllowQos")
    allowed = (
        () if (text := row.get(name, "")) in EVERYBODY else tuple(text.split(",")) for name in names
    )
    return Partition(
        row["PartitionName"], row.get("State", "UP"), num_nodes, largest, minutes, kinds, *allowed
    )
