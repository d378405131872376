"""The probe of a cluster and environment: two ranks try MPI and device memory, and what they find is kept.

In a job it is the first step, where no answer is known yet; it takes seconds, and no place in the queue of its own.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from gems.config.schema import RunSpec
from gems.errors import ConfigError, RankFailedError, StalledError
from gems.launch.local_launcher import Ended, mpiexec_argv, run_ranks
from gems.runs.folder import RunFolder
from gems.utils.atomic_io import read_json
from gems.utils.cache import keep_cached, read_cached
from jobs.launch.launchers import by_srun, rank_program
from jobs.slurm.resources import JobSpec

KIND = "probe"
KEPT_FOR = timedelta(days=30)
LIMIT_S = 180.0
RANKS = 2
OF_MPI = ("real", "emulated")  # kinds of machine whose ranks speak MPI
# What a run's ranks are started by and in. The same of these, the same answer.
OF_THE_CLUSTER = (
    "name", "launcher", "partition", "mpi", "modules", "setup", "environment", "srun", "gpu_request", "gpu_bind",
    "container", "container_image", "container_options",
)  # fmt: skip
OF_SLURM = ("srun: ", "slurmstepd: ")  # what these say at the end is that a task ended, not why
MPI_HELP = "MPICH takes cluster.mpi=pmi2, Open MPI pmix, Cray MPICH cray_shasta (srun --mpi=list)"


def key_of(spec: RunSpec, job: JobSpec) -> str:
    """Return what an answer depends on: cluster, interpreter, launcher, MPI type, modules, environment, container.

    Modules that were loaded by hand count where the preset loads none.
    """
    cluster = spec.cluster
    facts = {name: getattr(cluster, name) for name in OF_THE_CLUSTER}
    facts |= {"python": job.python, "gpus": job.gpus_per_node > 0, "device": spec.machine.device}
    if not cluster.modules and not cluster.setup and "export" not in cluster.sbatch:
        facts["loaded"] = os.environ.get("LOADEDMODULES", "")
    return json.dumps(facts, sort_keys=True)


def digest_of(spec: RunSpec, job: JobSpec) -> str:
    """Return 8 hexadecimal digits of the key."""
    return hashlib.sha256(key_of(spec, job).encode()).hexdigest()[:8]


def known_probe(spec: RunSpec, job: JobSpec) -> dict[str, Any] | None:
    """Return the answer that is kept for this cluster and environment; None where it is old, or of fewer nodes."""
    found = read_cached(spec.cache_dir, KIND, key_of(spec, job))
    if found is None:
        return None
    try:
        age = datetime.now(UTC) - datetime.fromisoformat(found["utc"])
        nodes = {rank["node"] for rank in found["ranks"]}
    except (KeyError, TypeError, ValueError):
        return None
    wanted = min(job.nodes, RANKS)
    return found if age < KEPT_FOR and max(len(nodes), found.get("nodes", 1)) >= wanted else None


def needs_probe(spec: RunSpec, job: JobSpec) -> bool:
    """Return whether a job's ranks speak MPI to each other, and nothing is known of how they do."""
    return job.is_batch and job.tasks >= RANKS and spec.machine.kind in OF_MPI and known_probe(spec, job) is None


def probe_in_job(spec: RunSpec, job: JobSpec, folder: RunFolder, environment: Mapping[str, str]) -> None:
    """Probe as the first step of a job, before its ranks, where nothing is known of its cluster and environment.

    What the ranks of the probe find is left in logs/probe.json, and kept for later jobs.

    Raises:
        ConfigError: MPI does not start as configured, or device memory is not to be given to it.
        RankFailedError: the ranks ended otherwise.
        StalledError: they did not end.
    """
    if not needs_probe(spec, job):
        return
    result = probe_json(folder)
    result.unlink(missing_ok=True)
    argv = probe_argv(spec, job, folder)
    ended = run_ranks(argv, environment, folder.logs / "probe.log", timeout_s=LIMIT_S, echo=False)
    found = judge(spec, ended, result) | {"nodes": pair_of(job).nodes}
    keep_cached(spec.cache_dir, KIND, key_of(spec, job), found)
    print(f"jobs: probe: {summary(found)}", file=sys.stderr, flush=True)


