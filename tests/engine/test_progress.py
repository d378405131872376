"""The progress that rank 0 leaves for those who look from outside."""

from __future__ import annotations

import json
import logging
import math
from pathlib import Path

import pytest

from gems.engine import progress
from gems.engine.progress import Progress


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A clock that a test turns."""
    now = [100.0]
    monkeypatch.setattr(progress.time, "perf_counter", lambda: now[0])
    return now


def test_the_note_tells_the_last_step_at_most_every_two_seconds(
    tmp_path: Path, clock: list[float]
) -> None:
    path = tmp_path / "progress.json"
    shown = Progress("one", 10, 8, path)
    steps = []
    for step in range(1, 11):
        clock[0] += 0.5
        shown.show(step, 1.0 / step)
        steps.append(json.loads(path.read_text())["step"])
    assert steps == [1, 1, 1, 1, 1, 6, 6, 6, 6, 10]
    note = json.loads(path.read_text())
    assert (note["steps"], note["loss"], note["images_per_s"]) == (10, 0.1, pytest.approx(16.0))


def test_what_is_not_known_is_null_and_not_shown(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "progress.json"
    with caplog.at_level(logging.INFO):
        Progress("one", 1, 8, path).show(1, math.nan)
        Progress("two", 1, 8, tmp_path / "two.json").show(1, 0.5, 0.00125)
    note = json.loads(path.read_text())
    assert note["loss"] is None and note["learning_rate"] is None
    first, second = caplog.messages
    assert "loss" not in first and "lr" not in first
    assert "step 1/1  loss 0.5000  lr 0.00125  " in second


def test_a_file_system_that_is_gone_does_not_stop_a_run(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    Progress("one", 10, 8, tmp_path / "file" / "progress.json").show(1, 0.5)


def test_an_error_is_shown_at_once_and_until_it_is_over(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "progress.json"
    shown = Progress("one", 10, 8, path)
    shown.show(1, 0.5)
    shown.show(2, 0.4)
    shown.show_error("save 1 of 5 failed")
    note = json.loads(path.read_text())
    assert (note["step"], note["error"]) == (2, "save 1 of 5 failed")
    with caplog.at_level(logging.INFO):
        shown.show(10, 0.3)
    assert "save 1 of 5 failed" in caplog.text
    shown.show_error(None)
    assert json.loads(path.read_text())["error"] is None
