"""`gems-jobs logs`: the last lines, one rank's, and following to the end of a run."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from gems.cli.framework import main
from gems.runs.folder import RunFolder
from gems.utils.process_tree import start_time
from jobs.__main__ import VERBS
from jobs.cli.logs import Tail
from tests.helpers.fake_slurm import FakeSlurm
from tests.helpers.job_helpers import ROOT, Capture, MonkeyPatch, Prepared, wait_until

HERE = {"pid": os.getpid(), "host": os.uname().nodename, "pid_started": start_time(os.getpid())}


def logs(*words: str | Path, code: int = 0) -> None:
    assert main("jobs", VERBS, ["logs", *map(str, words)]) == code


def write(folder: RunFolder, text: str) -> None:
    with (folder.logs / "ranks.log").open("a") as file:
        file.write(text)


def test_the_last_lines(recorded: Prepared, capfd: Capture) -> None:
    folder = recorded("finished", exit_code=0)
    write(folder, "".join(f"{number}\n" for number in range(300000)) + "an end without a break")
    logs(folder.path)
    out = capfd.readouterr().out.splitlines()
    assert (len(out), out[0], out[-1]) == (101, "299900", "an end without a break")
    logs(folder.path, "--lines", "2")
    assert capfd.readouterr().out == "299998\n299999\nan end without a break"
    logs(folder.path, "--lines", "all")
    assert capfd.readouterr().out.startswith("0\n1\n2\n")


@pytest.mark.parametrize("cluster", ["mini", "flux"])
def test_one_rank(cluster: str, prepared: Prepared, capfd: Capture) -> None:
    folder = prepared("one", f"cluster={cluster}")
    folder.write_status("finished", exit_code=0)
    write(folder, "0: a\n1: b\n10: x\nsrun: error: n1: task 1: Killed\n01: c\n1: d")
    logs(folder.path, "--rank", "1")
    assert capfd.readouterr().out == "1: b\n01: c\n1: d"
    logs(folder.path, "--rank", "4", code=2)
    assert "--rank=4: must be a rank of the run: 0 to 3" in capfd.readouterr().err
    logs(folder.path, "--lines", "-1", code=2)
    logs(folder.path, "--lines", "many", code=2)
    assert "--lines=many: must be a number of lines, or all" in capfd.readouterr().err
    here = prepared("here", "cluster=local")
    logs(here.path, "--rank", "1", code=2)
    assert "mpiexec does not label lines" in capfd.readouterr().err


def test_no_log_yet(recorded: Prepared, slurm: FakeSlurm, capfd: Capture) -> None:
    slurm.says("squeue", "41|PENDING|2030-01-02T03:04:05|Resources|one")
    folder = recorded("submitted", job_id="41")
    logs(folder.path)
    out, err = capfd.readouterr()
    assert out == ""
    assert (
        err
        == f"jobs: no log yet: {folder.path.name} is pending: Resources, starts about 2030-01-02"
        " 03:04\n"
    )


def test_a_run_whose_ranks_never_started_shows_the_batch_scripts_log(
    recorded: Prepared, capfd: Capture
) -> None:
    folder = recorded("failed", exit_code=2, cause="no srun")
    (folder.logs / "41_0_log.out").write_text("jobs: no srun\n")
    for words in ([], ["-f"]):
        logs(folder.path, *words)
        assert capfd.readouterr().out == "jobs: no srun\n"


def test_following_to_the_end(recorded: Prepared, slurm: FakeSlurm, capfd: Capture) -> None:
    """Pending, starting, a log that is replaced by a second one, and an end.

    Nothing is lost and nothing comes twice.
    """
    slurm.says("squeue", "41|PENDING|N/A|Priority|one")
    folder = recorded("submitted", job_id="41")
    thread = threading.Thread(target=logs, args=(folder.path, "-f"))
    thread.start()
    said = {"out": "", "err": ""}

    def has(stream: str, text: str) -> bool:
        out, err = capfd.readouterr()
        said["out"] += out
        said["err"] += err
        return text in said[stream]

    wait_until(lambda: has("err", "is pending: Priority\n"))
    slurm.says("squeue", "41|RUNNING|N/A|None|one")
    write(folder, "first\nhal")
    folder.write_status("running", job_id="41")
    wait_until(lambda: has("out", "first\nhal"))
    write(folder, "f\n")
    (folder.logs / "ranks.log").rename(folder.path / "old.log")
    write(folder, "second\n")
    wait_until(lambda: has("out", "second\n"))
    assert thread.is_alive()
    write(folder, "the end\n")
    folder.write_status("finished", job_id="41", exit_code=0)
    thread.join(timeout=30)
    assert not thread.is_alive()
    assert has("err", f"jobs: {folder.path.name} is finished\n")
    assert said["out"] == "first\nhalf\nsecond\nthe end\n"


def test_following_a_run_that_is_killed_without_a_word(
    prepared: Prepared, capfd: Capture, monkeypatch: MonkeyPatch
) -> None:
    monkeypatch.setattr("jobs.cli.logs.QUERY_EVERY_S", 0.1)
    folder = prepared()
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    folder.write_status(
        "running", **HERE | {"pid": process.pid, "pid_started": start_time(process.pid)}
    )
    write(folder, "a\n")
    thread = threading.Thread(target=logs, args=(folder.path, "-f"))
    thread.start()
    process.kill()
    process.communicate()
    thread.join(timeout=30)
    out, err = capfd.readouterr()
    assert out == "a\n" and f"is lost: its process {process.pid} has gone" in err


def test_an_interrupt_is_a_clean_end(recorded: Prepared) -> None:
    folder = recorded("running", **HERE)
    write(folder, "a\nb")
    process = subprocess.Popen(
        [sys.executable, "-m", "jobs", "logs", "-f", str(folder.path)],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(
            signal.SIGINT, signal.SIG_DFL
        ),  # a shell's background jobs ignore it
    )
    assert process.stdout is not None
    assert process.stdout.read(3) == b"a\nb"
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=30)
    assert (out, err, process.returncode) == (b"", b"", 0)


def test_a_tail_sees_a_file_that_comes_later_and_drains_one_that_goes(tmp_path: Path) -> None:
    path = tmp_path / "log"
    with Tail(path) as tail:
        assert (tail.read(), tail.was_there) == (b"", False)
        path.write_text("one")
        assert (tail.read(), tail.read(), tail.was_there) == (b"one", b"", True)
        with path.open("a") as file:
            file.write(" more")
        path.rename(tmp_path / "old")
        path.write_text("two")
        assert (tail.read(), tail.read(), tail.read()) == (b" more", b"two", b"")


def test_status_json_is_what_ends_it(recorded: Prepared) -> None:
    """A failed run that SLURM does not start again has ended, too."""
    folder = recorded("failed", exit_code=4, cause="x")
    assert json.loads(folder.status_json.read_text())["state"] == "failed"
    logs(folder.path, "-f")


def bytes_read() -> int:
    return int(Path("/proc/self/io").read_text().split()[1])


@pytest.mark.cases
@pytest.mark.parametrize("start", ["a line\n", ""])
def test_a_long_log_is_read_from_its_end(start: str, recorded: Prepared, capfd: Capture) -> None:
    folder = recorded("finished", exit_code=0)
    log = folder.logs / "ranks.log"
    with log.open("wb") as file:
        file.truncate(2 << 30)
        file.seek(2 << 30)
        file.write(f"{start}one\ntwo\nthree\n".encode())
    before = bytes_read()
    logs(folder.path, "--lines", "3")
    assert bytes_read() - before < 10 << 20
    assert capfd.readouterr().out.lstrip("\0") == "one\ntwo\nthree\n"


@pytest.mark.cases
def test_a_carriage_return_ends_a_line(
    prepared: Prepared, capfd: Capture, monkeypatch: MonkeyPatch
) -> None:
    monkeypatch.setattr("jobs.cli.logs.CHUNK_BYTES", 8)
    folder = prepared("one", "cluster=mini")
    folder.write_status("finished", exit_code=0)
    write(folder, "".join(f"{number % 2}: {number}\r" for number in range(1000)) + "0: a\r\n1: b\n")
    logs(folder.path, "--lines", "3")
    assert capfd.readouterr().out.encode() == b"1: 999\r0: a\r\n1: b\n"
    logs(folder.path, "--lines", "2", "--rank", "0")
    assert capfd.readouterr().out.encode() == b"0: 998\r0: a\r\n"
