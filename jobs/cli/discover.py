"""A draft of this site's cluster preset, from what SLURM says of itself; a person reads it before it is used."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gems.cli.framework import Options, print_json
from gems.config.cluster_presets import host_names
from gems.errors import ConfigError
from gems.launch.local_launcher import mpi_family
from jobs.slurm.command import RefusedError, UnansweredError
from jobs.slurm.command import ask as ask_slurm

MIB = 1 << 20
MINUTES_PER_DAY = 1440
ENDLESS = ("UNLIMITED", "INFINITE", "NONE", "")
# srun's word for the family of the mpiexec at hand.
TYPE_OF = {"mpich": "pmi2", "openmpi": "pmix"}


@dataclass(frozen=True, slots=True)
class NodeKind:
    """Nodes of a partition that are alike; `memory_bytes` is that of one."""

    partition: str
    is_default: bool
    nodes: int
    cpus: int
    memory_bytes: int
    gpus: int


@dataclass(frozen=True, slots=True)
class Site:
    """What SLURM's commands said."""

    hosts: tuple[str, ...]
    config: dict[str, str]
    kinds: tuple[NodeKind, ...]
    partitions: tuple[dict[str, str], ...]
    mpi_types: tuple[str, ...]
    mpi_family: str | None


def discover(words: Sequence[str], options: Options) -> int:
    """Print a draft of this site's preset, as YAML, or with --json as an object.

    Raises:
        ConfigError: words that are not understood, no SLURM here, or one that does not answer.
    """
    if words:
        raise ConfigError("discover", " ".join(words), "takes no words", "python -m jobs discover > FILE.yaml")
    site = ask()
    if options.json:
        print_json(preset_of(site))
    else:
        print(draft(site), end="")
    return 0


def ask() -> Site:
    """Ask this machine's SLURM.

    Raises:
        ConfigError: there is none, or it does not answer.
    """
    if shutil.which("sinfo") is None:
        raise ConfigError(
            "sinfo", "none", "is not on PATH: there is no SLURM here to draft a preset of",
            "call it on a login node, or run here with cluster=local",
        )  # fmt: skip
    kinds = tuple(read_kinds(_said("sinfo", "--exact", "--noheader", "--format=%P|%D|%c|%m|%G")))
    if not kinds:
        raise ConfigError("sinfo", "none", "names no partition that you may use", "ask the site")
    return Site(
        hosts=host_names(),
        config=read_config(_said("scontrol", "show", "config")),
        kinds=kinds,
        partitions=tuple(read_partitions(_said("scontrol", "--oneliner", "show", "partition"))),
        mpi_types=read_mpi_types(_said("srun", "--mpi=list")),
        mpi_family=mpi_family(),
    )


