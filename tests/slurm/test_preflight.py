"""The preflight and the probe on the mini cluster.

What could never start is refused before it is queued.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.helpers.mini_runs import CONFIGURATION, jobs
from tests.helpers.processes import ROOT

if TYPE_CHECKING:
    from tests.slurm.conftest import MiniSlurm

pytestmark = [
    pytest.mark.slurm,
    pytest.mark.timeout(300),
    pytest.mark.usefixtures("no_job_is_left"),
]

IN_A_JOB = """
import os, sys, pathlib
from gems.launch.local_launcher import rank_environment
from gems.runs.folder import RunFolder
from jobs.probes.mpi import MpiProbe
from jobs.batch.resources import job_spec
folder = RunFolder(pathlib.Path(sys.argv[1]))
spec = folder.read_spec()
probe = MpiProbe(job_spec(spec), spec.machine, spec.cache_dir)
probe.run_first(folder, rank_environment(1, keep_slurm=True) | {"PYTHONPATH": os.getcwd()})
"""


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (
            ["cluster.partition=nope"],
            "cluster.partition=nope: this SLURM has no such partition; allowed: debug; ",
        ),
        (
            ["cluster.gpus_per_node=4"],
            "cluster.gpus_per_node=4: a node of partition debug has at most 0 GPUs; ",
        ),
        (
            ["parallel.replicas=3", "cluster.nodes=3"],
            "cluster.nodes=3: partition debug has 2 nodes; ",
        ),
        (
            ["cluster.cpus_per_rank=3"],
            "cluster.cpus_per_rank=3: times 2 ranks a node is 6, and a node of partition debug ",
        ),
        (
            ["cluster.minutes=1441"],
            "cluster.minutes=1441: partition debug allows at most 1440 minutes; ",
        ),
        (
            ["+cluster.sbatch.constraint=x"],
            "cluster=mini: sbatch refuses the job: Invalid feature specification; ",
        ),
        (["machine.device_bytes=100000"], "above machine.device_bytes=100000"),
        (
            ["cluster.confirm_above_gpu_hours=-1"],
            "cluster.confirm_above_gpu_hours=-1.0: must be 0 or more",
        ),
    ],
)
def test_what_could_never_start(
    mini_slurm: MiniSlurm, tmp_path: Path, words: list[str], says: str
) -> None:
    before = mini_slurm.run("squeue", "--noheader", "--states=all", "--format=%i").stdout
    ended = jobs("submit", *CONFIGURATION, f"runs_dir={tmp_path / 'runs'}", *words)
    assert ended.returncode == (3 if words[0].startswith("machine.device_bytes") else 2)
    (line,) = [
        line
        for line in ended.stderr.splitlines()
        if not line.startswith("gems: taking the profile")
    ]
    assert line.startswith("jobs: ") and says in line
    assert ended.stdout == "" and not (tmp_path / "runs").exists()
    assert mini_slurm.run("squeue", "--noheader", "--states=all", "--format=%i").stdout == before


def test_a_dry_run_says_when_it_would_start(mini_slurm: MiniSlurm, tmp_path: Path) -> None:
    ended = jobs("submit", *CONFIGURATION, f"runs_dir={tmp_path / 'runs'}", "--dry-run", "--json")
    assert ended.returncode == 0, ended.stderr
    found = {row["check"]: row for row in json.loads(ended.stdout)["preflight"]}
    assert found["sbatch"]["ok"] is True and "to start " in found["sbatch"]["said"]
    assert found["partition"]["said"] == "debug: 2 of 2 nodes up, 2 idle, at most 1440 min"
    assert found["time"]["ok"] is True
    assert not (tmp_path / "runs").exists()


def test_the_probe_on_two_nodes(mini_slurm: MiniSlurm, tmp_path: Path) -> None:
    cache = str(tmp_path / "cache")
    words = ["cluster=mini", f"runs_dir='{tmp_path / 'my runs'}'"]
    ended = jobs("probe", *words, "--json", GEMS_CACHE_DIR=cache)
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout)
    assert (found["world_size"], found["nodes"], found["device_message"]) == (2, 2, "no GPU")
    if mini_slurm.has_own_host_names():
        assert {rank["node"] for rank in found["ranks"]} == {"n1", "n2"}
    shown = jobs(
        "submit",
        *CONFIGURATION,
        f"runs_dir={tmp_path}",
        "--dry-run",
        "--json",
        GEMS_CACHE_DIR=cache,
    )
    known = {row["check"]: row for row in json.loads(shown.stdout)["preflight"]}["probe"]
    assert known["ok"] is True and known["said"].startswith("MPICH Version")


def test_a_wrong_mpi_is_found_by_the_probe(mini_slurm: MiniSlurm, tmp_path: Path) -> None:
    ended = jobs(
        "probe",
        "cluster=mini",
        "cluster.mpi=none",
        f"runs_dir={tmp_path}",
        GEMS_CACHE_DIR=str(tmp_path / "cache"),
    )
    assert ended.returncode == 2, ended.stderr
    line = ended.stderr.splitlines()[-1]
    assert line.startswith(
        "jobs: cluster.mpi=none: MPI sees a world of 1 and SLURM started 2 tasks; give the type"
        " that fits"
    )
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("mpi", ["pmi2", "none"])
def test_a_job_probes_first(mini_slurm: MiniSlurm, tmp_path: Path, mpi: str) -> None:
    """The function that a launch calls before its ranks, in a job of its own."""
    runs = tmp_path / "it's"
    prepared = jobs("prepare", *CONFIGURATION, f"cluster.mpi={mpi}", f'runs_dir="{runs}"')
    assert prepared.returncode == 0, prepared.stderr
    folder = Path(prepared.stdout.strip())
    (tmp_path / "step.py").write_text(IN_A_JOB)
    (tmp_path / "job.sh").write_text(
        f'#!/bin/sh\ncd "{ROOT}" && PYTHONPATH=. exec "{sys.executable}" "$1" "$2"\n'
    )
    ended = mini_slurm.run(
        "sbatch",
        "--wait",
        "--nodes=2",
        "--ntasks-per-node=2",
        f"--output={tmp_path / 'out'}",
        str(tmp_path / "job.sh"),
        str(tmp_path / "step.py"),
        str(folder),
        env={"GEMS_CACHE_DIR": str(tmp_path / "cache")},
        timeout_s=200,
    )
    said = (tmp_path / "out").read_text()
    if mpi == "pmi2":
        assert ended.returncode == 0, said
        assert "jobs: probe: MPICH Version" in said
        assert json.loads((folder / "logs" / "probe.json").read_text())["world_size"] == 2
        assert len(list((tmp_path / "cache").glob("probe-*.json"))) == 1
    else:
        assert (
            ended.returncode == 1 and "ConfigError: cluster.mpi=none: MPI sees a world of 1" in said
        )
        assert not list((tmp_path / "cache").glob("probe-*.json"))