def pair_of(job: JobSpec) -> JobSpec:
    """Return the resources of two ranks of a job, on two nodes where it has them."""
    nodes = min(job.nodes, RANKS)
    return replace(job, nodes=nodes, tasks=RANKS, tasks_per_node=RANKS // nodes)


def probe_argv(spec: RunSpec, job: JobSpec, folder: RunFolder) -> list[str]:
    """Return the command line of the probe, by the launcher that the job's ranks start by; its result is probe_json's.

    Raises:
        ConfigError: there is no mpiexec, or a path that the container's runtime would read as something else.
    """
    order = ",".join(map(str, spec.cluster.device_order))
    words = [str(probe_json(folder)), spec.machine.device, *([order] if order else [])]
    program = rank_program(job, folder, "gems.engine.transport.probe", *words)
    if job.launcher == "ibrun":
        return ["ibrun", "-n", str(RANKS), *program]  # the first tasks of the allocation
    if job.launcher == "mpiexec":
        return mpiexec_argv(RANKS, program)
    return by_srun(pair_of(job), folder, program)


def probe_json(folder: RunFolder) -> Path:
    """Return the file of what a probe found."""
    return folder.logs / "probe.json"


def judge(spec: RunSpec, ended: Ended, result: Path) -> dict[str, Any]:
    """Return what the probe found; a probe that found nothing is worded by what its ranks left, and how they ended.

    Raises:
        ConfigError: MPI does not start as configured, or device memory is not to be given to it.
        RankFailedError: the ranks ended otherwise.
        StalledError: they did not end.
    """
    try:
        found = read_json(result)
    except (OSError, ValueError):
        found = {}
    words = found.get("config_error")
    if words:
        key, value, *more = words
        raise ConfigError(key, spec.cluster.mpi or "null" if key == "cluster.mpi" else value, *more)
    if "error" in found:
        raise RankFailedError(f"the probe of two ranks failed: {found['error']}")
    blind = [rank["node"] for rank in found.get("ranks", []) if not rank["sees_folder"]]
    if blind:
        raise ConfigError(
            "runs_dir", spec.runs_dir, f"node {blind[0]} does not see it", "use a folder that all nodes share"
        )
    if ended.returncode == 0 and not ended.timed_out and "wall_s" in found:
        return found
    how = f"did not end within {LIMIT_S:g} s" if ended.timed_out else f"ended with code {ended.returncode}"
    telling = [line for line in ended.tail if not line.startswith(OF_SLURM)] or list(ended.tail)
    last = f": {telling[-1]}" if telling else ""
    if found.get("device_message") == "trying":
        raise ConfigError(
            "machine.transport", spec.machine.transport,
            f"MPI says that it takes device memory, and the probe's ranks {how} when it got some{last}",
            "use machine.transport=host, or an MPI built for these GPUs",
        )  # fmt: skip
    if ended.timed_out:
        raise StalledError(f"the probe's two ranks {how}{last}; {MPI_HELP}")
    if not found:
        given = spec.cluster.mpi or "null"
        raise RankFailedError(
            f"the probe's two ranks {how} before MPI had started, with cluster.mpi={given}{last}; {MPI_HELP}"
        )
    raise RankFailedError(f"the probe's two ranks {how}{last}")


def summary(found: Mapping[str, Any]) -> str:
    """Return what a probe found in one line."""
    nodes = sorted({rank["node"] for rank in found["ranks"]})
    host = found["host"]
    words = [
        found["mpi"], f"{found['world_size']} ranks on {', '.join(nodes)}",
        f"{1e6 * host['latency_s']:.1f} us and {host['bytes_per_s'] / 1e9:.2f} GB/s", _device_words(found),
    ]  # fmt: skip
    return "; ".join(" ".join(word.split()) for word in words)


def _device_words(found: Mapping[str, Any]) -> str:
    message = str(found["device_message"])
    if message == "passed":
        device = found["device"]
        rates = f"{1e6 * device['latency_s']:.1f} us and {device['bytes_per_s'] / 1e9:.2f} GB/s"
        return f"MPI takes device memory, {rates}"
    if message == "no GPU":
        return message
    claim = "though MPI says that it takes it" if found["takes_device_memory"] else "MPI does not take it"
    return f"device memory goes through the host: {claim}"
