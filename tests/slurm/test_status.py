"""Status, logs and cancel on the mini cluster.

A pending and a running job, a log to its end, and jobs that are ended.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from gems.runs.folder import RunFolder
from tests.helpers.mini_runs import (
    ENDLESS,
    job_fields,
    jobs,
    said,
    submit,
    wait_for_shown_step,
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
WHOLE = "cluster.cpus_per_rank=2"  # 4 ranks fill the 2 nodes of 4 processors


def status(runs: Path) -> dict[str, dict[str, Any]]:
    """Return what `jobs status` tells of each run, by the run's folder."""
    ended = jobs("status", f"runs_dir={runs}", "--json")
    assert ended.returncode == 0, ended.stderr
    return {run["run_folder"]: run for run in json.loads(ended.stdout)["runs"]}


def test_a_running_and_a_pending_job_are_shown_and_cancelled(
    mini_slurm: MiniSlurm, tmp_path: Path
) -> None:
    runs = tmp_path / "it's $HOME"
    first, goes = submit(runs, "train.steps=100000", WHOLE)
    wait_for_shown_step(goes, 3)
    second, waits = submit(runs, "train.steps=100000", WHOLE, "name='waits \"here\"'")
    wait_until(
        lambda: status(runs)[str(waits.path)]["note"] in ("Resources", "Priority"),
        60,
        "no reason is shown",
    )
    seen = status(runs)
    running = seen[str(goes.path)]
    pending = seen[str(waits.path)]
    assert (running["state"], running["job_id"], running["is_guess"]) == ("running", first, False)
    assert running["step"] >= 3 and running["steps"] == 100000
    assert running["images_per_s"] > 0 and running["loss"] > 0 and running["beat_age_s"] < 30
    assert (pending["state"], pending["job_id"], pending["step"]) == ("pending", second, None)
    assert (running["sources"]["state"], pending["sources"]["state"]) == ("squeue", "squeue")
    table = jobs("status", f"runs_dir={runs}").stdout
    assert " pending " in table and "Resources" in table + "Resources" * ("Priority" in table)
    ended = jobs("cancel", f"runs_dir={runs}", "--yes", goes.path.name, waits.path.name)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert f"{goes.path.name}: cancelled, job {first}\n" in ended.stdout
    for job, folder in ((first, goes), (second, waits)):
        assert folder.read_status()["state"] == "cancelled", said(folder)
        assert job_fields(mini_slurm, job)["JobState"] == "CANCELLED"
    assert {run["state"] for run in status(runs).values()} == {"cancelled"}
    again = jobs("cancel", f"runs_dir={runs}", "--yes", goes.path.name)
    assert (again.returncode, again.stdout) == (0, f"{goes.path.name}: left, it is cancelled\n")


def test_a_log_is_followed_from_the_queue_to_the_end(mini_slurm: MiniSlurm, tmp_path: Path) -> None:
    job, folder = submit(tmp_path, "train.steps=4", "+cluster.sbatch.hold=true")
    with subprocess.Popen(
        [sys.executable, "-m", "jobs", "logs", "-f", str(folder.path)],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stderr is not None
        try:
            held = f"JobHeldUser: `scontrol release {job}` lets it go"
            assert process.stderr.readline() == f"jobs: {folder.path.name} is pending: {held}\n"
            released = mini_slurm.run("scontrol", "release", job)
            assert released.returncode == 0, released.stderr
            out, err = process.communicate(timeout=150)
        finally:
            process.kill()
    assert process.returncode == 0
    assert out == (folder.logs / "ranks.log").read_text()
    assert "step 4/4" in out
    assert err.splitlines()[-1] == f"jobs: {folder.path.name} is finished"
    ranks = jobs("logs", str(folder.path), "--rank", "0", "--lines", "all").stdout.splitlines()
    assert ranks and all(line.startswith("0: ") for line in ranks)


def test_a_job_that_leaves_without_a_word_is_not_shown_as_running(
    mini_slurm: MiniSlurm, tmp_path: Path
) -> None:
    """Its launching process is killed: status.json goes on saying that it runs."""
    job, folder = submit(tmp_path, *ENDLESS)
    wait_for_step(folder, 0)
    os.kill(int(folder.read_status()["pid"]), 9)
    wait_until(
        lambda: status(tmp_path)[str(folder.path)]["state"] not in ("running", "stalled"),
        60,
        "it goes on",
    )
    found = status(tmp_path)[str(folder.path)]
    assert RunFolder(folder.path).read_status()["state"] == "running"
    assert (found["state"], found["job_id"]) == ("failed", job)
    assert found["note"].startswith("the job ended as FAILED")
