"""The saver on one rank: when it saves, that nobody waits for it, and what becomes of a disk that is full."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from gems.engine.checkpoint import saver as saver_module
from gems.engine.checkpoint.manifest import (
    Manifest,
    checkpoint_folder,
    checkpoint_folders,
    run_identity,
)
from gems.engine.checkpoint.saver import Saver
from gems.engine.transport.mpi import Transport, world
from gems.errors import RankFailedError
from gems.runs.failure_cause import FailureCause, classify_error
from gems.runs.folder import RunFolder
from gems.runs.heartbeat import Heartbeat
from gems.utils.atomic_io import read_json
from tests.helpers.small_disk import SmallDisk, small_disk
from tests.helpers.toys import make_spec

LIMIT_S = 60


class Slow:
    """A source whose bytes come only once a test lets them, or not at all."""

    def __init__(self) -> None:
        self.may_write = threading.Event()
        self.taken: list[list[float]] = []
        self.num_full = 0  # of the next writes
        self.size = 1

    def take(self, losses: Sequence[float]) -> None:
        self.taken.append(list(losses))

    def num_bytes(self) -> int:
        return self.size

    def host_tensors(self) -> dict[str, torch.Tensor]:
        assert self.may_write.wait(LIMIT_S)
        self.num_full -= 1
        if self.num_full >= 0:
            raise OSError(errno.EDQUOT, "Disk quota exceeded", "rank0000.safetensors.partial")
        return {"x": torch.full((self.size,), len(self.taken), dtype=torch.uint8)}


class Rig:
    """A saver of a run of 100 steps, and its step loop."""

    def __init__(self, path: Path, step: int = 0, stop=None, **train) -> None:
        spec = make_spec(train__steps=100, train__keep_checkpoints=2)
        self.folder, self.source, self.step = RunFolder(path), Slow(), step
        about = Manifest(step, 1, step * 8, "", run_identity(spec), {}, {})
        self.saver = Saver(
            self.folder,
            replace(spec.train, **train),
            Transport(world()),
            about,
            Heartbeat(path / "beat"),
            self.source,
            stop,
        )
        self.shown: list[str | None] = []
        self.on_error: Callable[[], None] = lambda: None

    def show_error(self, text: str | None) -> None:
        self.shown.append(text)
        self.on_error()

    def run(self, steps: int) -> bool:
        """Run steps; gives whether the last one was where the run stops."""
        stops = False
        for _ in range(steps):
            self.saver.begin()
            self.step += 1
            stops = self.saver.end(self.step, [0.5] * self.step, self.show_error)
        return stops

    def write(self) -> None:
        """Let the thread write what it has begun, and all after it."""
        self.source.may_write.set()
        self.saver._thread.submit(int).result(LIMIT_S)

    @property
    def saved(self) -> list[int]:
        return [
            Manifest.read(folder).step for folder in checkpoint_folders(self.folder.checkpoints)
        ]


@pytest.fixture
def rig(tmp_path: Path) -> Rig:
    return Rig(tmp_path, checkpoint_steps=3)


def test_a_slow_disk_stops_no_step_and_what_is_due_meanwhile_is_taken_behind_it(rig: Rig) -> None:
    rig.run(20)
    assert [len(losses) for losses in rig.source.taken] == [3] and rig.saved == []
    rig.source.may_write.set()
    rig.saver._thread.submit(int).result(LIMIT_S)  # behind what it writes
    rig.run(1)
    assert rig.saved == [3]
    rig.saver.finish()
    assert rig.saved == [21, 3] and [len(losses) for losses in rig.source.taken] == [3, 21]


def test_what_was_saved_counts_steps_and_samples(rig: Rig) -> None:
    rig.source.may_write.set()
    rig.run(3)
    rig.saver.finish()
    found = Manifest.read(checkpoint_folder(rig.folder.checkpoints, 3))
    assert (found.step, found.attempt, [written.name for written in found.files]) == (
        3,
        1,
        ["rank0000.safetensors"],
    )
    assert found.samples == 3 * found.identity["global batch"] > 0


def test_the_last_step_is_saved_and_two_checkpoints_stay(rig: Rig) -> None:
    rig.source.may_write.set()
    rig.run(100)
    rig.saver.finish()
    assert rig.saved[0] == 100 and len(rig.saved) == 2
    assert len(list(rig.folder.checkpoints.iterdir())) == 2


def test_nothing_is_saved_where_nobody_asks(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    assert not rig.run(100)
    rig.saver.finish()
    assert not rig.folder.checkpoints.exists() and not rig.source.taken


def test_time_makes_a_checkpoint_due(tmp_path: Path) -> None:
    rig = Rig(tmp_path, checkpoint_s=1e-9)
    rig.source.may_write.set()
    rig.run(1)
    rig.saver.finish()
    assert rig.saved == [1]
    late = Rig(tmp_path / "late", checkpoint_s=1e9)
    late.run(50)
    assert not late.source.taken


class Asked:
    """Wants the run to stop from the third step on."""

    calls = 0

    def reason(self) -> str | None:
        self.calls += 1
        return "time is over" if self.calls > 2 else None


def test_a_stop_saves_at_once_though_an_older_checkpoint_is_being_written(tmp_path: Path) -> None:
    rig = Rig(tmp_path, stop=Asked(), checkpoint_steps=1)
    threading.Timer(0.05, rig.source.may_write.set).start()
    assert not rig.run(2) and rig.run(1)
    note = read_json(rig.folder.stopped_json)
    assert (note["step"], note["reason"]) == (3, "time is over") and rig.saved == [3, 1]


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tries to save follow each other at once."""
    monkeypatch.setattr(saver_module, "RETRY_S", 0.001)


