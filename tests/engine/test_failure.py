"""gems.engine.supervision.failure.

What a failing rank leaves, and that leaving it neither raises nor hangs.
"""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from mpi4py import MPI

from gems.engine.supervision import failure
from gems.engine.supervision.failure import (
    FLUSH_S,
    LOST_PEER_S,
    abort_all_ranks,
    describe_cause,
    report_failure,
    stage_number,
)
from gems.engine.transport.environment import launched_rank
from gems.errors import (
    ConfigError,
    DoesNotFitError,
    LostPeerError,
    RankFailedError,
    ScheduleError,
    StalledError,
)
from gems.runs.failure_cause import FailureCause, classify_error
from gems.runs.folder import RunFolder
from gems.runs.heartbeat import Heartbeat
from gems.utils.atomic_io import read_json
from gems.utils.logs import set_up_rank_logging

ROOT = Path(__file__).resolve().parents[2]


def raised(error: BaseException, cause: BaseException | None = None) -> BaseException:
    """Return an exception with a traceback, as a rank has it in its hands."""
    try:
        raise error from cause
    except BaseException as caught:
        return caught


def test_the_record_tells_all_that_is_known(tmp_path, capfd):
    set_up_rank_logging(3)
    folder = RunFolder(tmp_path)
    heartbeat = Heartbeat(folder.heartbeat(3))
    heartbeat.beat(7, "2.1B5/1")
    assert report_failure(folder, 3, raised(ValueError("two\n words"))) == RankFailedError.exit_code
    record = read_json(folder.failed_json(3))
    assert (record["rank"], record["step"], record["action"], record["stage"]) == (
        3,
        7,
        "2.1B5/1",
        2,
    )
    assert (record["kind"], record["cause"], record["cause_class"]) == (
        "ValueError",
        "ValueError: two words",
        "exception",
    )
    assert (record["exit_code"], record["pid"], record["node"]) == (
        4,
        os.getpid(),
        os.uname().nodename,
    )
    assert record["traceback"][0].startswith("Traceback") and "raised" in "".join(
        record["traceback"]
    )
    assert 2**20 < record["rss_bytes"] < 2**40
    assert record["device_bytes"] is None and record["device_reserved_bytes"] is None, (
        "no GPU is in use"
    )
    assert record["mpi"] == MPI.Get_library_version().split("\n")[0].strip()
    assert record["waits_for"] is None and record["errno"] is None
    lines = capfd.readouterr().err.splitlines()
    node = os.uname().nodename
    assert (
        lines[-1]
        == f"[rank 3] ERROR failed on node {node} in step 7, action 2.1B5/1: ValueError: two words"
    )
    heartbeat.close()


def test_a_hang_names_who_waits_for_whom(tmp_path, capfd):
    error = StalledError("rank 0 waited 5 s for 0RECV_B1")
    error.waits_for = "rank 0 waits for 1SEND_B1 of rank 1, which is silent"
    assert report_failure(RunFolder(tmp_path), 0, error, ["  File a", "  File b"]) == 5
    record = read_json(RunFolder(tmp_path).failed_json(0))
    assert (record["cause"], record["waits_for"]) == (str(error), error.waits_for)
    assert record["traceback"] == ["  File a", "  File b"] and record["cause_class"] == "stalled"
    assert (record["step"], record["action"], record["stage"]) == (-1, "start", None)
    (line,) = capfd.readouterr().err.splitlines()
    assert line.endswith(
        " before the first step (start): rank 0 waited 5 s for 0RECV_B1; " + error.waits_for
    )


def mpi_error() -> BaseException:
    return MPI.Exception(MPI.ERR_RANK)


@pytest.mark.parametrize(
    ("error", "cause_class", "words"),
    [
        (
            torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"),
            "out of memory on device",
            "Tried to allocate",
        ),
        (MemoryError(), "out of memory on host", "MemoryError: (the node's memory"),
        (
            OSError(errno.ENOMEM, "Cannot allocate memory"),
            "out of memory on host",
            "Cannot allocate",
        ),
        (OSError(errno.ENOSPC, "No space left on device", "/scratch/x"), "file system", "ENOSPC"),
        (OSError(errno.EDQUOT, "Disk quota exceeded"), "file system", "EDQUOT"),
        (OSError(errno.EIO, "Input/output error"), "file system", "EIO"),
        (OSError(errno.ESTALE, "Stale file handle"), "file system", "ESTALE"),
        (FileNotFoundError(errno.ENOENT, "No such file"), "exception", "FileNotFoundError"),
        (ModuleNotFoundError("No module named 'tqdm'", name="tqdm"), "configuration", "lacks tqdm"),
        (ImportError("libmpi.so.40: cannot open shared object file"), "wrong MPI", "do not match"),
        (mpi_error(), "exception", "MPI failed"),
        (
            ConfigError("cluster.mpi", "none", "MPI sees a world of 1"),
            "wrong MPI",
            "cluster.mpi=none",
        ),
        (ConfigError("train.steps", 0, "at least 1"), "configuration", "train.steps=0"),
        (DoesNotFitError("rank 1", 2**31, 2**30, "split more"), "does not fit", "rank 1 needs"),
        (StalledError("waited"), "stalled", "waited"),
        (RankFailedError("gone"), "exception", "gone"),
        (ScheduleError(0, "1F0", "why"), "exception", "why"),
        (KeyboardInterrupt(), "exception", "KeyboardInterrupt"),
    ],
)
def test_causes_are_classed(error: BaseException, cause_class: str, words: str):
    assert classify_error(raised(error)).cause == FailureCause(cause_class)
    assert words in describe_cause(error) and "\n" not in describe_cause(error)


