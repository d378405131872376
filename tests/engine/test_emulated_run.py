"""A whole emulated run under mpiexec, where torch cannot even be imported."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from gems.launch.local_launcher import QUIET, mpiexec_argv, rank_environment, run_ranks
from gems.runs.folder import RunFolder
from gems.runs.heartbeat import read_beat
from gems.runs.prepare import prepare
from gems.trace import KINDS, SOURCES, part_path, read_part
from gems.utils.atomic_io import read_json
from tests.helpers.toys import make_spec

NUM_RANKS = 3
NUM_STEPS = 3
CHANGES = {
    "machine__kind": "emulated",
    "cost__unit_s": 0.0005,
    "cost__boundary_bytes": 5000,
    "cost__activation_bytes": 700,
    "cost__input_grad": 2.0,
    "train__steps": NUM_STEPS,
    "benchmark__skip_steps": 1,
}


def launch(folder: RunFolder, tmp_path: Path):
    """Start the ranks with a torch that raises when it is imported."""
    poison = tmp_path / "poison"
    (poison / "torch").mkdir(parents=True)
    (poison / "torch" / "__init__.py").write_text("raise ImportError('torch was imported')")
    environment = rank_environment(1) | {"PYTHONPATH": f"{poison}:{Path.cwd()}"}
    argv = mpiexec_argv(NUM_RANKS, [sys.executable, "-m", "gems.engine.run", str(folder.path)])
    return run_ranks(argv, environment, QUIET, 100.0)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    path = tmp_path_factory.mktemp("emulated")
    folder = prepare(make_spec("1f1b", NUM_RANKS, runs_dir=str(path), **CHANGES))
    ended = launch(folder, path)
    assert ended.returncode == 0, ended.tail
    return folder


def test_no_rank_imports_torch(run):
    assert [read_beat(run.heartbeat(rank)).action for rank in range(NUM_RANKS)] == [
        "finished"
    ] * NUM_RANKS


def test_parts_say_what_they_are(run):
    for rank in range(NUM_RANKS):
        part = read_part(part_path(run.path, rank))
        assert part.source == "emulated" and part.source in SOURCES
        assert (part.world_size, part.attributes["device"]) == (NUM_RANKS, "emulated")
        assert not any("torch" in version for version in part.attributes["versions"])
        assert {"clock_offset_ns", "clock_end_offset_ns"} <= part.attributes.keys()
        steps = part.rank_steps
        assert steps["step"].tolist() == [0, 1, 2] and steps["is_warmup"].tolist() == [1, 0, 0]
        assert steps["images"].tolist() == [8] * NUM_STEPS and bool(np.isnan(steps["loss"]).all())


def test_every_action_of_the_list_is_in_the_trace_in_every_step(run):
    schedule = run.read_schedule()
    for rank in range(NUM_RANKS):
        events = read_part(part_path(run.path, rank)).events
        for step in range(NUM_STEPS):
            mine = events[events["step"] == step]
            found = sorted(
                (KINDS[row["kind"]], int(row["stage"]), int(row["micro_batch"])) for row in mine
            )
            row = schedule.rank_schedules[rank]
            wanted = sorted(
                (a.kind.value, a.stage, -1 if a.micro_batch is None else a.micro_batch) for a in row
            )
            assert found == wanted


def test_messages_and_activations_have_the_configured_bytes(run):
    for rank in range(NUM_RANKS):
        events = read_part(part_path(run.path, rank)).events
        is_message = np.isin(
            events["kind"], [KINDS.index(kind) for kind in KINDS if kind[:4] in ("SEND", "RECV")]
        )
        assert set(events["moved_bytes"][is_message]) == {5000} and set(
            events["moved_bytes"][~is_message]
        ) == {0}
        assert (
            700 * (NUM_RANKS - rank)
            <= events["device_bytes"].max()
            < 700 * (NUM_RANKS - rank) + 6 * 5000
        )


def test_compute_takes_its_cost_to_the_nanosecond(run):
    events = read_part(part_path(run.path, 1)).events
    for kind, cost_ns in (("F", 500_000), ("B", 1_500_000)):
        mine = events[events["kind"] == KINDS.index(kind)]
        assert set(mine["end_ns"] - mine["start_ns"]) == {cost_ns}


def test_the_result_tells_steps_schedule_and_what_a_hop_took(run):
    result = read_json(run.result_json)
    assert result["num_steps"] == NUM_STEPS
    assert result["schedule_sha256"] == run.read_schedule().digest()
    assert result["schedule_rows"] == [
        " ".join(map(str, row)) for row in run.read_schedule().rank_schedules
    ]
    assert 0 < result["hop_s"] == read_part(part_path(run.path, 0)).attributes["hop_s"]


def test_another_number_of_ranks_is_refused(tmp_path):
    folder = prepare(make_spec("1f1b", NUM_RANKS + 1, runs_dir=str(tmp_path), **CHANGES))
    ended = launch(folder, tmp_path)
    assert ended.returncode != 0
    assert "needs 4 ranks and was started with 3" in read_json(folder.failed_json(0))["cause"]
