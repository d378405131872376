"""Probe a cluster and environment.

Two ranks try MPI and device memory, as the first step of a job if necessary. The results are kept
for later jobs.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from gems.config.schema import RunSpec
from gems.errors import ConfigError, RankFailedError, StalledError
from gems.launch.local_launcher import Ended, Output, mpiexec_argv, run_ranks
from gems.runs.folder import RunFolder
from gems.utils.cache import keep_cached, read_cached
from gems.utils.units import format_rates
from jobs.batch.launchers import by_flux, by_hydra, by_pals, by_srun, rank_program
from jobs.batch.output import report
from jobs.batch.resources import JobSpec
from jobs.status.job_record import read_or_empty

KIND = "probe"  # in the cache
MAX_AGE = timedelta(days=30)
RANKS = 2
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
        and spec.machine.takes_steps
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


LIMIT_S = 180.0
SLURM_PREFIXES = ("srun: ", "slurmstepd: ")  # their last lines report that a task ended, not why
MPI_HELP = "MPICH takes cluster.mpi=pmi2, Open MPI pmix, Cray MPICH cray_shasta (srun --mpi=list)"


def probe_in_job(
    spec: RunSpec, job: JobSpec, folder: RunFolder, environment: Mapping[str, str]
) -> Ended | None:
    """Probe as the first step of a job if its cluster and environment have no known probe.

    The ranks start after it. The result is written to logs/probe.json and kept for later jobs.
    Return how the probe ended if the job was stopped meanwhile, or None if the run may start.
    Raises the errors of `read_probe`.
    """
    if not needs_probe(spec, job):
        return None
    ended = run_probe(spec, job, folder, environment)
    if ended.stopped_by is not None:
        return ended
    found = read_probe(spec, ended, probe_json(folder)) | {"nodes": _pair(job).nodes}
    keep_probe(spec, job, found)
    report(f"probe: {describe_probe(found)}")
    return None


def run_probe(
    spec: RunSpec, job: JobSpec, folder: RunFolder, environment: Mapping[str, str]
) -> Ended:
    """Run the two ranks, which write `probe_json`; return how they ended."""
    probe_json(folder).unlink(missing_ok=True)
    argv = probe_argv(spec, job, folder)
    return run_ranks(argv, environment, Output(folder.logs / "probe.log", echo=False), LIMIT_S)


def _pair(job: JobSpec) -> JobSpec:
    """Return the resources of two ranks of a job, on two nodes if it has them."""
    nodes = min(job.nodes, RANKS)
    return replace(
        job, nodes=nodes, tasks=RANKS, tasks_per_node=RANKS // nodes, nodelist=job.nodelist[:nodes]
    )


def probe_argv(spec: RunSpec, job: JobSpec, folder: RunFolder) -> list[str]:
    """Return the command line of the probe, using the launcher of the job's ranks.

    The probe writes `probe_json`.
    """
    order = ",".join(map(str, spec.cluster.device_order))
    words = [str(probe_json(folder)), spec.machine.device, *([order] if order else [])]
    program = rank_program(job, folder, "gems.engine.transport.probe", *words)
    if job.launcher == "ibrun":
        return ["ibrun", "-n", str(RANKS), *program]  # the first tasks of the allocation
    if job.launcher == "mpiexec":
        return mpiexec_argv(RANKS, program)
    by = {"flux": by_flux, "hydra": by_hydra, "pals": by_pals}.get(job.launcher, by_srun)
    return by(_pair(job), folder, program)


def probe_json(folder: RunFolder) -> Path:
    """Return the file of a probe's result."""
    return folder.logs / "probe.json"


def read_probe(spec: RunSpec, ended: Ended, result: Path) -> dict[str, Any]:
    """Return the result of the probe.

    Without a result, raise an error from what its ranks left, and how they ended.

    Raises:
        ConfigError: MPI does not start as configured, or must not be given device memory.
        RankFailedError: the ranks ended otherwise.
        StalledError: the ranks did not end.
    """
    found = read_or_empty(result)
    if words := found.get("config_error"):
        key, value, *more = words
        raise ConfigError(key, spec.cluster.mpi or "null" if key == "cluster.mpi" else value, *more)
    if "error" in found:
        raise RankFailedError(f"the probe of two ranks failed: {found['error']}")
    blind = [rank["node"] for rank in found.get("ranks", []) if not rank["sees_folder"]]
    if blind:
        text = f"node {blind[0]} does not see it"
        raise ConfigError("runs_dir", spec.runs_dir, text, "use a folder that all nodes share")
    if ended.returncode == 0 and not ended.timed_out and "wall_s" in found:
        return found
    how = (
        f"did not end within {LIMIT_S:g} s"
        if ended.timed_out
        else f"ended with code {ended.returncode}"
    )
    lines = [line for line in ended.tail if not line.startswith(SLURM_PREFIXES)] or list(ended.tail)
    last = f": {lines[-1]}" if lines else ""
    if found.get("device_message") == "trying":
        text = (
            f"MPI claims to take device memory, and the probe's ranks {how} when it got some{last}"
        )
        advice = "use machine.transport=host, or an MPI built for these GPUs"
        raise ConfigError("machine.transport", spec.machine.transport, text, advice)
    if ended.timed_out:
        raise StalledError(f"the probe's two ranks {how}{last}; {MPI_HELP}")
    if not found:
        how += f" before MPI had started, with cluster.mpi={spec.cluster.mpi or 'null'}"
        last += f"; {MPI_HELP}"
    raise RankFailedError(f"the probe's two ranks {how}{last}")
