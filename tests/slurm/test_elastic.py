"""Runs whose jobs lose nodes, on a mini cluster of five.

They go on by themselves, and compute the same.
"""

from __future__ import annotations

import csv
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from gems.runs.folder import RunFolder
from gems.utils.atomic_io import read_json
from tests.helpers.fault_runs import cut_power, start_daemon
from tests.helpers.mini_runs import jobs, said, wait_for_step, wait_until

if TYPE_CHECKING:
    from tests.slurm.conftest import MiniSlurm

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(400)]

RUN = [
    "experiment=gems_master",
    "cluster=mini",
    "data=synthetic",
    "data.train_samples=64",
    "data.validation_samples=16",
    "cluster.nodes=4",
    "cluster.ranks_per_node=1",
    "parallel.partitions=4",
    "parallel.micro_batches=4",
    "benchmark.skip_steps=1",
    "train.checkpoint_steps=2",
    "train.precision=float64",
]
# Ranks that wait in place of computing, which start in seconds.
EMULATED = [*RUN, "machine=emulated", "cost.unit_s=0.01", "train.steps=100"]
TOLERANCE = 1e-6
# srun on a cluster in which the shared memory of a node is full.
SRUN_WITH_A_BAD_NODE = r"""#!/bin/bash
case "$*" in *gems.launch.node_check*) ;; *) exec {srun} "$@" ;; esac
exec {srun} "$@" > >(exec sed -u -E '/"node": "n2"/s|"fault": null|"fault": "{fault}"|')
"""
Submit = Callable[..., tuple[str, RunFolder]]


@pytest.fixture
def submit(five_nodes: MiniSlurm, tmp_path: Path) -> Iterator[Submit]:
    """Submit a run and give the job and its folder.

    What is left of it is ended, and all nodes are up again.
    """

    def submit(*words: str) -> tuple[str, RunFolder]:
        ended = jobs("submit", f"runs_dir={tmp_path}/runs", *words, "--json", "--yes")
        assert ended.returncode == 0, ended.stderr
        sent = json.loads(ended.stdout)
        return str(sent["job_id"]), RunFolder(Path(sent["run_folder"]))

    yield submit
    five_nodes.run("scancel", f"--user={os.getuid()}")
    wait_until(lambda: not five_nodes.run("squeue", "--noheader").stdout, 60, "the jobs do not end")
    five_nodes.run("scontrol", "update", "nodename=n[1-5]", "state=resume")


def end_of(folder: RunFolder, limit_s: float = 200, state: str = "finished") -> dict[str, Any]:
    """Wait until a run has ended, in this state, and give its status."""
    states = ("finished", "failed", "cancelled", "stopped")
    wait_until(
        lambda: folder.read_status().get("state") in states,
        limit_s,
        "the run does not end",
        lambda: f"{folder.read_status()}\n{said(folder)}",
    )
    assert folder.read_status()["state"] == state, f"{folder.read_status()}\n{said(folder)}"
    assert state != "finished" or folder.read_status()["collected"], said(folder)
    return folder.read_status()


def losses(folder: RunFolder) -> dict[int, float]:
    """Return the loss of each step; of one that was run again, the last."""
    with folder.metrics_csv.open() as file:
        return {int(row["step"]): float(row["train_loss"]) for row in csv.DictReader(file)}


def lose(cluster: MiniSlurm, node: str) -> None:
    assert (
        cluster.run(
            "scontrol", "update", f"nodename={node}", "state=down", "reason=test"
        ).returncode
        == 0
    )


