"""One job in a run folder, on the mini cluster.

Whatever squeue says, and whatever ends a submission.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from gems.runs.folder import RunFolder
from tests.helpers.fault_table import note
from tests.helpers.mini_runs import (
    CONFIGURATION,
    ENDLESS,
    end_of,
    jobs,
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
TRIALS = int(os.environ.get("GEMS_TEST_SIGNALS", "20"))
ROUNDS = int(os.environ.get("GEMS_TEST_ROUNDS", "2"))
SQUEUES = {
    "failing": "echo 'Unable to contact slurm controller (connect failure)' >&2; exit 1",
    "slow": "exec sleep 20",
    "empty": "exit 0",
    "garbage": "echo '\\0x1b[31m<html>502</html>|||'",
}


@pytest.fixture(scope="module", autouse=True)
def _profile_is_known(mini_slurm: MiniSlurm) -> None:
    """Take the profile once: processes that start together would each take it."""
    ended = jobs(
        "submit", *CONFIGURATION, "--dry-run", limit_s=280, SLURM_CONF=str(mini_slurm.conf)
    )
    assert ended.returncode == 0, ended.stderr


def in_queue(cluster: MiniSlurm, folder: Path) -> list[str]:
    """Return the jobs of a folder that wait or run, by the path of their script."""
    listed = cluster.run(
        "squeue", "--noheader", "--states=PENDING,RUNNING,COMPLETING", "--format=%i %o"
    ).stdout
    return [line.split()[0] for line in listed.splitlines() if str(folder) in line]


def stand_in(tmp_path: Path, name: str, script: str) -> str:
    """Put a command in front of PATH, and return that PATH."""
    (tmp_path / "bin").mkdir(exist_ok=True)
    path = tmp_path / "bin" / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}"


@pytest.mark.parametrize("number", range(ROUNDS))
def test_of_three_submissions_at_once_one_gets_the_folder(
    mini_slurm: MiniSlurm, tmp_path: Path, number: int
) -> None:
    words = [
        "submit",
        *CONFIGURATION,
        f"runs_dir={tmp_path}",
        "train.steps=4",
        "+cluster.sbatch.hold=true",
    ]
    argv = [sys.executable, "-m", "jobs", *words]
    started = [
        subprocess.Popen(
            argv, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        for _ in range(3)
    ]
    ended = [(process.communicate(timeout=120), process.returncode) for process in started]
    codes = sorted(code for _, code in ended)
    assert codes == [0, 2, 2], ended
    for (_, error), code in ended:
        assert code == 0 or re.search(
            rb"jobs: run folder=.*(belongs to job|process|at this moment)", error
        ), error
    (folder,) = tmp_path.iterdir()
    (job,) = in_queue(mini_slurm, folder)
    assert RunFolder(folder).read_status()["job_id"] == job
    note(f"3 submissions at once, {number + 1} of {ROUNDS}", "one job", f"the others: {codes[1:]}")


def test_no_squeue_lets_a_second_job_into_a_running_folder(
    mini_slurm: MiniSlurm, tmp_path: Path
) -> None:
    job, folder = submit(tmp_path / "runs", *ENDLESS)
    wait_for_step(folder, 1)
    words = ["submit", *CONFIGURATION, f"runs_dir={tmp_path / 'runs'}", *ENDLESS]
    for name, script in SQUEUES.items():
        ended = jobs(*words, PATH=stand_in(tmp_path, "squeue", script))
        assert ended.returncode == 2, name
        assert (
            f"belongs to job {job}, and nobody can tell whether it has ended (squeue "
            in ended.stderr
        ), name
        note(f"squeue {name}, run going on", "no second job", ended.stderr, code=2)
    lie = f"echo 'JOBID|STATE|COMMAND'; echo '{job}|FAILED|x'"
    for script, option in ((lie, "--yes"), (SQUEUES["empty"], "--force")):
        ended = jobs(*words, option, PATH=stand_in(tmp_path, "squeue", script))
        assert ended.returncode == 2
        assert (
            "was at work there" in ended.stderr and "whatever is known of its job" in ended.stderr
        )
    assert in_queue(mini_slurm, folder.path) == [job]
    assert folder.read_status()["state"] == "running" and not (folder.path / "attempts").exists()
    mini_slurm.run("scancel", job)
    assert end_of(folder)["state"] == "cancelled"


@pytest.mark.parametrize("verb", ["status", "cancel"])
def test_a_job_whose_submission_was_killed_is_found(
    mini_slurm: MiniSlurm, tmp_path: Path, verb: str
) -> None:
    """The submitting process is killed once SLURM has the job and before it is recorded."""
    real = mini_slurm.run("which", "sbatch").stdout.strip()
    script = (
        f'case "$*" in *--test-only*) exec {real} "$@" ;; esac\n{real} "$@" && kill -KILL $PPID'
    )
    words = ["submit", *CONFIGURATION, f"runs_dir={tmp_path / 'runs'}", "train.steps=4"]
    hold = ["+cluster.sbatch.hold=true"] if verb == "cancel" else []
    ended = jobs(*words, *hold, PATH=stand_in(tmp_path, "sbatch", script))
    assert ended.returncode == -signal.SIGKILL
    (path,) = (tmp_path / "runs").iterdir()
    folder = RunFolder(path)
    (job,) = in_queue(mini_slurm, path)
    assert folder.read_status()["state"] == "submitting"
    if verb == "status":
        shown = json.loads(jobs("status", str(path), "--json").stdout)["runs"]
        assert (shown[0]["job_id"], folder.read_status().get("job_id")) == (job, job)
        assert end_of(folder)["state"] == "finished", said(folder)
    else:
        assert jobs("cancel", str(path), "--yes").returncode == 0
        wait_until(lambda: not in_queue(mini_slurm, path), 30, "the job is left")
        assert folder.read_status()["state"] == "cancelled"


def test_interrupted_submissions_leave_no_orphan(mini_slurm: MiniSlurm) -> None:
    argv = [sys.executable, "-m", "tests.helpers.interrupted_submissions", str(TRIALS)]
    ended = subprocess.run(
        argv, cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=280
    )
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout)
    assert (found["trials"], found["faults"]) == (TRIALS, [])
    note(f"{TRIALS} signals while submitting", "no orphan, no double")


def test_drained_nodes_are_waited_for(mini_slurm: MiniSlurm, tmp_path: Path) -> None:
    """sbatch --test-only refuses it in the words of what could never run."""
    mini_slurm.run("scontrol", "update", "nodename=n2", "state=drain", "reason=test")
    try:
        ended = jobs("submit", *CONFIGURATION, f"runs_dir={tmp_path}", "train.steps=4")
        assert ended.returncode == 0, ended.stderr
        warning = "1 of 2 nodes of partition debug are up (others: drained)"
        assert warning in ended.stderr
        (path,) = tmp_path.iterdir()
        assert in_queue(mini_slurm, path) and RunFolder(path).read_status()["state"] == "submitted"
        note("node drained at submission", "queued", warning, code=0)
    finally:
        mini_slurm.run("scontrol", "update", "nodename=n2", "state=resume")
    assert end_of(RunFolder(path))["state"] == "finished"


def test_a_slurmctld_that_is_down_takes_nothing_and_refuses_nothing(
    other_cluster: MiniSlurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    up = other_cluster.script("up", "--nodes", "2", "--cpus", "4")
    assert up.returncode == 0, up.stderr
    monkeypatch.setenv("SLURM_CONF", str(other_cluster.conf))
    os.kill(int((other_cluster.folder / "run" / "slurmctld.pid").read_text()), signal.SIGTERM)
    wait_until(lambda: other_cluster.run("sinfo").returncode, 30, "slurmctld does not end")
    words = ["submit", *CONFIGURATION, f"runs_dir={tmp_path}", "train.steps=4"]
    ended = jobs(*words, limit_s=200)
    assert ended.returncode == 2
    assert "SLURM cannot be reached, and nothing is submitted (sbatch failed" in ended.stderr
    assert "refuses" not in ended.stderr
    note("slurmctld down at submission", "no job", ended.stderr, code=2)
    (path,) = tmp_path.iterdir()
    assert RunFolder(path).read_status()["state"] == "prepared"
    other_cluster.run(
        "slurmctld",
        "-f",
        str(other_cluster.conf),
        env={"PATH": f"{os.environ['PATH']}:/usr/sbin:/sbin"},
    )
    wait_until(lambda: other_cluster.run("sinfo").returncode == 0, 60, "slurmctld does not answer")
    again = jobs(*words)
    assert again.returncode == 0, again.stderr
    assert len(in_queue(other_cluster, path)) == 1
