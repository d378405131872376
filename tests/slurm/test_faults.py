"""Faults on a mini cluster, one a test.

How the run ends, how soon, what is told of it, and what its trace still holds.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from collections.abc import Callable
from datetime import datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from gems.runs.folder import RunFolder
from gems.trace import part_path, read_part
from gems.utils.atomic_io import read_json
from tests.helpers.fault_runs import (
    EMULATED,
    ENDLESS,
    RUN,
    check_trace,
    cut_power,
    daemon_of,
    ended,
    job_fields,
    last_steps,
    processes_on,
    start,
    start_daemon,
)
from tests.helpers.fault_table import ROWS, Fault
from tests.helpers.mini_runs import (
    beats,
    jobs,
    lines_of_jobs,
    said,
    wait_for_shown_step,
    wait_for_step,
    wait_until,
)

if TYPE_CHECKING:
    from tests.slurm.conftest import MiniSlurm

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(300)]

HELPERS = Path(__file__).resolve().parents[1] / "helpers"
STALL_LIMIT_S = 10
TICK_S = 30  # how often SLURM compares times


def test_a_rank_raises(
    preempt_slurm: MiniSlurm, submit: Callable[..., tuple[str, RunFolder]]
) -> None:
    job, folder = submit(
        *RUN,
        "data=synthetic",
        "data.train_samples=64",
        "model.target=faulty_net.FaultyNet",
        f"model.path={HELPERS}",
        "model.kwargs={fault:raise,after:20}",
        "partition=even",
        "schedule=1f1b",
        "train.steps=100",
    )
    found = ended(preempt_slurm, "rank raises", job, folder, 120)
    status = found["status"]
    told = found["told"]
    assert (status["state"], status["exit_code"], status["rank"], status["step"]) == (
        "failed",
        4,
        1,
        5,
    ), said(folder)
    assert (told["cause"], told["rank"], told["stages"]) == ("exception", 1, [1])
    assert "ValueError: the weights went out of bounds" in told["text"]
    assert (found["fields"]["JobState"], found["fields"]["ExitCode"]) == ("FAILED", "4:0")
    record = read_json(folder.failed_json(1))
    assert any("faulty_net.py" in line for line in record["traceback"])
    assert record["rss_bytes"] > 10_000_000
    check_trace(folder, 5)


def test_a_rank_is_killed(
    preempt_slurm: MiniSlurm, going: Callable[..., tuple[str, RunFolder]]
) -> None:
    job, folder = going()
    steps = last_steps(folder)
    victim = beats(folder)[3]
    os.kill(victim.pid, signal.SIGKILL)
    found = ended(preempt_slurm, "rank SIGKILLed", job, folder, 40)
    status = found["status"]
    told = found["told"]
    assert (status["state"], status["exit_code"], status["rank"], status["signal"]) == (
        "failed",
        4,
        3,
        9,
    ), said(folder)
    assert (told["cause"], told["rank"], told["node"]) == ("killed", 3, victim.node)
    assert told["resume_step"] == status["step"] // 5 * 5 or told["resume_step"] == steps // 5 * 5
    assert (found["fields"]["JobState"], found["fields"]["ExitCode"]) == ("FAILED", "4:0")
    check_trace(folder, steps)


# srun as it reports a rank that the kernel killed for its memory; the mini cluster has no cgroups.
SRUN_WITH_CGROUPS = r"""#!/bin/bash
event='slurmstepd: error: Detected 1 oom_kill event in StepId=7.0. Some of the step tasks have been OOM Killed.'
exec {srun} "$@" 2> >(exec sed -u -E "s/^(srun: error: [^:]+: tasks? [0-9,-]+): Killed$/$event\\n\\1: {what}/" >&2)
"""


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("fault", ["SIGKILL", "SIGBUS", "SIGABRT", "out of memory"])
def test_whoever_is_killed_is_named_and_no_neighbour(
    preempt_slurm: MiniSlurm,
    going: Callable[..., tuple[str, RunFolder]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    fault: str,
    num_ranks: int,
) -> None:
    is_memory = fault == "out of memory"
    if is_memory:
        srun = tmp_path / "bin" / "srun"
        srun.parent.mkdir()
        what = "Out Of Memory" if num_ranks == 2 else "Killed"
        srun.write_text(SRUN_WITH_CGROUPS.format(srun=shutil.which("srun"), what=what))
        srun.chmod(0o755)
        monkeypatch.setenv("PATH", f"{srun.parent}{os.pathsep}{os.environ['PATH']}")
    job, folder = going(num_ranks=num_ranks)
    rank = num_ranks - 1
    victim = beats(folder, num_ranks)[rank]
    os.kill(victim.pid, signal.SIGKILL if is_memory else signal.Signals[fault])
    found = ended(preempt_slurm, f"{fault}, 1 of {num_ranks} ranks", job, folder, 40)
    status = found["status"]
    told = found["told"]
    assert (status["exit_code"], status["rank"], status["node"]) == (4, rank, victim.node), said(
        folder
    )
    cause = "out of memory on host" if is_memory else "killed"
    assert (told["cause"], told["rank"], told["node"]) == (cause, rank, victim.node)
    assert told["blamed_node"] is None and not (folder.path.parent / "bad_nodes.json").exists()


def test_whoever_is_killed_is_named_over_gloo(
    preempt_slurm: MiniSlurm, submit: Callable[..., tuple[str, RunFolder]]
) -> None:
    """Its neighbours lose their messages at once, where those over MPI wait for the job to end."""
    job, folder = submit(
        *RUN,
        "data=synthetic",
        "data.height_px=16",
        "data.width_px=16",
        "schedule=1f1b",
        "machine.transport=gloo",
        "train.steps=100000",
    )
    wait_for_step(folder, 5)
    victim = beats(folder)[2]
    os.kill(victim.pid, signal.SIGKILL)
    found = ended(preempt_slurm, "SIGKILL over gloo", job, folder, 40)
    status = found["status"]
    told = found["told"]
    assert (status["exit_code"], status["rank"], status["node"]) == (4, 2, victim.node), said(
        folder
    )
    assert (told["cause"], told["rank"], told["node"], told["blamed_node"]) == (
        "killed",
        2,
        victim.node,
        None,
    )


AHEAD = """
import time
now, now_ns = time.time, time.time_ns
time.time, time.time_ns = lambda: now() + 3600, lambda: now_ns() + 3600 * 10**9
"""


def test_all_ranks_are_stopped_whose_clock_is_an_hour_ahead(
    preempt_slurm: MiniSlurm, going: Callable[..., tuple[str, RunFolder]], tmp_path: Path
) -> None:
    (tmp_path / "sitecustomize.py").write_text(AHEAD)
    words = [f"+cluster.environment.PYTHONPATH={tmp_path}", f"train.hang_timeout_s={STALL_LIMIT_S}"]
    job, folder = going(*words, num_ranks=2)
    stopped = beats(folder, 2)
    assert all(beat.time_ns > time.time_ns() + 3000 * 10**9 for beat in stopped)
    for beat in stopped:
        os.kill(beat.pid, signal.SIGSTOP)
    found = ended(
        preempt_slurm, "all ranks SIGSTOPped, clock +1 h", job, folder, STALL_LIMIT_S + 60
    )
    status = found["status"]
    told = found["told"]
    assert (status["state"], status["exit_code"], found["fields"]["ExitCode"]) == (
        "failed",
        5,
        "5:0",
    ), said(folder)
    assert told["cause"] == "stalled" and told["node"] == stopped[told["rank"]].node
    assert found["seconds"] < STALL_LIMIT_S + 30


def test_the_run_folder_is_moved_away(
    preempt_slurm: MiniSlurm, going: Callable[..., tuple[str, RunFolder]], tmp_path: Path
) -> None:
    job, folder = going(num_ranks=2)
    since_s = time.monotonic()
    moved = RunFolder(folder.path.rename(tmp_path / "moved"))
    resting = ("COMPLETED", "FAILED", "CANCELLED", "NODE_FAIL")
    wait_until(
        lambda: job_fields(preempt_slurm, job)["JobState"] in resting, 40, "the job trains on"
    )
    fields, (line,) = job_fields(preempt_slurm, job), lines_of_jobs(moved)
    assert line == f"jobs: the run folder {folder.path} is gone: the run has been ended"
    assert (fields["JobState"], fields["ExitCode"]) == ("FAILED", "4:0")
    ROWS.append(
        Fault("run folder gone", "-", 4, fields["JobState"], time.monotonic() - since_s, None, line)
    )


def test_a_rank_is_stopped(
    preempt_slurm: MiniSlurm, going: Callable[..., tuple[str, RunFolder]]
) -> None:
    job, folder = going(f"train.hang_timeout_s={STALL_LIMIT_S}")
    steps = last_steps(folder)
    victim = beats(folder)[1]
    os.kill(victim.pid, signal.SIGSTOP)
    found = ended(preempt_slurm, "rank SIGSTOPped", job, folder, STALL_LIMIT_S + 60)
    status = found["status"]
    told = found["told"]
    assert (status["state"], status["exit_code"]) == ("failed", 5), said(folder)
    assert (told["cause"], told["rank"], told["node"]) == ("stalled", 1, victim.node)
    assert found["seconds"] < STALL_LIMIT_S + 30
    assert found["fields"]["ExitCode"] == "5:0"
    stacks = {path.name for path in (folder.path / "stacks").glob("rank*.txt")}
    assert stacks >= {"rank0000.txt", "rank0002.txt", "rank0003.txt"}
    check_trace(folder, steps)
    assert (
        not Path(f"/proc/{victim.pid}/stat").exists()
        or " Z " in Path(f"/proc/{victim.pid}/stat").read_text()
    )


def test_a_node_goes_down(
    preempt_slurm: MiniSlurm, going: Callable[..., tuple[str, RunFolder]]
) -> None:
    """Its daemon is killed, and what ran there."""
    job, folder = going("+cluster.sbatch.no-requeue=true")
    steps = last_steps(folder)
    since_s = time.monotonic()
    cut_power(preempt_slurm, "n2")
    try:
        found = ended(preempt_slurm, "node's daemon and ranks killed", job, folder, 90, since_s)
    finally:
        start_daemon(preempt_slurm, "n2")
    assert found["status"]["state"] == "failed", said(folder)
    assert found["told"]["cause"] in ("node failed", "killed")
    assert found["told"]["node"] == "n2" or not preempt_slurm.has_own_host_names()
    check_trace(folder, steps)


def test_a_daemon_dies_and_the_ranks_live_on(
    preempt_slurm: MiniSlurm, going: Callable[..., tuple[str, RunFolder]]
) -> None:
    job, folder = going("+cluster.sbatch.no-requeue=true")
    steps = last_steps(folder)
    since_s = time.monotonic()
    os.kill(daemon_of(preempt_slurm, "n2"), signal.SIGKILL)
    try:
        found = ended(preempt_slurm, "node's daemon killed", job, folder, 90, since_s)
    finally:
        for pid in processes_on(preempt_slurm, "n2"):
            os.kill(pid, signal.SIGKILL)
        start_daemon(preempt_slurm, "n2")
    assert found["fields"]["JobState"] == "NODE_FAIL"
    told = found["told"]
    status = found["status"]
    if status["state"] == "stopped":  # SLURM told the ranks, and they had the time to save
        assert "node failed" in told["text"] and status["stopped_step"] >= steps, told
    else:
        assert told["cause"] == "node failed", told
    check_trace(folder, steps)


def test_a_job_is_cancelled(
    preempt_slurm: MiniSlurm, going: Callable[..., tuple[str, RunFolder]]
) -> None:
    job, folder = going()
    steps = last_steps(folder)
    preempt_slurm.run("scancel", job)
    found = ended(preempt_slurm, "job cancelled", job, folder, 30)
    assert (found["status"]["state"], found["status"]["exit_code"]) == ("cancelled", 143), said(
        folder
    )
    assert (found["told"]["cause"], found["fields"]["JobState"]) == ("cancelled", "CANCELLED")
    check_trace(folder, steps)


def test_a_time_limit_with_requeue(
    preempt_slurm: MiniSlurm, submit: Callable[..., tuple[str, RunFolder]]
) -> None:
    """The run saves before its time is over, starts again by itself, and ends where an undisturbed one would."""
    job, folder = submit(*EMULATED, "train.steps=260", "cluster.signal_before_end_s=60")
    wait_for_step(folder, 7)
    since_s = time.monotonic()
    end = datetime.now() + timedelta(seconds=70)  # minutes are whole, so the end is brought nearer
    preempt_slurm.run("scontrol", "update", f"jobid={job}", f"EndTime={end:%Y-%m-%dT%H:%M:%S}")
    wait_until(
        lambda: folder.read_status()["state"] == "requeued",
        TICK_S + 30,
        "no requeue",
        lambda: said(folder),
    )
    status = folder.read_status()
    step = status["stopped_step"]
    assert (status["job_id"], status["exit_code"], status["requeue_count"]) == (job, 0, 1)
    preempt_slurm.run(
        "scontrol", "update", f"jobid={job}", "TimeLimit=10"
    )  # the nearer end would count again
    found = ended(preempt_slurm, "time limit with requeue", job, folder, 200, since_s)
    assert found["status"]["state"] == "finished" and found["status"]["requeue_count"] >= 1, said(
        folder
    )
    assert found["told"]["trace_steps"] == 260
    first = read_part(part_path(folder.path / "attempts" / "001", 0))
    second = read_part(part_path(folder.path, 0))
    rows = read_json(folder.path / "requeues.json")["requeues"]
    assert [len(first.rank_steps), int(second.attributes["first_step"])] == [step, rows[-1]["step"]]
    assert (rows[0]["why"], rows[0]["by"], rows[0]["step"]) == ("time limit", "launcher", step)


def test_preempted_by_a_higher_partition(
    preempt_slurm: MiniSlurm, submit: Callable[..., tuple[str, RunFolder]]
) -> None:
    """SLURM tells the ranks alone, by SIGTERM, and lets them live for the partition's GraceTime."""
    job, folder = submit(
        *EMULATED, "train.steps=150", "cluster.partition=low", "+cluster.sbatch.exclusive=true"
    )
    wait_for_step(folder, 7)
    since_s = time.monotonic()
    high = [
        "--partition=high",
        "--nodes=2",
        "--exclusive",
        "--time=1",
        "--output=/dev/null",
        "--wrap=true",
    ]
    assert preempt_slurm.run("sbatch", *high).returncode == 0
    wait_until(
        lambda: folder.read_status()["state"] == "requeued",
        30,
        "not preempted",
        lambda: said(folder),
    )
    step = folder.read_status()["stopped_step"]
    found = ended(preempt_slurm, "preempted by a higher partition", job, folder, 200, since_s)
    assert (found["status"]["state"], found["status"]["requeue_count"]) == ("finished", 1), said(
        folder
    )
    assert int(read_part(part_path(folder.path, 0)).attributes["first_step"]) == step
    assert found["told"]["trace_steps"] == 150


