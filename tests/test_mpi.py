"""Runs the files of tests/mpi under mpiexec: one test body on all ranks, with a time limit."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from gems.launch.local_launcher import mpiexec_argv, rank_environment, run_ranks

FOLDER = Path(__file__).parent / "mpi"
NUM_RANKS = 4
LIMIT_S = 1500


@pytest.mark.timeout(LIMIT_S + 30)
def test_under_mpiexec() -> None:
    """In one start, which takes as long as many a test.

    `make test-gloo` has messages by gloo in place of MPI.
    """
    paths = sorted(map(str, FOLDER.glob("mpi_*.py")))
    words = ["-q", "-x", "-p", "no:cacheprovider", "--timeout=240"]
    argv = mpiexec_argv(NUM_RANKS, [sys.executable, "-m", "pytest", *words, *paths])
    environment = rank_environment(1) | {"GEMS_MPI_TESTS": "1"}
    ended = run_ranks(argv, environment, log=None, timeout_s=LIMIT_S)
    assert ended.returncode == 0, "\n".join(ended.tail)
    assert any(" passed" in line for line in ended.tail), "\n".join(ended.tail)