def preset_of(site: Site) -> dict[str, Any]:
    """Return the draft as a mapping, with the keys of `gems.config.cluster.ClusterConfig`."""
    kind = main_kind(site.kinds)
    return {
        "name": preset_name(site.config.get("ClusterName", "")),
        "launcher": "srun",
        "hosts": [host_pattern(site.hosts)],
        "gpus_per_node": kind.gpus,
        "usable_cpus_per_node": kind.cpus,
        "node_memory_bytes": kind.memory_bytes,
        "cpus_per_rank": max(1, kind.cpus // kind.gpus) if kind.gpus else 1,
        "partition": kind.partition,
        "account": None,
        "mpi": mpi_type(site),
        "gpu_request": gpu_request(kind.gpus, site.config.get("SelectType", "")),
        "gpu_bind": "none",
        "limits": [limit for limit in map(limit_of, site.partitions) if limit is not None],
    }


def draft(site: Site) -> str:
    """Return the draft as the text of a preset's file, with what to look at beside each line."""
    notes = _notes(site)
    lines = [
        f"# Drafted by `python -m jobs discover` on {site.hosts[0]}, SLURM {site.config.get('SLURM_VERSION', 'unknown')}.",
        "# Read it, add what it cannot know (modules, environment, cpu_bind, device_order, charge), and save it as",
        "# conf/cluster/NAME.yaml, NAME being the name below; then: python -m jobs submit cluster=NAME --dry-run",
    ]
    for key, value in preset_of(site).items():
        if key == "limits" and value:
            lines += ["limits:", *(f"  - {json.dumps(limit)}" for limit in value)]
            continue
        note = f" # {notes[key]}" if notes.get(key) else ""
        lines.append(f"{key}: {json.dumps(value)}{note}")
    return "\n".join(lines) + "\n"


def _notes(site: Site) -> dict[str, str]:
    kind = main_kind(site.kinds)
    others = [f"{k.partition} ({k.nodes} x {k.cpus} CPUs, {k.gpus} GPUs)" for k in site.kinds if k != kind]
    enforced = site.config.get("AccountingStorageEnforce", "none")
    return {
        "hosts": "login nodes; `python -m jobs submit cluster=auto` finds the preset by them",
        "usable_cpus_per_node": "lower it where the site keeps some for itself",
        "partition": ("others: " + ", ".join(others)) if others else "",
        "account": "needed here, your project" if "associations" in enforced else "your project, where one is needed",
        "mpi": f"of {', '.join(site.mpi_types) or 'none listed'}: MPICH pmi2, Open MPI pmix, Cray MPICH cray_shasta",
        "gpu_bind": "ranks choose by local rank" if kind.gpus else "",
    }


def main_kind(kinds: Sequence[NodeKind]) -> NodeKind:
    """Return the nodes to draft for: those with GPUs before others, the default partition's, then the most."""
    return max(kinds, key=lambda kind: (kind.gpus > 0, kind.is_default, kind.nodes * max(1, kind.gpus)))


def preset_name(cluster_name: str) -> str:
    """Return a name that a file and an override can bear."""
    return re.sub(r"[^a-z0-9_]+", "_", cluster_name.lower()).strip("_") or "site"


def host_pattern(hosts: Sequence[str]) -> str:
    """Return a pattern for this login node and those numbered like it, with the domain where it is known."""
    label, dot, domain = max(hosts, key=len, default="localhost").partition(".")
    return re.sub(r"\d+", "*", label) + dot + domain


def mpi_type(site: Site) -> str | None:
    """Return srun's word for MPI: the site's default, else that of the mpiexec at hand; None where neither is known."""
    default = site.config.get("MpiDefault", "none")
    if default not in ("none", "(null)"):
        return default
    own = TYPE_OF.get(site.mpi_family or "")
    return own if own in site.mpi_types else None


def gpu_request(gpus: int, select_type: str) -> str:
    """Return the option that asks for GPUs: SLURM has --gpus-per-node only with the plug-in cons_tres."""
    if not gpus:
        return "none"
    return "gpus-per-node" if "cons_tres" in select_type else "gres"


def limit_of(partition: dict[str, str]) -> dict[str, Any] | None:
    """Return a partition's row of `limits`; None where it says no name."""
    if "PartitionName" not in partition:
        return None
    total, most = _count(partition.get("TotalNodes", "")), _count(partition.get("MaxNodes", ""))
    limit: dict[str, Any] = {"partition": partition["PartitionName"]}
    least = _count(partition.get("MinNodes", "")) or 1
    sizes = [size for size in (total, most) if size]
    minutes = read_minutes(partition.get("MaxTime", ""))
    if least > 1:
        limit["min_nodes"] = least
    if sizes and min(sizes) >= least:
        limit["max_nodes"] = min(sizes)
    if minutes is not None:
        limit["minutes"] = minutes
    return limit


def read_kinds(said: str) -> list[NodeKind]:
    """Read sinfo's lines of partition, nodes, CPUs, memory in MiB and generic resources."""
    kinds = []
    for line in said.splitlines():
        found = re.fullmatch(r"([^|]+)\|(\d+)\|(\d+)\+?\|(\d+)\+?\|(.*)", line.strip())
        if found:
            name = found[1].strip()
            gpus = sum(int(number) for number in re.findall(r"\bgpu(?::[^:(,]+)?:(\d+)", found[5]))
            kinds.append(
                NodeKind(name.rstrip("*"), name.endswith("*"), int(found[2]), int(found[3]), int(found[4]) * MIB, gpus)
            )  # fmt: skip
    return kinds


def read_partitions(said: str) -> list[dict[str, str]]:
    """Read `scontrol --oneliner show partition`."""
    return [dict(re.findall(r"(\w+)=(\S*)", line)) for line in said.splitlines() if line.strip()]


def read_config(said: str) -> dict[str, str]:
    """Read `scontrol show config`."""
    return {key: value.strip() for key, value in re.findall(r"^(\w+)\s*=[ \t]*(.*)$", said, re.MULTILINE)}


def read_mpi_types(said: str) -> tuple[str, ...]:
    """Read `srun --mpi=list`: a heading, then words, a line each; newer releases name versions on a line of their own."""
    words = [line.removeprefix("srun:").strip() for line in said.splitlines()]
    return tuple(word for word in words if re.fullmatch(r"[a-z][a-z0-9_]*", word))


def read_minutes(text: str) -> int | None:
    """Read SLURM's durations (1-00:00:00, 12:00:00, 30:00, 30) in whole minutes; None for one without end."""
    if text.upper() in ENDLESS:
        return None
    found = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", text)
    if found is None:
        return None
    days, first, second = (int(part or 0) for part in found.groups()[:3])
    is_hours = (
        found[1] is not None or found[4] is not None
    )  # hours:minutes:seconds, where minutes:seconds may stand too
    return max(1, days * MINUTES_PER_DAY + first * 60 + second if is_hours else first)


def _count(text: str) -> int | None:
    return int(text) if text.isdecimal() else None


def _said(*words: str) -> str:
    """Return what a command of SLURM's said, on either stream."""
    try:
        return ask_slurm(words)
    except (UnansweredError, RefusedError) as error:
        why = str(error).removeprefix(f"{words[0]} said: ")
        raise ConfigError(words[0], " ".join(words[1:]), f"does not answer: {why}", "is the cluster up?") from error
