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
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from gems.config.schema import MachineConfig
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
LIMIT_S = 180.0
SLURM_PREFIXES = ("srun: ", "slurmstepd: ")  # their last lines report that a task ended, not why
MPI_HELP = "MPICH takes cluster.mpi=pmi2, Open MPI pmix, Cray MPICH cray_shasta (srun --mpi=list)"


@dataclass(frozen=True, slots=True)
class MpiProbe:
    """The probe of a job's cluster and environment, by two ranks that its launcher starts."""

    job: JobSpec
    machine: MachineConfig
    cache_dir: str | None

    @property
    def key(self) -> str:
        """What a probe depends on.

        Cluster, interpreter, launcher, MPI type, modules, environment, container.
        Modules that were loaded by hand count if the preset loads none.
        """
        job = self.job
        cluster = job.cluster
        facts = {name: getattr(cluster, name) for name in CLUSTER_KEYS}
        facts |= {"python": job.python, "gpus": job.gpus_per_node > 0}
        facts["device"] = self.machine.device
        if not cluster.modules and not cluster.setup and "export" not in cluster.sbatch:
            facts["loaded"] = os.environ.get("LOADEDMODULES", "")
        return json.dumps(facts, sort_keys=True)

    @property
    def digest(self) -> str:
        """8 hexadecimal digits of what a probe depends on."""
        return hashlib.sha256(self.key.encode()).hexdigest()[:8]

    def keep(self, result: dict[str, Any]) -> None:
        """Store the result of a probe."""
        keep_cached(self.cache_dir, KIND, self.key, result)

    def known(self) -> dict[str, Any] | None:
        """Return the stored result for this cluster and environment.

        Return None if it is old, or was made on fewer nodes.
        """
        result = read_cached(self.cache_dir, KIND, self.key) or {}
        with contextlib.suppress(KeyError, TypeError, ValueError):
            age = datetime.now(UTC) - datetime.fromisoformat(result["utc"])
            nodes = max(len({rank["node"] for rank in result["ranks"]}), result.get("nodes", 1))
            is_enough = age < MAX_AGE and nodes >= min(self.job.nodes, RANKS)
            return result if is_enough else None
        return None

    @property
    def is_needed(self) -> bool:
        """Whether a job's ranks speak MPI to each other, and no probe of that is known."""
        job = self.job
        speaks = job.is_batch and job.tasks >= RANKS and self.machine.takes_steps
        return speaks and self.known() is None

    def run_first(self, folder: RunFolder, environment: Mapping[str, str]) -> Ended | None:
        """Probe as the first step of a job if its cluster and environment have no known probe.

        The ranks start after it. The result is written to logs/probe.json and kept for later jobs.
        Return how the probe ended if the job was stopped meanwhile, or None if the run may start.
        Raises the errors of `read`.
        """
        if not self.is_needed:
            return None
        ended = self.run(folder, environment)
        if ended.stopped_by is not None:
            return ended
        result = self.read(ended, folder) | {"nodes": min(self.job.nodes, RANKS)}
        self.keep(result)
        report(f"probe: {describe_probe(result)}")
        return None

    def run(self, folder: RunFolder, environment: Mapping[str, str]) -> Ended:
        """Run the two ranks, which write `probe_json`; return how they ended."""
        probe_json(folder).unlink(missing_ok=True)
        output = Output(folder.logs / "probe.log", echo=False)
        return run_ranks(self.argv(folder), environment, output, LIMIT_S)

    def pair(self, nodes: int) -> JobSpec:
        """Return the resources of two ranks of the job, on two nodes if there are as many."""
        nodes = min(nodes, RANKS)
        per_node = RANKS // nodes
        nodelist = self.job.nodelist[:nodes]
        return replace(
            self.job, nodes=nodes, tasks=RANKS, tasks_per_node=per_node, nodelist=nodelist
        )

    def argv(self, folder: RunFolder) -> list[str]:
        """Return the command line of the probe, which writes `probe_json`."""
        job = self.job
        order = ",".join(map(str, job.cluster.device_order))
        words = [str(probe_json(folder)), self.machine.device, *([order] if order else [])]
        program = rank_program(job, folder, "gems.engine.transport.probe", *words)
        if job.launcher == "ibrun":
            return ["ibrun", "-n", str(RANKS), *program]  # the first tasks of the allocation
        if job.launcher == "mpiexec":
            return mpiexec_argv(RANKS, program)
        by = {"flux": by_flux, "hydra": by_hydra, "pals": by_pals}.get(job.launcher, by_srun)
        return by(self.pair(job.nodes), folder, program)

    def read(self, ended: Ended, folder: RunFolder) -> dict[str, Any]:
        """Return the result of the probe.

        Without a result, raise an error from what its ranks left, and how they ended.

        Raises:
            ConfigError: MPI does not start as configured, or must not be given device memory.
            RankFailedError: The ranks ended otherwise.
            StalledError: The ranks did not end.
        """
        result = read_or_empty(probe_json(folder))
        mpi = self.job.cluster.mpi or "null"
        if words := result.get("config_error"):
            key, value, *more = words
            raise ConfigError(key, mpi if key == "cluster.mpi" else value, *more)
        if "error" in result:
            raise RankFailedError(f"the probe of two ranks failed: {result['error']}")
        blind = [rank["node"] for rank in result.get("ranks", []) if not rank["sees_folder"]]
        if blind:
            text = f"node {blind[0]} does not see it"
            raise ConfigError(
                "runs_dir", self.job.runs_dir, text, "use a folder that all nodes share"
            )
        if ended.returncode == 0 and not ended.timed_out and "wall_s" in result:
            return result
        how = (
            f"did not end within {LIMIT_S:g} s"
            if ended.timed_out
            else f"ended with code {ended.returncode}"
        )
        lines = [line for line in ended.tail if not line.startswith(SLURM_PREFIXES)] or list(
            ended.tail
        )
        last = f": {lines[-1]}" if lines else ""
        if result.get("device_message") == "trying":
            text = (
                f"MPI claims to take device memory, and the probe's ranks {how} when it got"
                f" some{last}"
            )
            advice = "use machine.transport=host, or an MPI built for these GPUs"
            raise ConfigError("machine.transport", self.machine.transport, text, advice)
        if ended.timed_out:
            raise StalledError(f"the probe's two ranks {how}{last}; {MPI_HELP}")
        if not result:
            how += f" before MPI had started, with cluster.mpi={mpi}"
            last += f"; {MPI_HELP}"
        raise RankFailedError(f"the probe's two ranks {how}{last}")


def describe_probe(result: Mapping[str, Any]) -> str:
    """Describe in one line what a probe result."""
    nodes = sorted({rank["node"] for rank in result["ranks"]})
    device = str(result["device_message"])
    if device == "passed":
        device = f"MPI takes device memory, {_rates(result['device'])}"
    elif device != "no GPU":
        claim = (
            "though MPI claims to take it"
            if result["takes_device_memory"]
            else "MPI does not take it"
        )
        device = f"device memory goes through the host: {claim}"
    words = (
        result["mpi"],
        f"{result['world_size']} ranks on {', '.join(nodes)}",
        _rates(result["host"]),
        device,
    )
    return "; ".join(" ".join(word.split()) for word in words)


def _rates(link: Mapping[str, float]) -> str:
    return format_rates(link["latency_s"], link["bytes_per_s"])


def probe_json(folder: RunFolder) -> Path:
    """Return the file of a probe's result."""
    return folder.logs / "probe.json"