@pytest.mark.usefixtures("quick")
def test_a_failed_save_is_shown_and_tried_again_before_the_next_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rig = Rig(tmp_path, step=40, checkpoint_steps=5)
    rig.source.num_full = 2
    rig.write()
    rig.run(5)
    rig.write()
    rig.run(1)
    said = capsys.readouterr().err.splitlines()
    first = "save 1 of 5 failed: rank 0: Disk quota exceeded: rank0000"
    assert (
        f"the state before step 46: {first}" in said[0]
        and "the checkpoint of step 40 remains" in said[0]
    )
    assert rig.saved == [46] and [len(losses) for losses in rig.source.taken] == [45, 46, 46]
    assert [path.name for path in rig.folder.checkpoints.iterdir()] == ["step00000046"]
    first_shown, second_shown, last_shown = rig.shown
    assert first in str(first_shown) and "save 2 of 5" in str(second_shown) and last_shown is None


@pytest.mark.usefixtures("quick")
def test_a_run_ends_after_so_many_failed_saves_and_keeps_its_last_checkpoint(
    tmp_path: Path,
) -> None:
    rig = Rig(tmp_path, checkpoint_steps=5, max_failed_saves=3)
    rig.write()
    rig.run(5)
    rig.write()
    rig.source.num_full = 99
    rig.run(5)
    rig.write()
    text = (
        r"before step 11 could not be saved: rank 0: Disk quota.*3 tries.*; the checkpoint of step"
        r" 5 remains"
    )
    with pytest.raises(RankFailedError, match=text) as raised:
        rig.run(1)
    assert classify_error(raised.value).cause is FailureCause.FILE_SYSTEM
    assert rig.saved == [5] and len(rig.source.taken) == 1 + 3


@pytest.mark.usefixtures("quick")
def test_under_a_quota_older_checkpoints_make_room_before_a_try_counts(tmp_path: Path) -> None:
    rig = Rig(tmp_path, checkpoint_steps=5, max_failed_saves=1)
    rig.write()
    for _ in range(2):
        rig.run(5)
        rig.write()
    rig.run(1)
    assert rig.saved == [10, 5]
    rig.source.num_full = 1
    rig.run(4)
    rig.write()
    rig.run(1)
    assert rig.saved == [16, 10] and rig.shown == []


@pytest.mark.usefixtures("quick")
def test_a_stop_that_cannot_save_fails_and_results_are_written_all_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stopping = Rig(tmp_path / "stop", step=40, stop=Asked())
    stopping.source.num_full = 99
    stopping.write()
    with pytest.raises(RankFailedError, match="before step 43 could not be saved"):
        stopping.run(3)
    assert not stopping.folder.stopped_json.exists()
    last = Rig(tmp_path / "last", step=99, checkpoint_steps=5)
    last.source.num_full = 99
    last.write()
    last.run(1)
    last.saver.finish()
    assert "before step 100 could not be saved" in capsys.readouterr().err.splitlines()[-1]
    nan = Rig(tmp_path / "nan", step=44, checkpoint_steps=5)
    nan.source.num_full = 1
    nan.write()
    nan.run(1)
    nan.saver.finish(retries=False)
    assert len(nan.source.taken) == 1 and not nan.saved


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[SmallDisk]:
    with small_disk(tmp_path / "disk", 1024) as disk:
        yield disk


@pytest.mark.usefixtures("quick")
def test_a_full_disk_for_a_while_costs_no_step_and_for_good_one_interval(
    disk: SmallDisk, capsys: pytest.CaptureFixture[str]
) -> None:
    rig = Rig(disk.path, checkpoint_steps=5)
    rig.source.size = 1 << 16
    rig.write()
    rig.run(5)
    rig.write()
    rig.run(1)
    disk.fill()
    rig.on_error = lambda: disk.free() if len(rig.shown) == 2 else None
    rig.run(4)
    rig.write()
    rig.run(1)
    assert rig.saved == [10, 5] and [text is None for text in rig.shown] == [False, False, True]
    assert "(0.125 MiB needed, 0.00 MiB free)" in capsys.readouterr().err.splitlines()[0]
    disk.fill()
    rig.run(3)
    with pytest.raises(
        RankFailedError, match="before step 15 could not be saved: No space left on device"
    ):
        rig.run(1)
    assert rig.saved == [10, 5], "older ones stay if they make no room"


def test_older_checkpoints_go_if_that_makes_room(disk: SmallDisk) -> None:
    rig = Rig(disk.path, checkpoint_steps=5)
    rig.source.size = 400 << 10
    rig.write()
    for step in (5, 10, 15, 20):
        rig.run(5)
        rig.write()
        assert rig.step == step
    rig.saver.finish()
    assert rig.saved == [20, 15] and rig.shown == []


@pytest.mark.usefixtures("quick")
def test_a_read_only_file_system_is_told_of_in_one_line(disk: SmallDisk) -> None:
    rig = Rig(disk.path.parent, checkpoint_steps=5, max_failed_saves=2)
    rig.folder.checkpoints.symlink_to(disk.path)
    rig.write()
    rig.run(5)
    rig.write()
    rig.run(1)
    disk.remount("ro")
    rig.run(4)
    rig.write()
    with pytest.raises(
        RankFailedError, match=r"rank 0: Read-only file system: .*; the checkpoint of step 5"
    ) as raised:
        rig.run(1)
    assert "\n" not in str(raised.value)
