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
from gems.trace import read_trace
from gems.utils.atomic_io import write_json

RUN = {"name": "1f1b", "partitions": 2, "steps": 3, "images_per_step": 8, "source": "measured"}


@pytest.fixture
def folder(tmp_path) -> RunFolder:
    return prepare(compose(["parallel.partitions=2", "schedule=1f1b", f"runs_dir={tmp_path}"]))


def test_a_finished_run_becomes_one_trace_with_pictures(folder, write_parts):
    write_parts(folder.path, RUN)
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
    assert trace.attributes["hostnames"] == ["node0", "node1"]
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
    assert metrics.images_per_s == pytest.approx(8 / metrics.step_median_s)
    for name in ("timeline", "memory"):
        assert (folder.path / f"{name}.png").read_bytes().startswith(b"\x89PNG")
        assert files[name].endswith(f"{name}.png")


def test_a_stopped_run_keeps_every_row_and_draws_what_is_whole(folder, write_parts):
    write_parts(folder.path, RUN, {1: 2})
    loaded, _, files = collect(folder.path)
    trace = read_trace(folder.trace_h5)
    assert trace.steps["step"].tolist() == [0, 1]
    assert np.count_nonzero(trace.rank_steps["rank"] == 0) == 3
    assert any("rank 1 finished 2 steps" in note for note in loaded.notes)
    assert "timeline" in files


def test_a_run_without_a_whole_step_has_a_trace_and_no_picture(folder, write_parts):
    write_parts(folder.path, RUN, {0: 1, 1: 0})
    assert set(collect(folder.path)[2]) == {"trace"}
    assert np.unique(read_trace(folder.trace_h5).events["rank"]).tolist() == [0]


def test_a_folder_without_parts_is_refused(folder):
    with pytest.raises(ConfigError, match=r"rank\*\.h5"):
        collect(folder.path)
