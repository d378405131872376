"""A partition as SLURM has it now, and the accounts that this user may charge."""

from __future__ import annotations

import os
import pwd
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gems.errors import ConfigError, nearest
from jobs.cli.discover import NodeKind, read_config, read_kinds, read_minutes, read_partitions
from jobs.slurm.command import RefusedError, UnansweredError, ask

UP = ("idle", "mixed", "allocated", "completing", "planned", "reserved", "blocked")
EVERYBODY = ("ALL", "(null)", "N/A", "")
OFF = "~#@$*%!^+-"  # what sinfo puts behind a state


@dataclass(frozen=True, slots=True)
class Partition:
    """What a partition has and allows; None stands for no limit, and an empty list of names for everybody."""

    name: str
    state: str
    num_nodes: int
    num_up: int
    num_idle: int
    max_nodes: int | None
    minutes: int | None
    kinds: tuple[NodeKind, ...]
    accounts: tuple[str, ...] = ()
    denied_accounts: tuple[str, ...] = ()
    qos: tuple[str, ...] = ()

    def count(self, cpus: int, gpus: int) -> int:
        """Number of nodes that have at least so many CPUs and GPUs."""
        return sum(kind.nodes for kind in self.kinds if kind.cpus >= cpus and kind.gpus >= gpus)


@dataclass(frozen=True, slots=True)
class Accounts:
    """The accounts that this user belongs to, each with its qualities of service, and whether SLURM insists on them."""

    qos: Mapping[str, tuple[str, ...]]
    is_enforced: bool


def ask_partitions(names: str | None) -> tuple[Partition, ...]:
    """Return the partitions of a list like sbatch's, or the default one.

    Raises:
        ConfigError: SLURM has no such partition.
        UnansweredError: SLURM cannot be asked, or has no default.
    """
    try:
        said = read_partitions(ask(["scontrol", "--all", "--oneliner", "show", "partition"]))
        nodes = ask(["sinfo", "--all", "--exact", "--noheader", "--format=%P|%D|%c|%m|%G|%T"])
    except RefusedError as error:
        raise UnansweredError(str(error)) from error
    by_name = {row["PartitionName"]: row for row in said if "PartitionName" in row}
    wanted = (names or "").split(",") if names else [
        name for name, row in by_name.items() if row.get("Default") == "YES"
    ]  # fmt: skip
    if not wanted or not by_name:
        raise UnansweredError("SLURM names no default partition")
    for name in wanted:
        if name not in by_name:
            raise ConfigError(
                "cluster.partition", name, "this SLURM has no such partition",
                f"allowed: {', '.join(sorted(by_name))}; nearest: {nearest(name, by_name, 1)[0]}",
            )  # fmt: skip
    return tuple(_partition(by_name[name], nodes) for name in wanted)


def most_nodes(names: str | None) -> int | None:
    """Return how many nodes a job of a partition may have; None where SLURM does not say."""
    try:
        found = ask_partitions(names)
    except (ConfigError, UnansweredError):
        return None
    return max(min(each.num_nodes, each.max_nodes or each.num_nodes) for each in found)


def ask_accounts() -> Accounts:
    """Return the accounts of this user.

    Raises:
        UnansweredError: this SLURM keeps none, or does not tell.
    """
    user = pwd.getpwuid(os.getuid()).pw_name
    words = ["--noheader", "--parsable2", "show", "associations", f"user={user}", "format=Account,QOS"]
    try:
        lines = ask(["sacctmgr", *words]).splitlines()
        enforced = read_config(ask(["scontrol", "show", "config"])).get("AccountingStorageEnforce", "")
    except RefusedError as error:
        raise UnansweredError(f"sacctmgr said: {error}") from error
    found: dict[str, tuple[str, ...]] = {}
    for account, _, qos in (line.partition("|") for line in lines):
        if account:
            found[account] = found.get(account, ()) + tuple(filter(None, qos.split(",")))
    if not found:
        raise UnansweredError(f"sacctmgr names no account of {user}")
    return Accounts(found, "associations" in enforced)


def _partition(row: dict[str, str], nodes: str) -> Partition:
    name = row["PartitionName"]
    kinds, states = [], []
    for line in nodes.splitlines():
        node, _, state = line.rpartition("|")
        of_line = [kind for kind in read_kinds(node) if kind.partition == name]
        kinds += of_line
        states += [(state.strip().rstrip(OFF), kind.nodes) for kind in of_line]
    total, most = row.get("TotalNodes", ""), row.get("MaxNodes", "")
    return Partition(
        name=name,
        state=row.get("State", "UP"),
        num_nodes=int(total) if total.isdecimal() else sum(number for _, number in states),
        num_up=_count(states, UP),
        num_idle=_count(states, ("idle",)),
        max_nodes=int(most) if most.isdecimal() else None,
        minutes=read_minutes(row.get("MaxTime", "")),
        kinds=tuple(kinds),
        accounts=_names(row.get("AllowAccounts", "")),
        denied_accounts=_names(row.get("DenyAccounts", "")),
        qos=_names(row.get("AllowQos", "")),
    )


def _count(states: Sequence[tuple[str, int]], wanted: Sequence[str]) -> int:
    return sum(number for state, number in states if state in wanted)


def _names(text: str) -> tuple[str, ...]:
    return () if text in EVERYBODY else tuple(text.split(","))
