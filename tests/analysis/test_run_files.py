"""What a run folder tells about a run that was killed, or that goes on, and so has no trace.h5."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from analysis.__main__ import main
from analysis.io.load import load_trace
from gems.config.compose import compose
from gems.errors import ConfigError
from gems.plan.evaluate import evaluate
from gems.runs.folder import RunFolder
from gems.runs.prepare import change_layout, prepare
from gems.schedule.action import COMPUTE_KINDS
from gems.trace import KINDS, TracePart, part_path, root_attributes
from gems.utils.atomic_io import read_json

MS = 1_000_000
STEP_NS = 100 * MS


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    """A run under a memory policy whose ranks left two whole steps, one compute action after the other."""
    words = ["parallel.partitions=2", "schedule=1f1b", "memory=recompute", f"runs_dir={tmp_path}"]
    made = prepare(compose(words))
    for rank, row in enumerate(made.read_schedule().rank_schedules):
        part = TracePart(part_path(made.path, rank), rank, root_attributes("measured", "0" * 8, 2))
        for step in range(2):
            begin = step * STEP_NS
            for number, action in enumerate(
                action for action in row if action.kind in COMPUTE_KINDS
            ):
                start = begin + number * MS
                kind = KINDS.index(action.kind.value)
                place = (
                    -1 if action.segment is None else action.segment,
                    action.direction,
                    action.micro_batch,
                )
                part.add(
                    "events",
                    (rank, step, kind, action.stage, *place, 0, start, start + MS, 0, 0, 0),
                )
            part.add(
                "rank_steps", (rank, step, begin, begin + STEP_NS, 8, np.nan, 0, np.nan, np.nan)
            )
        part.close()
    return made


def test_a_killed_run_has_what_it_was_prepared_with(folder: RunFolder) -> None:
    loaded = load_trace(folder.path)
    trace = loaded.trace
    schedule = folder.read_schedule()
    assert trace.schedule_rows == tuple(" ".join(map(str, row)) for row in schedule.rank_schedules)
    assert trace.schedule_sha256 == schedule.digest()
    assert trace.boundaries == folder.read_boundaries() != ()
    assert json.loads(trace.memory_plan) == read_json(folder.memory_json)
    assert (
        trace.layer_times is not None and len(trace.layer_times.forward_s) == trace.boundaries[-1]
    )
    assert trace.attributes["git_commit"] == read_json(folder.provenance_json)["git_commit"]


def test_where_the_time_of_a_killed_run_went(
    folder: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["attribution", str(folder.path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["step_s"] == pytest.approx(STEP_NS * 1e-9) and found["num_steps"] == 2
    assert found["causes_s"]["memory"] >= 0


@pytest.mark.parametrize("name", ["profile.json", "schedule.json", "partition.json", "memory.json"])
@pytest.mark.parametrize("text", ["{", "[[1]]"])
def test_a_damaged_file_is_named_and_the_rest_is_read(
    folder: RunFolder, name: str, text: str
) -> None:
    whole = load_trace(folder.path).trace
    (folder.path / name).write_text(text)
    loaded = load_trace(folder.path)
    trace = loaded.trace
    assert any(note.startswith(f"left out {name}") for note in loaded.notes), loaded.notes
    assert len(trace.steps) == len(whole.steps) == 2
    kept = [
        getattr(trace, key) == getattr(whole, key)
        for key in ("schedule_rows", "boundaries", "memory_plan", "layer_times")
    ]
    assert kept.count(False) == 1


def test_a_folder_of_parts_alone_is_read_as_it_is(folder: RunFolder) -> None:
    for path in folder.path.glob("*.json"):
        path.unlink()
    trace = load_trace(folder.path).trace
    assert len(trace.steps) == 2 and trace.schedule_rows == () and trace.layer_times is None


def test_changes_of_the_layout_are_in_the_trace_and_the_summary(
    folder: RunFolder, tmp_path: Path
) -> None:
    spec = compose(
        ["parallel.partitions=1", "schedule=1f1b", "memory=recompute", f"runs_dir={tmp_path}"]
    )
    change_layout(folder, evaluate(spec), "node n2 is lost", "job 41 on n1", 7)
    (row,) = folder.layouts()
    line = (
        f"2 x 1 ranks on 1 node became 1 x 1 ranks on 1 node from step 7 ({row['utc']}, job 41 on"
        " n1: node n2 is lost)"
    )
    loaded = load_trace(folder.path)
    assert loaded.trace.attributes["layouts"] == [line] and line in loaded.notes
    assert loaded.trace.boundaries == folder.read_boundaries()  # of the present one
    assert len(loaded.trace.schedule_rows) == 1
    folder.layouts_json.write_text("{")
    with pytest.raises(ConfigError, match=r"layouts\.json is damaged"):
        folder.read_spec()
