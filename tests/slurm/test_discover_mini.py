"""A preset drafted on the mini cluster runs there, however its GPUs are asked for."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import yaml

from gems.runs.folder import RunFolder
from tests.helpers.processes import python

if TYPE_CHECKING:
    from tests.slurm.conftest import MiniSlurm

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(300)]

ROOT = Path(__file__).resolve().parents[2]
CONFIGURATION = [
    "experiment=gems_master",
    "data=synthetic",
    "data.train_samples=64",
    "data.validation_samples=16",
    "machine=emulated",
    "cost.unit_s=0.001",
    "parallel.partitions=4",
    "parallel.micro_batches=4",
    "train.steps=3",
    "benchmark.skip_steps=1",
]
ENDED = ("finished", "failed")


def said(folder: RunFolder) -> str:
    return "\n".join(
        path.read_text() for path in folder.logs.glob("*") if path.suffix in (".out", ".log")
    )


def test_a_drafted_preset_runs(
    other_cluster: MiniSlurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    up = other_cluster.script("up", "--nodes", "2", "--cpus", "4", "--gpus", "2")
    assert up.returncode == 0, up.stderr
    monkeypatch.setenv("SLURM_CONF", str(other_cluster.conf))
    drafted = python("-m", "jobs", "discover")
    assert (drafted.returncode, drafted.stderr) == (0, "")
    preset = yaml.safe_load(drafted.stdout)
    assert (preset["name"], preset["gpus_per_node"], preset["usable_cpus_per_node"]) == (
        "mini",
        2,
        4,
    )
    assert preset["limits"] == [{"partition": "debug", "max_nodes": 2, "minutes": 1440}]
    (tmp_path / "cluster").mkdir()
    (tmp_path / "cluster" / "drafted.yaml").write_text(drafted.stdout)

    on_it = [
        "submit",
        *CONFIGURATION,
        "--config-dir",
        str(tmp_path),
        "cluster=drafted",
        f"runs_dir={tmp_path / 'runs'}",
    ]
    folders = []
    for more in (
        [],
        ["cluster.gpu_request=gres", "cluster.cpu_bind=none"],
        ["cluster.gpu_request=gpus-per-task"],
    ):
        sent = python("-m", "jobs", *on_it, "cluster.minutes=5", *more)
        assert sent.returncode == 0, sent.stderr
        folders.append(
            RunFolder(
                Path(dict(line.split(maxsplit=1) for line in sent.stdout.splitlines())["folder"])
            )
        )
    pause = threading.Event()
    deadline_s = time.monotonic() + 150
    while any(folder.read_status()["state"] not in ENDED for folder in folders):
        assert time.monotonic() < deadline_s, "\n".join(map(said, folders))
        pause.wait(0.1)
    assert [folder.read_status()["state"] for folder in folders] == ["finished"] * 3, "\n".join(
        map(said, folders)
    )

    refused = python("-m", "jobs", *on_it, "cluster.minutes=1441")
    assert refused.returncode == 2
    assert refused.stderr.startswith(
        "jobs: cluster.minutes=1441: cluster mini allows at most 1440 minutes for jobs of 1-2"
        " nodes in "
    )
    refused = python("-m", "jobs", *on_it, "parallel.replicas=2")
    assert refused.returncode == 2
    assert refused.stderr.startswith(
        "jobs: cluster.nodes=4: cluster mini allows jobs of 1-2 nodes in partition debug; "
    )
