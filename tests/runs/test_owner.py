"""The owner of a run folder: who may take it, and who may not."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from gems.errors import ConfigError, TryLaterError
from gems.runs import owner as owner_module
from gems.runs.folder import RunFolder
from gems.runs.heartbeat import FINISHED, Heartbeat
from gems.runs.owner import FRESH_S, Owner, check_free, hold, read_owner, release, take
from gems.utils.atomic_io import write_json

HERE = os.uname().nodename


@pytest.fixture(autouse=True)
def _no_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder(tmp_path / "run")


def owned_by(folder: RunFolder, number: int = 1, **fields: Any) -> None:
    """Write the file of another owner: a process that ended unless told."""
    write_json(
        folder.path / "owners" / f"{number:04d}.json",
        {"token": "t", "host": HERE, "pid": 2**22 + 1, **fields},
    )


def test_one_of_many_takes_it(folder: RunFolder) -> None:
    """Threads that all find the same owner gone; each is a stranger to the others."""
    owned_by(folder)
    gate = threading.Barrier(8)
    won = []
    lost = []

    def refuse(_: RunFolder, owner: Owner) -> None:
        if owner.number > 1:
            raise TryLaterError("run folder", "x", "is taken")

    def race() -> None:
        gate.wait()
        try:
            won.append(take(folder, refuse, job_id="41"))
        except TryLaterError:
            lost.append(1)

    threads = [threading.Thread(target=race) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(won), len(lost)) == (1, 7)
    assert read_owner(folder) == won[0]
    assert sorted(path.name for path in (folder.path / "owners").iterdir()) == [
        "0001.json",
        "0002.json",
    ]


@pytest.mark.parametrize("number", [errno.EPERM, errno.EOPNOTSUPP])
def test_file_systems_without_hard_links(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def link(*paths: Path) -> None:
        raise OSError(number, "no links")

    monkeypatch.setattr(os, "link", link)
    assert take(folder).number == 1
    assert take(folder).number == 2  # by the same process


def test_a_link_whose_answer_was_lost_counts(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.link

    def link(*paths: Path) -> None:
        real(*paths)
        raise FileExistsError(errno.EEXIST, "NFS asked twice")

    monkeypatch.setattr(os, "link", link)
    assert take(folder).number == 1


def test_a_live_process_keeps_it_and_a_dead_one_does_not(folder: RunFolder) -> None:
    program = (
        "import sys, pathlib; from gems.runs.owner import *; from gems.runs.folder import"
        " RunFolder\ntake(RunFolder(pathlib.Path(sys.argv[1]))); print('taken', flush=True);"
        " sys.stdin.read()"
    )
    argv = [sys.executable, "-c", program, str(folder.path)]
    with subprocess.Popen(
        argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None and process.stdout.readline() == "taken\n"
        with pytest.raises(
            TryLaterError,
            match=f"a run goes on there .process {process.pid} on {HERE}.; wait for it",
        ):
            take(folder)
        folder.write_status("running", pid=process.pid)
        process.kill()
    taken = take(folder)
    assert taken.number == 2
    status = folder.read_status()
    cause = f"process {process.pid} on {HERE} ended without recording it"
    assert (status["state"], status["cause"]) == ("failed", cause)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"job_id": "41"}, "is that of job 41, which may not have ended"),
        ({"host": "elsewhere"}, "process 4194305 on elsewhere"),
    ],
)
def test_what_cannot_be_looked_at_from_here_is_not_gone(
    folder: RunFolder, fields: dict[str, Any], says: str
) -> None:
    owned_by(folder, **fields)
    with pytest.raises(TryLaterError, match=says):
        take(folder)


@pytest.mark.parametrize("text", ["", "{", "[1]", '{"who": "me"}'])
def test_a_damaged_file_is_not_gone(folder: RunFolder, text: str) -> None:
    owned_by(folder)
    (folder.path / "owners" / "0002.json").write_text(text)
    with pytest.raises(TryLaterError, match=r"owners/0002\.json is damaged"):
        take(folder)


def test_what_was_given_back_is_free(folder: RunFolder) -> None:
    owned_by(folder, job_id="41", is_released=True)
    hold(folder)
    hold(folder)  # already ours
    release(folder)
    last = read_owner(folder)
    assert last is not None and (last.number, last.is_released) == (2, True)


def test_nobody_gives_back_what_another_owns(folder: RunFolder) -> None:
    owned_by(folder, job_id="41")
    release(folder)
    last = read_owner(folder)
    assert last is not None and not last.is_released


def test_processes_of_a_job_own_what_their_job_owns(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    owned_by(folder, job_id="41", host="login1")
    monkeypatch.setenv("SLURM_JOB_ID", "41")
    check_free(folder)
    owned_by(folder, 2, job_id="41", pid=os.getppid())
    with pytest.raises(TryLaterError):  # another process of the job, here and alive
        check_free(folder)


def test_a_process_does_not_own_what_its_job_to_come_does(folder: RunFolder) -> None:
    """A study's process goes on after it has submitted a point."""
    take(folder).update(folder, job_id="41")
    with pytest.raises(TryLaterError, match="job 41"):
        take(folder)


@pytest.mark.parametrize(
    ("action", "node", "age_s", "status", "is_free"),
    [
        ("1F3", "n7", 1, {}, False),
        ("1F3", "n7", 1, {"state": "running"}, False),
        ("1F3", "n7", FRESH_S + 1, {"state": "running"}, True),
        (FINISHED, "n7", 1, {"state": "running"}, True),
        ("1F3", "n7", 1, {"state": "failed"}, True),  # recorded once the ranks had ended
        ("1F3", HERE, 1, {"state": "running"}, True),  # of a process that ended here
    ],
)
def test_fresh_heartbeats_keep_a_folder_whatever_is_known_of_its_owner(
    folder: RunFolder, action: str, node: str, age_s: float, status: dict[str, str], is_free: bool
) -> None:
    owned_by(folder)
    heartbeat = Heartbeat(folder.heartbeat(0))
    mark = f"{2**22 + 1} {node} 3 {action} {time.time_ns() - int(age_s * 1e9)}"
    heartbeat.close()
    folder.heartbeat(0).write_text(mark.ljust(256))
    if status:
        folder.write_status(**status)
    if is_free:
        take(folder)
        return
    with pytest.raises(
        TryLaterError, match=r"process 4194305 on n7 was at work there \d+ s ago, whatever is known"
    ):
        take(folder, lambda folder, owner: None)


def test_a_folder_of_an_earlier_version(folder: RunFolder) -> None:
    folder.write_status("submitted", job_id="41")
    with pytest.raises(TryLaterError, match="job 41"):
        take(folder)
    folder.write_status("failed", job_id="41")
    last = read_owner(folder)
    assert last is not None and (last.job_id, last.is_released) == ("41", True)


def test_a_folder_that_cannot_be_written_is_one_line(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder.path.write_text("a file")
    with pytest.raises(ConfigError, match=r"cannot write there .Not a directory"):
        take(folder)


def test_many_attempts_to_take_it_end(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on NFS, whose listing may lag behind what may be created."""
    monkeypatch.setattr(owner_module, "_create", lambda path, owner: False)
    with pytest.raises(TryLaterError, match="several processes take it at this moment; try again"):
        take(folder)
