"""Runs that faults befall on the mini cluster.

Their start, their end, and the row of the table that it fills.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from gems.runs.folder import RunFolder
from gems.trace import part_path, read_part
from tests.helpers.fault_table import ROWS, Fault
from tests.helpers.mini_runs import beats, jobs, said, wait_for_step, wait_until

if TYPE_CHECKING:
    from tests.slurm.conftest import MiniSlurm

RUN = [
    "experiment=gems_master",
    "cluster=mini",
    "parallel.partitions=4",
    "parallel.micro_batches=4",
    "benchmark.skip_steps=1",
]
# Ranks that wait in place of computing start in seconds; all else is as in training. A step takes
# .2 s at least.
EMULATED = [*RUN, "machine=emulated", "cost.unit_s=0.01", "train.checkpoint_steps=5"]
ENDLESS = [*EMULATED, "train.steps=100000"]
GOES_ON = ("submitted", "running", "requeued")


@pytest.fixture
def submit(
    preempt_slurm: MiniSlurm, tmp_path: Path
) -> Iterator[Callable[..., tuple[str, RunFolder]]]:
    """Submit a run and gives the job and its folder; what is left of it is ended."""

    def submit(*words: str) -> tuple[str, RunFolder]:
        ended = jobs("submit", f"runs_dir={tmp_path}/runs", *words, "--json")
        assert ended.returncode == 0, ended.stderr
        sent = json.loads(ended.stdout)
        return str(sent["job_id"]), RunFolder(Path(sent["run_folder"]))

    yield submit
    preempt_slurm.run("scancel", f"--user={os.getuid()}")
    states = "--states=PENDING,RUNNING,COMPLETING"
    wait_until(
        lambda: not preempt_slurm.run("squeue", "--noheader", states).stdout,
        90,
        "the jobs do not end",
    )


@pytest.fixture
def going(submit: Callable[..., tuple[str, RunFolder]]) -> Callable[..., tuple[str, RunFolder]]:
    """Submit an endless run, and waits until it is in its steps."""

    def going(*words: str, num_ranks: int = 4) -> tuple[str, RunFolder]:
        job, folder = submit(*ENDLESS, f"parallel.partitions={num_ranks}", *words)
        wait_for_step(folder, 7, num_ranks)
        return job, folder

    return going


def job_fields(cluster: MiniSlurm, job: str) -> dict[str, str]:
    shown = cluster.run("scontrol", "show", "job", job, "--oneliner")
    return dict(word.partition("=")[::2] for word in shown.stdout.split() if "=" in word)


def ended(
    cluster: MiniSlurm,
    name: str,
    job: str,
    folder: RunFolder,
    limit_s: float,
    since_s: float | None = None,
) -> dict[str, Any]:
    """Wait for the end of a run and of its job, and gives status, SLURM's fields and the diagnosis.

    Fills the table's row.
    """
    begin_s = time.monotonic() if since_s is None else since_s
    wait_until(
        lambda: (
            folder.read_status().get("state") not in GOES_ON
            or job_fields(cluster, job).get("JobState") in ("NODE_FAIL", "TIMEOUT")
        ),
        limit_s,
        f"the run does not end: {name}",
        lambda: f"{folder.read_status()}\n{said(folder)}",
    )
    seconds = time.monotonic() - begin_s
    resting = ("PENDING", "RUNNING", "COMPLETING", "CONFIGURING", None)
    wait_until(
        lambda: job_fields(cluster, job).get("JobState") not in resting, 60, "the job does not end"
    )
    fields = job_fields(cluster, job)
    status = folder.read_status()
    asked = jobs("diagnose", str(folder.path), "--json")
    assert asked.stdout, asked.stderr
    told = json.loads(asked.stdout)
    where = "" if told["rank"] is None else f"rank {told['rank']} on {told['node']}: "
    line = f"{told['cause']}: {where}{told['text']}"
    ROWS.append(
        Fault(
            name,
            str(status.get("state")),
            status.get("exit_code"),
            fields["JobState"],
            seconds,
            told["trace_steps"],
            line,
        )
    )
    return {"status": status, "fields": fields, "told": told, "seconds": seconds}


def check_trace(folder: RunFolder, least: int) -> None:
    """Check that each rank's part of the trace reads, up to its last finished step."""
    for rank in range(4):
        part = read_part(part_path(folder.path, rank))
        assert len(part.rank_steps) >= least, rank


def last_steps(folder: RunFolder) -> int:
    return min(beat.step for beat in beats(folder))


def daemon_of(cluster: MiniSlurm, node: str) -> int:
    """Return the process of a node's slurmd."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().decode().split("\0")
        except OSError:
            continue
        if Path(words[0]).name == "slurmd" and str(cluster.conf) in words and node in words:
            return int(path.parent.name)
    raise AssertionError(f"no slurmd of {node}")


def processes_on(cluster: MiniSlurm, node: str) -> list[int]:
    """Return the processes of jobs on a node, and the step daemons that started them."""
    found = set()
    for path in Path("/proc").glob("[0-9]*"):
        try:
            words = (path / "environ").read_bytes().split(b"\0")
            if (
                f"SLURMD_NODENAME={node}".encode() in words
                and f"SLURM_CONF={cluster.conf}".encode() in words
            ):
                parent = int((path / "stat").read_text().rpartition(")")[2].split()[1])
                if Path(os.readlink(f"/proc/{parent}/exe")).name.startswith(
                    "slurmstepd"
                ):  # Debian: slurmstepd-wlm
                    found.add(parent)
                found.add(int(path.name))
        except OSError:
            continue
    return sorted(found)


def cut_power(cluster: MiniSlurm, node: str) -> None:
    """Kill a node's daemon and all processes of jobs there.

    None of them sees another one die, and acts on it.
    """
    victims = [daemon_of(cluster, node), *processes_on(cluster, node)]
    for number in (signal.SIGSTOP, signal.SIGKILL):
        for pid in victims:
            os.kill(pid, number)


def start(cluster: MiniSlurm, words: list[str]) -> None:
    """Start a daemon, which takes no pipe of ours with it."""
    with (cluster.folder / "log" / "again.log").open("a") as log:
        subprocess.run(words, stdin=subprocess.DEVNULL, stdout=log, stderr=log, timeout=30)


def start_daemon(cluster: MiniSlurm, node: str) -> None:
    """Start a node's slurmd again, and waits until the node takes jobs."""
    words = ["slurmd", "-f", str(cluster.conf), "-N", node]
    if cluster.has_own_host_names():
        words = ["unshare", "--uts", "sh", "-c", 'hostname "$0" && exec "$@"', node, *words]
    start(cluster, words)
    wait_until(
        lambda: (
            cluster.run(
                "sinfo", "--noheader", f"--nodes={node}", "--partition=debug", "--format=%T"
            ).stdout.strip()
            == "idle"
        ),
        60,
        f"{node} does not come back",
        lambda: cluster.run("sinfo").stdout,
    )
