"""What SLURM has and allows now.

Its answers are read, and a job that could never start is refused in one line.
"""

from __future__ import annotations

from typing import Any

import pytest

from gems.config.schema import ClusterConfig, RunSpec
from jobs.batch.command import SchedulerUnavailableError
from jobs.batch.resources import job_spec
from jobs.schedulers.slurm_client.limits import check_account, check_partitions
from jobs.schedulers.slurm_client.site import (
    Accounts,
    expand_nodes,
    left_nodes,
    max_nodes,
    query_accounts,
    query_partitions,
)
from tests.helpers.fake_slurm import FakeSlurm
from tests.helpers.job_helpers import Resolved, refused, with_cluster

ROW = (
    "PartitionName={name} AllowGroups=ALL AllowAccounts={accounts} AllowQos={qos} Default={default}"
    " MaxNodes={most} MaxTime={time} MinNodes=0 State={state} TotalCPUs=8 TotalNodes={total}"
)


def row(name: str, **more: Any) -> str:
    facts = {
        "accounts": "ALL",
        "qos": "ALL",
        "default": "NO",
        "most": "UNLIMITED",
        "time": "1-00:00:00",
        "state": "UP",
        "total": 4,
    }
    return ROW.format(name=name, **facts | more)


@pytest.fixture
def site(slurm: FakeSlurm) -> FakeSlurm:
    """Two partitions: gpu, the default one, of 3 nodes with 4 GPUs and one that is down, and cpu."""
    slurm.says(
        "scontrol",
        row("gpu", default="YES", most=3, time="02:00:00"),
        row("cpu", time="UNLIMITED", total=900),
    )
    slurm.says(
        "sinfo",
        "gpu*|2|64|512000|gpu:a100:4(S:0-3)|idle~",
        "gpu*|1|64|512000|gpu:a100:4|mixed",
        "gpu*|1|8|9000|(null)|down*",
        "cpu|900|128|256000|(null)|allocated",
    )
    return slurm


@pytest.fixture
def on(resolved: Resolved) -> Resolved:
    """Compose a run on the gpu partition, with some values of a preset."""

    def make(replicas: int = 1, **more: Any) -> RunSpec:
        spec = resolved("cluster=slurm", f"parallel.replicas={replicas}")
        return with_cluster(spec, **{"partition": "gpu"} | more)

    return make


def check(spec: RunSpec) -> str:
    return check_partitions(job_spec(spec), query_partitions(spec.cluster.partition))


def test_what_a_partition_has_is_read(site: FakeSlurm) -> None:
    (gpu,) = query_partitions(None)
    assert (gpu.name, gpu.num_nodes, gpu.max_nodes, gpu.minutes) == ("gpu", 4, 3, 120)
    assert gpu.describe() == "gpu: 3 of 4 nodes up, 2 idle, at most 120 min"
    assert [gpu.count(8, 0), gpu.count(64, 4), gpu.count(65, 0), gpu.count(1, 5)] == [4, 3, 0, 0]
    (cpu,) = query_partitions("cpu")
    assert (cpu.num_nodes, cpu.max_nodes, cpu.minutes, cpu.kinds[0].cpus) == (900, None, None, 128)
    assert [each.name for each in query_partitions("cpu,gpu")] == ["cpu", "gpu"]
    assert (max_nodes("gpu"), max_nodes("cpu"), max_nodes("none")) == (3, 900, None)


def test_a_job_that_can_start(site: FakeSlurm, on: Resolved) -> None:
    assert check(on(minutes=120)) == "gpu: 3 of 4 nodes up, 2 idle, at most 120 min"


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (
            {"partition": "gpus"},
            (
                r"^cluster\.partition=gpus: this SLURM has no such partition; allowed: cpu, gpu;"
                r" nearest: gpu$"
            ),
        ),
        (
            {"gpus_per_node": 8},
            r"^cluster\.gpus_per_node=8: a node of partition gpu has at most 4 GPUs; ",
        ),
        (
            {"cpus_per_rank": 17},
            r"^cluster\.cpus_per_rank=17: times 4 ranks a node is 68, and .* at most 64 CPUs; ",
        ),
        (
            {"replicas": 5},
            r"^cluster\.nodes=5: partition gpu has 4 nodes; use fewer ranks, or choose another",
        ),
        (
            {"replicas": 4},
            r"^cluster\.nodes=4: partition gpu has 3 nodes of 32 CPUs and 4 GPUs or more; ",
        ),
        (
            {"replicas": 4, "cpus_per_rank": 1, "gpu_request": "none"},
            r"^cluster\.nodes=4: .* allows a job at most 3 nodes",
        ),
        (
            {"minutes": 121},
            r"^cluster\.minutes=121: partition gpu allows at most 120 minutes; ask for less",
        ),
    ],
)
def test_a_job_that_never_starts(
    site: FakeSlurm, on: Resolved, more: dict[str, Any], says: str
) -> None:
    with refused(says):
        check(on(**more))


