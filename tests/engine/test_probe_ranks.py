"""The probe's rank program: two real ranks under mpiexec, and what a rank that fails leaves."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from gems.cli.framework import Options
from gems.engine.transport import probe as program
from gems.engine.transport.mpi import Transport
from gems.errors import ConfigError, RankFailedError
from gems.launch.local_launcher import Ended, mpiexec_argv, rank_environment, run_ranks
from jobs.cli.probe import probe
from tests.helpers.processes import python
from tests.helpers.warm_python import REAL

pytestmark = pytest.mark.usefixtures("warm")

ROOT = Path(__file__).resolve().parents[2]


def ranks(number: int, *words: str) -> Ended:
    argv = mpiexec_argv(number, [sys.executable, "-m", "gems.engine.transport.probe", *words])
    return run_ranks(argv, rank_environment(1) | {"PYTHONPATH": str(ROOT)}, timeout_s=120)


@pytest.mark.timeout(150)
def test_two_ranks_find_each_other(tmp_path: Path) -> None:
    result = tmp_path / "logs" / "probe.json"
    result.parent.mkdir()
    ended = ranks(2, str(result), "cpu")
    assert ended.returncode == 0, ended.tail
    found = json.loads(result.read_text())
    assert (found["schema"], found["world_size"], found["threads"]) == (
        "gems.probe/1",
        2,
        "serialized",
    )
    assert (
        found["mpi"]
        and len(found["ranks"]) == 2
        and all(rank["sees_folder"] for rank in found["ranks"])
    )
    assert (found["device_message"], found["device"]) == ("no GPU", None)
    assert 0 < found["host"]["latency_s"] < 1 and found["host"]["bytes_per_s"] > 1e6


@pytest.mark.timeout(150)
def test_ranks_of_other_worlds_say_so(tmp_path: Path) -> None:
    result = tmp_path / "probe.json"
    ended = ranks(1, str(result), "cpu")
    assert ended.returncode == ConfigError.exit_code
    found = json.loads(result.read_text())
    assert found["exit_code"] == 2
    assert (
        found["config_error"][2] == "MPI sees a world of 1, and the probe was started with 2 ranks"
    )


@pytest.mark.timeout(150)
def test_the_verb_runs_here(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    assert probe(["cluster=local", f"runs_dir='{tmp_path / 'runs'}'"], Options()) == 0
    out = capsys.readouterr().out
    assert "world size     2" in out and "host to host" in out
    assert list((tmp_path / "runs").iterdir()) == []  # the answer is in the cache


def test_without_torch_where_there_is_no_gpu() -> None:
    code = (
        "import gems.engine.transport.probe as p, sys; p._device('cpu', ()); "
        "print('torch' in sys.modules, 'mpi4py' in sys.modules)"
    )
    ended = python("-c", code, executable=REAL)
    assert ended.stdout == "False False\n", ended.stderr


class Echo:
    """A transport whose other rank answers with given bytes."""

    rank = 0
    round_trip_s = Transport.round_trip_s

    def __init__(self, wrong: bool) -> None:
        self.wrong = wrong

    def send(self, data: Any, rank: int, tag: int) -> None:
        pass

    def receive(self, got: Any, rank: int, tag: int) -> None:
        got[:] = program._host_data(len(got), 17)
        got[-1] += self.wrong

    def wait(self, request: None, what: str) -> None:
        pass

    def drain(self) -> None:
        pass


def test_content_is_checked() -> None:
    good: Any = Echo(wrong=False)
    assert program._measure(good, program._host_data)["bytes_per_s"] > 0
    bad: Any = Echo(wrong=True)
    with pytest.raises(RankFailedError, match="rank 0 received 8 bytes with other content"):
        program._measure(bad, program._host_data)


def test_any_error_is_left_and_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(program, "FLUSH_S", 0)
    assert program._report_error(tmp_path / "probe.json", ImportError("no libmpi")) == 4
    assert "failed: ImportError: no libmpi" in capsys.readouterr().err
    assert json.loads((tmp_path / "probe.json").read_text())["config_error"] == []
    (tmp_path / "file").touch()
    assert program._report_error(tmp_path / "file" / "probe.json", ConfigError("a", 1, "b")) == 2
    assert "cannot write" in capsys.readouterr().err
