"""Studies of jobs on the mini cluster.

Some points are killed, and the next call finishes what is missing.
"""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from gems.runs.folder import RunFolder
from gems.trace import read_trace
from tests.helpers.mini_runs import jobs, wait_until

if TYPE_CHECKING:
    from tests.slurm.conftest import MiniSlurm

pytestmark = [
    pytest.mark.slurm,
    pytest.mark.timeout(400),
    pytest.mark.usefixtures("no_job_is_left"),
]


def study(runs: Path, *words: str) -> tuple[dict[str, Any], str]:
    """Call `jobs study` of mini_scaling; gives its answer and what it said."""
    ended = jobs(
        "study",
        "study=mini_scaling",
        "cluster=mini",
        f"runs_dir={runs}",
        *words,
        "--json",
        limit_s=300,
    )
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout), ended.stderr


def test_the_second_call_submits_only_what_was_killed(
    mini_slurm: MiniSlurm, tmp_path: Path
) -> None:
    first, _ = study(tmp_path)
    points = first["points"]
    assert [point["ranks"] for point in points[:3]] == [1, 2, 4]
    assert sorted(point["ranks"] for point in points[3:]) == [1, 2, 4]
    assert points[2]["ranks"] != points[3]["ranks"]
    assert first["num_run"] == 6 and len({point["job_id"] for point in points}) == 6
    victim = points[-1]
    assert mini_slurm.run("scancel", victim["job_id"]).returncode == 0
    second, said = study(tmp_path, "--wait")
    assert second["num_run"] == 1, said
    assert [point["state"] for point in second["points"]] == ["finished"] * 6, said
    jobs_of = [[point["job_id"] for point in answer["points"]] for answer in (first, second)]
    assert jobs_of[0][:-1] == jobs_of[1][:-1] and jobs_of[0][-1] != jobs_of[1][-1]
    with (tmp_path / "mini_scaling" / "scaling.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["ranks"] for row in rows] == ["1", "2", "4"]
    assert [len(row["signatures"].split()) for row in rows] == [2, 2, 2]  # both repetitions of each
    assert study(tmp_path)[0]["num_run"] == 0


def test_points_of_one_job_have_folders_and_traces_of_their_own(
    mini_slurm: MiniSlurm, tmp_path: Path
) -> None:
    answer, said = study(tmp_path, "cluster.runs_per_job=3", "train.steps=2", "--wait")
    points = answer["points"]
    assert [point["state"] for point in points] == ["finished"] * 6, said
    numbers = [point["job_id"] for point in points]
    assert len(set(numbers)) == 2 and numbers[:3] == numbers[:1] * 3
    for point in points:
        folder = RunFolder(Path(point["run_folder"]))
        assert folder.read_status()["job_id"] == point["job_id"]
        assert read_trace(folder.trace_h5).attributes["world_size"] == point["ranks"]


def test_a_full_queue_holds_points_back_and_stop_ends_all(
    mini_slurm: MiniSlurm, tmp_path: Path
) -> None:
    held, said = study(tmp_path, "+cluster.limits=[{queued_jobs: 2}]", "train.steps=2000")
    assert [point["state"] for point in held["points"]].count("waiting") == 4, said
    stopped, _ = study(tmp_path, "train.steps=2000", "--stop")
    assert [run["outcome"] for run in stopped["runs"]] == ["cancelled"] * 2, stopped
    assert not mini_slurm.run("squeue", "--noheader", "--states=PENDING,RUNNING").stdout


def test_equal_points_are_one_array_whose_killed_tasks_go_again(
    mini_slurm: MiniSlurm, tmp_path: Path
) -> None:
    file = tmp_path / "equal.yaml"
    runs = tmp_path / "runs"
    base = [
        "data=synthetic",
        "machine=emulated",
        "schedule=1f1b",
        "parallel.micro_batches=4",
        "cost.unit_s=0.01",
        "cluster=mini",
        "cluster.nodes=1",
        "cluster.minutes=5",
        "train.steps=30",
        "benchmark.skip_steps=1",
    ]
    file.write_text(yaml.safe_dump({"base": base, "axes": {"seed": list(range(8))}}))

    def call(*words: str) -> list[dict[str, Any]]:
        ended = jobs("study", f"study={file}", f"runs_dir={runs}", *words, "--json", limit_s=300)
        assert ended.returncode == 0, ended.stderr
        points: list[dict[str, Any]] = json.loads(ended.stdout)["points"]
        return points

    points = call()
    folders = [RunFolder(Path(point["run_folder"])) for point in points]
    array_id = points[0]["job_id"].partition("_")[0]
    assert [point["job_id"] for point in points] == [f"{array_id}_{index}" for index in range(8)]
    wait_until(
        lambda: folders[0].read_status()["state"] == "running", 60, "the first task does not start"
    )
    cancelled = jobs("cancel", str(folders[0].path), "--yes")
    assert f"{folders[0].path.name}: cancelled, job {array_id}_0" in cancelled.stdout, (
        cancelled.stderr
    )
    assert mini_slurm.run("scancel", f"{array_id}_7").returncode == 0
    living = (
        "squeue",
        "--noheader",
        "--states=PENDING,RUNNING,COMPLETING",
        f"--jobs={array_id}_0,{array_id}_7",
    )
    wait_until(lambda: not mini_slurm.run(*living).stdout, 60, "the two tasks do not end")
    again = call("--wait")
    assert [point["state"] for point in again] == ["finished"] * 8
    second_id = again[0]["job_id"].partition("_")[0]
    assert int(second_id) > int(array_id)
    expected = [
        f"{second_id}_0",
        *(f"{array_id}_{index}" for index in range(1, 7)),
        f"{second_id}_1",
    ]
    assert [point["job_id"] for point in again] == expected
    for folder, point in zip(folders, again, strict=True):
        assert (
            "Job completed successfully"
            in (folder.logs / f"{point['job_id']}_0_log.out").read_text()
        )
        assert read_trace(folder.trace_h5).attributes["world_size"] == 1
