"""Runs on the mini cluster as tests start, watch and end them."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from gems.runs.folder import RunFolder
from gems.runs.heartbeat import Beat, read_beat
from gems.utils.atomic_io import read_json
from tests.helpers.processes import python

if TYPE_CHECKING:
    from tests.slurm.conftest import MiniSlurm

PYTHON = sys.executable  # of commands; the tests of tests/slurm replace it by a warm one
CONFIGURATION = [
    "experiment=gems_master",
    "cluster=mini",
    "data=synthetic",
    "data.train_samples=64",
    "data.validation_samples=16",
    "parallel.partitions=4",
    "parallel.micro_batches=4",
    "benchmark.skip_steps=1",
]
# emulated: leaves the cores to others
ENDLESS = ["machine=emulated", "cost.unit_s=0.01", "train.steps=100000"]
ENDED = ("finished", "failed", "cancelled")


def wait_until(
    condition: Callable[[], object], limit_s: float, what: str, seen: Callable[[], str] = str
) -> None:
    """Wait for a condition; when the time is over, the failure says `what` and all that `seen` tells."""
    pause = threading.Event()
    deadline_s = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > deadline_s:
            pytest.fail(f"{what}\n{seen()}", pytrace=False)
        pause.wait(0.1)


@pytest.fixture
def no_job_is_left(mini_slurm: MiniSlurm) -> Iterator[None]:
    """End what a failed test leaves running, which would keep the nodes from the next test."""
    yield
    mini_slurm.run("scancel", f"--user={os.getuid()}")
    states = "--states=PENDING,RUNNING,COMPLETING"
    wait_until(
        lambda: not mini_slurm.run("squeue", "--noheader", states).stdout, 60, "the jobs do not end"
    )


def jobs(*words: str, limit_s: float = 120, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run `gems-jobs` as a user does."""
    variables = os.environ | environment
    return python("-m", "jobs", *words, env=variables, timeout_s=limit_s, executable=PYTHON)


def submit(runs: Path, *words: str) -> tuple[str, RunFolder]:
    """Submit through the command line; gives the job and its folder."""
    ended = jobs("submit", *CONFIGURATION, f'runs_dir="{runs}"', *words)
    assert ended.returncode == 0, ended.stderr
    lines = dict(line.split(maxsplit=1) for line in ended.stdout.splitlines())
    return lines["job"].partition(":")[0], RunFolder(Path(lines["folder"]))


def end_of(folder: RunFolder, limit_s: float = 150) -> dict[str, Any]:
    """Wait for the end of a run; gives its status."""
    wait_until(
        lambda: folder.read_status()["state"] in ENDED,
        limit_s,
        "the run does not end",
        lambda: f"{folder.read_status()}\n{said(folder)}",
    )
    return folder.read_status()


def said(folder: RunFolder) -> str:
    """Return all that the job wrote, for the message of a failing test."""
    return "\n".join(
        path.read_text() for path in folder.logs.glob("*") if path.suffix in (".out", ".log")
    )


def batch_log(folder: RunFolder) -> str:
    (path,) = folder.logs.glob("*.out")
    return path.read_text()


def lines_of_jobs(folder: RunFolder) -> list[str]:
    """Return what the launching process said, but for the probe that the first job of a cluster makes."""
    lines = batch_log(folder).splitlines()
    return [
        line for line in lines if line.startswith("jobs: ") and not line.startswith("jobs: probe: ")
    ]


def job_fields(mini_slurm: MiniSlurm, job: str) -> dict[str, str]:
    """Wait until SLURM has put the job to rest; gives what it says about it."""
    fields: dict[str, str] = {}

    def rests() -> bool:
        shown = mini_slurm.run("scontrol", "show", "job", job, "--oneliner")
        fields.update(word.partition("=")[::2] for word in shown.stdout.split())
        return fields.get("JobState") not in ("PENDING", "RUNNING", "COMPLETING", None)

    wait_until(rests, 60, f"job {job} does not end")
    return fields


def beats(folder: RunFolder, num_ranks: int = 4) -> list[Beat]:
    read = [read_beat(folder.heartbeat(rank)) for rank in range(num_ranks)]
    return [beat for beat in read if beat is not None]


def wait_for_step(folder: RunFolder, step: int, num_ranks: int = 4) -> None:
    """Wait until every rank has come to a step."""

    def are_there() -> bool:
        assert folder.read_status()["state"] not in ENDED, said(folder)
        return sum(beat.step >= step for beat in beats(folder, num_ranks)) == num_ranks

    def seen() -> str:
        commands = (
            ["squeue"],
            ["sinfo", "-N", "-l"],
            ["ps", "-eo", "pid,ppid,stat,time,wchan:20,args"],
        )
        shown = [
            subprocess.run(command, capture_output=True, text=True, timeout=60).stdout
            for command in commands
        ]
        marks = [str(read_beat(folder.heartbeat(rank))) for rank in range(4)]
        return "\n".join([str(folder.read_status()), *marks, *shown, said(folder)])

    wait_until(are_there, 120, f"the ranks do not come to step {step}", seen)


def wait_for_shown_step(folder: RunFolder, step: int) -> None:
    """Wait until progress.json, which lies behind the ranks' marks by up to 2 s, tells of a step."""
    wait_for_step(folder, step)
    wait_until(
        lambda: read_json(folder.progress_json).get("step", 0) >= step,
        30,
        f"step {step} is not shown",
        lambda: said(folder),
    )
