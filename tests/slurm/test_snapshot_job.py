"""A job runs the code that it was submitted with, and leaves a record of itself.

On the mini cluster, with a hostile name.
"""

from __future__ import annotations

import json
import os
import shutil
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from gems.runs.code_archive import PACKAGES, code_root, hash_of
from gems.runs.folder import RunFolder
from tests.helpers.mini_runs import wait_until
from tests.helpers.processes import python

if TYPE_CHECKING:
    from tests.slurm.conftest import MiniSlurm

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(300)]

ROOT = Path(__file__).resolve().parents[2]
CONFIGURATION = [
    "experiment=gems_master",
    "cluster=mini",
    "data=synthetic",
    "data.train_samples=32",
    "data.validation_samples=8",
    "parallel.partitions=4",
    "parallel.micro_batches=4",
    "benchmark.skip_steps=1",
    "train.steps=3",
]
NAME = 'it\'s "q" $(touch owned) `touch owned` #1; & ünï'
ENDED = ("finished", "failed")


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy of our code, which is edited while its job waits."""
    copy = tmp_path / "my code"
    copy.mkdir()
    for package in PACKAGES:
        shutil.copytree(
            ROOT / package, copy / package, ignore=shutil.ignore_patterns("__pycache__")
        )
    return copy


def submit(checkout: Path, runs: Path, *words: str) -> tuple[str, RunFolder]:
    """Submit from a checkout; gives the job and its folder."""
    base = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    said = python(
        "-m",
        "jobs",
        "submit",
        *CONFIGURATION,
        f'runs_dir="{runs}"',
        "--json",
        *words,
        cwd=checkout,
        env=base,
    )
    assert said.returncode == 0, said.stderr
    told = json.loads(said.stdout)
    return told["job_id"], RunFolder(Path(told["run_folder"]))


def end_of(folder: RunFolder, limit_s: float = 180) -> dict[str, Any]:
    """Wait for the end of a run; gives its status."""
    deadline_s = time.monotonic() + limit_s
    pause = threading.Event()
    while (status := folder.read_status())["state"] not in ENDED:
        if time.monotonic() > deadline_s:
            pytest.fail(f"the run does not end: {status}", pytrace=False)
        pause.wait(0.2)
    return status


def test_what_was_submitted_is_what_runs(
    mini_slurm: MiniSlurm, tmp_path: Path, short_tmp: Path, checkout: Path
) -> None:
    """Each node has a copy of the code, as in jobs of many nodes."""
    quoted = NAME.replace("'", "\\'")
    stage = ["cluster.stage_above_nodes=1", f"cluster.stage_dir={short_tmp}"]
    job, folder = submit(
        checkout, tmp_path / "my runs", f"name='{quoted}'", "+cluster.sbatch.hold=true", *stage
    )
    assert folder.path.name.startswith(NAME)
    for package in ("gems", "jobs", "analysis"):
        (checkout / package / "__init__.py").write_text("raise SystemExit('the code of later')")
    assert mini_slurm.run("scontrol", "release", job).returncode == 0
    status = end_of(folder)
    said = "".join(
        path.read_text() for path in folder.logs.glob("*.*") if path.suffix in (".out", ".log")
    )
    assert (status["state"], status["exit_code"]) == ("finished", 0), said
    assert "the code of later" not in said
    assert f"{short_tmp}/gems-{job}-code.zip" in status["command"] and "cluster.stage" not in said
    wait_until(lambda: not list(short_tmp.glob("gems-*.zip")), 60, "the nodes' copies are left")
    assert not list(tmp_path.rglob("owned"))

    assert (
        folder.path / "trace.h5"
    ).exists() and "images/s" in said  # what the job starts itself, too
    assert folder.job_sh.read_text() == (folder.logs / f"{job}_submission.sh").read_text()
    assert json.loads(folder.provenance_json.read_text())["code_blake2b"] == hash_of(
        folder.code_zip
    )
    table = json.loads(folder.affinity_json.read_text())
    assert [place["rank"] for place in table["ranks"]] == [0, 1, 2, 3]
    assert [place["node"] for place in table["ranks"]] == ["n1", "n1", "n2", "n2"]
    record = json.loads(folder.slurm_json.read_text())
    (start,) = record["starts"]
    assert (record["job_id"], start["job"]["JobName"], start["job"]["NumTasks"]) == (job, NAME, "4")
    assert start["end"]["job"]["JobId"] == job and "UserId" not in start["job"]
    environment = json.loads((folder.provenance / "environment.json").read_text())
    assert environment["job"]["variables"]["SLURM_JOB_ID"] == job and "prepared" in environment
    assert len(list(folder.provenance.iterdir())) <= 9


def test_a_damaged_snapshot_is_refused(mini_slurm: MiniSlurm, tmp_path: Path) -> None:
    job, folder = submit(code_root(), tmp_path, "+cluster.sbatch.hold=true")
    data = folder.code_zip.read_bytes()
    folder.code_zip.unlink()  # other runs share the file
    folder.code_zip.write_bytes(data + b"more")
    assert mini_slurm.run("scontrol", "release", job).returncode == 0
    status = end_of(folder)
    assert (status["state"], status["exit_code"]) == ("failed", 2)
    assert "is not what was prepared" in status["cause"]
