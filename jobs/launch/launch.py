"""Launch a prepared run, here or in a job: start and watch the ranks, collect the traces."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import types
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any, Self

from gems.cli.framework import print_json
from gems.config.schema import RunSpec
from gems.errors import ConfigError, NodeFailedError, RankFailedError
from gems.launch.local_launcher import GRACE_S, Ended, Output, rank_environment, run_ranks
from gems.launch.mpich_cleanup import remove_stale_shared_memory
from gems.runs.failure_cause import FailureCause, classify_error
from gems.runs.folder import CANCELLED_JSON, RunFolder
from gems.runs.owner import hold, own_job_id, release
from gems.runs.provenance import check_run_yaml
from gems.utils.atomic_io import read_json, reserve, write_json
from gems.utils.process_tree import start_time
from gems.utils.run_module import RUN_MODULE
from gems.utils.units import now_utc
from jobs.batch.command import run_command
from jobs.batch.launchers import command, module_on_each_node, on_each_node
from jobs.batch.output import report
from jobs.batch.resources import CODE, IMAGE, SIMULATED, JobSpec, job_spec
from jobs.diagnosis.launcher_output import RANK_CODES, LauncherOutput
from jobs.diagnosis.root_cause import Failure, RankEvidence, read_records
from jobs.launch import own_job
from jobs.launch.elastic import Recovery, select_nodes
from jobs.launch.notify import notify
from jobs.launch.rank_watch import RankWatch, is_gone
from jobs.probes.mpi import MpiProbe
from jobs.status.job_record import CHAIN_JSON, REQUEUES_JSON, SLURM, JobRecord, read_or_empty

# The rank of the batch script itself. srun sets it for each task; ranks of another launcher would
# all inherit it.
BATCH_SCRIPT_VARIABLES = ("SLURM_LOCALID", "SLURM_PROCID", "SLURM_NODEID")
JOB_FILES = (
    "provenance.json",
    "provenance",
    "status.json",
    CANCELLED_JSON,
    CHAIN_JSON,
    REQUEUES_JSON,
    "logs",
)
SWEEP = "gems.launch.mpich_cleanup"
SWEEP_LIMIT_S = 120.0
COPY_LIMIT_S = 600.0  # a container's image has some GB
REMOVE_LIMIT_S = 10.0
# SLURM has signalled the ranks itself, and this process has KillWait to record the end
BATCH_GRACE_S = 2.0
# destinations of the closing table
STDOUT = "stdout"
STDERR = "stderr"
LOGS = "logs"
JSON = "json"


class StopRequest:
    """A context that passes SIGUSR2 on to the ranks through stop.json.

    Outside the main thread it does nothing, because Python allows no handlers there.
    """

    def __init__(self) -> None:
        self.is_noted = False
        self._before: object = None

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGUSR2, self._note)
        return self

    def __exit__(self, *error: object) -> None:
        if self._before is not None:
            signal.signal(signal.SIGUSR2, self._before)  # type: ignore[arg-type]

    def pass_on(self, folder: RunFolder) -> None:
        """Write stop.json after the signal has arrived, for each launch.

        The ranks stop at the end of a step.
        """
        if not self.is_noted or folder.stop_json.exists():
            return
        by = f"launcher {os.getpid()} on {os.uname().nodename}"
        with contextlib.suppress(OSError):  # the file system may be back at the next call
            write_json(
                folder.stop_json,
                {"reason": signal.SIGUSR2.name, "utc": now_utc("milliseconds"), "by": by},
            )

    def _note(self, number: int, frame: types.FrameType | None) -> None:
        self.is_noted = True


def launch(
    folder: RunFolder,
    spec: RunSpec,
    *,
    echo: bool = True,
    summary: str = STDOUT,
    request: StopRequest | None = None,
    recovery: Recovery | None = None,
) -> int:
    """Run all ranks of a prepared run and return the run's exit code.

    A failed run is reported in one line and recorded in status.json, and as much of its traces as
    possible is collected. With `echo`, the ranks' output goes to stderr as well as to
    logs/ranks.log. `summary` is the destination of the closing table; with LOGS, a simulated run is
    not drawn. `request` receives SIGUSR2, which makes the ranks save and stop. The `recovery` of a
    batch job continues the run in a new job or without lost nodes. This process, or its job, owns
    the folder until the end.

    Raises:
        ConfigError: The launcher is missing, or the folder has another owner.
        KeyboardInterrupt: The user interrupted the run; it is raised after the ranks have ended.
    """
    job = job_spec(spec)
    environment = _environment(job, spec.machine.threads_per_rank, echo)
    probe = MpiProbe(job, spec.machine, spec.cache_dir)
    limit_s = spec.train.hang_timeout_s
    launched = _Launch(folder, job, probe, limit_s, summary, recovery, environment)
    with contextlib.ExitStack() as stack:
        if recovery is None:  # a batch job notifies once the next job of its chain is known
            stack.callback(notify, folder)
        stack.callback(_give_back, folder)
        return launched.run(stack, request, echo)


@dataclass
class _Launch:
    """One launch of a run; `facts` are the fields of status.json that every state has."""

    folder: RunFolder
    job: JobSpec
    probe: MpiProbe
    hang_timeout_s: float
    summary: str
    recovery: Recovery | None
    environment: dict[str, str]
    facts: dict[str, Any] = field(default_factory=dict)
    nodes: tuple[str, ...] = ()
    output: LauncherOutput = field(default_factory=LauncherOutput)

    def run(self, stack: contextlib.ExitStack, request: StopRequest | None, echo: bool) -> int:
        """Run the ranks and record the end; return the exit code."""
        folder = self.folder
        self._begin()
        stop_request = request or stack.enter_context(StopRequest())
        watch = RankWatch(
            folder, self.job, self.hang_timeout_s, self.output, lambda: stop_request.pass_on(folder)
        )
        try:
            ended = self._run_ranks(stack, watch, echo)
            if is_gone(folder):
                report(f"the run folder {folder.path} is gone: the run has been ended")
                return RankFailedError.exit_code
            if ended.stopped_by is None:
                own_job.record_end(folder)
        except BaseException as error:
            code = 130 if isinstance(error, KeyboardInterrupt) else getattr(error, "exit_code", 1)
            if self._is_recovered(error):
                return code
            self._record_error(error, code)
            raise
        return self._conclude(ended)

    def _begin(self) -> None:
        folder, job = self.folder, self.job
        argv = command(job, folder)
        hold(folder)
        pid = os.getpid()
        own_id = own_job_id()
        requeues = len(JobRecord.read(folder).requeues)
        self.facts = {
            "pid": pid,
            "pid_started": start_time(pid),
            "host": os.uname().nodename,
            "launcher": job.launcher,
            "command": argv,
            "started_utc": now_utc(),
            **({"job_id": own_id} if job.is_batch and own_id is not None else {}),
            **({"requeue_count": requeues} if requeues else {}),
        }
        reserve(folder.status_json)
        folder.write_status("running", **self.facts)

    def _run_ranks(self, stack: contextlib.ExitStack, watch: RankWatch, echo: bool) -> Ended:
        folder = self.folder
        recovery = self.recovery
        _check_run_yaml(folder)
        # SLURM may have requeued the job
        folder.archive(keep=JOB_FILES, also=[folder.logs / "ranks.log"])
        own_job.record_start(folder, self.job.snapshot)
        remove_stale_shared_memory()
        left_out = recovery.left_out if recovery is not None else {}
        job, nodes, stopped_early = select_nodes(self.job, folder, self.environment, left_out)
        self.nodes = nodes
        self.facts |= {"nodes": nodes} if nodes else {}
        self.job = job = stack.enter_context(staged(job, folder))
        self.facts["command"] = argv = command(job, folder)
        if nodes:
            folder.write_status("running", **self.facts)
        stopped_early = stopped_early or _sweep(job, folder, self.environment)
        probe = replace(self.probe, job=job)
        stopped_early = stopped_early or probe.run_first(folder, self.environment)
        if stopped_early is not None:
            return stopped_early
        with contextlib.nullcontext() if recovery is None else recovery.deputy(job, nodes):
            return run_ranks(
                argv,
                self.environment,
                Output(folder.logs / "ranks.log", echo, self.output.feed_line),
                give_up=watch.is_over,
                grace_s=BATCH_GRACE_S if job.is_batch else GRACE_S,
            )

    def _is_recovered(self, error: BaseException) -> bool:
        """Return whether the run continues without the bad nodes that an error names."""
        if self.recovery is None or not isinstance(error, NodeFailedError):
            return False
        if self.folder.cancelled_json.exists():
            return False
        report(str(error))
        return self.recovery.goes_on(self.job, self.facts, error.good, error.faults)

    def _record_error(self, error: BaseException, code: int) -> None:
        is_interrupt = isinstance(error, KeyboardInterrupt)
        state = "cancelled" if self.folder.cancelled_json.exists() else "failed"
        cause = "interrupted" if is_interrupt else f"{type(error).__name__}: {error}"
        cause_class = FailureCause.CANCELLED if is_interrupt else classify_error(error).cause
        self.folder.write_status(
            state, **self.facts, exit_code=code, cause=cause, cause_class=str(cause_class)
        )

    def _conclude(self, ended: Ended) -> int:
        """Record how the ranks ended, and return the run's exit code."""
        folder, job, facts = self.folder, self.job, self.facts
        is_killed = ended.stopped_by is not None
        has_record = bool(read_records(folder))
        stopped = read_or_empty(folder.stopped_json)
        if stopped and not has_record:  # all ranks have saved and stopped
            work = self.recovery.work if self.recovery is not None else None
            state = own_job.end_saved_run(folder, job, facts, stopped, is_killed, work)
            if state == "stopped" and not is_killed:
                collect(folder, self.summary)
            return own_job.CANCELLED_CODE if state == "cancelled" else 0
        if ended.returncode == 0 and not is_killed and not has_record:
            # the trace is complete, and nobody asks for the rest
            is_complete = self.summary == LOGS and job.launcher == SIMULATED
            code = 0 if is_complete else collect(folder, self.summary)
            folder.write_status("finished", **facts, exit_code=code, collected=code == 0)
            return code
        state = "failed"
        failure = RankEvidence(folder, self.output, ended).failure
        if job.launcher == SIMULATED and ended.returncode in RANK_CODES:
            # there is no rank; the code is the process's own
            failure = replace(failure, exit_code=ended.returncode)
        # SLURM may end the ranks first
        if is_killed or folder.cancelled_json.exists():
            state, failure = own_job.describe_killed_run(folder, job, failure, ended)
        recovery = self.recovery
        if (
            recovery is not None
            and state == "failed"
            and recovery.is_concerned(job, self.nodes, failure)
        ):
            report(failure.describe())
            faults = recovery.find_faults(job, self.environment, self.nodes, failure)
            good = [node for node in self.nodes if node not in faults]
            if faults and recovery.goes_on(job, facts, good, faults):
                return failure.exit_code
        return self._record_failure(state, failure, ended)

    def _record_failure(self, state: str, failure: Failure, ended: Ended) -> int:
        """Report the ranks' failure in status.json and on stderr; return the exit code."""
        folder = self.folder
        facts = self.facts
        if state == "requeued":
            record = JobRecord.read(folder).with_requeue(failure.what, SLURM, None)
            facts = facts | {"requeue_count": len(record.requeues)}
        folder.write_status(state, **facts, **failure.to_dict())
        has_traces = any((folder.path / "trace").glob("rank*.h5"))
        where = f"the ranks' output is in {folder.logs / 'ranks.log'}"
        if has_traces:
            where = f"traces up to the last finished step are in {folder.path / 'trace'}"
        report(f"{failure.describe()}; {where}")
        if ended.stopped_by is None and has_traces:
            collect(folder, self.summary)
        return failure.exit_code


