"""A whole training on a disk that fills up while it goes on: for a while, and for good."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gems.engine.checkpoint import saver
from gems.engine.checkpoint.manifest import Manifest, checkpoint_folders
from gems.engine.train import train
from gems.engine.transport.mpi import Comm
from gems.errors import RankFailedError
from gems.runs.folder import RunFolder
from gems.runs.heartbeat import Heartbeat
from gems.runs.prepare import prepare
from gems.trace import part_path, read_part
from gems.utils.atomic_io import read_json, reserve
from tests.helpers.device import DEVICE
from tests.helpers.small_disk import SmallDisk, small_disk
from tests.helpers.toys import make_spec

STEPS = 23
EVERY = 5
FULL_AT = 12


class Filler(Heartbeat):
    """Fills the disk at a step, and at each try to save while it is full asks `may_free`."""

    def __init__(self, path: Path, disk: SmallDisk, may_free: Callable[[int], bool]) -> None:
        self._disk = disk
        self._may_free = may_free
        self._num_tries = 0
        self._is_full = False
        super().__init__(path)

    def beat(self, step: int, action: str) -> None:
        super().beat(step, action)
        if step == FULL_AT and action == "load":
            self._disk.fill()
            self._is_full = True
        elif self._is_full and action == "checkpoint":
            self._num_tries += 1
            if self._may_free(self._num_tries):
                self._disk.free()
                self._is_full = False


@pytest.fixture
def disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SmallDisk]:
    monkeypatch.setattr(saver, "RETRY_S", 0.01)
    with small_disk(tmp_path / "disk", 1 << 14) as disk:
        yield disk


def run(
    disk: SmallDisk, comm: Comm, may_free: Callable[[int], bool]
) -> tuple[RunFolder, RankFailedError | None]:
    """Run a training on the disk, and return what ended it, if anything did."""
    spec = make_spec(
        "1f1b", 1, train__steps=STEPS, train__checkpoint_steps=EVERY, runs_dir=str(disk.path)
    )
    folder = prepare(spec)
    reserve(folder.progress_json)
    try:
        train(folder.read_plan(), folder, comm, DEVICE, Filler(folder.heartbeat(0), disk, may_free))
    except RankFailedError as error:
        return folder, error
    return folder, None


def checkpoints(folder: RunFolder) -> list[int]:
    return [Manifest.read(path).step for path in checkpoint_folders(folder.checkpoints)]


def test_a_run_outlasts_a_full_disk_and_nothing_recorded_is_lost(
    disk: SmallDisk, comm: Comm
) -> None:
    folder, error = run(disk, comm, lambda num_tries: num_tries == 3)
    assert error is None and checkpoints(folder) == [STEPS, 20]
    assert read_json(folder.result_json)["num_steps"] == STEPS
    part = read_part(part_path(folder.path, 0))
    assert (
        part.rank_steps["step"].tolist()
        == sorted({*part.events["step"].tolist()})
        == list(range(STEPS))
    )
    with folder.metrics_csv.open(newline="") as file:
        assert [int(row["step"]) for row in csv.DictReader(file)] == list(range(1, STEPS + 1))
    assert read_json(folder.progress_json)["error"] is None


def test_a_run_ends_on_a_disk_that_stays_full_and_loses_one_interval_at_most(
    disk: SmallDisk, comm: Comm, capfd: pytest.CaptureFixture[str]
) -> None:
    folder, error = run(disk, comm, lambda num_tries: False)
    assert "before step 15 could not be saved: No space left on device" in str(
        error
    ) and "5 tries" in str(error)
    assert checkpoints(folder) == [10, 5] and len(list(folder.checkpoints.iterdir())) == 2
    shown = read_json(folder.progress_json)
    assert shown["step"] == 15 <= checkpoints(folder)[0] + EVERY
    assert shown["error"].startswith("save 4 of 5 failed: No space left on device")
    assert read_part(part_path(folder.path, 0)).rank_steps["step"].tolist()[:FULL_AT] == list(
        range(FULL_AT)
    )
    told = [line for line in capfd.readouterr().err.splitlines() if "failed: No space" in line]
    assert len(told) == 4 and all("the checkpoint of step 10 remains" in line for line in told)
