"""Handle the sbatch variables in a user's environment.

sbatch prefers its SBATCH_* variables to the lines of a script, so a variable left in a shell would
change a run. Variables are kept for options that the configuration leaves open. The others are
ignored, and named in a note.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

from gems.config.schema import ClusterConfig
from gems.launch.local_launcher import without_leftovers
from gems.runs.owner import CLUSTER_VARIABLE, own_job_id

PREFIX = "SBATCH_"
CLUSTERS = ("SBATCH_CLUSTERS", "SLURM_CLUSTERS")  # the first takes precedence, as in sbatch
OWN_KEYS = {
    "nodes": "cluster.nodes",
    "ntasks": "parallel.partitions and parallel.replicas",
    "ntasks-per-node": "cluster.ranks_per_node",
    "cpus-per-task": "cluster.cpus_per_rank",
    "gpus-per-node": "cluster.gpus_per_node",
    "gpus-per-task": "cluster.gpu_request",
    "time": "cluster.minutes",
    "partition": "cluster.partition",
    "account": "cluster.account",
    "job-name": "name",
    "array": "cluster.array",
    "output": "runs_dir",
    "error": "runs_dir",
    "open-mode": "runs_dir",
    "exclude": "cluster.exclude",
}
# sbatch options whose variable has another name.
OPTIONS = {
    "SBATCH_ARRAY_INX": "array",
    "SBATCH_BURST_BUFFER": "bb",
    "SBATCH_MEM_PER_CPU": "mem-per-cpu",
    "SBATCH_MEM_PER_NODE": "mem",
    "SBATCH_REQ_SWITCH": "switches",
    "SBATCH_TIMELIMIT": "time",
    "SLURM_CLUSTERS": "clusters",
}
# Options that choose where a job waits and runs. Other options would change its ranks, its output
# or how sbatch ends.
CHOICES = (
    "account",
    "acctg-freq",
    "bb",
    "clusters",
    "constraint",
    "core-spec",
    "delay-boot",
    "exclusive",
    "licenses",
    "mem",
    "mem-per-cpu",
    "mem-per-gpu",
    "network",
    "no-requeue",
    "partition",
    "power",
    "prefer",
    "profile",
    "qos",
    "requeue",
    "reservation",
    "switches",
    "use-min-nodes",
    "wait-all-nodes",
    "wckey",
)
# Variables that srun reads and that shells set; sbatch passes none of them on to its job.
OF_SRUN = (
    "SLURM_ACCOUNT",
    "SLURM_CONSTRAINT",
    "SLURM_CPU_BIND",
    "SLURM_DISTRIBUTION",
    "SLURM_EXCLUSIVE",
    "SLURM_EXPORT_ENV",
    "SLURM_GPU_BIND",
    "SLURM_GRES",
    "SLURM_HINT",
    "SLURM_KILL_BAD_EXIT",
    "SLURM_MEM_BIND",
    "SLURM_MPI_TYPE",
    "SLURM_NETWORK",
    "SLURM_OVERLAP",
    "SLURM_PARTITION",
    "SLURM_QOS",
    "SLURM_RESERVATION",
    "SLURM_TIMELIMIT",
)


def clusters(cluster: ClusterConfig) -> str:
    """Return the clusters chosen by the configuration, or else by the environment.

    The result is empty for the default cluster.
    """
    names = [name for name in cluster.sbatch if str(name).lstrip("-") in ("clusters", "cluster")]
    chosen = (
        cluster.sbatch[names[0]]
        if names
        else next(filter(None, map(os.environ.get, CLUSTERS)), None)
    )
    return "" if chosen is None else str(chosen)


def submission_environment(script: str) -> dict[str, str]:
    """Return the environment for an sbatch call.

    It keeps the user's sbatch variables only for options that the script leaves open.
    """
    inherited, _ = _sorted(script)
    return {
        name: value
        for name, value in without_leftovers(os.environ).items()
        if name != CLUSTER_VARIABLE
    } | inherited


def notes(script: str) -> list[str]:
    """Return a line that names the user's sbatch variables, those kept and those ignored.

    Return an empty list if there are none.
    """
    inherited, ignored = _sorted(script)
    parts = [f"{name}={inherited[name]} is kept" for name in sorted(inherited)]
    parts += [f"{name}={os.environ[name]} is ignored: {ignored[name]}" for name in sorted(ignored)]
    return [f"of your environment, {'; '.join(parts)}"] if parts else []


def _sorted(script: str) -> tuple[dict[str, str], dict[str, str]]:
    """Return the variables to keep, and for each ignored variable what decides instead."""
    lines = dict(re.findall(r"^#SBATCH --([a-z0-9-]+)(?:=(.*))?$", script, re.MULTILINE))
    inherited = {}
    ignored = {}
    for name, option in _variables(os.environ).items():
        if option is None:
            ignored[name] = f"set +cluster.environment.{name}"
        elif option in lines:
            if lines[option].strip("'\"") != os.environ[name]:
                key = OWN_KEYS.get(option, f"cluster.sbatch.{option}")
                ignored[name] = f"{key} is decisive (--{option}={lines[option]})"
        elif option in CHOICES:
            inherited[name] = os.environ[name]
        else:
            ignored[name] = f"set {OWN_KEYS.get(option, f'+cluster.sbatch.{option}')}"
    return inherited, ignored


def _variables(environment: Mapping[str, str]) -> dict[str, str | None]:
    """Map each of the user's variables that SLURM reads to its sbatch option.

    The option is None if only srun reads the variable.
    """
    options: dict[str, str | None] = {}
    for name in environment:
        if name.startswith(PREFIX) or name in CLUSTERS:
            options[name] = OPTIONS.get(name, name.removeprefix(PREFIX).lower().replace("_", "-"))
        # inside a job, these may be the job's own variables
        elif name in OF_SRUN and own_job_id() is None:
            options[name] = None
    return options
