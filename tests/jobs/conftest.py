"""Runs that start no training.

Specifications, prepared folders, and a tiny program in the place of a rank.
"""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gems.cli.framework import main
from gems.config.compose import compose
from gems.config.schema import RunSpec
from gems.runs.folder import RunFolder
from gems.runs.prepare import prepare
from jobs.__main__ import VERBS
from jobs.launch import launch as launch_module
from tests.helpers.fake_slurm import FakeSlurm
from tests.helpers.job_helpers import ROOT, Called, Capture, MonkeyPatch, Prepared, Resolved, Tiny


@pytest.fixture(autouse=True)
def _nothing_is_probed(monkeypatch: MonkeyPatch) -> None:
    """Let launches start no probe of MPI before the ranks, which `test_probe.py` tests."""
    monkeypatch.setattr(launch_module.MpiProbe, "run_first", lambda *words: None)


@pytest.fixture(autouse=True)
def swept(monkeypatch: MonkeyPatch) -> list[str]:
    """Note each launch that would look through the memory of all processes for what ranks left."""
    seen: list[str] = []
    monkeypatch.setattr(
        launch_module, "remove_stale_shared_memory", lambda: seen.append("shared memory")
    )
    return seen


TINY_RANK = """
import json, os, pathlib, signal, sys, time
sys.path.insert(0, {root!r})
mode, _, who = os.environ.get("TINY", "").partition(":")
if mode == "early" and os.environ["PMI_RANK"] == who:
    sys.exit("ImportError: no such library")
from mpi4py import MPI
from gems.runs.heartbeat import Heartbeat, read_beat
from gems.utils.atomic_io import write_json
from gems.runs.folder import RunFolder

folder, rank, size = RunFolder(pathlib.Path(sys.argv[-1])), MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
heartbeat = Heartbeat(folder.heartbeat(rank))
(folder.path / "trace").mkdir(exist_ok=True)
(folder.path / "trace" / f"rank{{rank:04d}}.h5").touch()
print(f"hello from {{rank}}\\n", end="", flush=True)
heartbeat.beat(12, f"{{rank}}F3")
while mode and not all((b := read_beat(folder.heartbeat(k))) and b.step == 12 for k in range(size)):
    time.sleep(0.01)
if mode and str(rank) in who.split(","):
    if mode in ("raise", "linger"):
        code = int(os.environ["CODE"])
        record = {{"rank": rank, "node": os.uname().nodename, "pid": os.getpid(), "step": 12, "action": "1F3",
                  "cause": "ValueError: no such thing", "exit_code": code, "utc": "2026-01-01"}}
        write_json(folder.failed_json(rank), record)
        if mode == "raise":
            MPI.COMM_WORLD.Abort(code)
    elif mode == "exit":
        os._exit(3)
    elif mode == "signal":
        os.kill(os.getpid(), signal.SIGSEGV)
while mode and mode != "stop":
    MPI.COMM_WORLD.Barrier()
while mode == "stop" and not MPI.COMM_WORLD.allreduce(folder.stop_json.exists()):
    time.sleep(0.02)
if mode == "stop" and rank == 0:
    write_json(folder.stopped_json, {{"step": 13, "reason": json.loads(folder.stop_json.read_text())["reason"]}})
heartbeat.close()
"""


@pytest.fixture(scope="session")
def resolved() -> Resolved:
    """Compose and resolves a configuration; the same overrides are composed once."""
    known: dict[tuple[str, ...], RunSpec] = {}

    def get(*overrides: str) -> RunSpec:
        if overrides not in known:
            known[overrides] = compose(["experiment=gems_master", "data=synthetic", *overrides])
        return known[overrides]

    return get


@pytest.fixture
def tiny(tmp_path: Path, resolved: Resolved) -> Tiny:
    """Prepare a run whose ranks are the tiny program; keywords become its environment."""
    program = tmp_path / "tiny rank.py"
    program.write_text(TINY_RANK.format(root=str(ROOT)))

    def make(**environment: str) -> tuple[RunFolder, RunSpec]:
        spec = resolved()
        python = shlex.join([sys.executable, str(program)])
        cluster = replace(spec.cluster, python=python, environment=environment)
        spec = replace(spec, runs_dir=str(tmp_path / "runs"), cluster=cluster)
        return prepare(spec), spec

    return make


@pytest.fixture
def collected(monkeypatch: MonkeyPatch) -> list[RunFolder]:
    """Put a note in the place of the collection, whose own tests read real traces."""
    seen: list[RunFolder] = []

    def note(folder: RunFolder, summary: str) -> int:
        seen.append(folder)
        return 0

    monkeypatch.setattr("jobs.launch.launch.collect", note)
    return seen


@pytest.fixture
def write_failed() -> Callable[..., None]:
    """Write what a failing rank leaves."""

    def write(
        folder: RunFolder, rank: int, utc: str, cause: str, exit_code: int = 4, **more: Any
    ) -> None:
        record = {
            "rank": rank,
            "node": "n1",
            "pid": 100 + rank,
            "step": 3,
            "action": "0F1",
            "cause": cause,
            "exit_code": exit_code,
            "utc": utc,
            **more,
        }
        folder.failed_json(rank).write_text(json.dumps(record))

    return write


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: MonkeyPatch) -> FakeSlurm:
    """An empty PATH, for commands of a SLURM that a test gives words to."""
    here = tmp_path / "slurm"
    here.mkdir()
    monkeypatch.setenv("PATH", str(here))
    return FakeSlurm(here)


@pytest.fixture
def call(tmp_path: Path, capfd: Capture) -> Called:
    """Call a verb of `gems-jobs` on runs/ of the test, and return its stdout and stderr."""

    def run(verb: str, *words: str, code: int = 0) -> tuple[str, str]:
        capfd.readouterr()
        got = main("jobs", VERBS, [verb, f"runs_dir={tmp_path / 'runs'}", *words])
        out, err = capfd.readouterr()
        assert got == code, out + err
        return out, err

    return run


@pytest.fixture
def prepared(tmp_path: Path, resolved: Resolved) -> Prepared:
    """Prepare runs below runs/ by the code itself, told apart by their names."""

    def make(name: str = "one", *overrides: str) -> RunFolder:
        spec = resolved("cluster=mini", *overrides)
        return prepare(replace(spec, name=name, runs_dir=str(tmp_path / "runs")))

    return make


@pytest.fixture
def recorded(prepared: Prepared) -> Prepared:
    """Prepare a run whose status.json has a state."""

    def make(state: str, name: str = "one", **fields: Any) -> RunFolder:
        folder = prepared(name)
        folder.write_status(state, **fields)
        return folder

    return make
