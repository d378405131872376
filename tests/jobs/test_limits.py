"""What a site allows, refused before anything is queued, with the limit named."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import pytest

from gems.config.cluster import QueueLimit
from gems.config.schema import RunSpec
from gems.errors import ConfigError
from jobs.batch.preset_limits import check_limits, check_queue, queue_limit
from jobs.batch.resources import job_spec
from jobs.schedulers.scheduler import SCHEDULERS
from jobs.schedulers.slurm_client.jobs import num_queued
from tests.helpers.fake_slurm import FakeSlurm
from tests.helpers.job_helpers import MonkeyPatch, Resolved, refused, with_cluster

LIMITS = [
    QueueLimit(qos="debug", minutes=30, queued_jobs=1),
    QueueLimit("normal", max_nodes=2, minutes=60),
    QueueLimit("normal", min_nodes=3, max_nodes=8, minutes=120),
    QueueLimit("large", min_nodes=9),
]


@pytest.fixture
def on(resolved: Resolved) -> Resolved:
    """Compose a run on one node of 4 ranks, with a preset's values."""

    def make(**more: Any) -> RunSpec:
        spec = resolved("cluster=slurm")
        return with_cluster(spec, **{"partition": "normal", "limits": LIMITS} | more)

    return make


def check(spec: RunSpec) -> None:
    check_limits(job_spec(spec), spec.machine.host_bytes)


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
    on: Resolved, nodes: int, partition: str | None, qos: str | None, row: int
) -> None:
    cluster = on(partition=partition, sbatch={"qos": qos} if qos else {}).cluster
    assert queue_limit(cluster, nodes) is LIMITS[row]


def test_where_nothing_is_known_everything_is_allowed(on: Resolved) -> None:
    assert queue_limit(on(partition="other").cluster, 5000) is None
    check(on(limits=[], minutes=10**6))


def test_too_many_minutes_for_so_many_nodes(on: Resolved) -> None:
    check(on(minutes=60))
    with pytest.raises(ConfigError) as caught:
        check(on(minutes=61))
    assert (
        str(caught.value)
        == "cluster.minutes=61: cluster slurm allows at most 60 minutes for jobs of 1-2 nodes in"
        " partition normal; ask for less; if the site has changed it, set cluster.limits=[]"
    )
    with refused("at most 30 minutes for jobs of 1 or more nodes in qos debug"):
        check(on(minutes=31, sbatch={"qos": "debug"}))


@pytest.mark.parametrize(("partition", "nodes"), [("normal", 9), ("large", 8)])
def test_nodes_that_no_limit_of_the_partition_has(
    resolved: Resolved, partition: str, nodes: int
) -> None:
    spec = resolved("cluster=slurm", f"parallel.replicas={nodes}")
    spec = with_cluster(spec, partition=partition, limits=LIMITS)
    with refused(
        rf"^cluster\.nodes={nodes}: cluster slurm allows jobs of .* in partition {partition}; "
    ):
        check(spec)


def test_more_cpus_than_a_node_has_for_jobs(on: Resolved) -> None:
    check(on(usable_cpus_per_node=32))
    with refused(
        r"^cluster\.cpus_per_rank=8: times 4 ranks a node is 32, and jobs may use 28 CPUs .*at"
        r" most 7,"
    ):
        check(on(usable_cpus_per_node=28))
    with refused(r"jobs may use 3 CPUs of a node; use fewer cluster\.ranks_per_node$"):
        check(on(usable_cpus_per_node=3))


def test_ranks_that_a_list_of_cpus_has_no_place_for(on: Resolved) -> None:
    check(on(cpu_bind="map_cpu:0,8,16,24"))
    with refused(r"^cluster\.cpu_bind=map_cpu:0,8: names 2 places for 4 ranks of a node"):
        check(on(cpu_bind="map_cpu:0,8"))


def test_more_host_memory_than_a_node_has(on: Resolved) -> None:
    spec = on(node_memory_bytes=100)
    check(replace(spec, machine=replace(spec.machine, host_bytes=100)))
    with refused(r"^machine\.host_bytes=101: must be at most cluster\.node_memory_bytes=100"):
        check(replace(spec, machine=replace(spec.machine, host_bytes=101)))


