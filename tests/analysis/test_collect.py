"""Collection of a run folder: parts in, one trace, two pictures and the figures out."""

from __future__ import annotations

import json

import h5py
import numpy as np
import pytest

from analysis.cli.collect import collect
from gems.config.compose import compose
from gems.errors import ConfigError
from gems.profile.hdf5 import read_profile
from gems.runs.folder import RunFolder
from gems.runs.prepare import prepare
from gems.trace import TracePart, part_path, read_trace, root_attributes
from gems.utils.atomic_io import write_json

STEP_NS = 1_000_000


def leave_parts(folder: RunFolder, steps_of_rank: list[int]) -> None:
    """Write what ranks leave: one forward and one backward a step, `steps_of_rank[r]` steps of rank r."""
    for rank, num_steps in enumerate(steps_of_rank):
        attributes = root_attributes("measured", "0" * 8, len(steps_of_rank), hostname=f"n{rank}")
        part = TracePart(part_path(folder.path, rank), rank, attributes)
        for step in range(num_steps):
            start = step * STEP_NS
            for kind in (0, 1):
                begin = start + kind * 400_000
                part.add(
                    "events",
                    (rank, step, kind, rank, -1, 0, 0, 0, begin, begin + 400_000, 0, 1 << 20, 0),
                )
            loss = 1.0 / (step + 1) if rank == 0 else float("nan")
            part.add(
                "rank_steps",
                (rank, step, start, start + STEP_NS, 8, loss, step == 0, np.nan, np.nan),
            )
        part.close()


@pytest.fixture
def folder(tmp_path) -> RunFolder:
    return prepare(compose(["parallel.partitions=2", "schedule=1f1b", f"runs_dir={tmp_path}"]))


def test_a_finished_run_becomes_one_trace_with_pictures(folder):
    leave_parts(folder, [3, 3])
    write_json(
        folder.result_json,
        {
            "validation_accuracy": 0.75,
            "validation_majority": 0.5,
            "schedule_rows": ["0F0", "1F0"],
            "schedule_sha256": "ab",
        },
    )
    loaded, metrics, files = collect(folder.path)
    trace = read_trace(folder.trace_h5)
    assert trace.steps["step"].tolist() == [0, 1, 2]
    assert trace.attributes["hostnames"] == ["n0", "n1"]
    assert trace.attributes["validation_accuracy"] == 0.75
    assert (
        trace.attributes["git_commit"]
        == json.loads(folder.provenance_json.read_text())["git_commit"]
    )
    assert trace.schedule_rows == ("0F0", "1F0")
    assert trace.boundaries == folder.read_boundaries()
    with h5py.File(folder.trace_h5) as file:
        profile = read_profile(file["profile"])
    assert json.loads(json.dumps(profile.to_json())) == json.loads(folder.profile_json.read_text())
    assert trace.layer_times == loaded.trace.layer_times
    assert trace.layer_times is not None and trace.layer_times.source == profile.source
    assert trace.layer_times.forward_s == tuple(layer.forward_s for layer in profile.layers)
    assert trace.run_yaml == folder.run_yaml.read_text()
    assert metrics.num_steps == 2
    assert metrics.images_per_s == pytest.approx(8 / (STEP_NS * 1e-9))
    for name in ("timeline", "memory"):
        assert (folder.path / f"{name}.png").read_bytes().startswith(b"\x89PNG")
        assert files[name].endswith(f"{name}.png")


def test_a_stopped_run_keeps_every_row_and_draws_what_is_whole(folder):
    leave_parts(folder, [3, 2])
    loaded, _, files = collect(folder.path)
    trace = read_trace(folder.trace_h5)
    assert trace.steps["step"].tolist() == [0, 1]
    assert np.count_nonzero(trace.rank_steps["rank"] == 0) == 3
    assert any("rank 1 finished 2 steps" in note for note in loaded.notes)
    assert "timeline" in files


def test_a_run_without_a_whole_step_has_a_trace_and_no_picture(folder):
    leave_parts(folder, [1, 0])
    assert set(collect(folder.path)[2]) == {"trace"}
    assert len(read_trace(folder.trace_h5).events) == 2


def test_a_folder_without_parts_is_refused(folder):
    with pytest.raises(ConfigError, match=r"rank\*\.h5"):
        collect(folder.path)
