"""What a site allows, refused before anything is queued, with the limit named."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gems.cli.framework import Options
from gems.config.cluster import QueueLimit
from gems.config.schema import RunSpec
from gems.errors import ConfigError
from jobs.batch.resources import job_spec
from jobs.cli.submit import submit
from jobs.schedulers.scheduler import SCHEDULERS
from jobs.schedulers.slurm_client.jobs import num_queued
from jobs.schedulers.slurm_client.limits import check_limits, check_queue, queue_limit

LIMITS = [
    QueueLimit(qos="debug", minutes=30, queued_jobs=1),
    QueueLimit("normal", max_nodes=2, minutes=60),
    QueueLimit("normal", min_nodes=3, max_nodes=8, minutes=120),
    QueueLimit("large", min_nodes=9),
]


def on(resolved: Callable[..., RunSpec], **more: Any) -> RunSpec:
    """Return a run on one node of 4 ranks, with a preset's values."""
    spec = resolved("cluster=slurm")
    return replace(
        spec, cluster=replace(spec.cluster, **{"partition": "normal", "limits": LIMITS} | more)
    )


def check(spec: RunSpec) -> None:
    check_limits(spec, job_spec(spec))


@pytest.mark.parametrize(
    ("nodes", "partition", "qos", "row"),
    [
        (1, "normal", None, 1),
        (2, "normal", None, 1),
        (3, "normal", None, 2),
        (8, "normal", "high", 2),
        (9, "large", None, 3),
        (900, "large", None, 3),
        (5, "normal", "debug", 0),
        (700, None, "debug", 0),
    ],
)
def test_the_first_limit_that_fits(
    resolved: Callable[..., RunSpec], nodes: int, partition: str | None, qos: str | None, row: int
) -> None:
    cluster = on(resolved, partition=partition, sbatch={"qos": qos} if qos else {}).cluster
    assert queue_limit(cluster, nodes) is LIMITS[row]


def test_where_nothing_is_known_everything_is_allowed(resolved: Callable[..., RunSpec]) -> None:
    assert queue_limit(on(resolved, partition="other").cluster, 5000) is None
    check(on(resolved, limits=[], minutes=10**6))


def test_too_many_minutes_for_so_many_nodes(resolved: Callable[..., RunSpec]) -> None:
    check(on(resolved, minutes=60))
    with pytest.raises(ConfigError) as caught:
        check(on(resolved, minutes=61))
    assert (
        str(caught.value)
        == "cluster.minutes=61: cluster slurm allows at most 60 minutes for jobs of 1-2 nodes in"
        " partition normal; ask for less; if the site has changed it, set cluster.limits=[]"
    )
    with pytest.raises(
        ConfigError, match="at most 30 minutes for jobs of 1 or more nodes in qos debug"
    ):
        check(on(resolved, minutes=31, sbatch={"qos": "debug"}))


@pytest.mark.parametrize(("partition", "nodes"), [("normal", 9), ("large", 8)])
def test_nodes_that_no_limit_of_the_partition_has(
    resolved: Callable[..., RunSpec], partition: str, nodes: int
) -> None:
    spec = resolved("cluster=slurm", f"parallel.replicas={nodes}")
    spec = replace(spec, cluster=replace(spec.cluster, partition=partition, limits=LIMITS))
    with pytest.raises(
        ConfigError,
        match=(
            rf"^cluster\.nodes={nodes}: cluster slurm allows jobs of .* in partition {partition}; "
        ),
    ):
        check(spec)


def test_more_cpus_than_a_node_has_for_jobs(resolved: Callable[..., RunSpec]) -> None:
    check(on(resolved, usable_cpus_per_node=32))
    with pytest.raises(
        ConfigError,
        match=(
            r"^cluster\.cpus_per_rank=8: times 4 ranks a node is 32, and jobs may use 28 CPUs .*at"
            r" most 7,"
        ),
    ):
        check(on(resolved, usable_cpus_per_node=28))
    with pytest.raises(
        ConfigError, match=r"jobs may use 3 CPUs of a node; use fewer cluster\.ranks_per_node$"
    ):
        check(on(resolved, usable_cpus_per_node=3))


def test_ranks_that_a_list_of_cpus_has_no_place_for(resolved: Callable[..., RunSpec]) -> None:
    check(on(resolved, cpu_bind="map_cpu:0,8,16,24"))
    with pytest.raises(
        ConfigError, match=r"^cluster\.cpu_bind=map_cpu:0,8: names 2 places for 4 ranks of a node"
    ):
        check(on(resolved, cpu_bind="map_cpu:0,8"))


def test_more_host_memory_than_a_node_has(resolved: Callable[..., RunSpec]) -> None:
    spec = on(resolved, node_memory_bytes=100)
    check(replace(spec, machine=replace(spec.machine, host_bytes=100)))
    with pytest.raises(
        ConfigError,
        match=r"^machine\.host_bytes=101: must be at most cluster\.node_memory_bytes=100",
    ):
        check(replace(spec, machine=replace(spec.machine, host_bytes=101)))


