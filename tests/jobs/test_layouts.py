"""The layouts on fewer nodes: which is chosen, what it keeps, and when a submission starts by one."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path

import pytest

from gems.config.compose import compose
from gems.config.resolve import run_id
from gems.errors import ConfigError
from gems.runs.folder import RunFolder
from jobs.batch.preset_limits import check_limits
from jobs.batch.resources import job_spec
from jobs.preflight.layouts import check_layouts, plan_of_start, smaller_plan
from jobs.schedulers.scheduler import SCHEDULERS
from tests.helpers.fake_slurm import FakeSlurm
from tests.helpers.job_helpers import MonkeyPatch, Resolved, refused

pytestmark = pytest.mark.timeout(120)
FOUR = [
    "cluster=mini",
    "cluster.nodes=4",
    "cluster.ranks_per_node=1",
    "parallel.partitions=4",
    "parallel.micro_batches=8",
    "parallel.micro_batch_size=1",
]
TWO_CPUS = "cluster.usable_cpus_per_node=2"
PLENTY = 2**34


@pytest.mark.parametrize(
    ("words", "nodes", "expected"),
    [
        ([TWO_CPUS], 2, {(4, 1), (2, 2), (1, 4)}),  # ranks of a node rise where its CPUs allow it
        ([], 2, {(2, 1), (1, 2)}),
        ([TWO_CPUS], 1, {(2, 1), (1, 2)}),
        ([TWO_CPUS], 3, {(3, 1)}),  # 8 micro-batches cannot be shared by 3 replicas
        (["cluster.gpus_per_node=4", "cluster.ranks_per_node=1"], 1, {(4, 1), (2, 2), (1, 4)}),
    ],
)
def test_a_smaller_layout_makes_the_same_steps(
    resolved: Resolved, words: list[str], nodes: int, expected: set[tuple[int, int]]
) -> None:
    spec = resolved(*FOUR, *words, f"cluster.elastic=[{nodes}]")
    plan = smaller_plan(spec, nodes)
    parallel = plan.spec.parallel
    assert (parallel.partitions, parallel.replicas) in expected
    assert plan.spec.parallel.global_batch == spec.parallel.global_batch == 8
    assert parallel.micro_batch_size == spec.parallel.micro_batch_size
    assert plan.spec.cluster.nodes == nodes
    assert plan.schedule.num_ranks == parallel.partitions
    assert (plan.spec.model, plan.spec.data, plan.spec.optimizer) == (
        spec.model,
        spec.data,
        spec.optimizer,
    )


def test_another_policy_where_the_own_one_does_not_fit(resolved: Resolved) -> None:
    spec = resolved(
        "cluster=mini", "parallel.partitions=2", "cluster.elastic=[1]", "parallel.micro_batches=2"
    )
    plan = smaller_plan(replace(spec, machine=replace(spec.machine, device_bytes=PLENTY)), 1)
    peaks = plan.peak_bytes
    assert plan.spec.memory.name == "keep" and peaks is not None
    small = replace(spec, machine=replace(spec.machine, device_bytes=max(peaks) * 7 // 10))
    plan = smaller_plan(small, 1)
    assert (
        plan.spec.memory.name != "keep"
        and plan.spec.parallel.global_batch == spec.parallel.global_batch
    )


def test_no_layout_is_refused_in_one_line(resolved: Resolved, monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setattr("jobs.preflight.layouts.SEARCH_BUDGET_S", 1.0)
    spec = resolved(*FOUR, "cluster.elastic=[1]")
    tiny = replace(spec, machine=replace(spec.machine, device_bytes=1000))
    with pytest.raises(ConfigError) as raised:
        check_layouts(tiny)
    text = str(raised.value)
    assert text.startswith(
        "cluster.elastic=[1]: no layout on 1 node makes steps of 8 samples in micro-batches of 1"
    )
    assert text.endswith("leave 1 out") and "\n" not in text
    assert check_layouts(spec) == (True, "else 1 x 1 ranks on 1 node")
    is_smaller, text = check_layouts(resolved(*FOUR, "cluster.elastic=[8,4]"))
    assert (is_smaller, text) == (
        False,
        "cluster.elastic=[8, 4] has no number below 4, the nodes of this job",
    )


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (
            ["cluster=mini", "cluster.elastic=[1,2]"],
            "cluster.elastic=[1, 2]: must be numbers of nodes, each smaller",
        ),
        (
            ["cluster.elastic=[1]"],
            "cluster.elastic=[1]: needs cluster.launcher=srun, and it is mpiexec",
        ),
        (["cluster.spare_nodes=1"], "cluster.spare_nodes=1: needs cluster.launcher=srun"),
        (["cluster.check_nodes=true"], "cluster.check_nodes=True: needs cluster.launcher=srun"),
    ],
)
def test_keys_that_cannot_be(words: list[str], text: str) -> None:
    with pytest.raises(ConfigError) as raised:
        compose(["experiment=gems_master", "data=synthetic", *words])
    assert str(raised.value).startswith(text)


def test_the_allocation_has_spare_nodes_and_cpus_for_the_densest_layout(resolved: Resolved) -> None:
    spec = resolved(
        *FOUR, TWO_CPUS, "cluster.elastic=[4,2]", "cluster.spare_nodes=1", "cluster.gpus_per_node=1"
    )
    job = job_spec(spec)
    script = SCHEDULERS["slurm"].script(job, RunFolder(Path("/runs/my-run")))
    for line in ("--nodes=5", "--ntasks-per-node=1", "--no-kill"):  # one GPU a rank
        assert f"#SBATCH {line}\n" in script
    assert (job.nodes, job.gpus, job.gpu_hours) == (4, 5, 5 * job.minutes / 60)
    assert "nodes 4 and 1 spare" in job.summary()
    without = resolved(*FOUR, TWO_CPUS, "cluster.elastic=[4,2]")
    dense = SCHEDULERS["slurm"].script(job_spec(without), RunFolder(Path("/runs/my-run")))
    assert "#SBATCH --nodes=4\n" in dense and "#SBATCH --ntasks-per-node=2\n" in dense
    plain = SCHEDULERS["slurm"].script(job_spec(resolved(*FOUR)), RunFolder(Path("/runs/my-run")))
    assert "--no-kill" not in plain
    assert run_id(spec) == run_id(resolved(*FOUR, TWO_CPUS, "cluster.gpus_per_node=1"))


def test_limits_count_spare_nodes(resolved: Resolved) -> None:
    words = [*FOUR, "cluster.limits=[{max_nodes: 4, minutes: 60}]"]
    check_limits(job_spec(resolved(*words)), None)
    spare = resolved(*words, "cluster.spare_nodes=1")
    with refused(r"^cluster.nodes=5: "):
        check_limits(job_spec(spare), None)


def answer(slurm: FakeSlurm, hours: dict[int, float]) -> None:
    """Put an sbatch there that estimates a start in so many hours for a number of nodes.

    Others are not available.
    """
    cases = ""
    for nodes, wait_h in hours.items():
        start = datetime.now() + timedelta(hours=wait_h)
        line = f"sbatch: Job 7 to start at {start:%Y-%m-%dT%H:%M:%S} using 2 processors on nodes n1"
        cases += f"*--nodes={nodes}\\ *|*--nodes={nodes}'\n'*) echo '{line}' >&2; exit 0 ;;\n"
    refused = "sbatch: error: allocation failure: Requested node configuration is not available"
    slurm.does(
        "sbatch", f'text=$(/bin/cat)\ncase "$text" in\n{cases}esac\necho "{refused}" >&2; exit 1'
    )


def test_a_submission_takes_the_nodes_that_start_in_time(
    resolved: Resolved, slurm: FakeSlurm
) -> None:
    folder = RunFolder(Path("/runs/my-run"))
    spec = resolved(*FOUR, "cluster.elastic=[2,1]", "cluster.elastic_wait_h=4")
    answer(slurm, {4: 3})
    assert plan_of_start(spec, folder) is None
    answer(slurm, {4: 30, 2: 3, 1: 0})
    found = plan_of_start(spec, folder)
    assert found is not None and found[0].spec.cluster.nodes == 2
    assert found[1] == "4 nodes have an estimated start in 30.0 h"
    answer(slurm, {1: 5})  # none in time: the first to start
    found = plan_of_start(spec, folder)
    assert found is not None and found[0].spec.layout == "1 x 1 ranks on 1 node"
    assert found[1] == "4 nodes have no estimated start"
    answer(slurm, {4: 30, 2: 30, 1: 30.5})
    assert plan_of_start(spec, folder) is None  # no gain


def test_a_submission_takes_the_nodes_that_are_not_excluded(
    resolved: Resolved, slurm: FakeSlurm
) -> None:
    slurm.says("sinfo", "n1", "n2", "n3", "n4")
    slurm.says("scontrol", "n2")
    spec = resolved(*FOUR, "cluster.elastic=[3,2]", "cluster.exclude=[n2]")
    found = plan_of_start(spec, RunFolder(Path("/runs/my-run")))
    assert found is not None and found[0].spec.cluster.nodes == 3
    assert found[1] == "cluster.exclude leaves 3 nodes"
    assert not any(line.startswith("sbatch") for line in slurm.asked())