def test_a_run_that_is_no_job_has_no_limits(resolved: Resolved) -> None:
    for overrides in (["cluster=local"], ["cluster=slurm", "machine=simulated"]):
        spec = resolved(*overrides)
        check(replace(spec, cluster=replace(spec.cluster, limits=[QueueLimit(minutes=1)])))


def test_too_many_node_hours(on: Resolved) -> None:
    limits = [QueueLimit("normal", max_nodes=2, minutes=90, node_hours=1.5)]
    for nodes, minutes in ((1, 90), (2, 45)):
        check(on(limits=limits, minutes=minutes, nodes=nodes))
    with refused(r"^cluster\.minutes=46: times 2 nodes is 1\.53\d+ node-hours, .* 1\.5; "):
        check(on(limits=limits, minutes=46, nodes=2))


def test_what_a_site_wants_of_a_submission(on: Resolved, monkeypatch: MonkeyPatch) -> None:
    monkeypatch.delenv("SBATCH_ACCOUNT", raising=False)
    check_submission = SCHEDULERS["slurm"].check_submission
    check_submission(on().cluster)
    strict = on(account_required=True).cluster
    with refused(r"^cluster\.account=null: cluster slurm takes no job without an acc"):
        check_submission(strict)
    check_submission(replace(strict, account="a"))
    monkeypatch.setenv("SBATCH_ACCOUNT", "b")
    check_submission(strict)
    bare = on(sbatch={"export": "NONE"}).cluster
    with refused(r"^cluster\.modules=\[\]: cluster slurm passes no environment on to jobs"):
        check_submission(bare)
    for more in (
        {"modules": ["a"]},
        {"setup": ["b"]},
        {"container": "apptainer", "container_image": "c"},
    ):
        check_submission(replace(bare, **more))


def test_a_full_queue(on: Resolved, slurm: FakeSlurm) -> None:
    spec = on(sbatch={"qos": "debug"})
    slurm.says("squeue")
    check_queue(job_spec(spec), num_queued)
    words = f"--noheader --array --format=%i --user={os.getuid()} --qos=debug"
    assert slurm.asked() == [f"squeue {words}"]
    slurm.says("squeue", "17")
    with refused(
        r"^cluster=slurm: 1 jobs are queued, and at most 1 are allowed of .* in qos debug; wait"
    ):
        check_queue(job_spec(spec), num_queued)


def test_jobs_of_all_partitions_count_beside_those_of_one(on: Resolved, slurm: FakeSlurm) -> None:
    limits = [
        QueueLimit(queued_jobs=3),
        QueueLimit("normal", max_nodes=2, minutes=60, queued_jobs=9),
    ]
    spec = on(limits=limits)
    slurm.says("squeue", "1", "2")
    check_queue(job_spec(spec), num_queued)
    slurm.says("squeue", "1", "2", "3")
    with refused(r"3 jobs are queued, and at most 3 are allowed of 1 or more nodes; wait"):
        check_queue(job_spec(spec), num_queued)
    with refused(r"^cluster\.nodes=3: cluster slurm allows jobs of 1-2 nodes"):
        queue_limit(spec.cluster, 3)


def test_a_queue_without_a_limit_is_not_asked(on: Resolved, slurm: FakeSlurm) -> None:
    spec = on()
    check_queue(job_spec(spec), num_queued)
    assert slurm.asked() == []


def test_a_queue_that_does_not_answer(slurm: FakeSlurm) -> None:
    assert num_queued("normal") is None


def test_what_a_job_costs(on: Resolved) -> None:
    def charge(**more: Any) -> str:
        return job_spec(on(minutes=90, **more)).summary().partition("GPU-hours 6")[2]

    assert charge() == ""
    assert charge(charge_per="gpu-hour", charge_rate=2.0) == ", charge 12"
    assert charge(charge_per="node-hour", charge_rate=2.0, charge_unit="SU") == ", charge 3 SU"
