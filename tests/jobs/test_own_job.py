"""What a job notes of itself, with stand-ins for scontrol and sacct."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gems.runs.folder import RunFolder
from jobs.launch.own_job import record_end, record_start
from jobs.schedulers.scheduler import SCHEDULERS
from tests.helpers.fake_slurm import FakeSlurm
from tests.helpers.job_helpers import Capture, MonkeyPatch, Prepared, refused

ONELINER = (
    "JobId=41 JobName=my run=2 UserId=me(1000) GroupId=me(1000) JobState=RUNNING Reason=None"
    " NodeList=n[1-2] CPUs/Task=1 Comment= Command=/runs/a b/logs/x.sh WorkDir=/home/me"
    " TRES=cpu=4,mem=12G,node=2 "
)
STEPS = (
    "41|run|RUNNING|0:0|00:01:00||n[1-2]||",
    "41.0|python|COMPLETED|0:0|00:00:50|4|n[1-2]|512M|7000",
)


@pytest.fixture
def folder(prepared: Prepared, slurm: FakeSlurm, monkeypatch: MonkeyPatch) -> RunFolder:
    """A prepared run inside of its job."""
    monkeypatch.setenv("SLURM_JOB_ID", "41")
    slurm.says("scontrol", ONELINER)
    slurm.says("sacct", *STEPS)
    return prepared()


def noted(folder: RunFolder) -> dict[str, Any]:
    record: dict[str, Any] = json.loads(folder.slurm_json.read_text())
    return record


def test_start_and_end(folder: RunFolder, slurm: FakeSlurm) -> None:
    record_start(folder, True)
    (start,) = noted(folder)["starts"]
    assert start["restart_count"] == 0 and "end" not in start
    record_end(folder)
    (start,) = noted(folder)["starts"]
    assert (
        start["end"]["steps"][1]["MaxRSS"] == "512M"
        and start["end"]["steps"][1]["ConsumedEnergyRaw"] == "7000"
    )
    environment = json.loads((folder.provenance / "environment.json").read_text())
    assert environment["job"]["variables"]["SLURM_JOB_ID"] == "41" and environment["prepared"]
    assert slurm.asked()[0] == "scontrol --oneliner show job 41"


def test_fields_keep_their_blanks_and_people_are_left_out(folder: RunFolder) -> None:
    fields = SCHEDULERS["slurm"].record("41")
    assert fields is not None
    assert (fields["JobName"], fields["Command"], fields["Comment"]) == (
        "my run=2",
        "/runs/a b/logs/x.sh",
        "",
    )
    assert (fields["TRES"], fields["CPUs/Task"]) == ("cpu=4,mem=12G,node=2", "1")
    assert not fields.keys() & {"UserId", "GroupId"}


def test_another_start_keeps_the_first(folder: RunFolder, monkeypatch: MonkeyPatch) -> None:
    record_start(folder, True)
    folder.affinity_json.write_text('{"ranks": ["first"]}')
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    record_start(folder, True)
    assert [start["restart_count"] for start in noted(folder)["starts"]] == [0, 1]
    assert not folder.affinity_json.exists()
    assert "first" in (folder.provenance / "affinity.start1.json").read_text()


def test_a_slurm_that_does_not_answer_is_no_trouble(folder: RunFolder, slurm: FakeSlurm) -> None:
    slurm.says(
        "scontrol", error="slurm_load_jobs error: Unable to contact slurm controller", code=1
    )
    (slurm.here / "sacct").unlink()
    record_start(folder, True)
    record_end(folder)
    (start,) = noted(folder)["starts"]
    assert start["job"] is None and start["end"]["job"] is None and start["end"]["steps"] is None


def test_changed_code_is_refused(folder: RunFolder) -> None:
    folder.code_zip.unlink()
    folder.code_zip.write_bytes(b"other code")
    record_start(folder, False)  # it runs the code that lies there
    with refused(r"code\.zip is not what was prepared .*submit it again"):
        record_start(folder, True)


def test_outside_of_slurm_nothing_is_noted(folder: RunFolder, monkeypatch: MonkeyPatch) -> None:
    monkeypatch.delenv("SLURM_JOB_ID")
    record_start(folder, True)
    record_end(folder)
    assert not folder.slurm_json.exists()


def test_notes_that_cannot_be_taken_end_no_run(folder: RunFolder, capsys: Capture) -> None:
    folder.slurm_json.mkdir()
    record_start(folder, True)
    record_end(folder)
    assert (
        capsys.readouterr().err.count(
            "jobs: the batch system's record of the job cannot be written"
        )
        == 2
    )
