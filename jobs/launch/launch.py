"""Launch a prepared run, in the same way here and in a SLURM job.

The steps are: start the ranks, watch them, find the failure, collect the traces.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import types
from collections.abc import Callable
from dataclasses import replace
from typing import IO, Any, Self

from gems.cli.framework import print_json
from gems.config.schema import RunSpec
from gems.errors import ConfigError, NodeFailedError, RankFailedError
from gems.launch.local_launcher import GRACE_S, Ended, rank_environment, run_ranks
from gems.launch.mpich_cleanup import remove_stale_shared_memory
from gems.runs.failure_cause import FailureCause, classify_error
from gems.runs.folder import CANCELLED_JSON, RunFolder
from gems.runs.owner import hold, own_job_id, release
from gems.runs.provenance import check_run_yaml
from gems.utils.atomic_io import read_json, reserve, write_json
from gems.utils.process_tree import start_time
from gems.utils.run_module import RUN_MODULE
from gems.utils.stdio import report
from gems.utils.units import now_utc
from jobs.batch.resources import PROBE, SIMULATED, JobSpec, Work, job_spec
from jobs.diagnosis.launcher_output import RANK_CODES, LauncherOutput
from jobs.diagnosis.root_cause import Failure, find_failure, read_records
from jobs.launch import own_job
from jobs.launch.elastic import Recovery
from jobs.launch.launchers import command, sweep_by_srun
from jobs.launch.mpi_probe import probe_in_job
from jobs.launch.nodes import select_nodes
from jobs.launch.notify import notify
from jobs.launch.rank_watch import RankWatch, is_gone
from jobs.launch.staging import staged
from jobs.status.ownership import CHAIN_JSON
from jobs.status.run_status import read_or_empty

# The batch script's own rank. srun gives each task one; ranks of another launcher would all take
# these for theirs.
BATCH_SCRIPT_VARIABLES = ("SLURM_LOCALID", "SLURM_PROCID", "SLURM_NODEID")
JOB_FILES = (
    "provenance.json",
    "provenance",
    "status.json",
    CANCELLED_JSON,
    CHAIN_JSON,
    own_job.REQUEUES_JSON,
    "logs",
)
SWEEP_LIMIT_S = 120.0
# SLURM has signalled the ranks itself, and leaves this process its KillWait to record the end
BATCH_GRACE_S = 2.0


class StopRequest:
    """A context that notes SIGUSR2 and passes it on to the ranks through stop.json.

    Outside of the main thread it notes nothing, as Python allows no handlers there.
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
    table_on_stderr: bool = False,
    is_quiet: bool = False,
    request: StopRequest | None = None,
    work: Work | None = None,
    recovery: Recovery | None = None,
) -> int:
    """Run all ranks of a prepared run and return the run's exit code.

    A failed run is reported in one line and recorded in status.json, and as much of its traces as
    possible is collected. With `echo`, the ranks' output goes to stderr as well as to
    logs/ranks.log. `is_quiet` writes the closing table to logs/, and writes neither table nor
    pictures of a simulated run. `request` notes SIGUSR2, which makes the ranks save and stop.
    `work` is what a new job runs if SLURM refuses to requeue this one. `recovery` lets the run
    continue if nodes are lost. This process, or its job, owns the folder until the end.

    Raises:
        ConfigError: the launcher is missing, or the folder has another owner.
        KeyboardInterrupt: the user interrupted the run; it is raised after the ranks have ended.
    """
    job = job_spec(spec)
    with contextlib.ExitStack() as stack:
        if work is None:  # a batch job tells it once the next one of its chain is known
            stack.callback(notify, folder)
        stack.callback(_give_back, folder)
        argv = command(job, folder)
        environment = _environment(job, spec, echo)
        hold(folder)
        pid = os.getpid()
        own_id = own_job_id()
        requeues = len(own_job.read_requeues(folder))
        facts: dict[str, Any] = {
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
        folder.write_status("running", **facts)
        output = LauncherOutput()
        stop_request = request or stack.enter_context(StopRequest())
        watch = RankWatch(
            folder, job, spec.train.hang_timeout_s, output, lambda: stop_request.pass_on(folder)
        )
        try:
            _check_run_yaml(folder)
            # SLURM may have requeued the job
            folder.archive(keep=JOB_FILES, also=[folder.logs / "ranks.log"])
            own_job.record_start(folder, job.snapshot)
            remove_stale_shared_memory()
            left_out = recovery.left_out if recovery is not None else {}
            job, nodes, stopped_early = select_nodes(job, folder, environment, left_out)
            facts |= {"nodes": nodes} if nodes else {}
            job = stack.enter_context(staged(job, folder))
            facts["command"] = argv = command(job, folder)
            if nodes:
                folder.write_status("running", **facts)
            stopped_early = stopped_early or _sweep(job, folder, environment)
            stopped_early = stopped_early or probe_in_job(spec, job, folder, environment)
            with contextlib.nullcontext() if recovery is None else recovery.deputy(job, nodes):
                ended = stopped_early or run_ranks(
                    argv,
                    environment,
                    folder.logs / "ranks.log",
                    on_line=output.feed_line,
                    give_up=watch.is_over,
                    echo=echo,
                    grace_s=BATCH_GRACE_S if job.is_batch else GRACE_S,
                )
            if is_gone(folder):
                report("jobs", f"the run folder {folder.path} is gone: the run has been ended")
                return RankFailedError.exit_code
            if ended.stopped_by is None:
                own_job.record_end(folder)
        except BaseException as error:
            interrupted = isinstance(error, KeyboardInterrupt)
            code = 130 if interrupted else getattr(error, "exit_code", 1)
            cause = "interrupted" if interrupted else f"{type(error).__name__}: {error}"
            cause_class = str(
                FailureCause.CANCELLED if interrupted else classify_error(error).cause
            )
            state = "cancelled" if folder.cancelled_json.exists() else "failed"
            if recovery is not None and isinstance(error, NodeFailedError) and state == "failed":
                report("jobs", str(error))
                if recovery.goes_on(job, facts, error.good, error.faults):
                    return code
            folder.write_status(
                state, **facts, exit_code=code, cause=cause, cause_class=cause_class
            )
            raise

        def collect_traces() -> int:
            return collect(folder, table_on_stderr=table_on_stderr, is_quiet=is_quiet)

        is_killed = ended.stopped_by is not None
        has_record = bool(read_records(folder))
        if (
            stopped := read_or_empty(folder.stopped_json)
        ) and not has_record:  # all ranks have saved and stopped
            state = own_job.end_saved_run(folder, spec, job, facts, stopped, is_killed, work)
            if state == "stopped" and not is_killed:
                collect_traces()
            return own_job.CANCELLED_CODE if state == "cancelled" else 0
        if ended.returncode == 0 and not is_killed and not has_record:
            # the trace is complete, and nobody asks for the rest
            is_complete = is_quiet and job.launcher == SIMULATED
            code = 0 if is_complete else collect_traces()
            folder.write_status("finished", **facts, exit_code=code, collected=code == 0)
            return code
        state, failure = _find_failure(folder, job, output, ended)
        if (
            recovery is not None
            and state == "failed"
            and recovery.is_concerned(job, nodes, failure)
        ):
            report("jobs", failure.describe())
            faults = recovery.find_faults(job, environment, nodes, failure)
            if faults and recovery.goes_on(
                job, facts, [node for node in nodes if node not in faults], faults
            ):
                return failure.exit_code
        return _record_failure(folder, state, failure, facts, ended, collect_traces)


def _give_back(folder: RunFolder) -> None:
    """Release the folder unless this job will restart or the next of its chain will continue."""
    with contextlib.suppress(OSError):  # the folder is gone
        status = read_or_empty(folder.status_json)
        continues = own_job.next_in_chain(folder) is not None and not own_job.is_over(status)
        if status.get("state") != "requeued" and not continues:
            release(folder)


def _check_run_yaml(folder: RunFolder) -> None:
    wrong = check_run_yaml(folder.run_yaml, read_or_empty(folder.provenance_json))
    if wrong is None and (layouts := folder.layouts()):
        wrong = check_run_yaml(folder.layout.run_yaml, layouts[-1])
    if wrong is not None:
        raise ConfigError(
            "run folder", folder.path, wrong, "submit the run again, with the change as key=value"
        )


def _sweep(job: JobSpec, folder: RunFolder, environment: dict[str, str]) -> Ended | None:
    """Remove what an earlier start left on a job's nodes.

    Return how the sweep ended if the job was stopped meanwhile. The sweep is not needed after a
    node check, which does the same.
    """
    is_first = "SLURM_RESTART_COUNT" not in os.environ  # a job that starts again has its old number
    if job.launcher != "srun" or is_first or job.cluster.checks_nodes:
        return None
    ended = run_ranks(sweep_by_srun(job, folder), environment, timeout_s=SWEEP_LIMIT_S)
    return ended if ended.stopped_by is not None else None


def collect(
    folder: RunFolder,
    *,
    table_on_stderr: bool = False,
    as_json: bool = False,
    is_quiet: bool = False,
) -> int:
    """Merge the ranks' traces and print the summary.

    Return the exit code of `gems-analysis collect`. `is_quiet` writes the summary to
    logs/summary.txt. Only the child process loads the plotting and HDF5 libraries.
    """
    is_probe = folder.read_spec().machine.kind == PROBE
    sys.stdout.flush()
    words = [
        sys.executable,
        *RUN_MODULE,
        "analysis",
        "collect",
        str(folder.path),
        *(["--json"] if as_json else []),
    ]
    with contextlib.ExitStack() as stack:
        out: IO[str] | None = sys.stderr if table_on_stderr else None
        if is_quiet:
            out = stack.enter_context((folder.logs / "summary.txt").open("w"))
        if is_probe:
            return _show_placement(folder, out, as_json)
        return subprocess.run(words, stdin=subprocess.DEVNULL, stdout=out).returncode


def _show_placement(folder: RunFolder, out: IO[str] | None, as_json: bool) -> int:
    """Report the result of a placement check, which leaves no trace.

    The check has failed if the first rank left no placement.
    """
    found = read_json(folder.result_json)
    if not found:
        report("jobs", f"no rank of the probe {folder.path} has answered")
        return RankFailedError.exit_code
    if as_json:
        print_json(found)
        return 0
    gpus = (
        (found["visible_gpus"] or "those of its node")
        if found["gpus_on_node"]
        else "none asked for"
    )
    ranks = f"{found['num_ranks']} ranks on {found['num_nodes']} nodes are where the run wants them"
    print(
        f"probe   {ranks}; rank 0 is on {found['node']} and sees GPUs: {gpus}", file=out, flush=True
    )
    return 0


def _find_failure(
    folder: RunFolder, job: JobSpec, output: LauncherOutput, ended: Ended
) -> tuple[str, Failure]:
    """Return the state and the failure of a run whose ranks have failed."""
    state = "failed"
    failure = find_failure(folder, output, ended)
    if job.launcher == SIMULATED and ended.returncode in RANK_CODES:
        # there is no rank; the code is the process's own
        failure = replace(failure, exit_code=ended.returncode)
    # SLURM may end the ranks first
    if ended.stopped_by is not None or folder.cancelled_json.exists():
        state, failure = own_job.describe_killed_run(folder, job, failure, ended)
    return state, failure


def _record_failure(
    folder: RunFolder,
    state: str,
    failure: Failure,
    facts: dict[str, Any],
    ended: Ended,
    collect_traces: Callable[[], int],
) -> int:
    """Report the ranks' failure in status.json and on stderr; return the exit code."""
    if state == "requeued":
        facts = facts | {
            "requeue_count": own_job.add_requeue(folder, failure.what, own_job.SLURM, None)
        }
    folder.write_status(state, **facts, **failure.to_dict())
    has_traces = any((folder.path / "trace").glob("rank*.h5"))
    where = f"the ranks' output is in {folder.logs / 'ranks.log'}"
    if has_traces:
        where = f"traces up to the last finished step are in {folder.path / 'trace'}"
    report("jobs", f"{failure.describe()}; {where}")
    if ended.stopped_by is None and has_traces:
        collect_traces()
    return failure.exit_code


def _environment(job: JobSpec, spec: RunSpec, echo: bool) -> dict[str, str]:
    environment = rank_environment(spec.machine.threads_per_rank, keep_slurm=job.is_batch)
    if echo and sys.stderr.isatty():
        environment["GEMS_PROGRESS"] = "bar"
    if job.is_batch:
        environment["SLURM_EXPORT_ENV"] = (
            "ALL"  # after `sbatch --export=NONE` ranks would get nothing of this
        )
    if job.launcher == "ibrun":
        environment = {
            name: value for name, value in environment.items() if name not in BATCH_SCRIPT_VARIABLES
        }
    return environment | {key: str(value) for key, value in spec.cluster.environment.items()}