def _give_back(folder: RunFolder) -> None:
    """Release the folder unless this job will restart or the next of its chain will continue."""
    with contextlib.suppress(OSError):  # the folder is gone
        record = JobRecord.read(folder)
        continues = record.next_job is not None and not record.is_over
        if record.status.get("state") != "requeued" and not continues:
            release(folder)


def _check_run_yaml(folder: RunFolder) -> None:
    fault = check_run_yaml(folder.run_yaml, read_or_empty(folder.provenance_json))
    if fault is None and (layouts := folder.layouts()):
        fault = check_run_yaml(folder.layout.run_yaml, layouts[-1])
    if fault is not None:
        raise ConfigError(
            "run folder", folder.path, fault, "submit the run again, with the change as key=value"
        )


def _sweep(job: JobSpec, folder: RunFolder, environment: dict[str, str]) -> Ended | None:
    """Remove the shared memory that an earlier start left on a job's nodes.

    Return the end of the sweep if the job was stopped during it. A node check does the same.
    """
    is_first = "SLURM_RESTART_COUNT" not in os.environ  # a job that starts again has its old number
    if job.launcher != "srun" or is_first or job.cluster.checks_nodes:
        return None
    ended = run_ranks(module_on_each_node(job, folder, SWEEP), environment, timeout_s=SWEEP_LIMIT_S)
    return ended if ended.stopped_by is not None else None


