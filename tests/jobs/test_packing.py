"""Several points of a study in one job: which go together, what the job asks for, and what it runs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from gems.runs.folder import RunFolder
from jobs.launch.batch import BatchJob
from jobs.launch.launch import StopRequest
from jobs.studies.points import Point
from jobs.studies.runner import pack_points, pack_resources
from tests.helpers.job_helpers import MonkeyPatch, Resolved

CLUSTER = ("cluster=mini", "cluster.nodes=1", "cluster.minutes=10")


@pytest.fixture
def point(resolved: Resolved) -> Callable[..., Point]:
    def make(*words: str, size: int = 3) -> Point:
        return Point(words, resolved(*CLUSTER, f"cluster.runs_per_job={size}", *words))

    return make


def test_a_job_takes_so_many_points_in_their_order(point: Callable[..., Point]) -> None:
    points = [point(f"seed={seed}") for seed in range(7)]
    assert pack_points(points) == [tuple(points[:3]), tuple(points[3:6]), tuple(points[6:])]
    alone = [point(f"seed={seed}", size=1) for seed in range(2)]
    assert pack_points(alone) == [(alone[0],), (alone[1],)]


def test_points_of_several_nodes_or_other_settings_or_of_this_machine_go_alone(
    point: Callable[..., Point],
) -> None:
    first = point("seed=0")
    two = point("cluster.nodes=2")
    other = point("cluster.partition=high")
    here = point("cluster=local", "cluster.nodes=1")
    last = point("parallel.partitions=2")
    assert pack_points([first, two, other, here, last]) == [
        (first, last),
        (two,),
        (other,),
        (here,),
    ]


def test_the_job_serves_each_and_lasts_as_long_as_all(point: Callable[..., Point]) -> None:
    job = pack_resources(
        [
            point(
                "parallel.partitions=2",
                "cluster.cpus_per_rank=5",
                "cluster.gpus_per_node=2",
                "cluster.minutes=7",
            ),
            point("parallel.partitions=4", "cluster.cpus_per_rank=2", "cluster.gpus_per_node=4"),
        ]
    )
    assert (job.nodes, job.tasks, job.tasks_per_node, job.cpus_per_task) == (
        1,
        4,
        4,
        3,
    )  # 2 x 5 and 4 x 2 CPUs
    assert (job.gpus_per_node, job.minutes) == (4, 17)


def test_the_minutes_of_a_pack_stay_within_the_sites(point: Callable[..., Point]) -> None:
    limited = [point(f"seed={seed}", "+cluster.limits=[{minutes: 20}]") for seed in range(3)]
    assert pack_points(limited) == [tuple(limited[:2]), (limited[2],)]


@pytest.mark.parametrize(
    ("ends", "ran", "code"),
    [
        ([("finished", 0), ("finished", 0), ("finished", 0)], 3, None),
        ([("failed", 4), ("finished", 0), ("failed", 3)], 3, 4),
        ([("finished", 0), ("failed", 143), ("finished", 0)], 2, 143),
        ([("requeued", 0), ("finished", 0), ("finished", 0)], 1, None),
    ],
)
def test_a_failure_ends_no_other_and_an_end_of_the_job_ends_all(
    ends: list[tuple[str, int]],
    ran: int,
    code: int | None,
    tmp_path: Path,
    monkeypatch: MonkeyPatch,
) -> None:
    all_ran: list[str] = []

    def run_prepared(folder: RunFolder, request: StopRequest, token: str) -> int:
        state, code = ends_by_name[folder.path.name]
        all_ran.append(folder.path.name)
        folder.write_status(state, exit_code=code, job_id="7")
        return code

    ends_by_name: dict[str, tuple[str, int]] = dict(zip("abc", ends, strict=True))
    monkeypatch.setattr("jobs.launch.batch.run_prepared", run_prepared)
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    job = BatchJob(tuple(str(tmp_path / name) for name in "abc"))
    for name in "abc":
        RunFolder(tmp_path / name).write_status("submitted", job_id="7")
    if code is None:
        job()
    else:
        with pytest.raises(SystemExit) as ended:
            job()
        assert ended.value.code == code
    assert list("abc")[:ran] == all_ran
    unfinished = [
        name
        for name, (state, _) in ends_by_name.items()
        if state != "finished" or name not in all_ran
    ]
    all_ran.clear()
    ends_by_name = dict.fromkeys("abc", ("finished", 0))
    job()  # as SLURM starts it again
    assert all_ran == unfinished
