"""SLURM's record of one job, from sacct, from scontrol, or from neither."""

from __future__ import annotations

import pytest

from jobs.schedulers.slurm_client.jobs import find_job
from tests.helpers.fake_slurm import FakeSlurm

ROWS = (
    "41|NODE_FAIL|None|2026-11-21T09:50:00|0:0|n[1-2]|2026-11-21T10:00:00|00:10:00|01:00:00|",
    "41|OUT_OF_MEMORY|None|2026-11-21T11:40:00|0:125|n[1-2]|2026-11-21T12:00:00|00:20:00|01:00:00|",
    "41.batch|OUT_OF_MEMORY||2026-11-21T11:40:00|0:125|n1|2026-11-21T12:00:00|00:20:00||2048K",
    "41.0|CANCELLED by 1000||2026-11-21T11:41:00|0:9|n[1-2]|2026-11-21T12:00:00|00:19:00||1.50G",
)
SCONTROL = (
    "JobId=41 JobName=a name with=signs UserId=x(0) JobState=TIMEOUT Reason=TimeLimit"
    " Dependency=(null) ExitCode=0:15 RunTime=01:00:12 TimeLimit=01:00:00"
    " EndTime=2026-11-21T12:00:00 NodeList=n[1-2] BatchHost=n1"
)


def test_the_last_start_counts_and_its_steps_give_memory(slurm: FakeSlurm) -> None:
    slurm.says("sacct", *ROWS)
    record, errors = find_job("41")
    assert errors == () and record is not None
    assert (record.source, record.state, record.nodes) == ("sacct", "OUT_OF_MEMORY", "n[1-2]")
    assert record.max_rss_bytes == 3 * 2**29
    assert record.step_states == ("OUT_OF_MEMORY", "CANCELLED")
    assert (
        record.describe()
        == "state OUT_OF_MEMORY, exit code 0:125, nodes n[1-2], elapsed 00:20:00, time limit"
        " 01:00:00"
    )
    assert "--jobs=41" in slurm.asked()[0]


def test_without_accounting_scontrol_answers(slurm: FakeSlurm) -> None:
    slurm.says("sacct", error="Slurm accounting storage is disabled\n", code=1)
    slurm.says("scontrol", SCONTROL)
    record, errors = find_job("41")
    assert record is not None and (record.source, record.state, record.reason) == (
        "scontrol",
        "TIMEOUT",
        "TimeLimit",
    )
    assert (record.time_limit, record.elapsed, record.exit_code) == ("01:00:00", "01:00:12", "0:15")
    assert errors == ("sacct failed: Slurm accounting storage is disabled",)


def test_without_slurm_there_is_no_record(slurm: FakeSlurm) -> None:
    assert find_job("41") == (None, ("sacct is not on PATH", "scontrol is not on PATH"))


@pytest.mark.parametrize("rows", [ROWS, ("411|FAILED",), ("", "41", "41|")])
def test_another_jobs_rows_are_not_taken(slurm: FakeSlurm, rows: tuple[str, ...]) -> None:
    slurm.says("sacct", *rows)
    record, errors = find_job("4" if rows is ROWS else "41")
    assert record is None and errors[0].startswith("sacct does not know job 4")