def collect(folder: RunFolder, summary: str = STDOUT) -> int:
    """Merge the ranks' traces and print the summary, as JSON if `summary` is JSON.

    Return the exit code of `gems-analysis collect`. With LOGS, the summary goes to
    logs/summary.txt. Only the child process loads the plotting and HDF5 libraries.
    """
    is_json = summary == JSON
    sys.stdout.flush()
    words = [sys.executable, *RUN_MODULE, "analysis", "collect", str(folder.path)]
    with contextlib.ExitStack() as stack:
        out: IO[str] | None = sys.stderr if summary == STDERR else None
        if summary == LOGS:
            out = stack.enter_context((folder.logs / "summary.txt").open("w"))
        if folder.read_spec().machine.is_probe:
            return show_placement(folder, out, is_json)
        argv = [*words, "--json"] if is_json else words
        return subprocess.run(argv, stdin=subprocess.DEVNULL, stdout=out).returncode


def _environment(job: JobSpec, threads: int, echo: bool) -> dict[str, str]:
    environment = rank_environment(threads, keep_slurm=job.is_batch)
    if echo and sys.stderr.isatty():
        environment["GEMS_PROGRESS"] = "bar"
    if job.is_batch:  # after `sbatch --export=NONE` ranks would not get this environment
        environment["SLURM_EXPORT_ENV"] = "ALL"
    if job.launcher == "ibrun":
        environment = {
            name: value for name, value in environment.items() if name not in BATCH_SCRIPT_VARIABLES
        }
    return environment | {key: str(value) for key, value in job.cluster.environment.items()}


