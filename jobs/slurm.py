"""Submission to SLURM, with submitit underneath.

A job is one batch script. On the first node it runs `jobs.batch.BatchJob`, which launches all ranks by ONE
srun step (submitit's own srun is switched off). So a job leaves one log and three small files, not three a
rank; post-processing happens outside of MPI; the launch is the very one of a local run; and a failure is
named and kept in status.json without asking SLURM's accounting, which not every site has.

The only module that imports submitit; it is imported when it is needed.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import shutil
import sys
from collections.abc import Iterator
from typing import Any

from submitit.core.utils import FailedJobError, FailedSubmissionError
from submitit.slurm.slurm import SlurmExecutor

from gems.config import RunSpec
from gems.errors import ConfigError
from gems.ranks import without_leftovers
from gems.runfolder import RunFolder
from jobs.batch import BatchJob
from jobs.spec import JobSpec

OWN_KEYS = {
    "nodes": "cluster.nodes",
    "ntasks": "parallel.partitions and parallel.replicas",
    "ntasks-per-node": "cluster.ranks_per_node",
    "cpus-per-task": "cluster.cpus_per_rank",
    "gpus-per-node": "cluster.gpus_per_node",
    "time": "cluster.minutes",
    "partition": "cluster.partition",
    "account": "cluster.account",
    "job-name": "name",
    "output": "runs_dir",
    "error": "runs_dir",
    "open-mode": "runs_dir",
    "array": "name",
}
SIGNAL_LINE = "#SBATCH --signal="


class Executor(SlurmExecutor):
    """submitit's executor with a script that can be shown anywhere, and without a signal before the end.

    submitit's `--signal=USR2@90` would reach every rank 90 s before the end, at once in a job of one minute.
    """

    @classmethod
    def name(cls) -> str:
        """Gives the name under which submitit's batch side knows its environment."""
        return "slurm"

    @classmethod
    def affinity(cls) -> int:
        """Says that SLURM can be used: a script is shown also where there is none."""
        return 2

    @property
    def _submitit_command_str(self) -> str:
        # exec: SLURM's SIGTERM and the job's exit code are then the launching process's, not the shell's
        return f"exec {super()._submitit_command_str}"

    def _make_submission_file_text(self, command: str, uid: str) -> str:
        text = super()._make_submission_file_text(command, uid)
        if "signal" in (self.parameters.get("additional_parameters") or {}):
            return text
        return "".join(line for line in text.splitlines(keepends=True) if not line.startswith(SIGNAL_LINE))

    def script(self) -> str:
        """Gives the batch script that a submission would use."""
        return self._make_submission_file_text(self._submitit_command_str, "")


def executor(spec: RunSpec, job: JobSpec, folder: RunFolder) -> Executor:
    """Builds the executor of a run; its `script()` and its submission are the same text.

    Raises:
        ConfigError: a name, path or option that SLURM would read as something else.
    """
    _check_path(spec, folder)
    cluster = spec.cluster
    made = Executor(folder.logs, python=shlex.quote(sys.executable))
    made.update_parameters(
        job_name=spec.name,
        nodes=job.nodes,
        ntasks_per_node=job.tasks_per_node,
        cpus_per_task=job.cpus_per_task,
        gpus_per_node=job.gpus_per_node or None,
        time=job.minutes,
        partition=cluster.partition,
        account=cluster.account or os.environ.get("SBATCH_ACCOUNT"),
        wckey=None,
        stderr_to_stdout=True,
        use_srun=False,
        setup=[*cluster.setup, *_exports(spec, job)],
        additional_parameters=sbatch_options(cluster.sbatch),
    )
    return made


def submit_job(spec: RunSpec, job: JobSpec, folder: RunFolder) -> str:
    """Submits a prepared run and gives the job's number.

    Raises:
        ConfigError: sbatch refuses it.
    """
    before = set(folder.logs.iterdir())
    made = executor(spec, job, folder)
    said = io.StringIO()
    try:
        with without_enclosing_job(), contextlib.redirect_stderr(said):
            return str(made.submit(BatchJob(str(folder.path))).job_id)
    except (FailedJobError, FailedSubmissionError) as error:
        for path in set(folder.logs.iterdir()) - before:
            path.unlink()
        text = " ".join((str(error) or said.getvalue()).split())
        raise ConfigError(
            "cluster", spec.cluster.name, f"sbatch refuses the job: {text}",
            "see cluster.partition, cluster.account, cluster.minutes and cluster.sbatch",
        ) from error  # fmt: skip


@contextlib.contextmanager
def without_enclosing_job() -> Iterator[None]:
    """Hides what an enclosing allocation left in the environment, so that it does not change the new job."""
    before = dict(os.environ)
    kept = without_leftovers(before)
    for name in before.keys() - kept.keys():
        del os.environ[name]
    try:
        yield
    finally:
        os.environ.update(before)


def sbatch_options(options: dict[str, Any]) -> dict[str, Any]:
    """Checks the free `cluster.sbatch` map: true gives a bare flag, false and null leave the option out.

    Raises:
        ConfigError: an option that a key of its own sets, or text that would leave its line.
    """
    checked: dict[str, Any] = {}
    for name, value in options.items():
        option = str(name).removeprefix("--").replace("_", "-")
        key = f"cluster.sbatch.{name}"
        if option in OWN_KEYS:
            raise ConfigError(key, value, "must not be given here", f"set {OWN_KEYS[option]}")
        if not re.fullmatch(r"[a-z][a-z0-9-]*", option):
            raise ConfigError(
                key, value, "is not the long name of an sbatch option", "as in +cluster.sbatch.qos=debug"
            )
        if isinstance(value, dict | list):
            raise ConfigError(key, value, "must be one value", "as in +cluster.sbatch.qos=debug")
        if not str(value).isprintable():
            raise ConfigError(key, repr(value), "must be printable text")
        if value is not None and value is not False:
            checked[option] = value
    return checked


def need_sbatch() -> None:
    """Makes sure that there is a SLURM to submit to.

    Raises:
        ConfigError: sbatch is not on PATH.
    """
    if shutil.which("sbatch") is None:
        raise ConfigError(
            "cluster.launcher", "srun", "needs sbatch, which is not on PATH",
            "submit from a login node, show the script with --dry-run, or run here with cluster=local",
        )  # fmt: skip


def _exports(spec: RunSpec, job: JobSpec) -> list[str]:
    values = {"SRUN_CPUS_PER_TASK": str(job.cpus_per_task), **spec.cluster.environment}
    for name, value in values.items():
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            raise ConfigError(f"cluster.environment.{name}", value, "is not the name of a variable")
    return [f"export {name}={shlex.quote(str(value))}" for name, value in values.items()]


def _check_path(spec: RunSpec, folder: RunFolder) -> None:
    path = str(folder.path)
    if not path.isprintable() or "%" in path or "\\" in path:
        key, value = (
            ("runs_dir", spec.runs_dir)
            if "%" not in spec.name and "\\" not in spec.name
            else ("name", spec.name)
        )
        raise ConfigError(
            key, value, "must have no '%', '\\' or line break: SLURM gives them a meaning in paths"
        )