def test_a_run_that_is_no_job_has_no_limits(resolved: Callable[..., RunSpec]) -> None:
    for overrides in (["cluster=local"], ["cluster=slurm", "machine=simulated"]):
        spec = resolved(*overrides)
        check(replace(spec, cluster=replace(spec.cluster, limits=[QueueLimit(minutes=1)])))


def test_too_many_node_hours(resolved: Callable[..., RunSpec]) -> None:
    limits = [QueueLimit("normal", max_nodes=2, minutes=90, node_hours=1.5)]
    for nodes, minutes in ((1, 90), (2, 45)):
        check(on(resolved, limits=limits, minutes=minutes, nodes=nodes))
    with pytest.raises(
        ConfigError, match=r"^cluster\.minutes=46: times 2 nodes is 1\.53\d+ node-hours, .* 1\.5; "
    ):
        check(on(resolved, limits=limits, minutes=46, nodes=2))


def test_what_a_site_wants_of_a_submission(
    resolved: Callable[..., RunSpec], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SBATCH_ACCOUNT", raising=False)
    check_submission = SCHEDULERS["slurm"].check_submission
    check_submission(on(resolved).cluster)
    strict = on(resolved, account_required=True).cluster
    with pytest.raises(
        ConfigError, match=r"^cluster\.account=null: cluster slurm takes no job without an acc"
    ):
        check_submission(strict)
    check_submission(replace(strict, account="a"))
    monkeypatch.setenv("SBATCH_ACCOUNT", "b")
    check_submission(strict)
    bare = on(resolved, sbatch={"export": "NONE"}).cluster
    with pytest.raises(
        ConfigError, match=r"^cluster\.modules=\[\]: cluster slurm passes no environment on to jobs"
    ):
        check_submission(bare)
    for more in (
        {"modules": ["a"]},
        {"setup": ["b"]},
        {"container": "apptainer", "container_image": "c"},
    ):
        check_submission(replace(bare, **more))


@pytest.mark.parametrize("flags", [frozenset(), frozenset({"--dry-run"})])
def test_nothing_is_prepared_of_what_is_refused(
    resolved: Callable[..., RunSpec], tmp_path: Path, flags: frozenset[str]
) -> None:
    spec = replace(on(resolved, minutes=600), runs_dir=str(tmp_path / "runs"))
    with pytest.raises(ConfigError, match=r"^cluster\.minutes=600: ") as caught:
        submit(spec, Options(flags=flags))
    assert caught.value.exit_code == 2
    assert not (tmp_path / "runs").exists()


@pytest.fixture
def queue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An squeue that keeps its words, and prints what the file `jobs` holds."""
    path = tmp_path / "squeue"
    path.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/words\ncat {tmp_path}/jobs\n')
    path.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    return tmp_path


def test_a_full_queue(resolved: Callable[..., RunSpec], queue: Path) -> None:
    spec = on(resolved, sbatch={"qos": "debug"})
    (queue / "jobs").write_text("")
    check_queue(spec, job_spec(spec))
    words = (queue / "words").read_text().split()
    assert words == ["--noheader", "--array", "--format=%i", f"--user={os.getuid()}", "--qos=debug"]
    (queue / "jobs").write_text("17\n")
    with pytest.raises(
        ConfigError,
        match=(
            r"^cluster=slurm: 1 jobs are queued, and at most 1 are allowed of .* in qos debug; wait"
        ),
    ):
        check_queue(spec, job_spec(spec))


def test_jobs_of_all_partitions_count_beside_those_of_one(
    resolved: Callable[..., RunSpec], queue: Path
) -> None:
    limits = [
        QueueLimit(queued_jobs=3),
        QueueLimit("normal", max_nodes=2, minutes=60, queued_jobs=9),
    ]
    spec = on(resolved, limits=limits)
    (queue / "jobs").write_text("1\n2\n")
    check_queue(spec, job_spec(spec))
    (queue / "jobs").write_text("1\n2\n3\n")
    with pytest.raises(
        ConfigError, match=r"3 jobs are queued, and at most 3 are allowed of 1 or more nodes; wait"
    ):
        check_queue(spec, job_spec(spec))
    with pytest.raises(
        ConfigError, match=r"^cluster\.nodes=3: cluster slurm allows jobs of 1-2 nodes"
    ):
        queue_limit(spec.cluster, 3)


def test_a_queue_without_a_limit_is_not_asked(
    resolved: Callable[..., RunSpec], queue: Path
) -> None:
    spec = on(resolved)
    check_queue(spec, job_spec(spec))
    assert not (queue / "words").exists()


def test_a_queue_that_does_not_answer(queue: Path) -> None:
    assert num_queued("normal") is None


def test_what_a_job_costs(resolved: Callable[..., RunSpec]) -> None:
    def charge(**more: Any) -> str:
        return job_spec(on(resolved, minutes=90, **more)).summary().partition("GPU-hours 6")[2]

    assert charge() == ""
    assert charge(charge_per="gpu-hour", charge_rate=2.0) == ", charge 12"
    assert charge(charge_per="node-hour", charge_rate=2.0, charge_unit="SU") == ", charge 3 SU"
