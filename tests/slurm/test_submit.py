"""`gems-jobs submit` on the mini cluster: real ranks of the real engine over srun --mpi=pmi2."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from gems.trace import read_trace
from tests.helpers.mini_runs import (
    CONFIGURATION,
    batch_log,
    beats,
    end_of,
    job_fields,
    lines_of_jobs,
    said,
    submit,
    wait_for_step,
    wait_until,
)
from tests.helpers.processes import ROOT

if TYPE_CHECKING:
    from tests.slurm.conftest import MiniSlurm

pytestmark = [
    pytest.mark.slurm,
    pytest.mark.timeout(300),
    pytest.mark.usefixtures("no_job_is_left"),
]


def test_four_ranks_on_two_nodes_leave_one_trace(mini_slurm: MiniSlurm, tmp_path: Path) -> None:
    """In a folder whose name a shell would take apart."""
    job, folder = submit(
        tmp_path / "it's my $HOME", "train.steps=4", "name='four \"ranks\" & more'"
    )
    status = end_of(folder)
    assert status["state"] == "finished", said(folder)
    assert (status["job_id"], status["exit_code"], status["launcher"]) == (job, 0, "srun")
    trace = read_trace(folder.trace_h5)
    assert trace.attributes["world_size"] == 4
    if mini_slurm.has_own_host_names():
        assert set(trace.attributes["hostnames"]) == {"n1", "n2"}
    assert set(trace.events["rank"].tolist()) == {0, 1, 2, 3}
    assert (folder.path / "timeline.png").stat().st_size > 1000
    fields = job_fields(mini_slurm, job)
    assert (fields["JobState"], fields["ExitCode"]) == ("COMPLETED", "0:0")
    names = sorted(
        path.name
        for path in folder.logs.iterdir()
        if not path.is_symlink() and path.stem != "probe"
    )  # the first job of a cluster leaves what it probed
    assert names == [
        f"{job}_0_log.out",
        f"{job}_0_result.pkl",
        f"{job}_submission.sh",
        f"{job}_submitted.pkl",
        "ranks.log",
    ]
    assert "images/s" in batch_log(folder)


def test_wrong_mpi_is_said_in_one_line(mini_slurm: MiniSlurm, tmp_path: Path) -> None:
    job, folder = submit(tmp_path, "cluster.mpi=none", "train.steps=4")
    status = end_of(folder)
    assert (status["state"], status["exit_code"]) == ("failed", 2), said(folder)
    fields = job_fields(mini_slurm, job)
    assert (fields["JobState"], fields["ExitCode"]) == ("FAILED", "2:0")
    (line,) = lines_of_jobs(folder)  # written after status.json
    assert "world size" in line or "world of 1" in line, line


def test_killed_rank_fails_the_job_and_is_named(mini_slurm: MiniSlurm, tmp_path: Path) -> None:
    job, folder = submit(tmp_path, "train.steps=100000")
    wait_for_step(folder, 3)
    victim = beats(folder)[3]
    os.kill(victim.pid, signal.SIGKILL)
    status = end_of(folder, limit_s=30)
    fields = job_fields(mini_slurm, job)
    assert (status["state"], status["exit_code"], status["rank"], status["signal"]) == (
        "failed",
        4,
        3,
        9,
    )
    assert (status["node"], status["rank_pid"]) == (victim.node, victim.pid)
    assert status["step"] >= victim.step
    (line,) = lines_of_jobs(folder)
    assert (
        f"rank 3 on node {victim.node} was killed by signal 9 (SIGKILL) in step {status['step']}"
        in line
    )
    assert (fields["JobState"], fields["ExitCode"]) == ("FAILED", "4:0")
    trace = read_trace(folder.trace_h5)
    assert set(trace.events["rank"].tolist()) == {0, 1, 2, 3}


def test_cancelled_job_leaves_a_status(mini_slurm: MiniSlurm, tmp_path: Path) -> None:
    job, folder = submit(tmp_path, "train.steps=100000")
    wait_for_step(folder, 0)
    mini_slurm.run("scancel", job)
    status = end_of(folder, limit_s=30)
    assert (status["state"], status["exit_code"]) == ("cancelled", 128 + signal.SIGTERM), said(
        folder
    )
    assert job_fields(mini_slurm, job)["JobState"] == "CANCELLED"


def test_requeued_job_runs_again_beside_the_stale_files(
    mini_slurm: MiniSlurm, tmp_path: Path
) -> None:
    """The second attempt has the job's old number; what the first one recorded is kept."""
    job, folder = submit(tmp_path, "train.steps=40", "+cluster.sbatch.requeue=true")
    wait_for_step(folder, 1)
    requeued = mini_slurm.run("scontrol", "requeue", job)
    assert requeued.returncode == 0, requeued.stderr
    wait_until(lambda: (folder.path / "attempts" / "001").exists(), 120, "it is not started again")
    status = end_of(folder)
    assert (status["state"], status["job_id"]) == ("finished", job), said(folder)
    assert any((folder.path / "attempts" / "001" / "trace").glob("rank*.h5"))


def test_dry_run_is_accepted_and_is_what_is_submitted(
    mini_slurm: MiniSlurm, tmp_path: Path
) -> None:
    runs = tmp_path / "it is"
    words = ["name='a \"b\" $c'", "train.steps=4"]
    argv = [
        sys.executable,
        "-m",
        "jobs",
        "submit",
        *CONFIGURATION,
        f'runs_dir="{runs}"',
        *words,
        "--dry-run",
    ]
    shown = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert shown.returncode == 0, shown.stderr
    assert not runs.exists()
    script = tmp_path / "job.sh"
    script.write_text(shown.stdout)
    tested = mini_slurm.run("sbatch", "--test-only", str(script))
    assert tested.returncode == 0, tested.stderr
    assert "to start at" in tested.stderr
    job, folder = submit(runs, *words)
    mini_slurm.run("scancel", job)
    assert (folder.logs / f"{job}_submission.sh").read_text() == shown.stdout
    named = mini_slurm.run("squeue", "--noheader", "--states=all", f"--jobs={job}", "--format=%j")
    assert named.stdout == 'a "b" $c\n'


def test_refused_partition_is_one_line(mini_slurm: MiniSlurm, tmp_path: Path) -> None:
    argv = [
        sys.executable,
        "-m",
        "jobs",
        "submit",
        *CONFIGURATION,
        f"runs_dir={tmp_path}",
        "cluster.partition=none",
    ]
    ended = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 2
    (line,) = ended.stderr.splitlines()
    assert line.startswith(
        "jobs: cluster.partition=none: this SLURM has no such partition; allowed: debug"
    )
