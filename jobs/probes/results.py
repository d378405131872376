"""Keep the results of probes for later jobs.

A probe is two ranks that find out about MPI and device memory on a cluster.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

from gems.config.schema import RunSpec
from gems.utils.cache import keep_cached, read_cached
from gems.utils.units import format_rates
from jobs.batch.resources import JobSpec

KIND = "probe"  # in the cache
MAX_AGE = timedelta(days=30)
RANKS = 2
MPI_MACHINES = ("real", "emulated")  # kinds of machine whose ranks speak MPI
# The keys of a cluster by which ranks are started. The same values, the same answer.
CLUSTER_KEYS = (
    "name",
    "scheduler",
    "launcher",
    "partition",
    "mpi",
    "modules",
    "setup",
    "environment",
    "srun",
    "flux_run",
    "mpiexec",
    "gpu_request",
    "gpu_bind",
    "container",
    "container_image",
    "container_options",
)


def probe_digest(spec: RunSpec, job: JobSpec) -> str:
    """Return 8 hexadecimal digits of what a probe depends on."""
    return hashlib.sha256(_key(spec, job).encode()).hexdigest()[:8]


def _key(spec: RunSpec, job: JobSpec) -> str:
    """Return what a probe depends on.

    Cluster, interpreter, launcher, MPI type, modules, environment, container.
    Modules that were loaded by hand count if the preset loads none.
    """
    cluster = spec.cluster
    facts = {name: getattr(cluster, name) for name in CLUSTER_KEYS}
    facts |= {"python": job.python, "gpus": job.gpus_per_node > 0, "device": spec.machine.device}
    if not cluster.modules and not cluster.setup and "export" not in cluster.sbatch:
        facts["loaded"] = os.environ.get("LOADEDMODULES", "")
    return json.dumps(facts, sort_keys=True)


def keep_probe(spec: RunSpec, job: JobSpec, found: dict[str, Any]) -> None:
    """Store the result of a probe."""
    keep_cached(spec.cache_dir, KIND, _key(spec, job), found)


def known_probe(spec: RunSpec, job: JobSpec) -> dict[str, Any] | None:
    """Return the stored probe of this cluster and environment.

    Return None if it is old, or was made on fewer nodes.
    """
    found = read_cached(spec.cache_dir, KIND, _key(spec, job)) or {}
    with contextlib.suppress(KeyError, TypeError, ValueError):
        age = datetime.now(UTC) - datetime.fromisoformat(found["utc"])
        nodes = max(len({rank["node"] for rank in found["ranks"]}), found.get("nodes", 1))
        return found if age < MAX_AGE and nodes >= min(job.nodes, RANKS) else None
    return None


def needs_probe(spec: RunSpec, job: JobSpec) -> bool:
    """Return whether a job's ranks speak MPI to each other, and no probe of that is known."""
    return (
        job.is_batch
        and job.tasks >= RANKS
        and spec.machine.kind in MPI_MACHINES
        and known_probe(spec, job) is None
    )


def describe_probe(found: Mapping[str, Any]) -> str:
    """Describe in one line what a probe found."""
    nodes = sorted({rank["node"] for rank in found["ranks"]})
    device = str(found["device_message"])
    if device == "passed":
        device = f"MPI takes device memory, {_rates(found['device'])}"
    elif device != "no GPU":
        claim = (
            "though MPI claims to take it"
            if found["takes_device_memory"]
            else "MPI does not take it"
        )
        device = f"device memory goes through the host: {claim}"
    words = (
        found["mpi"],
        f"{found['world_size']} ranks on {', '.join(nodes)}",
        _rates(found["host"]),
        device,
    )
    return "; ".join(" ".join(word.split()) for word in words)


def _rates(link: Mapping[str, float]) -> str:
    return format_rates(link["latency_s"], link["bytes_per_s"])
