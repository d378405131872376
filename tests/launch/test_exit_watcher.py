"""gems.launch.exit_watcher: the note of a process's end, and the program in the process's own place."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gems.launch.exit_watcher import read_notes
from tests.helpers.job_helpers import wait_until

ROOT = Path(__file__).resolve().parents[2]


def start(folder: Path, rank: str | None, text: str) -> subprocess.Popen[str]:
    environment = {name: value for name, value in os.environ.items() if name != "PMI_RANK"}
    if rank is not None:
        environment["PMI_RANK"] = rank
    words = [
        sys.executable,
        "-m",
        "gems.launch.exit_watcher",
        str(folder),
        sys.executable,
        "-c",
        text,
        "a b",
    ]
    return subprocess.Popen(words, env=environment, cwd=ROOT, stdout=subprocess.PIPE, text=True)


def test_killed_process_is_noted_after_it_has_ended(tmp_path: Path) -> None:
    text = "import os, sys, time; print(os.getpid(), sys.argv[1], flush=True); time.sleep(600)"
    process = start(tmp_path / "run", "3", text)
    assert process.stdout is not None
    assert (
        process.stdout.readline() == f"{process.pid} a b\n"
    )  # the program has the process's number
    assert read_notes(tmp_path / "run") == {}
    before_ns = time.time_ns()
    process.send_signal(signal.SIGKILL)
    assert process.stdout.read() == ""  # the witness lets go of the pipe: then the note is there
    after_ns = time.time_ns()
    notes = read_notes(tmp_path / "run")
    assert list(notes) == [3] and before_ns < notes[3] < after_ns
    process.communicate()
    assert process.returncode == -signal.SIGKILL


@pytest.mark.parametrize("code", [0, 3])
def test_exit_codes_pass_through(tmp_path: Path, code: int) -> None:
    process = start(tmp_path, "0", f"raise SystemExit({code})")
    assert process.communicate()[0] == ""
    assert process.returncode == code
    assert list(read_notes(tmp_path)) == [0]


def test_children_of_the_program_do_not_keep_it_alive(tmp_path: Path) -> None:
    text = (
        "import subprocess, sys\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "print(child.pid, flush=True)"
    )
    process = start(tmp_path, "0", text)
    assert process.stdout is not None
    child = int(process.stdout.readline())
    try:
        wait_until(lambda: read_notes(tmp_path))
    finally:
        os.kill(child, signal.SIGKILL)
        process.communicate()


def test_without_hydra_there_is_no_witness(tmp_path: Path) -> None:
    process = start(tmp_path / "run", None, "print('done')")
    assert process.communicate()[0] == "done\n"
    assert not (tmp_path / "run").exists()
