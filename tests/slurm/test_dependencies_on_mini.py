"""Jobs that wait for others on the mini cluster.

--after, a chain of one run, and a dependency that cannot be met.
"""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from gems.runs.folder import RunFolder
from gems.utils.atomic_io import read_json
from tests.helpers.fault_table import note
from tests.helpers.mini_runs import jobs, wait_until

if TYPE_CHECKING:
    from tests.slurm.conftest import MiniSlurm

pytestmark = [
    pytest.mark.slurm,
    pytest.mark.timeout(300),
    pytest.mark.usefixtures("no_job_is_left"),
]

RUN = [
    "cluster=mini",
    "cluster.nodes=1",
    "cluster.minutes=5",
    "cluster.max_requeues=0",
    "data=synthetic",
    "machine=emulated",
    "schedule=1f1b",
    "parallel.partitions=2",
    "parallel.micro_batches=4",
    "cost.unit_s=0.01",
    "benchmark.skip_steps=1",
]


def submit(runs: Path, *words: str) -> tuple[dict[str, Any], RunFolder]:
    ended = jobs("submit", *RUN, f"runs_dir={runs}", *words, "--json")
    assert ended.returncode == 0, ended.stderr
    answer: dict[str, Any] = json.loads(ended.stdout)
    return answer, RunFolder(Path(answer["run_folder"]))


def state(folder: RunFolder) -> str:
    return str(folder.read_status().get("state"))


def test_a_chain_goes_on_until_the_steps_are_done(mini_slurm: MiniSlurm, tmp_path: Path) -> None:
    answer, folder = submit(tmp_path, "train.steps=120", "name=links", "--chain", "4")
    first, second, third, fourth = answer["chain"]
    assert answer["job_id"] == first
    wait_until(
        lambda: read_json(folder.progress_json).get("step", 0) > 2,
        90,
        "the first job does not begin",
    )
    ended = mini_slurm.run("scancel", "--batch", "--signal=USR2", first)  # as before a time limit
    assert ended.returncode == 0, (
        f"{ended.stderr}{folder.read_status()}\n{jobs('logs', str(folder.path)).stdout}"
    )
    wait_until(
        lambda: folder.read_status().get("job_id") == second,
        60,
        "the second job does not take over",
    )
    wait_until(lambda: state(folder) == "running", 90, "the second job does not begin")
    wait_until(
        lambda: read_json(folder.progress_json).get("step", 0) > 2,
        90,
        "the second job makes no steps",
    )
    os.kill(
        folder.read_status()["pid"], signal.SIGKILL
    )  # the launching process, which records no end then
    wait_until(
        lambda: folder.read_status().get("job_id") == third, 90, "the third job does not take over"
    )
    wait_until(lambda: state(folder) == "finished", 120, "the third job does not finish")

    def left():
        return mini_slurm.run("squeue", "--noheader", "--states=PENDING,RUNNING,COMPLETING").stdout

    wait_until(lambda: not left(), 60, "the fourth job does not end", left)
    assert (state(folder), folder.read_status()["job_id"]) == ("finished", third)
    assert (
        "this job of its chain has nothing to do"
        in (folder.logs / f"{fourth}_0_log.out").read_text()
    )
    assert read_json(folder.result_json)["num_steps"] == 120
    assert [row["by"] for row in read_json(folder.path / "requeues.json")["requeues"]][:1] == [
        "chain"
    ]


def test_a_cancelled_chain_leaves_no_job(mini_slurm: MiniSlurm, tmp_path: Path) -> None:
    answer, folder = submit(tmp_path, "train.steps=3000", "--chain=3")
    wait_until(lambda: state(folder) == "running", 90, "the first job does not begin")
    refused = jobs("submit", *RUN, f"runs_dir={tmp_path}", "train.steps=3000")
    assert refused.returncode == 2 and f"belongs to job {answer['job_id']}" in refused.stderr
    assert jobs("cancel", str(folder.path), "--yes").returncode == 0
    assert not mini_slurm.run("squeue", "--noheader", "--states=PENDING,RUNNING").stdout


def test_a_run_after_another_starts_when_that_has_ended(
    mini_slurm: MiniSlurm, tmp_path: Path
) -> None:
    _, first = submit(tmp_path, "train.steps=20", "name=first")
    answer, second = submit(tmp_path, "train.steps=2", "name=second", "--after", first.path.name)
    assert (
        "Dependency=afterany:" in mini_slurm.run("scontrol", "show", "job", answer["job_id"]).stdout
    )
    wait_until(lambda: state(second) == "finished", 120, "the second run does not finish")
    assert state(first) == "finished"
    assert first.read_status()["updated_utc"] <= second.read_status()["started_utc"]
    ended = jobs(
        "submit",
        *RUN,
        f"runs_dir={tmp_path}",
        "name=third",
        "--after",
        first.path.name,
        "--dry-run",
    )
    assert (
        "it is finished, so that there is nothing to wait for" in ended.stderr
        and "afterany" not in ended.stdout
    )


def test_a_dependency_that_cannot_be_met_is_named(mini_slurm: MiniSlurm, tmp_path: Path) -> None:
    failing = mini_slurm.run(
        "sbatch", "--parsable", "--output=/dev/null", "--hold", "--wrap=exit 1"
    ).stdout.strip()
    _, folder = submit(tmp_path, "train.steps=2", f"+cluster.sbatch.dependency=afterok:{failing}")
    assert mini_slurm.run("scontrol", "release", failing).returncode == 0

    def shown() -> str:
        return jobs("status", str(folder.path)).stdout

    wait_until(
        lambda: "DependencyNeverSatisfied" in shown(), 90, "SLURM does not give it up", shown
    )
    assert (
        "it never starts, as a job that it depends on did not end as it must; cancel it" in shown()
    )
    told = jobs("diagnose", str(folder.path)).stdout
    note("dependency never satisfied", "pending", told)
    assert (
        f"gems-jobs cancel {folder.path.name}, then gems-jobs resubmit {folder.path.name}" in told
    )
    assert jobs("cancel", str(folder.path), "--yes").returncode == 0
    again = jobs("resubmit", str(folder.path), "+cluster.sbatch.dependency=null", "--yes")
    assert again.returncode == 0, again.stdout + again.stderr
    name = again.stdout.partition(":")[0]
    made = RunFolder(tmp_path / name)
    wait_until(lambda: state(made) == "finished", 90, "it does not finish without the dependency")
