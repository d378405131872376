"""The batch side: what runs on the first node of an allocation, through submitit's own entry."""

from __future__ import annotations

import os
import subprocess
import threading
from pathlib import Path

import cloudpickle
import pytest
from submitit.core.utils import DelayedSubmission

from gems.runs.folder import RunFolder
from gems.runs.owner import read_owner, take
from gems.utils.run_module import RUN_MODULE
from jobs.launch.batch import BatchJob, claim, wait_for_submission
from tests.helpers.job_helpers import MonkeyPatch, Tiny
from tests.helpers.processes import python

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("warm")]


def test_the_pickle_holds_a_name_and_a_path() -> None:
    """A function pickled by value would carry the code of the day of submission, and whatever it closes over."""
    pickled = cloudpickle.dumps(DelayedSubmission(BatchJob(("/runs/x",))))
    assert b"jobs.launch.batch" in pickled and b"/runs/x" in pickled
    assert len(pickled) < 400


def run_as_slurm_would(
    folder: RunFolder, job_id: str, token: str = "", **more: str
) -> subprocess.CompletedProcess[str]:
    """Run the last line of the batch script."""
    submission = DelayedSubmission(BatchJob((str(folder.path),), token))
    submission.set_timeout(10, 0)
    submission.dump(folder.logs / f"{job_id}_submitted.pkl")
    return python(
        "-u",
        *RUN_MODULE,
        "submitit.core._submit",
        str(folder.logs),
        env={**os.environ, "SUBMITIT_EXECUTOR": "slurm", "SLURM_JOB_ID": job_id, **more},
    )


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
def test_a_job_leaves_a_folder_alone_that_has_a_later_owner(tiny: Tiny, state: str) -> None:
    """SLURM may put a job back although it refused to, and two jobs must not run in one folder."""
    folder, _ = tiny()
    first = take(folder, job_id="41")
    first.release(folder)
    take(folder, job_id="42")
    folder.write_status(state, job_id="42")
    status = folder.read_status()
    ended = run_as_slurm_would(folder, "41", first.token, SLURM_RESTART_COUNT="1")
    assert ended.returncode == 0, ended.stderr
    assert (
        "jobs: the folder belongs to job 42 now; this job leaves it alone"
        in ended.stderr.splitlines()
    )
    assert folder.read_status() == status


@pytest.mark.parametrize("released", [False, True])
def test_a_job_that_starts_again_owns_its_folder_again(tiny: Tiny, released: bool) -> None:
    folder, _ = tiny()
    owner = take(folder, job_id="41")
    if released:
        owner.release(folder)
    folder.write_status("requeued", job_id="41")
    run_as_slurm_would(folder, "41", owner.token, SLURM_RESTART_COUNT="1")
    assert folder.read_status()["state"] == "finished"
    last = read_owner(folder)
    assert last is not None and (last.number, last.job_id, last.is_released) == (
        2 if released else 1,
        "41",
        True,
    )


def test_a_job_whose_submission_was_interrupted_claims_the_folder(
    tmp_path: Path, monkeypatch: MonkeyPatch
) -> None:
    """The submitting process was killed before it wrote the job's number.

    The token says whose job this is.
    """
    folder = RunFolder(tmp_path)
    owner = take(folder)
    folder.write_status("submitting", token=owner.token)
    monkeypatch.setenv("SLURM_JOB_ID", "41")
    assert claim(folder, owner.token) is None
    claimed = read_owner(folder)
    assert claimed is not None and (claimed.job_id, claimed.is_mine) == ("41", True)
    later = claim(folder, "another token")
    assert later is None  # by the number
    monkeypatch.setenv("SLURM_JOB_ID", "42")
    assert claim(folder, "another token") == claimed


def test_waits_for_the_submitting_process(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
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


def test_a_lost_submitter_is_not_waited_for_for_ever(
    tmp_path: Path, monkeypatch: MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "41")
    monkeypatch.setattr("jobs.launch.batch.SUBMITTED_LIMIT_S", 0.2)
    wait_for_submission(RunFolder(tmp_path))