def test_a_quality_of_service_may_lift_limits_but_makes_no_nodes(
    site: FakeSlurm, on: Resolved
) -> None:
    check(on(minutes=600, sbatch={"qos": "long"}))
    with refused(r"has 4 nodes"):
        check(on(replicas=5, sbatch={"qos": "long"}))


def test_one_partition_of_several_will_do(site: FakeSlurm, on: Resolved) -> None:
    assert check(on(partition="gpu,cpu", gpus_per_node=0, minutes=600)).startswith("cpu: ")
    with refused(r"a node of partition cpu has at most 0 GPUs"):
        check(on(partition="cpu,gpu", minutes=600))


@pytest.mark.parametrize(
    ("partition", "more", "says"),
    [
        (
            {"accounts": "physics,art"},
            {"account": "maths"},
            r"^cluster\.account=maths: partition gpu is open to physics, art",
        ),
        (
            {"qos": "debug"},
            {"sbatch": {"qos": "long"}},
            r"^cluster\.sbatch\.qos=long: partition gpu takes debug",
        ),
        ({"state": "DRAIN"}, {}, r"^cluster\.partition=gpu: takes no jobs now \(state DRAIN\)"),
    ],
)
def test_a_partition_that_is_not_for_everybody(
    site: FakeSlurm, on: Resolved, partition: dict[str, str], more: dict[str, Any], says: str
) -> None:
    site.says("scontrol", row("gpu", **partition))
    with refused(says):
        check(on(**more))


def test_names_of_accounts_have_no_case(site: FakeSlurm, on: Resolved) -> None:
    site.says("scontrol", row("gpu", accounts="physics"))
    check(on(account="Physics"))


@pytest.mark.parametrize("command", ["scontrol", "sinfo"])
def test_a_slurm_that_does_not_answer(site: FakeSlurm, command: str) -> None:
    site.says(
        command,
        error="slurm_load_partitions: Unable to contact slurm controller (connect failure)",
        code=1,
    )
    with pytest.raises(SchedulerUnavailableError, match=rf"^{command} failed: .*Unable to contact"):
        query_partitions("gpu")


def test_a_warning_is_no_name_of_a_node(slurm: FakeSlurm) -> None:
    slurm.says("sinfo", "n1", "n2", error="sinfo: warning: slurm.conf differs\n")
    slurm.says("scontrol", "n2", error="scontrol: warning: slurm.conf differs\n")
    assert left_nodes(ClusterConfig(exclude=["n2"])) == ({"n1"}, {"n2"})
    assert expand_nodes(["n2"]) == ("n2",)


def test_nodes_are_those_of_the_cluster_of_the_run(slurm: FakeSlurm) -> None:
    slurm.says("sinfo", "CLUSTER: other", "n1", "n2")
    slurm.says("scontrol", "n2")
    assert left_nodes(ClusterConfig(exclude=["n2"], sbatch={"clusters": "other"})) == (
        {"n1"},
        {"n2"},
    )
    assert any(line.startswith("sinfo --clusters=other") for line in slurm.asked())


def test_accounts_of_a_user(slurm: FakeSlurm) -> None:
    slurm.says("sacctmgr", "physics|normal,debug", "art|", "physics|long")
    slurm.says(
        "scontrol", "Configuration data", "AccountingStorageEnforce = associations,limits,qos"
    )
    found = query_accounts()
    assert found == Accounts({"physics": ("normal", "debug", "long"), "art": ()}, is_enforced=True)
    slurm.says("sacctmgr")
    with pytest.raises(SchedulerUnavailableError, match=r"names no account"):
        query_accounts()


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (
            {"account": "phsyics"},
            r"^cluster\.account=phsyics: you may charge art, physics; nearest: physics$",
        ),
        (
            {"account": "physics", "sbatch": {"qos": "lon"}},
            r"^cluster\.sbatch\.qos=lon: account physics may use normal",
        ),
        (
            {"account": "physics", "account_suffix": "_g"},
            r"^cluster\.account=physics_g: you may charge",
        ),
    ],
)
def test_an_account_that_is_not_yours(on: Resolved, more: dict[str, Any], says: str) -> None:
    known = {"physics": ("normal",), "art": ()}
    with refused(says):
        check_account(on(**more).cluster, Accounts(known, is_enforced=True))
    check_account(on(**more).cluster, Accounts(known, is_enforced=False))


def test_an_account_of_yours(on: Resolved) -> None:
    known = Accounts({"physics": ("normal",), "art": ()}, is_enforced=True)
    assert (
        check_account(on(account="PHYSICS", sbatch={"qos": "normal"}).cluster, known)
        == "PHYSICS, qos normal"
    )
    assert check_account(on(account="art", sbatch={"qos": "any"}).cluster, known) == "art, qos any"
    assert check_account(on().cluster, known) == "your default account"
