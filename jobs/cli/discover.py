"""`gems-jobs discover`: draft a preset of this site from its SLURM, to be checked by a person."""

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
from jobs.batch.command import SchedulerUnavailableError
from jobs.schedulers.slurm_client import site as slurm_site
from jobs.schedulers.slurm_client.site import (
    NodeKind,
    parse_count,
    parse_kinds,
    parse_minutes,
    query_site,
)

# srun's MPI type for the family of the mpiexec on this machine.
MPI_TYPES = {"mpich": "pmi2", "openmpi": "pmix"}


@dataclass(frozen=True, slots=True)
class Site:
    """A site as SLURM's commands describe it."""

    hosts: tuple[str, ...]
    config: dict[str, str]
    kinds: tuple[NodeKind, ...]
    partitions: tuple[dict[str, str], ...]
    mpi_types: tuple[str, ...]
    mpi_family: str | None


def discover(words: Sequence[str], options: Options) -> int:
    """Print a draft of this site's preset, as YAML, or with --json as an object.

    Raises:
        ConfigError: There are extra words, or SLURM is missing here or does not answer.
    """
    if words:
        raise ConfigError(
            "discover", " ".join(words), "takes no words", "gems-jobs discover > FILE.yaml"
        )
    if shutil.which("sinfo") is None:
        raise ConfigError(
            "sinfo",
            "none",
            "is not on PATH: there is no SLURM here to draft a preset of",
            "call it on a login node, or run here with cluster=local",
        )
    kinds = tuple(parse_kinds(_query("sinfo", "--exact", "--noheader", "--format=%P|%D|%c|%m|%G")))
    if not kinds:
        raise ConfigError("sinfo", "none", "lists no partition that you may use", "ask the site")
    config = slurm_site.parse_config(_query("scontrol", "show", "config"))
    partitions = tuple(
        slurm_site.parse_partitions(_query("scontrol", "--oneliner", "show", "partition"))
    )
    # older releases print the list on stderr
    mpi_types = slurm_site.parse_mpi_types(_query("srun", "--mpi=list", with_stderr=True))
    site = Site(host_names(), config, kinds, partitions, mpi_types, mpi_family())
    if options.json:
        print_json(draft_preset(site))
    else:
        print(format_draft(site), end="")
    return 0


def draft_preset(site: Site) -> dict[str, Any]:
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
        "limits": [limit for limit in map(draft_limit, site.partitions) if limit is not None],
    }


def format_draft(site: Site) -> str:
    """Return the draft as the text of a preset's file, with notes for the reader."""
    kind = main_kind(site.kinds)
    enforced = site.config.get("AccountingStorageEnforce", "none")
    others = [
        f"{k.partition} ({k.nodes} x {k.cpus} CPUs, {k.gpus} GPUs)" for k in site.kinds if k != kind
    ]
    notes = {
        "hosts": "login nodes; `gems-jobs submit cluster=auto` finds the preset by them",
        "usable_cpus_per_node": "lower it if the site reserves some",
        "partition": ("others: " + ", ".join(others)) if others else "",
        "account": (
            "needed here, your project"
            if "associations" in enforced
            else "your project, if one is needed"
        ),
        "mpi": (
            f"of {', '.join(site.mpi_types) or 'none listed'}: MPICH pmi2, Open MPI pmix, Cray"
            " MPICH cray_shasta"
        ),
        "gpu_bind": "ranks choose by local rank" if kind.gpus else "",
    }
    version = site.config.get("SLURM_VERSION", "unknown")
    lines = [
        f"# Drafted by `gems-jobs discover` on {site.hosts[0]}, SLURM {version}.",
        (
            "# Read it, add what it cannot know (modules, environment, cpu_bind, device_order,"
            " charge), and save it as"
        ),
        (
            "# conf/cluster/NAME.yaml, NAME being the name below; then: gems-jobs submit"
            " cluster=NAME --dry-run"
        ),
    ]
    for key, value in draft_preset(site).items():
        if key == "limits" and value:
            lines += ["limits:", *(f"  - {json.dumps(limit)}" for limit in value)]
        else:
            lines.append(
                f"{key}: {json.dumps(value)}" + (f" # {notes[key]}" if notes.get(key) else "")
            )
    return "\n".join(lines) + "\n"


def main_kind(kinds: Sequence[NodeKind]) -> NodeKind:
    """Return the nodes for the draft: those with GPUs, then of the default partition, then most."""
    return max(
        kinds, key=lambda kind: (kind.gpus > 0, kind.is_default, kind.nodes * max(1, kind.gpus))
    )


def preset_name(cluster_name: str) -> str:
    """Return a name that is valid for a file and an override."""
    return re.sub(r"[^a-z0-9_]+", "_", cluster_name.lower()).strip("_") or "site"


def host_pattern(hosts: Sequence[str]) -> str:
    """Return a pattern for this login node and its numbered siblings, with the domain if known."""
    label, dot, domain = max(hosts, key=len, default="localhost").partition(".")
    return re.sub(r"\d+", "*", label) + dot + domain


def mpi_type(site: Site) -> str | None:
    """Return srun's MPI type: the site's default, or that of this machine's mpiexec, or None."""
    default = site.config.get("MpiDefault", "none")
    if default not in ("none", "(null)"):
        return default
    own = MPI_TYPES.get(site.mpi_family or "")
    return own if own in site.mpi_types else None


def gpu_request(gpus: int, select_type: str) -> str:
    """Return the option that requests GPUs; --gpus-per-node needs the plug-in cons_tres."""
    if not gpus:
        return "none"
    return "gpus-per-node" if "cons_tres" in select_type else "gres"


def draft_limit(partition: dict[str, str]) -> dict[str, Any] | None:
    """Return a partition's row of `limits`, or None if it has no name."""
    if "PartitionName" not in partition:
        return None
    total, largest, smallest = (
        parse_count(partition.get(name, "")) for name in ("TotalNodes", "MaxNodes", "MinNodes")
    )
    least = smallest or 1
    sizes = [size for size in (total, largest) if size]
    minutes = parse_minutes(partition.get("MaxTime", ""))
    return {
        "partition": partition["PartitionName"],
        **({"min_nodes": least} if least > 1 else {}),
        **({"max_nodes": min(sizes)} if sizes and min(sizes) >= least else {}),
        **({"minutes": minutes} if minutes is not None else {}),
    }


def _query(*argv: str, with_stderr: bool = False) -> str:
    try:
        return query_site(*argv, with_stderr=with_stderr)
    except SchedulerUnavailableError as error:
        text = f"does not answer: {error.reason}"
        raise ConfigError(argv[0], " ".join(argv[1:]), text, "is the cluster up?") from error
