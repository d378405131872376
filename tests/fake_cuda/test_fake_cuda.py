"""A quick part of the tests on the fake device, in processes of their own.

Torch sees a GPU from its import on.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.fake_cuda.build import library, why_not
from tests.mpi.world import World

ROOT = Path(__file__).resolve().parent.parent.parent
LIMIT_S = 280
ENGINE = (
    "host_copies",
    "activation_store",
    "staging",
    "device",
    "p2p_channels",
    "transport",
    "out_of_memory",
)
# on four ranks: both directions, a split backward and a replica; activations that leave the device
QUICK = {
    "direct": [
        "exactness.py::test_equals_one_unsplit_process[gems_master-3-1]",
        "exactness.py::test_equals_one_unsplit_process[zb_v-4-1]",
    ],
    "staged": [
        "exactness.py::test_equals_one_unsplit_process[gems_master-2-2]",
        "exactness.py::test_equals_one_unsplit_process[1f1b-4-1]",
        "memory.py::test_bits_and_bytes[resnet-1f1b-vdnn_all]",
    ],
}

SLOTS = (
    "graphs[unet-keep-zb_h1]",
    "graphs[unet-recompute-1f1b]",
    "graphs_of_strips[unet in blocks-gems_master]",
    "graphs_of_strips_under_policies[unet-recompute-zb_h1]",
)

pytestmark = [
    pytest.mark.skipif(why_not() is not None, reason=why_not() or ""),
    pytest.mark.timeout(LIMIT_S + 200),  # the first one compiles
]


def on_fake_device(arguments: Sequence[str | Path], **environment: str) -> None:
    """Run pytest, which passes, in a process that has the fake device."""
    paths = [str(ROOT), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    variables = (
        os.environ
        | {"GEMS_TEST_DEVICE": "fake_cuda", "PYTHONPATH": os.pathsep.join(paths)}
        | environment
    )
    argv = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-x",
        "-p",
        "no:cacheprovider",
        *map(str, arguments),
    ]
    ended = subprocess.run(
        argv, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=LIMIT_S
    )
    assert ended.returncode == 0, ended.stdout[-6000:] + ended.stderr[-2000:]


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    """Compile once, and not in each of the processes."""
    library()


def test_the_device_and_the_engine_on_it() -> None:
    """The device itself, CUDA graphs on it, mutants of the engine's waits, tests of its parts."""
    here = Path(__file__).parent
    engine = ROOT / "tests" / "engine"
    paths = [
        here / "fake_device.py",
        here / "fake_graphs.py",
        *(f"{here / 'fake_slots.py'}::test_bytes_of_{name}" for name in SLOTS),
        here / "fake_mutants.py",
        *(engine / f"test_{name}.py" for name in ENGINE),
    ]
    on_fake_device(paths, GEMS_FAKE_CUDA_SEEDS="1")


@pytest.mark.parametrize("transport", QUICK)
def test_ranks_on_it(transport: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks fail a test that makes a race."""
    monkeypatch.setenv("GEMS_TEST_DEVICE", "fake_cuda")
    if transport == "direct":
        monkeypatch.setenv("GEMS_FAKE_CUDA_DIRECT", "1")
    ranks = World(tmp_path, sys.executable)
    try:
        for name in QUICK[transport]:
            assert ranks.run(f"tests/mpi/test_{name}") == ("passed", ""), name
    finally:
        ranks.close()
