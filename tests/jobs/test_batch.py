"""The batch side: what runs on the first node of an allocation, through submitit's own entry."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import cloudpickle
import pytest
from submitit.core.utils import DelayedSubmission

from gems.config.schema import RunSpec
from gems.runs.folder import RunFolder
from jobs.launch.batch import BatchJob, wait_for_submission
from jobs.launch.own_job import successor
from tests.jobs.job_helpers import ROOT

Tiny = Callable[..., tuple[RunFolder, RunSpec]]

pytestmark = pytest.mark.timeout(120)


def test_the_pickle_holds_a_name_and_a_path() -> None:
    """A function pickled by value would carry the code of the day of submission, and whatever it closes over."""
    pickled = cloudpickle.dumps(DelayedSubmission(BatchJob(("/runs/x",))))
    assert b"jobs.launch.batch" in pickled and b"/runs/x" in pickled
    assert len(pickled) < 400


def run_as_slurm_would(folder: RunFolder, job_id: str, **more: str) -> subprocess.CompletedProcess[str]:
    """Run the last line of the batch script."""
    submission = DelayedSubmission(BatchJob((str(folder.path),)))
    submission.set_timeout(10, 0)
    submission.dump(folder.logs / f"{job_id}_submitted.pkl")
    return subprocess.run(
        [sys.executable, "-u", "-m", "submitit.core._submit", str(folder.logs)],
        env={**os.environ, "SUBMITIT_EXECUTOR": "slurm", "SLURM_JOB_ID": job_id, **more},
        cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=90,
    )  # fmt: skip


@pytest.mark.parametrize("code", [2, 4])
def test_the_jobs_exit_code_is_the_runs(tiny: Tiny, code: int) -> None:
    folder, _ = tiny(TINY="raise:1", CODE=str(code))
    folder.write_status("submitted", job_id="41")
    ended = run_as_slurm_would(folder, "41")
    assert ended.returncode == code, ended.stderr
    (line,) = [line for line in ended.stderr.splitlines() if line.startswith("jobs: ")]
    assert "rank 1 on node" in line
    assert "hello from" not in ended.stdout + ended.stderr  # that is in logs/ranks.log, once
    assert folder.read_status()["exit_code"] == code


def test_a_bad_folder_is_one_line_and_a_status(tiny: Tiny) -> None:
    folder, _ = tiny()
    folder.run_yaml.write_text("nonsense: 1\n")
    folder.write_status("submitted", job_id="41")
    ended = run_as_slurm_would(folder, "41")
    assert ended.returncode == 2
    assert "jobs: nonsense=1: " in ended.stderr and "Traceback" not in ended.stderr
    status = folder.read_status()
    assert (status["state"], status["exit_code"], status["job_id"]) == ("failed", 2, "41")


@pytest.mark.parametrize("state", ["requeued", "running", "finished"])
def test_a_job_that_starts_again_leaves_a_run_alone_that_went_on_as_another(tiny: Tiny, state: str) -> None:
    """SLURM may put a job back although it refused to, and two jobs must not run in one folder."""
    folder, _ = tiny()
    folder.write_status(state, job_id="42")
    status = folder.read_status()
    ended = run_as_slurm_would(folder, "41", SLURM_RESTART_COUNT="1")
    assert ended.returncode == 0, ended.stderr
    assert "jobs: the run continues as job 42; this one leaves it alone" in ended.stderr.splitlines()
    assert folder.read_status() == status


@pytest.mark.parametrize(
    ("own", "restarts", "noted", "other"),
    [
        ("41", "1", "42", "42"), ("42", "1", "42", None), ("43", "1", "42", None), ("41", "0", "42", None),
        ("41", None, "42", None), ("41", "1", None, None), (None, "1", "42", None),
    ],
)  # fmt: skip
def test_a_run_has_gone_on_as_a_later_job_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own: str | None, restarts: str | None, noted: str | None,
    other: str | None
) -> None:  # fmt: skip
    for name, value in (("SLURM_JOB_ID", own), ("SLURM_RESTART_COUNT", restarts)):
        if value is None:
            monkeypatch.delenv(name, raising=False)
        else:
            monkeypatch.setenv(name, value)
    RunFolder(tmp_path).write_status("running", **({} if noted is None else {"job_id": noted}))
    assert successor(RunFolder(tmp_path)) == other


def test_waits_for_the_submitting_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = RunFolder(tmp_path)
    monkeypatch.setenv("SLURM_JOB_ID", "41")
    folder.write_status("prepared")
    done = threading.Event()

    def wait() -> None:
        wait_for_submission(folder)
        done.set()

    waiter = threading.Thread(target=wait)
    waiter.start()
    assert not done.wait(0.5)
    folder.write_status("submitted", job_id="41")
    assert done.wait(30)
    waiter.join()


def test_a_lost_submitter_is_not_waited_for_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "41")
    wait_for_submission(RunFolder(tmp_path), limit_s=0.2)
