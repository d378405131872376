"""The condition of a run: its folder, squeue and sacct joined, with any of the three missing."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest

from gems.engine.progress import Progress
from gems.runs import heartbeat as heartbeat_module
from gems.runs.folder import RunFolder
from gems.runs.heartbeat import Heartbeat
from gems.utils.atomic_io import write_json
from gems.utils.process_tree import start_time
from jobs.status import run_status
from jobs.status.job_record import CHAIN_JSON
from jobs.status.run_status import read_recorded, run_statuses
from tests.helpers.fake_slurm import FakeSlurm
from tests.helpers.job_helpers import MonkeyPatch, Prepared, status_of

RESOURCES = "41|PENDING|2026-11-21T12:00:00|Resources|one"


def beat(folder: RunFolder, step: int, action: str, age_s: float = 0.0, rank: int = 0) -> None:
    """Leave a mark of a rank, as old as it is said to be."""
    Heartbeat(folder.heartbeat(rank)).beat(step, action)
    path = folder.heartbeat(rank)
    *words, _ = path.read_text().split()
    path.write_text(" ".join([*words, str(time.time_ns() - int(age_s * 1e9))]))


@pytest.mark.parametrize(
    ("state", "more", "queue", "accounting", "expected"),
    [
        ("submitted", {}, RESOURCES, None, "pending"),
        ("submitted", {}, "41|EXPEDITING|N/A|None|one", None, "pending"),
        ("submitted", {}, "41|CONFIGURING|N/A|None|one", None, "starting"),
        ("submitted", {}, "41|RUNNING|N/A|None|one", None, "starting"),
        ("submitted", {}, "41|CANCELLED|N/A|None|one", None, "cancelled"),
        ("submitted", {}, "41|FAILED|N/A|JobLaunchFailure|one", None, "failed"),
        ("submitted", {}, "", None, "lost"),
        ("submitted", {}, "", "41|CANCELLED by 0|None|Unknown", "cancelled"),
        ("submitted", {}, None, None, "submitted"),
        ("submitted", {}, None, "41|PENDING|Priority|Unknown", "pending"),
        ("running", {}, "41|RUNNING|N/A|None|one", None, "running"),
        ("running", {}, "41|COMPLETING|N/A|None|one", None, "running"),
        ("running", {}, "41|PENDING|N/A|BeginTime|one", None, "pending"),
        ("running", {}, "41|NODE_FAIL|N/A|None|one", None, "failed"),
        ("running", {}, "41|COMPLETED|N/A|None|one", None, "lost"),
        ("running", {}, "", None, "lost"),
        ("running", {}, "", "41|RUNNING|None|Unknown", "lost"),
        ("running", {}, "", "41|TIMEOUT|None|2026-11-21T12:00:00", "failed"),
        ("running", {}, None, "41|TIMEOUT|None|2026-11-21T12:00:00", "failed"),
        ("running", {}, None, None, "running"),
        ("failed", {"exit_code": 143}, RESOURCES, None, "pending"),
        ("failed", {"exit_code": 143}, "41|RUNNING|N/A|None|one", None, "failed"),
        ("failed", {"exit_code": 143}, "41|CANCELLED|N/A|None|one", None, "cancelled"),
        ("failed", {"exit_code": 4}, RESOURCES, None, "failed"),
        ("finished", {"exit_code": 0}, RESOURCES, None, "finished"),
        ("finished", {"exit_code": 2}, None, None, "failed"),
        ("cancelled", {"exit_code": 143}, RESOURCES, None, "cancelled"),
    ],
)
def test_states(
    state: str,
    more: dict[str, Any],
    queue: str | None,
    accounting: str | None,
    expected: str,
    recorded: Prepared,
    slurm: FakeSlurm,
) -> None:
    """A command that is None is not there; one that is empty knows no job."""
    for name, line in (("squeue", queue), ("sacct", accounting)):
        if line is not None:
            slurm.says(name, *filter(None, [line]))
    folder = recorded(state, job_id="41", **more)
    found = status_of(folder)
    assert found.state == expected
    knew = [line for line in (queue, accounting) if line]
    if expected in ("pending", "starting") and knew:
        assert (found.source, found.is_guess) == ("squeue" if queue else "sacct", False)
    assert found.is_guess == (
        state in ("submitted", "running") and queue is None and accounting is None
    )


def test_one_call_of_each_for_all_jobs(prepared: Prepared, slurm: FakeSlurm) -> None:
    slurm.says("squeue", "41|PENDING|2026-11-21T12:00:00|Resources|a", "43|RUNNING|N/A|None|b|c")
    slurm.says("sacct", "44|FAILED|None|Unknown")
    names = {"a": "41", "b|c": "43", "gone": "44", "ended": "45"}
    folders = [prepared(name) for name in names]
    for folder, job_id in zip(folders, names.values(), strict=True):
        state = "finished" if job_id == "45" else "submitted"
        folder.write_status(state, job_id=job_id, exit_code=0)
    found = run_statuses(folders)
    assert [run.state for run in found.runs] == ["pending", "starting", "failed", "finished"]
    assert [run.job_name for run in found.runs] == ["a", "b|c", None, None]
    assert found.runs[0].start_utc is not None and found.runs[0].note == "Resources"
    squeue, sacct = slurm.asked()
    assert squeue.endswith("--jobs=41,43,44") and sacct.endswith("--jobs=44")
    assert found.errors == ()


def test_a_users_own_filters_do_not_hide_jobs(
    recorded: Prepared, slurm: FakeSlurm, monkeypatch: MonkeyPatch
) -> None:
    monkeypatch.setenv("SQUEUE_USERS", "someone")
    slurm.does("squeue", f'[ -z "$SQUEUE_USERS" ] && echo "{RESOURCES}"')
    folder = recorded("submitted", job_id="41")
    assert status_of(folder).state == "pending"


def test_a_job_number_that_is_none_reaches_no_command_line(
    prepared: Prepared, slurm: FakeSlurm
) -> None:
    slurm.says("squeue")
    folder = prepared()
    for job_id in ("41; touch owned", "--all", "$(touch owned)", "4\n1", "٤١", True, [41], -1):
        folder.write_status("running", job_id=job_id)
        found = status_of(folder)
        assert (found.job_id, slurm.asked()) == (None, []), job_id
        assert found.is_guess


def test_what_could_not_be_asked_is_said(
    recorded: Prepared, slurm: FakeSlurm, monkeypatch: MonkeyPatch
) -> None:
    monkeypatch.setattr("jobs.batch.command.QUERY_LIMIT_S", 0.2)
    slurm.hangs("squeue")
    slurm.says("sacct", error="Slurm accounting storage is disabled\n", code=1)
    folder = recorded("submitted", job_id="41")
    found = run_statuses([folder])
    assert found.errors == (
        "squeue did not answer within 0.2 s",
        "sacct failed: Slurm accounting storage is disabled",
    )
    assert (found.runs[0].state, found.runs[0].is_guess) == ("submitted", True)


def test_one_job_that_squeue_has_forgotten_is_lost(recorded: Prepared, slurm: FakeSlurm) -> None:
    slurm.says("squeue", error="slurm_load_jobs error: Invalid job id specified\n", code=1)
    folder = recorded("running", job_id="41")
    found = status_of(folder)
    assert (found.state, found.source) == ("lost", "squeue")
    write_json(folder.cancelled_json, {})
    assert status_of(folder).state == "cancelled"


def test_a_run_that_ends_between_the_two_looks(recorded: Prepared, slurm: FakeSlurm) -> None:
    folder = recorded("finished", job_id="41", exit_code=0)
    end = folder.status_json.read_text()
    folder.write_status("running", job_id="41")
    slurm.does("squeue", f"/bin/cat > '{folder.status_json}' <<'END'\n{end}END\n")
    assert status_of(folder).state == "finished"


def test_of_a_killed_job_in_a_chain_the_second_look_counts(
    prepared: Prepared, slurm: FakeSlurm
) -> None:
    folder = prepared()
    write_json(folder.path / CHAIN_JSON, {"jobs": ["41", "42"]})
    folder.write_status("running", job_id="41")
    progress = '{"step": 7, "time_ns": 1}'
    slurm.does(
        "squeue",
        f"echo '{progress}' > '{folder.progress_json}'; echo '42|PENDING|N/A|Dependency|one'",
    )
    found = status_of(folder)
    assert (found.state, found.job_id, found.step) == ("pending", "42", 7)


def test_step_rate_and_loss_are_those_that_rank_0_noted(
    recorded: Prepared, slurm: FakeSlurm
) -> None:
    slurm.says("squeue", "41|RUNNING|N/A|None|one")
    folder = recorded("running", job_id="41")
    beat(folder, 12, "0F3", age_s=3.0)
    found = status_of(folder)
    assert (found.step, found.sources) == (12, {"step": "heartbeats"})
    assert found.steps == folder.read_spec().train.steps
    Progress("one", 70, 8, folder.progress_json).show(11, 0.25)
    found = status_of(folder)
    assert (found.step, found.steps, found.loss, found.sources) == (11, 70, 0.25, {})
    assert found.images_per_s is not None and found.images_per_s > 0
    assert found.age_s is not None and found.age_s < 2.0
    Progress("one", 70, 8, folder.progress_json).show(12, float("nan"))
    assert status_of(folder).loss is None


@pytest.mark.parametrize(
    ("step", "action", "age_s", "state"),
    [
        (3, "0F3", 60.0, "running"),
        (3, "0F3", 130.0, "stalled"),
        (3, "load", 130.0, "running"),
        (-1, "start", 590.0, "running"),
        (-1, "start", 610.0, "stalled"),
        (100, "checkpoint", 610.0, "stalled"),
        (-1, "finished", 5000.0, "running"),
    ],
)
def test_stalled_after_its_limit(
    step: int, action: str, age_s: float, state: str, recorded: Prepared, slurm: FakeSlurm
) -> None:
    slurm.says("squeue", "41|RUNNING|N/A|None|one")
    folder = recorded("running", job_id="41")
    beat(folder, step, action, age_s)
    found = status_of(folder)
    assert found.state == state
    assert found.age_s == pytest.approx(age_s, abs=5)
    if state == "stalled":
        assert found.note.startswith("no rank has moved for") and found.note.endswith(
            f"the last in {action}"
        )
    slurm.says("squeue")
    assert status_of(folder).state == "lost"


def test_the_newest_of_all_ranks_counts(recorded: Prepared, slurm: FakeSlurm) -> None:
    slurm.says("squeue", "41|RUNNING|N/A|None|one")
    folder = recorded("running", job_id="41")
    beat(folder, 3, "0F3", age_s=500.0)
    beat(folder, 4, "1F0", age_s=1.0, rank=1)
    assert status_of(folder).state == "running"


def test_runs_of_this_machine_by_their_process(prepared: Prepared, slurm: FakeSlurm) -> None:
    me = {"pid": os.getpid(), "host": os.uname().nodename}
    folder = prepared()
    for more, state in (
        (me, "running"),
        (me | {"pid_started": start_time(os.getpid())}, "running"),
        (me | {"pid_started": "1"}, "lost"),
        (me | {"pid": 2**22 + 1}, "lost"),
        (me | {"pid": None}, "lost"),
    ):
        folder.write_status("running", **more)
        found = status_of(folder)
        assert (found.state, found.source, found.is_guess) == (state, "process", False), more
    folder.write_status("running", **me | {"host": "elsewhere"})
    found = status_of(folder)
    assert (found.state, found.source, found.is_guess, found.note) == (
        "running",
        "heartbeats",
        True,
        "on elsewhere",
    )
    assert slurm.asked() == []


def test_a_run_that_was_started_by_hand(prepared: Prepared, slurm: FakeSlurm) -> None:
    folder = prepared()
    assert status_of(folder).state == "prepared"
    beat(folder, 3, "0F3")
    found = status_of(folder)
    assert (found.state, found.is_guess) == ("running", True)
    beat(folder, -1, "finished")
    assert status_of(folder).state == "finished"


def test_damaged_files_are_facts_too(prepared: Prepared, slurm: FakeSlurm, tmp_path: Path) -> None:
    folder = prepared()
    folder.status_json.write_text("{")
    found = status_of(folder)
    assert found.state == "unreadable" and "damaged" in found.note
    folder.write_status("running", job_id="41")
    folder.progress_json.write_text("{")
    folder.heartbeat(0).write_text("nothing that is a mark")
    folder.run_yaml.write_text("- no configuration")
    facts = read_recorded(folder)
    assert (facts.step, facts.steps, facts.loss, facts.images_per_s) == (None, None, None, None)
    assert read_recorded(RunFolder(tmp_path / "none")).state == "missing"


@pytest.mark.parametrize("behind_s", [3600, -3600])
@pytest.mark.parametrize(("waits_s", "state"), [(5, "running"), (200, "stalled")])
def test_a_clock_of_the_ranks_that_is_an_hour_off_changes_nothing(
    recorded: Prepared, monkeypatch: MonkeyPatch, behind_s: int, waits_s: int, state: str
) -> None:
    """They show signs of life, and began their action some seconds before by the clock that they share."""
    folder = recorded("running", pid=os.getpid(), host=os.uname().nodename)
    now_ns = time.time_ns() - behind_s * 10**9
    heartbeat = Heartbeat(folder.heartbeat(0))
    monkeypatch.setattr(heartbeat_module, "now_ns", lambda: now_ns - waits_s * 10**9)
    heartbeat.beat(7, "0F1")
    signs = iter(range(100))
    monkeypatch.setattr(heartbeat_module, "now_ns", lambda: now_ns + next(signs))
    heartbeat.live()

    def sleep(seconds: float) -> None:
        heartbeat.live()

    monkeypatch.setattr(run_status.time, "sleep", sleep)
    found = status_of(folder)
    assert (found.state, round(found.age_s or 0)) == (state, waits_s)
