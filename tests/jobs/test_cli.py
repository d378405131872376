"""`gems-jobs` from outside: bad input is one line and exit code 2, and a login node loads nothing heavy."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from gems.cli.framework import main
from gems.config.compose import compose
from gems.runs.prepare import prepare
from jobs.__main__ import VERBS
from tests.helpers.job_helpers import Called, Capture
from tests.helpers.processes import python
from tests.helpers.warm_python import REAL

MASTER = ["experiment=gems_master", "data=synthetic"]


@pytest.mark.parametrize(
    ("words", "key", "value", "says"),
    [
        (["parallel.partition=4"], "parallel.partition", "4", r"parallel\.partitions"),
        (["train.stepz=4"], "train.stepz", "4", r"train\.steps"),
        (["schedule=gem_master"], "schedule", "gem_master", "nearest: gems_master"),
        (["experiment=quickstar"], "experiment", "quickstar", "quickstart"),
        (["--dry"], "option", "--dry", "--dry-run"),
        (["cluster.nodes=3"], "cluster.nodes", "3", "world size, partitions x replicas = 4"),
        (["cluster.nodes=2"], "cluster.nodes", "2", "use cluster=slurm"),
        (
            ["cluster=slurm", "cluster.launcher=hydra", "cluster.nodes=2"],
            "cluster.nodes",
            "2",
            "starts ranks here",
        ),
        (["parallel.micro_batches=7"], "parallel.micro_batches", "7", "must be even"),
        (["parallel.partitions=50"], "parallel.partitions", "50", "must make at most"),
        (["parallel.partitions=four"], "parallel.partitions", "four", "must be a whole number"),
        (["data.height_px=2"], "data.height_px", "2", "stride|at least|or more"),
        (
            ["data=folder", "data.path=/no/such/folder"],
            "data.path",
            "/no/such/folder",
            "folder|directory",
        ),
        (["cluster=mini", "name=50%j"], "name", "50%j", "SLURM"),
        (
            ["cluster=mini", "+cluster.sbatch.nodes=3"],
            "cluster.sbatch.nodes",
            "3",
            r"cluster\.nodes",
        ),
        (["cluster.python='\"open'"], "cluster.python", '"open', "command line"),
    ],
)
@pytest.mark.parametrize("dry", [[], ["--dry-run"]])
def test_bad_input(
    words: list[str], key: str, value: str, says: str, dry: list[str], call: Called, tmp_path: Path
) -> None:
    out, err = call("submit", *MASTER, *words, *dry, code=2)
    (line,) = err.splitlines()
    assert out == "" and line.startswith(f"jobs: {key}={value}: ")
    assert re.search(says, line)
    assert not (tmp_path / "runs").exists()


def test_runs_dir_that_cannot_be_written(tmp_path: Path, capfd: Capture) -> None:
    file = tmp_path / "file"
    file.touch()
    for verb in ("submit", "prepare"):
        assert main("jobs", VERBS, [verb, *MASTER, f"runs_dir={file / 'runs'}"]) == 2
        said = capfd.readouterr().err.splitlines()
        (line,) = (line for line in said if "taking the profile" not in line)
        assert line.startswith(
            f"jobs: runs_dir={file / 'runs'}: cannot write there (Not a directory"
        )


def test_folder_of_another_configuration(call: Called, tmp_path: Path) -> None:
    """As after two configurations of one signature, or a run.yaml that someone changed."""
    folder = prepare(compose([*MASTER, f"runs_dir={tmp_path / 'runs'}"]))
    text = folder.run_yaml.read_text()
    folder.run_yaml.write_text(text.replace("seed: 0", "seed: 1"))
    (line,) = call("submit", *MASTER, code=2)[1].splitlines()
    assert line.startswith(f"jobs: run folder={folder.path}: holds another configuration")


def test_folder_in_use(call: Called, tmp_path: Path) -> None:
    folder = prepare(compose([*MASTER, f"runs_dir={tmp_path / 'runs'}"]))
    folder.write_status("running", pid=os.getppid(), host=os.uname().nodename)
    (line,) = call("prepare", *MASTER, code=2)[1].splitlines()
    assert f"a run goes on there (process {os.getppid()})" in line


def test_prepare_prints_the_folder_alone(tmp_path: Path) -> None:
    ended = python("-m", "jobs", "prepare", *MASTER, f"runs_dir={tmp_path}")
    assert (ended.returncode, ended.stderr) == (0, "")
    (line,) = ended.stdout.splitlines()
    assert (Path(line) / "run.yaml").exists() and Path(line).parent == tmp_path


@pytest.mark.parametrize("words", [[], ["a", "b"]])
def test_collect_takes_one_folder(words: list[str], capfd: Capture) -> None:
    assert main("jobs", VERBS, ["collect", *words]) == 2
    assert "takes one run folder" in capfd.readouterr().err


def test_collect_needs_a_run(tmp_path: Path, capfd: Capture) -> None:
    assert main("jobs", VERBS, ["collect", str(tmp_path)]) == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith(f"jobs: run folder={tmp_path}: holds no readable run.yaml")


def test_unknown_command(capfd: Capture) -> None:
    assert main("jobs", VERBS, ["submti"]) == 2
    assert "nearest: submit" in capfd.readouterr().err


@pytest.mark.usefixtures("warm")
def test_help_of_every_verb() -> None:
    for words in (["--help"], ["submit", "--help"], ["collect", "--help"], ["status", "--help"]):
        ended = python("-m", "jobs", *words)
        assert ended.returncode == 0, ended.stderr
        assert ended.stdout


@pytest.mark.parametrize("work", ["dry run", "submit --help"])
def test_a_login_node_loads_nothing_heavy(work: str) -> None:
    words = (
        ["submit", *MASTER, "cluster=mini", "--dry-run"]
        if work == "dry run"
        else ["submit", "--help"]
    )
    program = f"""
import runpy, sys
import jobs.launch.batch, jobs.cli.cancel, jobs.launch.launch, jobs.cli.logs, \
jobs.schedulers.slurm, jobs.cli.status, jobs.cli.submit
sys.argv = ["jobs", *{words!r}]
try:
    runpy.run_module("jobs", run_name="__main__")
except SystemExit as ended:
    assert not ended.code, ended.code
heavy = {{"torch", "mpi4py", "matplotlib", "h5py", "skimage", "scipy", "tqdm"}} & sys.modules.keys()
assert not heavy, heavy
"""
    ended = python("-c", program, executable=REAL)
    assert ended.returncode == 0, ended.stderr


def test_submitit_is_loaded_for_slurm_alone() -> None:
    program = (
        "import sys, jobs.cli.submit, jobs.launch.launch\nassert 'submitit' not in sys.modules"
    )
    ended = python("-c", program, executable=REAL)
    assert ended.returncode == 0, ended.stderr
