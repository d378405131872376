"""Runs whose jobs lose nodes.

On which nodes, by which layout and in which job they go on, and what is recorded.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from gems.config.resolve import run_id
from gems.errors import GemsError
from gems.launch.local_launcher import Ended
from gems.runs.failure_cause import FailureCause
from gems.runs.folder import RunFolder
from gems.runs.prepare import prepare
from gems.utils.atomic_io import read_json, write_json
from jobs.batch.resources import JobSpec, job_spec
from jobs.diagnosis.root_cause import Failure
from jobs.launch import batch as batch_module
from jobs.launch import launch as launch_module
from jobs.launch.batch import BatchJob, run_prepared
from jobs.launch.deputy import main as deputy
from jobs.launch.elastic import Recovery
from jobs.launch.launch import StopRequest
from jobs.status.job_record import CHAIN_JSON
from jobs.status.run_status import read_recorded
from tests.helpers.fake_slurm import FakeSlurm
from tests.helpers.job_helpers import Capture, MonkeyPatch, Prepared, with_cluster

pytestmark = pytest.mark.timeout(120)
FOUR = (
    "cluster.nodes=4",
    "cluster.ranks_per_node=1",
    "parallel.partitions=4",
    "parallel.micro_batches=4",
)
NODES = ["n1", "n2", "n3", "n4"]
Make = Callable[..., tuple[RunFolder, JobSpec, Recovery]]


def has_nodes(slurm: FakeSlurm, *nodes: str) -> None:
    """Let SLURM say that the job has these nodes, and take any requeue."""
    lines = "; ".join(f"echo {node}" for node in nodes)
    slurm.does(
        "scontrol",
        f"case $2 in job) echo 'JobId=41 JobState=RUNNING NodeList={','.join(nodes)}' ;;\n"
        f"hostnames) {lines} ;; esac",
    )


@pytest.fixture
def make(prepared: Prepared, slurm: FakeSlurm, monkeypatch: MonkeyPatch) -> Make:
    """Prepare a run of four nodes whose job, 41, this process is in."""

    def make(*words: str) -> tuple[RunFolder, JobSpec, Recovery]:
        folder = prepared("one", *FOUR, *words)
        monkeypatch.setenv("SLURM_JOB_ID", "41")
        monkeypatch.delenv("SLURM_RESTART_COUNT", raising=False)
        slurm.does("sbatch", "echo Submitted batch job 42")
        has_nodes(slurm, *NODES)
        return folder, job_spec(folder.read_spec()), Recovery(folder, BatchJob((str(folder.path),)))

    return make


def test_a_spare_node_keeps_the_layout(make: Make, capfd: Capture) -> None:
    folder, job, recovery = make("cluster.spare_nodes=1", "cluster.elastic=[2]")
    assert recovery.goes_on(job, {"pid": 1}, ["n1", "n2", "n3", "n5"], {"n4": "it did not answer"})
    assert (recovery.again, recovery.has_moved, [*recovery.left_out]) == (True, False, ["n4"])
    assert folder.layouts() == []
    status = folder.read_status()
    line = "node n4 is lost: it did not answer; the run goes on by 4 x 1 ranks on 4 nodes"
    assert (status["state"], status["job_id"], status["cause"]) == ("requeued", "41", line)
    assert capfd.readouterr().err.endswith(f"jobs: {line}\n")
    (entry,) = read_json(folder.path.parent / "bad_nodes.json")["nodes"]
    assert (entry["node"], entry["reason"]) == ("n4", "it did not answer")


def test_fewer_nodes_of_the_same_job_have_another_layout(make: Make) -> None:
    folder, job, recovery = make("cluster.elastic=[4,2,1]", "cluster.usable_cpus_per_node=2")
    before = folder.path
    yaml = folder.run_yaml.read_text()
    own = folder.read_spec()
    assert recovery.goes_on(job, {}, ["n1", "n2", "n3"], {"n4": "gone"})
    assert recovery.again
    now = folder.read_spec()
    assert (now.cluster.nodes, now.world_size) == (2, 4)
    assert folder.read_schedule().num_ranks == now.parallel.partitions
    assert folder.run_yaml.read_text() == yaml and folder.read_own_spec() == own
    assert RunFolder.of(own).path == before and run_id(now) != run_id(own) == folder.run_id(now)
    (row,) = folder.layouts()
    assert (row["number"], row["nodes"], row["from"]) == (2, 2, "4 x 1 ranks on 4 nodes")
    assert (
        row["to"].endswith("ranks on 2 nodes")
        and row["by"].startswith("job 41 on ")
        and "n4" in row["why"]
    )
    assert (folder.path / "layouts" / "0002" / "run.yaml").exists()
    assert read_recorded(folder).layout_note.startswith(
        f"{row['from']} became {row['to']} from its start ("
    )
    assert recovery.goes_on(
        job_spec(now), {}, ["n1"], {"n2": "gone", "n3": "gone"}
    )  # and once more
    assert [each["number"] for each in folder.layouts()] == [2, 3]
    assert folder.read_spec().cluster.nodes == 1


def test_too_few_nodes_left_are_a_new_job(make: Make) -> None:
    folder, job, recovery = make("cluster.elastic=[3]", "cluster.exclude=[n9]")
    assert recovery.goes_on(job, {}, ["n1", "n2"], {"n3": "gone", "n4": "gone"})
    assert (recovery.again, recovery.has_moved) == (False, True)
    status = folder.read_status()
    assert (status["state"], status["job_id"]) == ("requeued", "42")
    script = folder.job_sh.read_text()
    assert "#SBATCH --nodes=3\n" in script and "#SBATCH --exclude=n9,n3,n4\n" in script
    assert folder.read_spec().cluster.nodes == 3


def test_without_a_smaller_layout_the_job_is_put_back_as_often_as_allowed(
    make: Make, slurm: FakeSlurm, capfd: Capture
) -> None:
    _, job, recovery = make("cluster.spare_nodes=1", "cluster.max_requeues=1")
    assert recovery.goes_on(job, {}, ["n1", "n2"], {"n3": "gone", "n4": "gone"})
    assert (recovery.again, recovery.has_moved) == (False, True)
    assert "scontrol requeue 41" in slurm.asked()
    assert not recovery.goes_on(job, {}, ["n1"], {"n2": "gone"})
    assert "has started again 1 times, which is cluster.max_requeues" in capfd.readouterr().err


def test_only_a_node_s_loss_is_repaired(make: Make, slurm: FakeSlurm) -> None:
    _, job, recovery = make("cluster.elastic=[2]")
    failure = Failure(4, "was killed", node="n2", cause_class=FailureCause.KILLED)
    assert recovery.is_concerned(job, NODES, failure)
    for settled in (
        FailureCause.CONFIGURATION,
        FailureCause.DEVICE_MEMORY,
        FailureCause.HOST_MEMORY,
    ):
        assert not recovery.is_concerned(job, NODES, replace(failure, cause_class=settled))
    assert not recovery.is_concerned(job, NODES, replace(failure, exit_code=2))
    plain = with_cluster(job, elastic=[])
    assert not recovery.is_concerned(plain, NODES, failure) and not recovery.goes_on(
        plain, {}, NODES, {"n4": "gone"}
    )
    good = [
        json.dumps({"node": node, "address": ["", 1], "time_ns": time.time_ns(), "fault": None})
        for node in NODES
    ]
    links = [json.dumps({"node": node, "link": None}) for node in NODES]
    slurm.does(
        "srun",
        "\n".join(f"echo '{line}'" for line in good)
        + "\nread all\n"
        + "\n".join(f"echo '{line}'" for line in links)
        + "\nread end",
    )
    assert (
        recovery.find_faults(job, os.environ, NODES, failure) == {}
    )  # every node is there and well
    broken = replace(failure, cause_class=FailureCause.DEVICE)
    assert recovery.find_faults(job, os.environ, NODES, broken) == {"n2": "the failure is its own"}
    has_nodes(slurm, "n1", "n2", "n3")
    assert recovery.find_faults(job, os.environ, NODES, failure) == {
        "n4": "SLURM has taken it from the job"
    }
    slurm.does("srun", "exit 1")
    has_nodes(slurm, *NODES)
    assert recovery.find_faults(job, os.environ, NODES, failure) == {}  # nobody can tell


def test_a_job_that_has_all_its_nodes_again_goes_back_to_the_own_layout(
    make: Make, slurm: FakeSlurm
) -> None:
    folder, job, recovery = make("cluster.elastic=[2]")
    recovery.return_to_own_layout()
    assert folder.layouts() == []
    recovery.goes_on(job, {}, ["n1", "n2", "n3"], {"n4": "gone"})
    has_nodes(slurm, "n1", "n2", "n3")
    recovery.return_to_own_layout()
    assert folder.read_spec().cluster.nodes == 2
    has_nodes(slurm, *NODES)
    recovery.return_to_own_layout()
    assert folder.read_spec() == folder.read_own_spec() and folder.layout == folder
    assert [row["number"] for row in folder.layouts()] == [2, 1]
    assert read_recorded(folder).layout_note == ""


def test_the_same_command_prepares_the_own_layout_again(make: Make) -> None:
    folder, job, recovery = make("cluster.elastic=[2]")
    recovery.goes_on(job, {}, ["n1", "n2", "n3"], {"n4": "gone"})
    assert prepare(folder.read_own_spec(), own=lambda folder: None) == folder
    assert folder.layout == folder and folder.read_spec().cluster.nodes == 4
    assert folder.layouts()[-1]["why"] == "prepared again"


def test_an_edited_layout_is_refused(
    make: Make, slurm: FakeSlurm, monkeypatch: MonkeyPatch
) -> None:
    folder, job, recovery = make("cluster.elastic=[2]")
    recovery.goes_on(job, {}, ["n1", "n2", "n3"], {"n4": "gone"})
    has_nodes(slurm, "n1", "n2", "n3")
    path = folder.layout.run_yaml
    path.write_text(path.read_text().replace("seed: 0", "seed: 1"))
    monkeypatch.setattr(batch_module, "wait_for_submission", lambda folder: None)
    with StopRequest() as request:
        assert run_prepared(folder, request, "") == 2
    assert "its run.yaml is not what was prepared" in folder.read_status()["cause"]


def test_a_batch_job_launches_again_on_what_is_left(
    make: Make,
    slurm: FakeSlurm,
    collected: list[RunFolder],
    monkeypatch: MonkeyPatch,
    capfd: Capture,
) -> None:
    """The ranks' srun reports the failure of a node, which SLURM has taken from the job by then."""
    folder, _, _ = make("cluster.elastic=[2]", "cluster.check_nodes=false")
    launched: list[list[str]] = []

    def ranks(argv: list[str], *words: Any, **more: Any) -> Ended:
        launched.append(argv)
        if len(launched) > 1:
            return Ended(0, ())
        has_nodes(slurm, "n1", "n2", "n4")
        return Ended(143, ("srun: error: Node failure on n3",))

    monkeypatch.setattr(launch_module, "run_ranks", ranks)
    monkeypatch.setattr(batch_module, "wait_for_submission", lambda folder: None)
    with StopRequest() as request:
        assert run_prepared(folder, request, "") == 0
    options = [
        [word for word in argv if word.startswith(("--nodes", "--nodelist"))] for argv in launched
    ]
    assert options == [["--nodes=4", "--nodelist=n1,n2,n3,n4"], ["--nodes=2", "--nodelist=n1,n2"]]
    assert folder.read_status()["state"] == "finished" and collected == [folder]
    assert (
        "node n3 is lost: SLURM has taken it from the job; the run goes on by"
        in capfd.readouterr().err
    )