@contextlib.contextmanager
def staged(job: JobSpec, folder: RunFolder) -> Iterator[JobSpec]:
    """Copy the files that `cluster.stage` names; yield the job with commands that use the copies.

    Remove the copies at the end. Files that cannot be copied are read in place. Jobs of few nodes,
    and of launchers other than srun, copy nothing.
    """
    copied: list[str] = []
    if job.launcher == "srun" and job.nodes > job.cluster.stage_above_nodes:
        for what, path in sources(job, folder).items():
            error = _run(["sbcast", "--force", str(path), job.stage_path(what)], COPY_LIMIT_S)
            if error is None:
                copied.append(what)
            else:
                report(f"cluster.stage: {path} is read by all nodes where it is ({error})")
    try:
        yield replace(job, staged=tuple(copied))
    finally:
        if copied:
            _run([*on_each_node(job), "rm", "-f", *map(job.stage_path, copied)], REMOVE_LIMIT_S)


def sources(job: JobSpec, folder: RunFolder) -> dict[str, Path]:
    """Return the files to copy: the code archive, and the container image if it is a file."""
    files = {}
    if job.snapshot:
        files[CODE] = folder.code_zip
    if job.cluster.container_image is not None:
        files[IMAGE] = Path(job.cluster.container_image)
    return {
        what: files[what] for what in job.cluster.stage if what in files and files[what].is_file()
    }


def _run(argv: list[str], limit_s: float) -> str | None:
    """Run a command in this process's own job; return its error, or None."""
    return run_command(argv, limit_s=limit_s, environment=os.environ).failure


def show_placement(folder: RunFolder, out: IO[str] | None, as_json: bool) -> int:
    """Report the result of a placement check, which has no trace; fail if rank 0 left none."""
    placement = read_json(folder.result_json)
    if not placement:
        report(f"no rank of the probe {folder.path} has answered")
        return RankFailedError.exit_code
    if as_json:
        print_json(placement)
        return 0
    gpus = "none asked for"
    if placement["gpus_on_node"]:
        gpus = placement["visible_gpus"] or "those of its node"
    ranks = f"{placement['num_ranks']} ranks on {placement['num_nodes']} nodes"
    rank_0 = f"rank 0 is on {placement['node']} and sees GPUs: {gpus}"
    print(f"probe   {ranks} are where the run wants them; {rank_0}", file=out, flush=True)
    return 0
