"""Probe a cluster and environment.

Two ranks try MPI and device memory, as the first step of a job if necessary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from gems.config.schema import RunSpec
from gems.errors import ConfigError, RankFailedError, StalledError
from gems.launch.local_launcher import Ended, Output, mpiexec_argv, run_ranks
from gems.runs.folder import RunFolder
from gems.utils.stdio import report
from jobs.batch.launchers import by_flux, by_hydra, by_pals, by_srun, rank_program
from jobs.batch.resources import JobSpec
from jobs.probes.results import RANKS, describe_probe, keep_probe, needs_probe
from jobs.status.run_status import read_or_empty

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
    report("jobs", f"probe: {describe_probe(found)}")
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