def test_a_deputy_replaces_a_job_whose_batch_script_is_lost(
    make: Make, slurm: FakeSlurm, monkeypatch: MonkeyPatch
) -> None:
    folder, _, _ = make("cluster.elastic=[3]")
    slurm.says("scancel")
    monkeypatch.setattr("os.dup2", lambda *words: None)  # this test's output stays where it is
    monkeypatch.setattr("signal.signal", lambda *words: None)
    monkeypatch.setattr("jobs.launch.deputy.LOOK_EVERY_S", 0.05)
    has_nodes(slurm, "n2", "n3", "n4")
    assert deputy([str(folder.path), "n1"]) == 0
    script = folder.job_sh.read_text()
    for line in ("--nodes=3", "--exclude=n1", "--dependency=afterany:41"):
        assert f"#SBATCH {line}\n" in script
    assert (folder.read_status()["state"], folder.read_status()["job_id"]) == ("requeued", "42")
    assert slurm.asked()[-1] == "scancel 41"
    assert deputy(["one"]) == 2


def test_the_next_job_of_a_chain_replaces_one_whose_batch_script_is_lost(
    make: Make, slurm: FakeSlurm, capfd: Capture
) -> None:
    folder, _, recovery = make("cluster.elastic=[3]")
    write_json(folder.path / CHAIN_JSON, {"jobs": ["41", "43"]})
    recovery.replace_job("n1")
    assert not any(line.startswith("sbatch") for line in slurm.asked())
    assert "job 43, the next of its chain, continues the run" in capfd.readouterr().err
    assert read_json(folder.path.parent / "bad_nodes.json")["nodes"]


def test_without_a_smaller_layout_a_lost_batch_script_is_replaced_as_often_as_allowed(
    make: Make, slurm: FakeSlurm
) -> None:
    folder, _, recovery = make("cluster.spare_nodes=1", "cluster.max_requeues=1")
    slurm.says("sbatch", error="the partition is closed\n", code=1)
    with pytest.raises(GemsError, match="the partition is closed"):
        recovery.replace_job("n1")
    assert read_json(folder.path / "requeues.json")["requeues"] == []
    slurm.does("sbatch", "echo Submitted batch job 42")
    recovery.replace_job("n1")
    assert (folder.read_status()["job_id"], folder.read_status()["requeue_count"]) == ("42", 1)
    with pytest.raises(
        GemsError, match=r"has started again 1 times, which is cluster\.max_requeues"
    ):
        recovery.replace_job("n2")
