"""`gems-jobs status`: the table and its JSON, studies with their points, names, and watching."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from gems.cli.framework import main
from gems.engine.progress import Progress
from gems.runs.folder import RunFolder
from jobs.__main__ import VERBS
from jobs.cli.status import status_table
from jobs.status.lookup import StudyRecord, find_one_run, find_runs, overview
from tests.helpers.fake_slurm import FakeSlurm
from tests.helpers.job_helpers import Called, Capture, MonkeyPatch, Prepared, refused

Status = Callable[..., str]


@pytest.fixture
def status(call: Called) -> Status:
    """Show the status, and return what the command printed."""
    return lambda *words, code=0: call("status", *words, code=code)[code != 0]


@pytest.fixture
def some(prepared: Prepared, slurm: FakeSlurm, tmp_path: Path) -> dict[str, RunFolder]:
    """One pending, one running and one failed run, and a study of three points, one of which is missing."""
    slurm.says(
        "squeue", "41|PENDING|2030-01-02T03:04:05|Resources|waits", "42|RUNNING|N/A|None|goes"
    )
    runs = {name: prepared(name) for name in ("waits", "goes", "broke")}
    runs["waits"].write_status("submitted", job_id="41")
    runs["goes"].write_status("running", job_id="42")
    Progress("goes", 70, 8, runs["goes"].progress_json).show(11, 0.25)
    runs["broke"].write_status("failed", exit_code=4, cause="rank 3\nhad no \x1b[2Jmemory")
    points = {
        f"parallel.replicas={count}": prepared("grid", f"parallel.replicas={count}")
        for count in (1, 2)
    }
    for folder, state in zip(points.values(), ("finished", "cancelled"), strict=True):
        folder.write_status(state, exit_code=0)
    labels = [(label, folder.path) for label, folder in points.items()]
    record = StudyRecord(tmp_path / "runs" / "grid")
    record.begin([*labels, ("parallel.replicas=3", tmp_path / "runs" / "grid-00000000")])
    document = record.read() | {"pid": 2**22 + 1}
    record.study_json.write_text(json.dumps(document))
    return runs


def rows(text: str) -> dict[str, list[str]]:
    return {line.split()[0]: line.split()[1:] for line in text.splitlines()}


def test_the_table(some: dict[str, RunFolder], status: Status, slurm: FakeSlurm) -> None:
    text = status()
    found = rows(text)
    waits, goes, broke = (found[some[name].path.name] for name in ("waits", "goes", "broke"))
    assert waits == ["pending", "41", "Resources,", "starts", "about", "2030-01-02", "03:04"]
    assert goes[:3] == ["running", "42", "11/70"] and goes[4] == "0.2500" and goes[6] == "s"
    assert broke == ["failed", "rank", "3", "had", "no", "[2Jmemory"]
    assert found["grid"] == [
        "cancelled",
        "study",
        "of",
        "3:",
        "1",
        "cancelled,",
        "1",
        "finished,",
        "1",
        "missing",
    ]
    assert "\x1b" not in text and len(text.splitlines()) == 5
    assert [line.split()[0] for line in slurm.asked()] == ["squeue"]


def test_points_stand_below_their_study(some: dict[str, RunFolder], status: Status) -> None:
    lines = status("-v", "grid").splitlines()
    assert [line.split()[:2] for line in lines[1:]] == [
        ["grid", "cancelled"],
        ["parallel.replicas=1", "finished"],
        ["parallel.replicas=2", "cancelled"],
        ["parallel.replicas=3", "missing"],
    ]


def test_json(some: dict[str, RunFolder], status: Status) -> None:
    found = json.loads(status("--json"))
    by_name = {run["name"]: run for run in found["runs"]}
    goes = by_name[some["goes"].path.name]
    assert (goes["state"], goes["step"], goes["steps"], goes["loss"], goes["job_id"]) == (
        "running",
        11,
        70,
        0.25,
        "42",
    )
    assert goes["sources"] == {"state": "squeue"} and goes["beat_age_s"] < 60
    assert by_name[some["waits"].path.name]["start_utc"].startswith("2030-01-0")
    (study,) = found["studies"]
    assert (study["name"], study["counts"]) == (
        "grid",
        {"finished": 1, "cancelled": 1, "missing": 1},
    )
    assert [point["state"] for point in study["points"]] == ["finished", "cancelled", "missing"]
    assert found["query_errors"] == []


def test_names(some: dict[str, RunFolder], status: Status, tmp_path: Path) -> None:
    name = some["waits"].path.name
    assert list(rows(status("waits")))[1:] == [name]
    assert list(rows(status(str(some["waits"].path), "goes")))[1:] == [name, some["goes"].path.name]
    (line,) = status("wait", code=2).splitlines()
    assert line.startswith("jobs: run=wait: is no run and no study of ") and "nearest: " in line
    runs_dir = f"runs_dir={tmp_path / 'runs'}"
    with refused("is a study; name one of its runs: grid-"):
        find_one_run([runs_dir, "grid"], "logs")
    with refused("takes one run"):
        find_one_run([runs_dir, "waits", "goes"], "logs")


def test_a_name_without_signature_means_all_of_that_name_or_the_only_one(
    prepared: Prepared, tmp_path: Path
) -> None:
    same = {prepared("same").path, prepared("same", "seed=1").path}
    words = [f"runs_dir={tmp_path / 'runs'}", "same"]
    assert {folder.path for folder in find_runs(words).runs} == same
    with refused("names several runs; same-"):
        find_runs(words, allows_several=False)


def test_guesses_are_marked_and_explained(
    some: dict[str, RunFolder], status: Status, slurm: FakeSlurm
) -> None:
    (slurm.here / "squeue").unlink()
    text = status()
    found = rows(text)
    assert (
        found[some["waits"].path.name][0] == "submitted?"
        and found[some["goes"].path.name][0] == "running?"
    )
    assert "no answer: squeue is not on PATH\nno answer: sacct is not on PATH\n" in text
    assert "?  the state is judged by heartbeats and status.json alone" in text


def test_a_narrow_screen_cuts_the_note_alone(some: dict[str, RunFolder], tmp_path: Path) -> None:
    some["broke"].write_status("failed", exit_code=4, cause="a long story " * 40)
    text = status_table(overview(find_runs([f"runs_dir={tmp_path / 'runs'}"])), width=110)
    assert max(map(len, text.splitlines())) == 110
    assert any("a long story" in line and line.endswith("...") for line in text.splitlines())


def test_nothing_there(status: Status, slurm: FakeSlurm) -> None:
    assert status() == "no runs here\n"
    assert slurm.asked() == []


def test_a_folder_of_runs_that_is_none(tmp_path: Path, slurm: FakeSlurm) -> None:
    (tmp_path / "file").touch()
    with refused("cannot be read"):
        find_runs([f"runs_dir={tmp_path / 'file'}"])
    with refused("is no run and no study"):
        find_runs(["x" * 5000])


def test_watching_ends_with_the_last_run(
    some: dict[str, RunFolder], status: Status, slurm: FakeSlurm, monkeypatch: MonkeyPatch
) -> None:
    waits: list[float | None] = []

    def wait(self: threading.Event, timeout: float | None = None) -> bool:
        waits.append(timeout)
        some["goes" if len(waits) > 1 else "waits"].write_status("finished", exit_code=0)
        return False

    monkeypatch.setattr(threading.Event, "wait", wait)
    text = status("--watch", "2.5")
    assert waits == [2.5, 2.5]
    assert text.count(" UTC\n") == 3
    assert rows(text)[some["goes"].path.name][0] == "finished"


def test_a_watcher_may_stop(
    some: dict[str, RunFolder], status: Status, monkeypatch: MonkeyPatch
) -> None:
    def stop(self: threading.Event, timeout: float | None = None) -> bool:
        raise KeyboardInterrupt

    monkeypatch.setattr(threading.Event, "wait", stop)
    assert status("--watch", "5").count("UTC") == 1


@pytest.mark.parametrize("text", ["0.5", "often", "nan", "inf"])
def test_an_interval_that_is_none(text: str, status: Status) -> None:
    (line,) = status("--watch", text, code=2).splitlines()
    assert line.startswith(f"jobs: --watch={text}: must be 1 or more seconds")


def test_saves_that_fail_are_in_the_note(some: dict[str, RunFolder], status: Status) -> None:
    progress = Progress("goes", 70, 8, some["goes"].progress_json)
    progress.show(12, 0.25)
    progress.show_error("save 2 of 5 failed: No space left on device")
    assert "save 2 of 5 failed: No space left on device" in status()
    found = json.loads(status("--json"))["runs"]
    errors = {run["name"]: run["error"] for run in found if run["error"]}
    assert errors == {some["goes"].path.name: "save 2 of 5 failed: No space left on device"}
    progress.show_error(None)
    assert "save" not in status()


@pytest.mark.cases
def test_help_and_status_wrap_at_the_width_of_the_terminal(
    recorded: Prepared, capfd: Capture, monkeypatch: MonkeyPatch
) -> None:
    folder = recorded(
        "failed",
        name="a_name_as_long_as_those_of_users_are",
        exit_code=4,
        cause="rank 3 on node n1 was killed by signal 9 (SIGKILL) " * 3,
    )
    monkeypatch.setenv("COLUMNS", "80")
    for words in (["--help"], ["status", "--help"], ["status", str(folder.path)]):
        assert main("jobs", VERBS, words) == 0
        out = capfd.readouterr().out
        assert max(map(len, out.splitlines())) <= 80, out
    assert folder.path.name in out and out.count("SIGKILL") == 3