def test_out_of_time_without_a_signal(
    preempt_slurm: MiniSlurm, going: Callable[..., tuple[str, RunFolder]]
) -> None:
    job, folder = going("cluster.signal_before_end_s=0")
    end = datetime.now() + timedelta(seconds=1)
    preempt_slurm.run("scontrol", "update", f"jobid={job}", f"EndTime={end:%Y-%m-%dT%H:%M:%S}")
    found = ended(preempt_slurm, "time limit without a signal", job, folder, TICK_S + 30)
    assert (found["status"]["state"], found["status"]["cause"]) == (
        "failed",
        "reached its time limit",
    ), said(folder)
    assert found["told"]["cause"] == "time limit"
    assert found["told"]["resume_step"] >= 5


def test_a_wrong_mpi(
    preempt_slurm: MiniSlurm, submit: Callable[..., tuple[str, RunFolder]]
) -> None:
    job, folder = submit(*ENDLESS, "cluster.mpi=none")
    found = ended(preempt_slurm, "wrong --mpi", job, folder, 90)
    assert (found["status"]["state"], found["status"]["exit_code"]) == ("failed", 2), said(folder)
    assert found["told"]["cause"] == "wrong MPI"
    assert (found["fields"]["JobState"], found["fields"]["ExitCode"]) == ("FAILED", "2:0")