def test_the_cause_behind_an_exception_classes_it():
    error = raised(
        RuntimeError("could not write the trace"), OSError(errno.ENOSPC, "No space left on device")
    )
    assert classify_error(error).cause == "file system"
    ring = RuntimeError("a")
    ring.__context__ = RuntimeError("b")
    ring.__context__.__context__ = ring
    assert classify_error(ring).cause == "exception"


def test_an_exception_that_cannot_even_be_printed_is_told_by_its_class(tmp_path, capfd):
    class BrokenError(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no words")

    assert report_failure(RunFolder(tmp_path), 1, raised(BrokenError())) == 4
    assert read_json(RunFolder(tmp_path).failed_json(1))["cause"] == "BrokenError"


def test_a_full_file_system_keeps_the_line(tmp_path, capfd, monkeypatch):
    def full(*args: object, **more: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("gems.engine.supervision.failure.write_json", full)
    assert report_failure(RunFolder(tmp_path), 2, raised(ValueError("why"))) == 4
    said = capfd.readouterr().err.splitlines()
    assert next(line for line in said if line.startswith("[rank 0] ERROR failed on node")).endswith(
        "ValueError: why"
    )
    assert said[-1].startswith("[rank 0] ERROR cannot write to ") and "No space left" in said[-1]


def test_a_run_folder_that_is_gone_keeps_the_line(tmp_path, capfd):
    (tmp_path / "file").write_text("")
    assert report_failure(RunFolder(tmp_path / "file"), 2, ConfigError("a", 1, "b")) == 2
    assert " before the first step (start): a=1: b" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("action", "stage"), [("3F1", 3), ("12SEND_B4/1", 12), ("load", None), ("start", None)]
)
def test_the_stage_of_an_action(action: str, stage: int | None):
    assert stage_number(action) == stage


def test_the_rank_is_the_launchers(monkeypatch):
    for name in ("PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_RANK", "PALS_RANKID", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    assert launched_rank() == 0
    monkeypatch.setenv("SLURM_PROCID", "7")
    assert launched_rank() == 7
    monkeypatch.setenv("PMI_RANK", "nonsense")
    assert launched_rank() == 7


HANGS = """
import signal, sys, time
from gems.engine.supervision.failure import ensure_exit
from gems.engine.transport.environment import launched_rank
ensure_exit(0.5)
assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
print("guarded", flush=True)
import ctypes
while True:
    ctypes.PyDLL(None).pause()  # holds the interpreter
"""


@pytest.mark.timeout(100)
def test_an_end_that_hangs_is_ended(tmp_path):
    """Also by what holds the interpreter.

    SIGTERM from the launcher meanwhile does not cut the record short.
    """
    with subprocess.Popen(
        [sys.executable, "-c", HANGS],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.readline() == "guarded\n"
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 1
        assert "Timeout" in process.stderr.read()


def test_a_record_is_whole_or_not_there(tmp_path):
    report_failure(RunFolder(tmp_path), 0, raised(ValueError("x" * 100_000)))
    assert [path.name for path in tmp_path.iterdir()] == ["FAILED.rank0000.json"]
    json.loads((tmp_path / "FAILED.rank0000.json").read_text())


@pytest.mark.parametrize(
    ("error", "waited_s"),
    [
        (MPI.Exception(MPI.ERR_OTHER), LOST_PEER_S),
        (LostPeerError("gone"), LOST_PEER_S),
        (ValueError("bad"), FLUSH_S),
    ],
)
def test_a_rank_that_lost_a_peer_lets_the_launcher_report_that_one_first(
    monkeypatch, error, waited_s
):
    done = []
    monkeypatch.setattr(failure.time, "sleep", done.append)
    monkeypatch.setattr("gems.engine.transport.mpi.abort", done.append)
    monkeypatch.setattr(os, "_exit", lambda code: done.append("exit"))
    abort_all_ranks(4, error)
    assert done == [waited_s, 4, "exit"]


def test_an_errno_of_a_socket_is_no_file_systems(tmp_path):
    lost = OSError(errno.ENOTCONN, "Transport endpoint is not connected")
    assert classify_error(lost).cause is FailureCause.EXCEPTION
    mount = OSError(errno.ENOTCONN, "Transport endpoint is not connected", str(tmp_path))
    assert classify_error(mount).cause is FailureCause.FILE_SYSTEM
