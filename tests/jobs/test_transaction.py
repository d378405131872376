"""Submissions that signals end, that several call at once, and whose sbatch gives no answer.

Each job is recorded.
"""

from __future__ import annotations

import os
import signal
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gems.config.schema import RunSpec
from gems.errors import TryLaterError
from gems.plan.evaluate import evaluate
from gems.runs.folder import RunFolder
from gems.runs.owner import check_free, read_owner
from gems.runs.prepare import prepare
from jobs.batch.job import UnclearSubmissionError
from jobs.batch.resources import job_spec
from jobs.launch.batch import BatchJob
from jobs.launch.submission import start_run, submit_together
from jobs.launch.transaction import SIGNALS, Ownership, SignalsWait, submit_owned
from jobs.status.job_record import gone_verifier
from jobs.status.run_status import run_statuses
from tests.helpers.fake_slurm import FakeSlurm
from tests.helpers.interrupted_submissions import measure
from tests.helpers.job_helpers import MonkeyPatch, Resolved, owner_of, refused, status_of

pytestmark = pytest.mark.timeout(300)
# Goes on by a shell whose command line has no script, as that of sbatch has none between fork and
# exec.
NAMELESS = """if [ -z "$SCRIPT" ]; then
    export SCRIPT="$1" SBATCH="$0"
    exec /bin/sh -c 'KILL; /bin/sleep 0.5; set "$SCRIPT"; . "$SBATCH"'
fi
"""


@pytest.fixture
def queue(slurm: FakeSlurm) -> FakeSlurm:
    """A SLURM of which sbatch, squeue and scancel answer.

    Sbatch takes its time before and after it takes a job.
    """
    slurm.has_queue()
    for moment in ("before", "after"):
        (slurm.here / f"sbatch.{moment}").write_text("/bin/sleep 0.02\n")
    for name in ("scontrol", "sinfo", "sacctmgr", "sacct"):
        slurm.says(name, error="Unable to contact slurm controller (connect failure)\n", code=1)
    return slurm


@pytest.fixture
def make(resolved: Resolved, tmp_path: Path) -> Resolved:
    """Return a run on SLURM below runs/, by its name."""
    return lambda name="one": replace(
        resolved("cluster=mini"), name=name, runs_dir=str(tmp_path / "runs")
    )


def test_no_signal_leaves_an_orphan(queue: FakeSlurm, tmp_path: Path) -> None:
    """Each 4 of 16 submissions get SIGINT, SIGTERM, SIGHUP and SIGKILL.

    The next command finds what is left.
    """
    found = measure(16, tmp_path / "runs")
    assert found["faults"] == []
    assert queue.jobs() == ["41", "42"]  # the two that nobody interrupted


@pytest.mark.parametrize(
    ("moment", "script"),
    [
        ("before", "KILL; /bin/sleep 0.5\n"),
        ("after", "KILL; /bin/sleep 0.5\n"),
        ("before", NAMELESS),
    ],
)
def test_a_submission_that_was_killed_is_completed_by_the_next_look(
    queue: FakeSlurm, make: Resolved, moment: str, script: str
) -> None:
    """sbatch itself kills its caller, before or after it has taken the job, and goes on."""
    spec = make()
    folder = RunFolder.of(spec)
    start_run(make("warm"), assume_yes=True)
    (queue.here / f"sbatch.{moment}").write_text(script.replace("KILL", "kill -KILL $PPID"))
    pid = os.fork()
    if pid == 0:
        start_run(spec, assume_yes=True)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
    assert folder.read_status()["state"] == "submitting"
    (queue.here / f"sbatch.{moment}").write_text("")
    run = status_of(folder)
    assert (run.state, run.job_id, folder.read_status()["job_id"]) == ("pending", "42", "42")
    assert {"42_submission.sh", "42_submitted.pkl"} <= {path.name for path in folder.logs.iterdir()}
    owner = owner_of(folder)
    assert (owner.job_id, owner.is_released) == ("42", False)
    with refused("belongs to job 42, which has not ended", TryLaterError):
        start_run(spec, assume_yes=True)
    assert queue.jobs() == ["41", "42"]


def test_a_submission_that_never_came_to_slurm_is_lost(queue: FakeSlurm, make: Resolved) -> None:
    spec = make()
    folder = RunFolder.of(spec)
    start_run(make("warm"), assume_yes=True)
    (queue.here / "sbatch.before").write_text("kill -KILL $PPID; exit 1\n")
    pid = os.fork()
    if pid == 0:
        start_run(spec, assume_yes=True)
        os._exit(1)
    os.waitpid(pid, 0)
    (queue.here / "sbatch.before").write_text("")
    run = status_of(folder)
    assert (run.state, run.is_active) == (
        "lost",
        False,
    ) and "ended before SLURM had the job" in run.note
    assert start_run(spec, assume_yes=True) == 0
    assert queue.jobs() == ["41", "42"]
    (attempt,) = (folder.path / "attempts").iterdir()
    assert "ended without recording it" in (attempt / "status.json").read_text()


@pytest.mark.parametrize("num", [3, 6])
def test_of_several_submissions_at_once_one_gets_the_folder(
    queue: FakeSlurm, make: Resolved, num: int
) -> None:
    start_run(make("warm"), assume_yes=True)
    spec = make()
    gate = os.pipe()
    pids = []
    for _ in range(num):
        if (pid := os.fork()) == 0:
            os.close(gate[1])
            os.read(gate[0], 1)  # until the parent closes it
            try:
                os._exit(start_run(spec, assume_yes=True))
            except TryLaterError:
                os._exit(9)
        pids.append(pid)
    os.close(gate[1])
    codes = sorted(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids)
    assert codes == [0, *[9] * (num - 1)]
    assert queue.jobs() == ["41", "42"]