@pytest.mark.parametrize(
    ("name", "words", "key"),
    [
        (
            "bad account",
            ["cluster.partition=members", "cluster.account=strangers"],
            "cluster.account=strangers",
        ),
        ("bad partition", ["cluster.partition=nope"], "cluster.partition=nope"),
        ("too many GPUs", ["cluster.gpus_per_node=8"], "cluster.gpus_per_node=8"),
    ],
)
def test_what_is_refused_before_submission(
    preempt_slurm: MiniSlurm, tmp_path: Path, name: str, words: list[str], key: str
) -> None:
    before = preempt_slurm.run("squeue", "--noheader", "--states=all", "--format=%i").stdout
    since_s = time.monotonic()
    refused = jobs("submit", f"runs_dir={tmp_path}/runs", *ENDLESS, *words)
    assert refused.returncode == 2
    (line,) = refused.stderr.splitlines()
    assert key in line
    assert preempt_slurm.run("squeue", "--noheader", "--states=all", "--format=%i").stdout == before
    assert not (tmp_path / "runs").exists()
    ROWS.append(Fault(name, "refused", 2, "-", time.monotonic() - since_s, None, line))


def test_the_controller_is_started_anew(
    preempt_slurm: MiniSlurm, submit: Callable[..., tuple[str, RunFolder]]
) -> None:
    job, folder = submit(*EMULATED, "train.steps=60")
    wait_for_shown_step(folder, 7)
    since_s = time.monotonic()
    pid = int((preempt_slurm.folder / "run" / "slurmctld.pid").read_text())
    os.kill(pid, signal.SIGTERM)
    wait_until(lambda: not Path(f"/proc/{pid}").exists(), 60, "the controller does not end")
    lost = jobs("status", str(folder.path), "--json")
    assert json.loads(lost.stdout)["runs"][0]["step"] >= 5  # told by the run's folder alone
    start(preempt_slurm, ["slurmctld", "-f", str(preempt_slurm.conf)])
    wait_until(
        lambda: preempt_slurm.run("squeue").returncode == 0, 60, "the controller does not come back"
    )
    found = ended(preempt_slurm, "slurmctld started anew", job, folder, 150, since_s)
    assert (found["status"]["state"], found["status"]["exit_code"]) == ("finished", 0), said(folder)
    assert (found["told"]["cause"], found["told"]["trace_steps"]) == ("finished", 60)
    assert found["fields"]["JobState"] == "COMPLETED"


def test_without_sacct(
    preempt_slurm: MiniSlurm,
    going: Callable[..., tuple[str, RunFolder]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The command is not even there; what a rank's end was is told all the same."""
    commands = tmp_path / "bin"
    commands.mkdir()
    for name in ("squeue", "scontrol", "sbatch", "srun", "scancel", "sinfo", "git", "env"):
        found = shutil.which(name)
        if found:
            (commands / name).symlink_to(found)
    job, folder = going()
    os.kill(beats(folder)[0].pid, signal.SIGKILL)
    monkeypatch.setenv("PATH", f"{commands}{os.pathsep}/bin")
    if shutil.which("sacct"):
        monkeypatch.setenv("PATH", str(commands))
    assert shutil.which("sacct") is None
    found = ended(preempt_slurm, "no sacct; rank SIGKILLed", job, folder, 40)
    assert (found["status"]["exit_code"], found["told"]["cause"], found["told"]["rank"]) == (
        4,
        "killed",
        0,
    )
    shown = json.loads(jobs("status", str(folder.path), "--json").stdout)["runs"][0]
    assert shown["state"] == "failed"
