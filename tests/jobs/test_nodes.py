"""The nodes of a job: what the launcher makes of their answers, and which the ranks run on."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from gems.errors import NodeFailedError
from gems.runs.folder import RunFolder
from gems.utils.atomic_io import read_json
from jobs.batch.resources import JobSpec, job_spec
from jobs.launch.elastic import select_nodes
from jobs.probes.nodes import NodeCheck
from tests.helpers.fake_slurm import FakeSlurm
from tests.helpers.job_helpers import Capture, MonkeyPatch, Resolved, with_cluster

InJob = Callable[..., tuple[JobSpec, RunFolder]]

pytestmark = pytest.mark.timeout(60)
NODES = ("n1", "n2", "n3")


def facts(node: str, fault: str | None = None, ahead_s: float = 0.0) -> str:
    time_ns = time.time_ns() + int(ahead_s * 1e9)
    return json.dumps(
        {"node": node, "address": ["10.0.0.1", 7], "time_ns": time_ns, "fault": fault}
    )


def link(node: str, fault: str | None = None) -> str:
    return json.dumps({"node": node, "link": fault})


def faults(*lines: str) -> dict[str, str]:
    check = NodeCheck(NODES)
    for line in lines:
        check.feed(line)
    return check.faults()


def test_nodes_without_a_fault() -> None:
    lines = [*map(facts, NODES), *map(link, NODES)]
    assert faults(*lines, "srun: a message", "[1]", '{"node": "n9", "link": "x"}') == {}


def test_each_fault_names_its_node() -> None:
    assert faults(facts("n1"), facts("n2", "/dev/shm cannot be written")) == {
        "n2": "/dev/shm cannot be written",
        "n3": "it did not answer",
    }
    assert faults(facts("n1"), facts("n2"), facts("n3", ahead_s=90)) == {
        "n3": "its clock is +90 s off that of the first node"
    }
    found = faults(
        *map(facts, NODES),
        link("n1"),
        link("n2", "no message comes back from n3 (timed out)"),
        link("n3"),
    )
    assert found == {"n3": "n2 gets no answer from it: no message comes back from n3 (timed out)"}


@pytest.fixture
def in_job(resolved: Resolved, slurm: FakeSlurm, tmp_path: Path, monkeypatch: MonkeyPatch) -> InJob:
    """Return a job of two nodes of ranks that has three, of which some answer with these lines."""
    monkeypatch.setenv("SLURM_JOB_ID", "41")
    slurm.does(
        "scontrol",
        "if [ $2 = job ]; then echo 'JobId=41 JobState=RUNNING NodeList=n[1-3]'\n"
        "else echo n1; echo n2; echo n3; fi",
    )

    def make(*answers: str, **cluster: object) -> tuple[JobSpec, RunFolder]:
        said = "\n".join(f"echo '{line}'" for line in answers)
        links = "\n".join(f"echo '{link(json.loads(line)['node'])}'" for line in answers)
        slurm.does(
            "srun",
            f'{said}\nread addresses\necho "$addresses" > {tmp_path}/told\n{links}\nread end',
        )
        spec = resolved("cluster=mini")
        spec = with_cluster(spec, **cluster)  # type: ignore[arg-type]
        folder = RunFolder(tmp_path / "runs" / "my-run")
        folder.logs.mkdir(parents=True, exist_ok=True)
        return job_spec(spec), folder

    return make


def test_a_spare_node_takes_the_place_of_a_bad_one(
    in_job: InJob, slurm: FakeSlurm, tmp_path: Path, capfd: Capture
) -> None:
    job, folder = in_job(facts("n1"), facts("n2", "it has 3 of 4 GPUs"), facts("n3"), spare_nodes=1)
    selected = select_nodes(job, folder, os.environ)
    assert (selected.job.nodelist, selected.nodes, selected.stopped) == (
        ("n1", "n3"),
        ("n1", "n3"),
        None,
    )
    assert json.loads((tmp_path / "told").read_text()).keys() == {"n1", "n2", "n3"}
    assert "node n2 is left out: it has 3 of 4 GPUs" in capfd.readouterr().err
    (asked,) = (line for line in slurm.asked() if line.startswith("srun"))
    assert "--nodes=3 --ntasks=3 --ntasks-per-node=1 --nodelist=n1,n2,n3" in asked
    (entry,) = read_json(tmp_path / "runs" / "bad_nodes.json")["nodes"]
    assert (entry["node"], entry["reason"]) == ("n2", "it has 3 of 4 GPUs")


def test_too_few_good_nodes_end_the_job(in_job: InJob) -> None:
    job, folder = in_job(
        facts("n1"), facts("n2", "it is bad"), facts("n3", "it is worse"), check_nodes=True
    )
    with pytest.raises(NodeFailedError) as raised:
        select_nodes(job, folder, os.environ)
    assert raised.value.exit_code == 4
    assert (
        str(raised.value)
        == "node n2 is bad: it is bad, node n3 is bad: it is worse; good nodes left: 1, and the"
        " ranks need 2"
    )
    assert (raised.value.good, [*raised.value.faults]) == (("n1",), ["n2", "n3"])


def test_nodes_left_out_are_not_asked(in_job: InJob, slurm: FakeSlurm) -> None:
    job, folder = in_job(facts("n1"), facts("n3"), spare_nodes=1)
    assert select_nodes(job, folder, os.environ, {"n2": "lost"}).nodes == ("n1", "n3")
    assert any("--nodelist=n1,n3" in line for line in slurm.asked())


def test_a_check_that_cannot_run_ends_no_job(
    in_job: InJob, slurm: FakeSlurm, capfd: Capture
) -> None:
    job, folder = in_job(spare_nodes=1)
    slurm.does("srun", "echo 'srun: error: no such option' >&2; exit 1")
    assert select_nodes(job, folder, os.environ).nodes == NODES
    assert (
        "the check of the nodes got no answer, and is left out: srun: error: no such"
        in capfd.readouterr().err
    )


def test_a_job_without_these_keys_asks_nothing(in_job: InJob, slurm: FakeSlurm) -> None:
    job, folder = in_job()
    assert select_nodes(job, folder, os.environ) == (job, (), None)
    assert slurm.asked() == []