def test_a_run_that_loses_a_node_goes_on_on_fewer_and_computes_the_same(
    five_nodes: MiniSlurm, submit: Submit, tmp_path: Path
) -> None:
    _, whole = submit(*RUN, "name=whole", "train.steps=10")
    end_of(whole)
    job, folder = submit(
        *RUN,
        "name=elastic",
        "train.steps=10",
        "cluster.elastic=[4,2]",
        "cluster.usable_cpus_per_node=2",
    )
    wait_for_step(folder, 4)
    victim = read_json(folder.status_json)["nodes"][-1]
    lose(five_nodes, victim)
    status = end_of(folder)
    assert status["job_id"] == job  # in the same allocation
    (row,) = folder.layouts()
    assert (row["from"], row["to"]) == ("4 x 1 ranks on 4 nodes", "2 x 2 ranks on 2 nodes")
    assert victim in row["why"] and job in row["by"]
    assert (
        folder.read_own_spec().parallel.partitions == 4
        and folder.read_spec().parallel.replicas == 2
    )
    left = losses(whole)
    right = losses(folder)
    assert sorted(left) == sorted(right) == list(range(1, 11))
    difference = abs(left[10] - right[10])
    print(f"final loss {right[10]:.9f}, undisturbed {left[10]:.9f}, difference {difference:.1e}")
    assert difference <= TOLERANCE
    shown = jobs("status", str(folder.path), "--json")
    assert json.loads(shown.stdout)["runs"][0]["layouts"] == [row]
    (entry,) = read_json(tmp_path / "runs" / "bad_nodes.json")["nodes"]
    assert entry["node"] == victim


def test_a_spare_node_takes_the_place_of_a_lost_one(five_nodes: MiniSlurm, submit: Submit) -> None:
    job, folder = submit(*EMULATED, "cluster.spare_nodes=1")
    wait_for_step(folder, 5)
    assert "--nodelist=n1,n2,n3,n4" in read_json(folder.status_json)["command"]
    lose(five_nodes, "n2")
    status = end_of(folder)
    assert status["job_id"] == job and folder.layouts() == []
    assert "--nodelist=n1,n3,n4,n5" in status["command"]


def test_a_node_that_fails_the_check_is_left_out(
    five_nodes: MiniSlurm, submit: Submit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    srun = tmp_path / "bin" / "srun"
    fault = "/dev/shm has 0 MiB free, and 32 MiB are needed"
    srun.parent.mkdir()
    srun.write_text(SRUN_WITH_A_BAD_NODE.format(srun=shutil.which("srun"), fault=fault))
    srun.chmod(0o755)
    monkeypatch.setenv("PATH", f"{srun.parent}{os.pathsep}{os.environ['PATH']}")
    _, spared = submit(*EMULATED, "name=spared", "cluster.spare_nodes=1")
    status = end_of(spared)
    assert "--nodelist=n1,n3,n4,n5" in status["command"] and spared.layouts() == []
    assert f"jobs: node n2 is left out: {fault}" in said(spared)
    _, failed = submit(*EMULATED, "name=failed", "cluster.check_nodes=true")
    status = end_of(failed, state="failed")
    assert (status["exit_code"], status["cause_class"]) == (4, "node failed")
    assert f"node n2 is bad: {fault}; good nodes left: 3, and the ranks need 4" in status["cause"]
    (entry,) = read_json(tmp_path / "runs" / "bad_nodes.json")["nodes"]
    assert (entry["node"], len(entry["runs"]), entry["reason"]) == ("n2", 2, fault)


def test_a_job_that_loses_its_batch_script_is_replaced(
    five_nodes: MiniSlurm, submit: Submit
) -> None:
    """The node's daemon is killed, and all that ran there."""
    job, folder = submit(*EMULATED, "train.steps=80", "cluster.elastic=[3]")
    wait_for_step(folder, 5)
    cut_power(five_nodes, "n1")
    try:
        status = end_of(folder, 330)
    finally:
        start_daemon(five_nodes, "n1")
    assert status["job_id"] != job
    (row,) = folder.layouts()
    assert row["to"] == "3 x 1 ranks on 3 nodes" and "n1" in row["why"] and job in row["by"]
    assert "n1" not in status["nodes"] and len(status["nodes"]) == 3
