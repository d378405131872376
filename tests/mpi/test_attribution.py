"""Emulated runs of four ranks with one planted cause each: its part of the step is what grows most."""

from __future__ import annotations

import tempfile
from typing import TYPE_CHECKING

import pytest

from gems.engine.emulation.run import emulate
from gems.engine.transport.mpi import broadcast, meet
from gems.runs.folder import RunFolder
from gems.runs.heartbeat import Heartbeat
from gems.runs.prepare import prepare
from gems.trace import KINDS, part_path, read_part
from tests.helpers.toys import make_spec

if TYPE_CHECKING:
    from analysis.attribution.causes import Attribution

PLANTS = {
    "imbalance": {"cost__times": [1.0, 2.0, 1.0, 1.0]},
    "point_to_point": {"cost__boundary_bytes": 8_000_000},
    "noise": {"machine__slow_rank": 1, "machine__slowdown": 1.6},
    "input": {"cost__input_load": 8.0},
}


def attributed(comm, **changes) -> tuple[RunFolder, Attribution]:
    """Run one configuration and gives its folder and where its time went; collective."""
    path = broadcast(comm, tempfile.mkdtemp() if comm.rank == 0 else None)
    options = {
        "machine__kind": "emulated",
        "cost__unit_s": 0.002,
        "parallel__micro_batches": 8,
        "cost__boundary_bytes": 1000,
        "train__steps": 4,
        "benchmark__skip_steps": 1,
    }
    spec = make_spec("1f1b", 4, 1, runs_dir=path, **(options | changes))
    folder = prepare(spec) if comm.rank == 0 else RunFolder.of(spec)
    meet(comm)
    heartbeat = Heartbeat(folder.heartbeat(comm.rank))
    emulate(folder, comm, heartbeat)
    heartbeat.close()
    meet(comm)
    return folder, broadcast(comm, _attributed(folder) if comm.rank == 0 else None)


def _attributed(folder: RunFolder) -> Attribution:
    """Load the analysis on one rank alone: it takes seconds."""
    from analysis.attribution.causes import attribute
    from analysis.io.load import load_parts

    return attribute(load_parts(folder.path).trace)


@pytest.fixture(scope="module")
def without(comm) -> Attribution:
    return attributed(comm)[1]


@pytest.mark.parametrize("cause", PLANTS)
def test_the_planted_cause_grows_most(comm, without: Attribution, cause: str):
    folder, found = attributed(comm, **PLANTS[cause])
    assert found.ideal_s + sum(found.run_s.values()) == pytest.approx(found.step_s)
    assert abs(found.residual_s) < 0.01 * found.step_s
    grew = {name: time_s - without.run_s[name] for name, time_s in found.run_s.items()}
    assert max(grew, key=lambda name: grew[name]) == cause, grew
    if cause == "input":
        for rank in range(comm.size):
            kinds = read_part(part_path(folder.path, rank)).events["kind"]
            assert (KINDS.index("INPUT") in kinds) == (rank == 0)
