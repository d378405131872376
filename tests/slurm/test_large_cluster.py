"""A mini cluster of 256 nodes x 4 GPUs.

A job of 1024 tasks, and an emulated run of 128 real MPI ranks.
GEMS_LARGE_CLUSTER=1 runs it. On two cores the first takes about a minute, the second several: its
128 ranks share them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from gems.runs.folder import RunFolder
from gems.trace import read_trace

if TYPE_CHECKING:
    from tests.slurm.conftest import MiniSlurm

pytestmark = [
    pytest.mark.slurm,
    pytest.mark.skipif(
        os.environ.get("GEMS_LARGE_CLUSTER") != "1", reason="GEMS_LARGE_CLUSTER=1 runs it"
    ),
]
ROOT = Path(__file__).resolve().parents[2]
NODES = 256
GPUS = 4
RUN = (
    "data=synthetic",
    "schedule=gems_master",
    "parallel.partitions=8",
    "cluster=mini",
    f"cluster.gpus_per_node={GPUS}",
)


@pytest.fixture(scope="module")
def large(slurm_installed: None, short_tmp: Path) -> Iterator[MiniSlurm]:
    """Yield the cluster, up."""
    from tests.slurm.conftest import MiniSlurm

    cluster = MiniSlurm(short_tmp / "large")
    try:
        up = cluster.script("up", f"--nodes={NODES}", f"--gpus={GPUS}", "--cpus=4", timeout_s=180)
        assert up.returncode == 0, up.stderr
        yield cluster
    finally:
        down = cluster.script("down", timeout_s=180)
    assert down.returncode == 0, down.stderr


def submitted(cluster: MiniSlurm, runs: Path, *words: str) -> tuple[str, RunFolder]:
    """Submit through the command line; gives the job and its folder."""
    ended = cluster.run(
        sys.executable,
        "-m",
        "jobs",
        "submit",
        *RUN,
        f"runs_dir={runs}",
        *words,
        "--json",
        cwd=ROOT,
        timeout_s=120,
    )
    assert ended.returncode == 0, ended.stderr
    answer = json.loads(ended.stdout)
    return str(answer["job_id"]), RunFolder(Path(answer["run_folder"]))


def end_of(folder: RunFolder, limit_s: float) -> dict[str, Any]:
    """Wait for the end of a run; gives its status."""
    pause = threading.Event()
    deadline_s = time.monotonic() + limit_s
    while (status := folder.read_status())["state"] not in ("finished", "failed"):
        if time.monotonic() > deadline_s:
            logs = [
                path.read_text()[-3000:]
                for path in folder.logs.glob("*")
                if path.suffix in (".out", ".log")
            ]
            pytest.fail(
                "\n".join([f"the run does not end within {limit_s} s: {status}", *logs]),
                pytrace=False,
            )
        pause.wait(0.5)
    return status


@pytest.mark.timeout(420)
def test_1024_tasks_start_and_end(large: MiniSlurm, tmp_path: Path) -> None:
    job, folder = submitted(
        large, tmp_path, "machine=probe", "parallel.replicas=128", f"cluster.nodes={NODES}"
    )
    status = end_of(folder, 200)
    assert (status["state"], status["exit_code"], status["job_id"]) == ("finished", 0, job)
    found = json.loads(folder.result_json.read_text())
    assert (found["num_ranks"], found["num_nodes"], found["gpus_on_node"]) == (1024, NODES, GPUS)
    assert not list(folder.path.glob("FAILED.*"))
    pause = threading.Event()
    deadline_s = time.monotonic() + 120
    shown = ["scontrol", "show", "job", job, "--oneliner"]
    while "JobState=COMPLETED" not in (said := large.run(*shown).stdout):
        assert time.monotonic() < deadline_s, said
        pause.wait(0.5)
    assert "ExitCode=0:0" in said and f"NumNodes={NODES}" in said and "NumTasks=1024" in said


@pytest.mark.timeout(1500)
def test_128_ranks_leave_one_trace(large: MiniSlurm, tmp_path: Path) -> None:
    """Each of the 128 has 1/64 of a core here, so that a unit of work is long."""
    _, folder = submitted(
        large,
        tmp_path,
        "machine=emulated",
        "parallel.replicas=16",
        "parallel.micro_batches=16",
        "cost.unit_s=0.1",
        "train.steps=2",
        "benchmark.skip_steps=1",
        "train.hang_timeout_s=900",
        "cluster.nodes=32",
        "cluster.minutes=30",
    )
    status = end_of(folder, 1200)
    assert (status["state"], status["exit_code"]) == ("finished", 0), status
    trace = read_trace(folder.trace_h5)
    assert (trace.source, trace.attributes["world_size"], len(trace.steps)) == ("emulated", 128, 2)
    assert set(trace.events["rank"].tolist()) == set(range(128))
    if large.has_own_host_names():
        assert set(trace.attributes["hostnames"]) == {f"n{number}" for number in range(1, 33)}
    assert trace.schedule_rows and (folder.path / "timeline.png").stat().st_size > 1000


@pytest.mark.timeout(60)
def test_a_job_larger_than_the_cluster_is_refused_in_one_line(
    large: MiniSlurm, tmp_path: Path
) -> None:
    words = [
        *RUN,
        "machine=probe",
        "parallel.replicas=256",
        "cluster.nodes=512",
        f"runs_dir={tmp_path}",
    ]
    ended: subprocess.CompletedProcess[str] = large.run(
        sys.executable, "-m", "jobs", "submit", *words, cwd=ROOT, timeout_s=50
    )
    assert ended.returncode == 2, ended.stdout + ended.stderr
    (line,) = ended.stderr.splitlines()
    assert line.startswith("jobs: ")
