"""A run that saved and stopped, or that SLURM ended.

What it is called, and whether it starts again.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from gems.launch.local_launcher import Ended
from gems.runs.failure_cause import FailureCause
from gems.runs.folder import RunFolder
from gems.runs.heartbeat import read_beat
from gems.utils.atomic_io import read_json, write_json
from jobs.batch.resources import job_spec
from jobs.diagnosis.root_cause import Failure
from jobs.launch import launch as launch_module
from jobs.launch import own_job
from jobs.launch.batch import BatchJob
from jobs.launch.elastic import Recovery
from jobs.launch.launch import StopRequest, launch
from jobs.status.job_record import LAUNCHER, JobRecord
from tests.helpers.fake_slurm import FakeSlurm
from tests.helpers.job_helpers import Capture, MonkeyPatch, Resolved, Tiny, wait_until
from tests.helpers.processes import python

InJob = Callable[..., tuple[int, RunFolder]]

pytestmark = pytest.mark.timeout(120)
CLEAN = Ended(0, ())


def shown(
    left_s: float = 3000, restarts: int = 0, preempted: str = "None", state: str = "RUNNING"
) -> str:
    """Return a line as `scontrol show job --oneliner` does."""
    end = datetime.now() + timedelta(seconds=left_s)
    return (
        f"JobId=41 JobName=my run=x JobState={state} Reason=None Requeue=1 Restarts={restarts}"
        f" TimeLimit=01:00:00 EndTime={end:%Y-%m-%dT%H:%M:%S} PreemptEligibleTime=Unknown"
        f" PreemptTime={preempted}"
    )


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: MonkeyPatch) -> FakeSlurm:
    """Return a SLURM in whose job 41 this process is."""
    here = tmp_path / "slurm"
    here.mkdir()
    monkeypatch.setenv("PATH", f"{here}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_JOB_ID", "41")
    monkeypatch.delenv("SLURM_RESTART_COUNT", raising=False)
    return FakeSlurm(here)


@pytest.fixture
def log(tmp_path: Path, monkeypatch: MonkeyPatch) -> Path:
    """The output of the job that this process is in."""
    monkeypatch.setattr(own_job, "_stderr", lambda: tmp_path / "41.out")
    monkeypatch.setattr(own_job, "LOG_START_BYTES", 0)
    return tmp_path / "41.out"


@pytest.fixture
def in_job(
    tiny: Tiny, resolved: Resolved, collected: list[RunFolder], monkeypatch: MonkeyPatch
) -> InJob:
    """Launch a run of cluster=mini whose ranks end as told, and leave this stopped.json."""
    folder, _ = tiny()

    def go(
        stopped: dict[str, Any] | None, ended: Ended = CLEAN, cluster: dict[str, Any] | None = None
    ) -> tuple[int, RunFolder]:
        spec = resolved("cluster=mini")
        spec = replace(spec, cluster=replace(spec.cluster, **(cluster or {})))

        def ranks(*words: Any, **more: Any) -> Ended:
            if stopped is not None:
                write_json(folder.stopped_json, stopped)
            return ended

        monkeypatch.setattr(launch_module, "run_ranks", ranks)
        recovery = Recovery(folder, BatchJob((str(folder.path),)))
        return launch(folder, spec, recovery=recovery), folder

    return go


def scontrol(slurm: FakeSlurm, line: str, refuses: str = "") -> None:
    """Put a scontrol there that shows this, and takes or refuses to requeue."""
    answer = f"echo '{refuses}' >&2; exit 1" if refuses else "exit 0"
    slurm.does("scontrol", f"if [ $1 = show ]; then echo '{line}'; else {answer}; fi")


def test_a_run_out_of_time_is_put_back_until_the_bound(
    slurm: FakeSlurm, in_job: InJob, collected: list[RunFolder], capfd: Capture
) -> None:
    scontrol(slurm, shown(left_s=100))
    for number in (1, 2):
        code, folder = in_job(
            {"step": 10 * number, "reason": "SIGUSR2"}, cluster={"max_requeues": 2}
        )
        status = folder.read_status()
        assert (code, status["state"], status["exit_code"]) == (0, "requeued", 0)
        assert (status["job_id"], status["stopped_step"], status["requeue_count"]) == (
            "41",
            10 * number,
            number,
        )
        assert "scontrol requeue 41" in slurm.asked()
        assert "(time limit); it starts again by itself" in capfd.readouterr().err
    asked = slurm.asked().count("scontrol requeue 41")
    code, folder = in_job({"step": 30, "reason": "SIGUSR2"}, cluster={"max_requeues": 2})
    status = folder.read_status()
    assert (code, status["state"], status["stopped_step"], status["requeue_count"]) == (
        0,
        "stopped",
        30,
        2,
    )
    assert slurm.asked().count("scontrol requeue 41") == asked == 2
    assert capfd.readouterr().err.splitlines() == [
        "jobs: the run saved before step 30 and stopped (time limit); it has started again 2 times,"
        " which is cluster.max_requeues; the same command resumes at step 30"
    ]
    assert collected == [folder]  # what is stopped for good is collected, what goes on is not
    assert [row["step"] for row in read_json(folder.path / "requeues.json")["requeues"]] == [10, 20]


def test_a_run_that_exceeds_its_memory_is_put_back_until_the_bound(
    tmp_path: Path, resolved: Resolved
) -> None:
    folder = RunFolder(tmp_path)
    cluster = replace(resolved("cluster=pbs").cluster, max_requeues=1)
    assert own_job.requeue_refusal(folder, cluster, FailureCause.HOST_MEMORY) is None
    JobRecord.read(folder).with_requeue(FailureCause.HOST_MEMORY, LAUNCHER, 7)
    refusal = own_job.requeue_refusal(folder, cluster, FailureCause.HOST_MEMORY)
    assert refusal == "it has started again 1 times, which is cluster.max_requeues"


def test_a_preempted_run_is_put_back_beyond_the_bound(slurm: FakeSlurm, in_job: InJob) -> None:
    scontrol(slurm, shown(preempted="2026-11-21T21:46:49"))
    for number in (1, 2, 3):
        _, folder = in_job({"step": number, "reason": "SIGTERM"}, cluster={"max_requeues": 1})
        assert folder.read_status()["state"] == "requeued"
    assert {row["why"] for row in read_json(folder.path / "requeues.json")["requeues"]} == {
        "preempted"
    }


@pytest.mark.parametrize(
    ("line", "cluster", "cause"),
    [
        (
            shown(),
            {},
            "saved before step 7 and stopped (SIGUSR2)",
        ),  # a user's own, long before the end
        (shown(left_s=100), {"max_requeues": 0}, "(time limit); cluster.max_requeues=0"),
        (
            shown(left_s=100),
            {"sbatch": {"no_requeue": True}},
            "the job was submitted with no-requeue",
        ),
    ],
)
def test_a_run_that_is_to_stay_stopped(
    slurm: FakeSlurm, in_job: InJob, line: str, cluster: dict[str, Any], cause: str
) -> None:
    scontrol(slurm, line)
    code, folder = in_job({"step": 7, "reason": "SIGUSR2"}, cluster=cluster)
    status = folder.read_status()
    assert (code, status["state"], status["stopped_step"]) == (0, "stopped", 7)
    assert cause in status["cause"]
    assert "scontrol requeue 41" not in slurm.asked()


def test_a_refused_requeue_is_a_new_job(
    slurm: FakeSlurm, in_job: InJob, monkeypatch: MonkeyPatch
) -> None:
    scontrol(
        slurm, shown(left_s=100), refuses="Requested operation is presently disabled for job 41"
    )
    slurm.does("sbatch", "echo Submitted batch job 42")
    _, folder = in_job({"step": 7, "reason": "SIGUSR2"})
    status = folder.read_status()
    assert (status["state"], status["job_id"], status["requeue_count"]) == ("requeued", "42", 1)
    assert (folder.logs / "42_submitted.pkl").exists()


def test_a_job_that_slurm_puts_back_is_not_submitted_anew_though_the_answer_is_lost(
    slurm: FakeSlurm, in_job: InJob, monkeypatch: MonkeyPatch
) -> None:
    """SLURM ends all processes of the job, among them the one that asked for it."""
    log = slurm.here / "41.out"
    put_back = (
        "slurmstepd-n1: error: *** JOB 41 ON n1 CANCELLED AT 2026-11-21T21:45:47 DUE TO JOB"
        " REQUEUE ***"
    )
    log.write_text(f"{put_back}\n")
    monkeypatch.setattr(own_job, "_stderr", lambda: log)
    monkeypatch.setattr(own_job, "LOG_START_BYTES", log.stat().st_size)
    slurm.does("sbatch", "echo Submitted batch job 42")
    shows = f"if [ $1 = show ]; then echo '{shown(left_s=100)}'; else"
    slurm.does("scontrol", f"{shows} echo '{put_back}' >> {log}; kill -TERM $$; fi")
    _, folder = in_job({"step": 7, "reason": "SIGUSR2"})
    assert (folder.read_status()["job_id"], folder.read_status()["requeue_count"]) == ("41", 1)
    assert "sbatch" not in slurm.asked()
    monkeypatch.setattr(
        own_job, "LOG_START_BYTES", log.stat().st_size
    )  # the next attempt: those words are not of this one
    slurm.does("scontrol", f"{shows} kill -TERM $$; fi")
    _, folder = in_job({"step": 9, "reason": "SIGUSR2"})
    assert (folder.read_status()["job_id"], folder.read_status()["requeue_count"]) == ("42", 2)


def test_where_nothing_can_be_submitted_the_run_is_stopped(slurm: FakeSlurm, in_job: InJob) -> None:
    scontrol(slurm, shown(left_s=100), refuses="disabled")
    slurm.says("sbatch", error="sbatch: error: no jobs from compute nodes\n", code=1)
    code, folder = in_job({"step": 7, "reason": "SIGUSR2"})
    status = folder.read_status()
    assert (code, status["state"]) == (0, "stopped")
    assert "disabled" in status["cause"] and "no jobs from compute nodes" in status["cause"]
    assert read_json(folder.path / "requeues.json")["requeues"] == []


def test_slurm_that_does_not_answer_is_taken_to_end_the_time(
    slurm: FakeSlurm, in_job: InJob
) -> None:
    slurm.does("scontrol", "if [ $1 = show ]; then echo 'Unable to contact' >&2; exit 1; fi")
    _, folder = in_job({"step": 7, "reason": "SIGUSR2"})
    assert folder.read_status()["state"] == "requeued"


@pytest.mark.parametrize(
    ("said", "line", "state", "cause"),
    [
        ("", shown(), "cancelled", "was cancelled"),
        (" DUE TO TIME LIMIT", shown(left_s=-1), "failed", "reached its time limit"),
        (
            " DUE TO PREEMPTION",
            shown(restarts=1),
            "requeued",
            "was preempted; SLURM starts it again",
        ),
        (" DUE TO PREEMPTION", shown(), "failed", "was preempted"),
        (
            " DUE TO JOB REQUEUE",
            shown(restarts=1),
            "requeued",
            "was ended by SLURM: requeued; SLURM starts it again",
        ),
        (" DUE TO NODE FAILURE, SEE SLURMCTLD LOG FOR DETAILS", shown(), "failed", "lost a node"),
    ],
)
def test_who_ended_a_run_that_has_not_saved(
    slurm: FakeSlurm, in_job: InJob, log: Path, said: str, line: str, state: str, cause: str
) -> None:
    scontrol(slurm, line)
    log.write_text(
        "slurmstepd-n1: error: *** JOB 40 ON n1 CANCELLED AT 2026-11-21T21:45:47 DUE TO TIME LIMIT"
        f" ***\nslurmstepd-n1: error: *** JOB 41 ON n1 CANCELLED AT 2026-11-21T21:45:47{said} ***\n"
    )
    tail = ("srun: error: Node failure on n2",) if "NODE" in said else ()
    code, folder = in_job(None, Ended(143, tail, stopped_by="SIGTERM"))
    status = folder.read_status()
    assert (code, status["state"], status["cause"], status["exit_code"]) == (143, state, cause, 143)
    assert status.get("node") == ("n2" if tail else None)
    words = {
        "TIME LIMIT": "time limit",
        "PREEMPTION": "preempted",
        "NODE FAILURE": "node failed",
        "": "cancelled",
    }
    reason = said.removeprefix(" DUE TO ").partition(",")[0]
    assert status["cause_class"] == words.get(reason, "killed")
    assert status.get("requeue_count") == (1 if state == "requeued" else None)


@pytest.mark.parametrize(
    ("text", "cause", "what"),
    [
        ("mem 17gb exceeded limit 16gb", FailureCause.HOST_MEMORY, "exceeded its memory limit"),
        (
            "cput 9 exceeded limit 8",
            FailureCause.KILLED,
            "was ended by PBS: cput 9 exceeded limit 8",
        ),
    ],
)
def test_a_run_that_pbs_ended_names_pbs(
    tiny: Tiny,
    resolved: Resolved,
    monkeypatch: MonkeyPatch,
    log: Path,
    text: str,
    cause: FailureCause,
    what: str,
) -> None:
    monkeypatch.setenv("PBS_JOBID", "41.server")
    monkeypatch.setattr(own_job, "own_job", lambda: None)
    log.write_text(f"=>> PBS: job killed: {text}\n")
    failure = Failure(143, "was ended by SIGTERM", cause_class=FailureCause.KILLED)
    job = job_spec(resolved("cluster=pbs"))
    ended = own_job.describe_killed_run(tiny()[0], job, failure, Ended(143, ()))
    assert ended == ("failed", replace(failure, what=what, cause_class=cause))


@pytest.mark.parametrize("ended", [Ended(143, (), stopped_by="SIGTERM"), CLEAN])
@pytest.mark.parametrize(
    ("said", "restarts", "state", "code"),
    [
        ("", 0, "cancelled", 143),
        (" DUE TO PREEMPTION", 1, "requeued", 0),
        (" DUE TO TIME LIMIT", 0, "requeued", 0),
    ],
)
def test_a_run_that_saved_while_slurm_ended_it(
    slurm: FakeSlurm,
    in_job: InJob,
    log: Path,
    ended: Ended,
    said: str,
    restarts: int,
    state: str,
    code: int,
) -> None:
    """One whose ranks were quick to save when scancel sent them SIGTERM is cancelled all the same."""
    scontrol(slurm, shown(left_s=0, restarts=restarts, state="COMPLETING"))
    log.write_text(
        f"slurmstepd-n1: error: *** JOB 41 ON n1 CANCELLED AT 2026-11-21T21:45:47{said} ***\n"
    )
    found, folder = in_job({"step": 7, "reason": "SIGTERM"}, ended)
    status = folder.read_status()
    assert (found, status["exit_code"], status["state"], status["stopped_step"]) == (
        code,
        code,
        state,
        7,
    )
    is_asked = "scontrol requeue 41" in slurm.asked()
    assert is_asked == (state == "requeued" and not restarts)


def test_a_cancelled_run_that_saved_is_not_put_back(
    slurm: FakeSlurm, in_job: InJob, monkeypatch: MonkeyPatch
) -> None:
    """`jobs cancel` leaves its mark before scancel, whose signal may come to the ranks first."""
    scontrol(slurm, shown(left_s=10))
    archive = RunFolder.archive

    def marks(folder, **more):
        archive(folder, **more)
        write_json(folder.cancelled_json, {"by": "me"})

    monkeypatch.setattr(RunFolder, "archive", marks)
    code, folder = in_job({"step": 7, "reason": "SIGTERM"})
    assert (code, folder.read_status()["state"]) == (143, "cancelled")
    assert "scontrol requeue 41" not in slurm.asked()


def test_the_words_of_a_terminal_or_pipe_are_not_read(monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "41")
    program = "from jobs.launch.own_job import kill_reason; print(kill_reason())"
    ended = python("-c", program)
    assert (ended.stdout, ended.stderr) == ("None\n", "")


def test_sigusr2_makes_a_run_here_save_and_stop(
    tiny: Tiny, collected: list[RunFolder], capfd: Capture
) -> None:
    folder, spec = tiny(TINY="stop:all")

    def ask() -> None:
        wait_until(
            lambda: all((b := read_beat(folder.heartbeat(k))) and b.step == 12 for k in range(4))
        )
        os.kill(os.getpid(), signal.SIGUSR2)

    asker = threading.Thread(target=ask)
    asker.start()
    before = signal.getsignal(signal.SIGUSR2)
    code = launch(folder, spec)
    asker.join()
    status = folder.read_status()
    assert (code, status["state"], status["exit_code"], status["stopped_step"]) == (
        0,
        "stopped",
        0,
        13,
    )
    assert read_json(folder.stop_json)["by"].startswith("launcher ")
    (line,) = [line for line in capfd.readouterr().err.splitlines() if line.startswith("jobs: ")]
    assert (
        line
        == "jobs: the run saved before step 13 and stopped (SIGUSR2); the same command resumes at"
        " step 13"
    )
    assert collected == [folder]
    assert signal.getsignal(signal.SIGUSR2) == before
    spec.cluster.environment["TINY"] = ""
    assert (
        launch(folder, spec) == 0
    )  # neither the request nor the stop is taken for one of this attempt
    assert folder.read_status()["state"] == "finished"
    assert (folder.path / "attempts" / "001" / "stop.json").exists()


def test_a_request_is_passed_on_to_each_launch_and_to_where_one_can_write(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    with StopRequest() as request:
        request.pass_on(folder)
        assert not folder.stop_json.exists()
        os.kill(os.getpid(), signal.SIGUSR2)
        assert request.is_noted
        request.pass_on(folder)
        assert read_json(folder.stop_json)["reason"] == "SIGUSR2"
        before = folder.stop_json.read_text()
        request.pass_on(folder)
        assert folder.stop_json.read_text() == before
        folder.archive()  # as the next launch does
        request.pass_on(folder)
        assert folder.stop_json.exists()
