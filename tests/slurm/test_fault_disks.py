"""Faults of storage on a mini cluster.

Disks that are full or read-only, and files that somebody has changed.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from gems.config.checkpoint_schema import MANIFEST_JSON
from gems.engine.checkpoint.manifest import checkpoint_folders
from gems.runs.folder import RunFolder
from gems.utils.atomic_io import read_json
from jobs.diagnosis.evidence import newest_checkpoint
from tests.helpers.fault_runs import EMULATED, RUN, ended, last_steps
from tests.helpers.mini_runs import job_fields, jobs, lines_of_jobs, said, wait_for_step, wait_until
from tests.helpers.small_disk import SmallDisk, read_only, small_disk

if TYPE_CHECKING:
    from tests.slurm.conftest import MiniSlurm

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(300)]

EVERY = 5  # steps between saves
FULL_S = float(
    os.environ.get("GEMS_TEST_FULL_S", "1")
)  # how long a disk stays full once a save has failed
Submit = Callable[..., tuple[str, RunFolder]]


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[SmallDisk]:
    """Mount a small disk where the runs are."""
    with small_disk(tmp_path / "runs", 160 << 10) as disk:
        yield disk


def save_failed(folder: RunFolder) -> bool:
    return "No space left on device" in str(read_json(folder.progress_json).get("error"))


def test_a_disk_is_full_for_a_while(
    preempt_slurm: MiniSlurm, submit: Submit, disk: SmallDisk
) -> None:
    """No step is lost: the ranks wait for room between two of them."""
    job, folder = submit(*EMULATED, "parallel.partitions=2", "train.steps=40")
    wait_for_step(folder, 7, 2)
    since_s = time.monotonic()
    disk.fill()
    wait_until(lambda: save_failed(folder), 60, "no save fails", lambda: said(folder))
    shown = json.loads(jobs("status", str(folder.path), "--json").stdout)["runs"][0]
    assert "No space left on device" in shown["error"]
    time.sleep(FULL_S)  # the disk is full for so long, and no longer: that is the fault
    disk.free()
    found = ended(preempt_slurm, "disk full for a while", job, folder, 200, since_s)
    assert (found["status"]["state"], found["status"]["exit_code"]) == ("finished", 0), said(folder)
    assert found["told"]["trace_steps"] == 40


def test_a_disk_is_full_for_good(preempt_slurm: MiniSlurm, submit: Submit, disk: SmallDisk) -> None:
    """The newest complete checkpoint remains, and no step runs after a save that failed."""
    job, folder = submit(
        *EMULATED, "parallel.partitions=2", "train.steps=100000", "train.max_failed_saves=1"
    )
    wait_for_step(folder, 7, 2)
    before = newest_checkpoint(folder)
    assert before
    disk.fill()
    found = ended(preempt_slurm, "disk full for good", job, folder, 90)
    assert (found["status"]["state"], found["status"]["exit_code"]) == ("failed", 4), said(folder)
    told = found["told"]
    assert "No space left on device" in told["text"]
    pattern = r"before step (\d+) could not be saved: .* the checkpoint of step (\d+) remains"
    failed = re.search(pattern, said(folder))
    assert failed, said(folder)
    step, remains = map(int, failed.groups())
    assert before <= remains == told["resume_step"]
    # steps run beside a save that is being written, but not up to the next one
    assert last_steps(folder) <= step < remains + 2 * EVERY


def test_a_disk_becomes_read_only(preempt_slurm: MiniSlurm, submit: Submit) -> None:
    job, folder = submit(
        *EMULATED, "parallel.partitions=2", "train.steps=100000", "train.max_failed_saves=1"
    )
    wait_for_step(folder, 7, 2)
    with read_only(folder.checkpoints):
        found = ended(preempt_slurm, "disk read-only", job, folder, 90)
    assert (found["status"]["state"], found["status"]["exit_code"]) == ("failed", 4), said(folder)
    assert (
        found["told"]["cause"] == "file system" and "Read-only file system" in found["told"]["text"]
    )


def test_run_yaml_is_edited_while_the_job_waits(preempt_slurm: MiniSlurm, submit: Submit) -> None:
    job, folder = submit(*RUN, "machine=emulated", "train.steps=4", "+cluster.sbatch.hold=true")
    folder.run_yaml.write_text(folder.run_yaml.read_text().replace("steps: 4", "steps: 5"))
    preempt_slurm.run("scontrol", "release", job)
    found = ended(preempt_slurm, "run.yaml edited", job, folder, 60)
    assert (found["status"]["state"], found["status"]["exit_code"]) == ("failed", 2), said(folder)
    assert "run.yaml" in found["told"]["text"] and len(lines_of_jobs(folder)) == 1


def test_all_checkpoints_are_damaged(preempt_slurm: MiniSlurm, submit: Submit) -> None:
    first, folder = submit(*EMULATED, "parallel.partitions=2", "train.steps=100000")
    wait_for_step(folder, 7, 2)
    assert jobs("cancel", str(folder.path), "--yes").returncode == 0
    assert job_fields(preempt_slurm, first)["JobState"] == "CANCELLED"
    for checkpoint in checkpoint_folders(folder.checkpoints):
        (checkpoint / MANIFEST_JSON).write_text("{")
    sent = jobs("resubmit", str(folder.path), "--json")
    assert sent.returncode == 0, sent.stdout
    job = json.loads(sent.stdout)["runs"][0]["job_id"]
    found = ended(preempt_slurm, "all checkpoints damaged", job, folder, 90)
    assert (found["status"]["state"], found["status"]["exit_code"]) == ("failed", 2), said(folder)
    assert "are damaged" in found["told"]["text"] and "train.resume=never" in found["told"]["text"]
