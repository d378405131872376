"""From a configuration to resources and command lines, word by word."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from gems.launch import local_launcher as ranks
from gems.runs.folder import RunFolder
from gems.utils.run_module import RUN_MODULE
from jobs.batch.launchers import command, module_on_each_node
from jobs.batch.resources import job_spec
from jobs.launch.launch import SWEEP
from tests.helpers.job_helpers import MonkeyPatch, Resolved, refused, with_cluster

FOLDER = RunFolder(Path("/runs/it's mine"))
CODE_ZIP = "/runs/it's mine/provenance/code.zip"
IN_JOB = [CODE_ZIP, "gems.engine.run", "/runs/it's mine"]
PROGRAM = [*RUN_MODULE, "gems.engine.run", "/runs/it's mine"]


def test_gpus_left_idle_are_charged(resolved: Resolved) -> None:
    job = job_spec(resolved("cluster=slurm", "cluster.ranks_per_node=1", "cluster.minutes=30"))
    assert (job.nodes, job.gpus, job.gpu_hours) == (4, 16, 8.0)


def test_srun_without_gpus_and_without_an_mpi_plugin(resolved: Resolved) -> None:
    spec = resolved(
        "cluster=mini",
        "cluster.mpi=null",
        "cluster.python='apptainer exec \"my image.sif\" python'",
    )
    assert command(job_spec(spec), FOLDER) == [
        "srun",
        "--nodes=2",
        "--ntasks=4",
        "--ntasks-per-node=2",
        "--cpus-per-task=1",
        "--kill-on-bad-exit=1",
        "--wait=60",
        "--label",
        "--unbuffered",
        "apptainer",
        "exec",
        "my image.sif",
        "python",
        *IN_JOB,
    ]


def test_without_a_snapshot_the_code_as_it_is(resolved: Resolved) -> None:
    job = job_spec(resolved("cluster=mini", "cluster.archive_code=false"))
    assert command(job, FOLDER)[-5:] == [sys.executable, *PROGRAM]
    assert module_on_each_node(job, FOLDER, SWEEP)[-4:] == [
        sys.executable,
        *RUN_MODULE,
        "gems.launch.mpich_cleanup",
    ]


def test_mpiexec(resolved: Resolved, monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "_find_mpiexec", lambda: "/opt/mpi/mpiexec")
    monkeypatch.setattr(ranks, "_flags", lambda mpiexec: ("--flag",))
    assert command(job_spec(resolved()), FOLDER) == [
        "/opt/mpi/mpiexec",
        "--flag",
        "-n",
        "4",
        sys.executable,
        *RUN_MODULE,
        "gems.launch.exit_watcher",
        "/runs/it's mine",
        sys.executable,
        *PROGRAM,
    ]


def test_mpiexec_has_one_node(resolved: Resolved) -> None:
    with refused(r"cluster\.nodes=2: must be 1 with cluster\.launcher=mpiexec"):
        job_spec(resolved("cluster.nodes=2"))


@pytest.mark.parametrize("python", ["'open quote", " "])
def test_python_must_be_a_command_line(resolved: Resolved, python: str) -> None:
    spec = resolved()
    with refused(r"^cluster\.python="):
        job_spec(with_cluster(spec, python=python))


def test_a_probe_starts_without_site_packages_and_knows_what_was_asked(resolved: Resolved) -> None:
    words = ["machine=probe", "cluster=mini", "cluster.gpus_per_node=4", "parallel.replicas=2"]
    argv = command(job_spec(resolved(*words)), RunFolder(Path("/runs/one")))
    code = "/runs/one/provenance/code.zip"
    assert argv[argv.index("-I") :] == [
        "-I",
        "-S",
        code,
        "gems.launch.placement_check",
        "/runs/one",
        "8",
        "4",
        "4",
    ]
    argv = command(
        job_spec(resolved(*words, "cluster.archive_code=false")), RunFolder(Path("/runs/one"))
    )
    place = argv.index("-I")
    assert argv[place : place + 2] == ["-I", "-S"] and argv[place + 2].endswith(
        "/gems/launch/placement_check.py"
    )
    assert argv[place + 3 :] == ["/runs/one", "8", "4", "4"]
