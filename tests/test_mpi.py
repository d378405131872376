"""Runs each file of tests/mpi under mpiexec: one test body on all ranks, with a time limit."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from gems.ranks import mpiexec_argv, rank_environment, run_ranks

FOLDER = Path(__file__).parent / "mpi"
NUM_RANKS = 4


@pytest.mark.timeout(600)
@pytest.mark.parametrize("path", sorted(FOLDER.glob("mpi_*.py")), ids=lambda path: path.stem)
def test_under_mpiexec(path: Path) -> None:
    argv = mpiexec_argv(
        NUM_RANKS,
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "--timeout=240", str(path)],
    )
    ended = run_ranks(argv, rank_environment(1) | {"GEMS_MPI_TESTS": "1"}, log=None, timeout_s=570)
    assert ended.returncode == 0, "\n".join(ended.tail)
    assert any(" passed" in line for line in ended.tail), "\n".join(ended.tail)
