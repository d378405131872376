"""Runs the files of tests/mpi under mpiexec: one test body on all ranks, with a time limit."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from gems.launch.local_launcher import mpiexec_argv, rank_environment, run_ranks

FOLDER = Path(__file__).parent / "mpi"
NUM_RANKS = 4


# Files that share ranks, whose start takes as long as many a test; all in one would use up the communicators of MPI.
TOGETHER = {
    "bits": ("exactness", "memory", "placed", "tasks", "zoo"),
    "runs": ("attribution", "emulated", "resume", "training", "transport"),
}


def test_every_file_is_run() -> None:
    found = sorted(path.stem.removeprefix("mpi_") for path in FOLDER.glob("mpi_*.py"))
    assert found == sorted(name for names in TOGETHER.values() for name in names)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("names", TOGETHER.values(), ids=TOGETHER)
def test_under_mpiexec(names: tuple[str, ...]) -> None:
    paths = [str(FOLDER / f"mpi_{name}.py") for name in names]
    argv = mpiexec_argv(
        NUM_RANKS, [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "--timeout=240", *paths]
    )
    ended = run_ranks(argv, rank_environment(1) | {"GEMS_MPI_TESTS": "1"}, log=None, timeout_s=570)
    assert ended.returncode == 0, "\n".join(ended.tail)
    assert any(" passed" in line for line in ended.tail), "\n".join(ended.tail)
