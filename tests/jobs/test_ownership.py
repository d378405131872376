"""The proof that a folder's owner is gone, by a squeue that answers, lies, hangs, or is not there."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from gems.errors import TryLaterError
from gems.runs.folder import RunFolder
from gems.runs.owner import take
from gems.utils.atomic_io import write_json
from jobs.status.job_record import find_among, gone_verifier
from tests.helpers.fake_slurm import FakeSlurm
from tests.helpers.job_helpers import MonkeyPatch, refused

HEADER = "JOBID|STATE|COMMAND"
UNSURE = "belongs to job 41, and nobody can tell whether it has ended .*; try again, or add --force"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: MonkeyPatch) -> RunFolder:
    """A folder of job 41."""
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    folder = RunFolder(tmp_path / "run")
    owned_by(folder, job_id="41")
    folder.write_status("running", job_id="41")
    return folder


def owned_by(folder: RunFolder, **fields: Any) -> None:
    fields = {
        "token": "t",
        "host": "login9",
        "pid": 7,
        "utc": datetime.now(UTC).isoformat(),
        **fields,
    }
    write_json(folder.path / "owners" / "0001.json", fields)


@pytest.mark.parametrize("force", [False, True])
@pytest.mark.parametrize("state", ["PENDING", "RUNNING", "COMPLETING", "SUSPENDED"])
def test_an_active_job_keeps_its_folder(
    folder: RunFolder, slurm: FakeSlurm, state: str, force: bool
) -> None:
    slurm.says("squeue", HEADER, f"41|{state}|/x/job.sh")
    with refused(r"belongs to job 41, which has not ended; wait for it", TryLaterError):
        take(folder, gone_verifier(force=force))


@pytest.mark.parametrize("lines", [[HEADER, "41|TIMEOUT|/x/job.sh"], [HEADER]])
def test_an_ended_or_forgotten_job_does_not(
    folder: RunFolder, slurm: FakeSlurm, lines: list[str]
) -> None:
    slurm.says("squeue", *lines)
    take(folder, gone_verifier())
    assert folder.read_status()["cause"] == "the job left the queue: cancelled, lost or out of time"


def test_a_number_that_slurm_does_not_know_does_not(folder: RunFolder, slurm: FakeSlurm) -> None:
    slurm.says("squeue", error="slurm_load_jobs error: Invalid job id specified\n", code=1)
    take(folder, gone_verifier())


@pytest.mark.parametrize(
    "answer",
    [
        {},
        {"lines": ["garbage"]},
        {"lines": [HEADER, "41|what|x"]},
        {"lines": [HEADER, "no job"]},
        {"lines": ["41|COMPLETED|x"]},
        {"code": 1},
        {"error": "Unable to contact slurm controller\n", "code": 1},
        {"error": "slurm_load_jobs error: Socket timed out on send/recv operation\n", "code": 1},
    ],
)
def test_an_answer_that_is_none_lets_nobody_in(
    folder: RunFolder, slurm: FakeSlurm, answer: dict[str, Any]
) -> None:
    slurm.says("squeue", *answer.pop("lines", []), **answer)
    with refused(UNSURE, TryLaterError):
        take(folder, gone_verifier())
    assert folder.read_status()["state"] == "running"
    assert take(folder, gone_verifier(force=True)).number == 2


def test_no_squeue_lets_nobody_in(folder: RunFolder, slurm: FakeSlurm) -> None:
    with refused("squeue is not on PATH", TryLaterError):
        take(folder, gone_verifier())


@pytest.mark.parametrize(("state", "is_free"), [("finished", True), ("failed", False)])
def test_what_was_given_back_may_be_queued_again_by_slurm(
    folder: RunFolder, slurm: FakeSlurm, state: str, is_free: bool
) -> None:
    owned_by(folder, job_id="41", is_released=True)
    folder.write_status(state, job_id="41")
    slurm.says("squeue", HEADER, "41|PENDING|/x/job.sh")
    if is_free:
        take(folder, gone_verifier())
        return
    with refused("belongs to job 41, which has not ended", TryLaterError):
        take(folder, gone_verifier())
    slurm.says("squeue", code=1)  # it is given back: the doubt is not against it
    take(folder, gone_verifier())


@pytest.mark.parametrize(
    ("age_s", "force", "is_free"),
    [(5, False, False), (5, True, False), (700, False, False), (700, True, True)],
)
def test_a_process_on_another_host_is_gone_if_it_is_old_and_the_user_says_so(
    folder: RunFolder, slurm: FakeSlurm, age_s: float, force: bool, is_free: bool
) -> None:
    owned_by(folder, utc=(datetime.now(UTC) - timedelta(seconds=age_s)).isoformat())
    folder.write_status("running", host="login9")
    if is_free:
        take(folder, gone_verifier(force=force))
        return
    with refused("belongs to process 7 on login9, and nobody can tell from here", TryLaterError):
        take(folder, gone_verifier(force=force))


@pytest.mark.parametrize("job_id", [None, "43"])
def test_a_submission_on_another_host_is_found_by_its_script(
    folder: RunFolder, slurm: FakeSlurm, job_id: str | None
) -> None:
    """Its caller may be alive or not, and may have written the job's number as the owner.

    The job is in the queue.
    """
    owned_by(folder, job_id=job_id)
    folder.write_status("submitting", token="t", host="login9", pid=7)
    folder.logs.mkdir()
    script = folder.logs / ".submission_file_t.sh"
    script.write_text("#!/bin/sh\n")
    (folder.logs / ".submitted_t.pkl").write_text("")
    slurm.says("squeue", HEADER, f"43|PENDING|{script}", "44|RUNNING|/x/.submission_file_u.sh")
    with refused("belongs to job 43, which has not ended", TryLaterError):
        take(folder, gone_verifier())
    assert folder.read_status()["job_id"] == "43"
    assert (folder.logs / "43_submission.sh").read_text() == script.read_text() == "#!/bin/sh\n"
    assert (folder.logs / "43_submitted.pkl").exists()


@pytest.mark.parametrize(
    ("own", "other", "is_free"), [("COMPLETED", "RUNNING", True), ("RUNNING", "FAILED", False)]
)
def test_of_an_array_the_own_task_alone_counts(
    folder: RunFolder, slurm: FakeSlurm, own: str, other: str, is_free: bool
) -> None:
    owned_by(folder)
    folder.write_status("submitting", token="t", host="login9", pid=7, task=1)
    script = "/x/.submission_file_t.sh"
    slurm.says(
        "squeue", HEADER, f"43_0|{other}|{script}", f"43_1|{own}|{script}", f"43_2|{other}|{script}"
    )
    if is_free:
        take(folder, gone_verifier())
        return
    with refused("belongs to job 43_1, which has not ended", TryLaterError):
        take(folder, gone_verifier())
    assert folder.read_status()["job_id"] == "43_1"


def test_one_squeue_looks_many_jobs_up(folder: RunFolder, slurm: FakeSlurm) -> None:
    slurm.says("squeue", HEADER, "41|RUNNING|/x/job.sh", "42_1|COMPLETED|/x/job.sh")
    find = find_among(["41", "42_1", "42_2", "no number"])
    with refused("belongs to job 41, which has not ended", TryLaterError):
        take(folder, gone_verifier(find=find))
    owned_by(folder, job_id="42_2")
    take(folder, gone_verifier(find=find))
    (asked,) = slurm.asked()
    assert asked.endswith("--jobs=41,42")


def test_a_squeue_that_fails_for_many_lets_nobody_in(folder: RunFolder, slurm: FakeSlurm) -> None:
    slurm.says("squeue", code=1)
    find = find_among(["41"])
    with refused(UNSURE, TryLaterError):
        take(folder, gone_verifier(find=find))
