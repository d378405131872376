"""The saver on one rank: when it saves, that nobody waits for it, and what becomes of a disk that is full."""

from __future__ import annotations

import errno
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from gems.engine.checkpoint.manifest import HostTensor, Manifest, checkpoint_folder, checkpoint_folders, run_identity
from gems.engine.checkpoint.saver import Saver
from gems.engine.transport.mpi import Transport, world
from gems.errors import RankFailedError
from gems.runs.folder import RunFolder
from gems.runs.heartbeat import Heartbeat
from gems.utils.atomic_io import read_json
from tests.engine.toys import make_spec

LIMIT_S = 60


class Slow:
    """A source whose bytes come only once a test lets them, or not at all."""

    def __init__(self) -> None:
        self.may_write = threading.Event()
        self.taken: list[list[float]] = []
        self.is_full = False

    def take(self, losses: Sequence[float]) -> None:
        self.taken.append(list(losses))

    def host_tensors(self) -> dict[str, HostTensor]:
        assert self.may_write.wait(LIMIT_S)
        if self.is_full:
            raise OSError(errno.ENOSPC, "No space left on device", "rank0000.safetensors.partial")
        return {"x": HostTensor("U8", (1,), memoryview(bytes([len(self.taken)])))}


class Rig:
    """A saver of a run of 100 steps, and its step loop."""

    def __init__(self, path: Path, step: int = 0, stop=None, **train) -> None:
        spec = make_spec(train__steps=100, train__keep_checkpoints=2)
        self.folder, self.source, self.step = RunFolder(path), Slow(), step
        about = Manifest(step, 1, step * 8, "", run_identity(spec), {}, {})
        self.saver = Saver(
            self.folder, replace(spec.train, **train), Transport(world()), about, Heartbeat(path / "beat"),
            self.source, stop,
        )  # fmt: skip

    def run(self, steps: int) -> bool:
        """Run steps; gives whether the last one was where the run stops."""
        stops = False
        for _ in range(steps):
            self.saver.begin()
            self.step += 1
            stops = self.saver.end(self.step, [0.5] * self.step)
        return stops

    @property
    def saved(self) -> list[int]:
        return [Manifest.read(folder).step for folder in checkpoint_folders(self.folder.checkpoints)]


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
    assert (found.step, found.attempt, [written.name for written in found.files]) == (3, 1, ["rank0000.safetensors"])
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


def test_a_full_disk_is_told_of_and_the_run_goes_on_while_a_checkpoint_stands(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rig = Rig(tmp_path, step=40, checkpoint_steps=5)
    rig.source.is_full = True
    rig.source.may_write.set()
    rig.run(5)
    rig.saver.finish()
    said = capsys.readouterr().err
    assert "before step 45 could not be saved (rank 0: No space left on device: rank0000" in said
    assert "the checkpoint of step 40 remains" in said and said.count("\n") == 1
    assert rig.saved == []


def test_a_full_disk_ends_a_run_that_has_no_checkpoint_and_one_that_is_to_stop(tmp_path: Path) -> None:
    rig = Rig(tmp_path / "none", checkpoint_steps=5)
    rig.source.is_full = True
    rig.source.may_write.set()
    rig.run(5)
    with pytest.raises(RankFailedError, match="before step 5 could not be saved: rank 0: No space left"):
        rig.saver.finish()
    stopping = Rig(tmp_path / "stop", step=40, stop=Asked())
    stopping.source.is_full = True
    stopping.source.may_write.set()
    with pytest.raises(RankFailedError, match="was to stop, and its state before step 43 could not be saved"):
        stopping.run(3)
    assert not stopping.folder.stopped_json.exists()
