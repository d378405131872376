"""A quick part of the tests on the fake device, in processes of their own.

Torch sees a GPU from its import on.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from gems.launch.local_launcher import mpiexec_argv, rank_environment, run_ranks
from tests.fake_cuda.build import library, why_not

ROOT = Path(__file__).resolve().parent.parent.parent
NUM_RANKS = 4
LIMIT_S = 280
ENGINE = (
    "copies",
    "activation_store",
    "staging",
    "device",
    "p2p_channels",
    "transport",
    "out_of_memory",
)
# on four ranks: both directions, a split backward and a replica; activations that leave the device
QUICK = {
    "direct": "equals_one and (gems_master-3-1 or zb_v-4-1)",
    "staged": "(equals_one and (gems_master-2-2 or 1f1b-4-1)) or (bits_and_bytes and resnet-1f1b)",
}

pytestmark = [
    pytest.mark.skipif(why_not() is not None, reason=why_not() or ""),
    pytest.mark.timeout(LIMIT_S + 200),  # the first one compiles
]


def environment(**more: str) -> dict[str, str]:
    paths = [str(ROOT), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    return (
        os.environ | {"GEMS_TEST_DEVICE": "fake_cuda", "PYTHONPATH": os.pathsep.join(paths)} | more
    )


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    """Compile once, and not in each of the processes."""
    library()


def test_the_device_and_the_engine_on_it() -> None:
    """The device itself, the mutants of the engine's waits, and tests of the engine's parts."""
    here = Path(__file__).parent
    engine = ROOT / "tests" / "engine"
    paths = [
        here / "fake_device.py",
        here / "fake_mutants.py",
        *(engine / f"test_{name}.py" for name in ENGINE),
    ]
    argv = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *map(str, paths)]
    ended = subprocess.run(
        argv,
        cwd=ROOT,
        env=environment(GEMS_FAKE_CUDA_SEEDS="1"),
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert ended.returncode == 0, ended.stdout[-6000:] + ended.stderr[-2000:]


@pytest.mark.parametrize("transport", QUICK)
def test_ranks_on_it(transport: str) -> None:
    paths = [str(ROOT / "tests" / "mpi" / f"mpi_{name}.py") for name in ("exactness", "memory")]
    pytest_argv = [
        "-m",
        "pytest",
        "-q",
        "-x",
        "-p",
        "no:cacheprovider",
        "-k",
        QUICK[transport],
        *paths,
    ]
    more = {"GEMS_MPI_TESTS": "1"} | (
        {"GEMS_FAKE_CUDA_DIRECT": "1"} if transport == "direct" else {}
    )
    ended = run_ranks(
        mpiexec_argv(NUM_RANKS, [sys.executable, *pytest_argv]),
        rank_environment(1) | environment(**more),
        log=None,
        timeout_s=LIMIT_S,
    )
    assert ended.returncode == 0, "\n".join(ended.tail)
    assert any(" passed" in line for line in ended.tail), "\n".join(ended.tail)