@pytest.mark.parametrize(
    "answer", ["echo 'Socket timed out on send/recv operation' >&2; exit 1", "kill -KILL $$"]
)
def test_where_nobody_can_tell_nothing_is_submitted_again(
    queue: FakeSlurm, make: Resolved, answer: str
) -> None:
    folder = RunFolder.of(make())
    (queue.here / "sbatch.after").write_text(f"{answer}\n")
    listing = (queue.here / "squeue").read_text()
    queue.says("squeue", error="Socket timed out on send/recv operation\n", code=1)
    with pytest.raises(
        UnclearSubmissionError, match="cannot determine whether SLURM accepted the job"
    ):
        start_run(make(), assume_yes=True)
    assert folder.read_status()["state"] == "submitting"
    with refused("a job whose submission was interrupted, and nobody can tell", TryLaterError):
        start_run(make(), assume_yes=True)
    run = status_of(folder)
    assert (run.state, run.is_guess) == ("submitting", True)
    assert queue.jobs() == ["41"]
    (queue.here / "squeue").write_text(listing)
    run = status_of(folder)
    assert (run.state, run.job_id) == ("pending", "41")


def test_a_pack_is_recorded_together(queue: FakeSlurm, make: Resolved) -> None:
    specs = [make("a"), make("b")]
    job_id = submit_together([*map(evaluate, specs)], job_spec(specs[0]))
    for spec in specs:
        owner = read_owner(RunFolder.of(spec))
        assert (
            owner is not None
            and owner.job_id == job_id == RunFolder.of(spec).read_status()["job_id"]
        )


def test_of_a_pack_with_a_folder_in_use_nothing_is_kept(queue: FakeSlurm, make: Resolved) -> None:
    specs = [make("a"), make("b")]
    start_run(specs[1], assume_yes=True)
    with refused("belongs to job 41", TryLaterError):
        submit_together([*map(evaluate, specs)], job_spec(specs[0]))
    owner = read_owner(RunFolder.of(specs[0]))
    assert owner is not None and owner.is_released
    assert queue.jobs() == ["41"]


def submit_array(specs: list[RunSpec], home: Path) -> list[str]:
    """Submit runs as one array."""
    with Ownership(gone_verifier()) as ownership:
        folders = [prepare(spec, own=ownership.take) for spec in specs]
        works = [BatchJob((str(folder.path),)) for folder in folders]
        return submit_owned(job_spec(specs[0]), ownership, works, home=RunFolder(home))


def test_an_array_is_recorded_by_its_tasks(
    queue: FakeSlurm, make: Resolved, tmp_path: Path
) -> None:
    specs = [make("a"), make("b")]
    assert submit_array(specs, tmp_path / "home") == ["41_0", "41_1"]
    for task, folder in enumerate(map(RunFolder.of, specs)):
        owner = read_owner(folder)
        status = folder.read_status()
        assert (
            owner is not None
            and owner.job_id == status["job_id"] == f"41_{task}"
            and "task" not in status
        )
        assert (folder.logs / f"41_{task}_submitted.pkl").exists()
        with refused(f"belongs to job 41_{task}, which has not ended", TryLaterError):
            check_free(folder, gone_verifier())
    assert (tmp_path / "home" / "logs" / "41_submission.sh").exists()


@pytest.mark.parametrize("moment", ["before", "after"])
def test_an_array_whose_submission_was_killed_is_completed_by_the_next_look(
    queue: FakeSlurm, make: Resolved, tmp_path: Path, moment: str
) -> None:
    specs = [make("a"), make("b")]
    start_run(make("warm"), assume_yes=True)
    (queue.here / f"sbatch.{moment}").write_text("kill -KILL $PPID; /bin/sleep 0.5\n")
    if (pid := os.fork()) == 0:
        submit_array(specs, tmp_path / "home")
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
    (queue.here / f"sbatch.{moment}").write_text("")
    folders = [RunFolder.of(spec) for spec in specs]
    assert [folder.read_status()["task"] for folder in folders] == [0, 1]
    with refused("belongs to job 42_1, which has not ended", TryLaterError):
        start_run(specs[1], assume_yes=True)
    assert (
        folders[0].read_status()["state"] == "submitting"
    )  # each is completed when it is looked at
    assert [run.job_id for run in run_statuses(folders).runs] == ["42_0", "42_1"]
    for task, folder in enumerate(folders):
        assert (folder.logs / f"42_{task}_submitted.pkl").exists()
    assert (tmp_path / "home" / "logs" / "42_submission.sh").exists()
    assert queue.jobs() == ["41", "42"]


def test_signals_wait_and_then_come() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt), SignalsWait():
        signal.pthread_kill(
            threading.get_ident(), signal.SIGINT
        )  # another thread would take one of os.kill
        assert signal.SIGINT in signal.sigpending()
    assert signal.getsignal(signal.SIGTERM) == before
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()).isdisjoint(
        {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
    )


def test_a_signal_that_comes_at_the_end_leaves_no_handler(monkeypatch: MonkeyPatch) -> None:
    """As one does that another thread took: it raises as soon as its own handler is back."""
    before = [signal.getsignal(number) for number in SIGNALS]
    real = signal.signal
    came = iter([signal.SIGINT])

    def late(number: int, handler: Any) -> Any:
        found = real(number, handler)
        if number == signal.SIGINT and handler == before[0] and (number := next(came, 0)):
            signal.raise_signal(number)
        return found

    monkeypatch.setattr(signal, "signal", late)
    with pytest.raises(KeyboardInterrupt), SignalsWait():
        pass
    assert [signal.getsignal(number) for number in SIGNALS] == before


def test_in_another_thread_signals_are_left_alone() -> None:
    def enter() -> None:
        with SignalsWait():
            pass

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
