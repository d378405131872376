"""The rank program under mpiexec.

Every way to fail ends all ranks, with a code, one line and a file.
"""

from __future__ import annotations

import os
import re
import signal
import struct
import subprocess
import sys
import threading
import time
import zlib
from pathlib import Path

import pytest
import yaml
from PIL import Image
from safetensors.torch import load_file

from gems.engine.checkpoint.manifest import checkpoint_folders
from gems.errors import ConfigError, RankFailedError, StalledError
from gems.launch.local_launcher import QUIET, Ended, mpiexec_argv, rank_environment, run_ranks
from gems.launch.mpich_cleanup import remove_stale_shared_memory
from gems.runs.folder import RunFolder
from gems.runs.heartbeat import Beat, read_beat
from gems.runs.prepare import prepare
from gems.trace import KINDS, part_path, read_part
from gems.utils.atomic_io import read_json
from tests.helpers.processes import python
from tests.helpers.toys import make_spec

pytestmark = pytest.mark.usefixtures("warm")

ROOT = Path(__file__).resolve().parents[2]
NUM_RANKS = 2
LIMIT_S = 100.0
RECORD = {
    "rank",
    "node",
    "pid",
    "step",
    "action",
    "stage",
    "cause",
    "cause_class",
    "kind",
    "errno",
    "traceback",
    "waits_for",
    "rss_bytes",
    "device_bytes",
    "device_reserved_bytes",
    "memory",
    "mpi",
    "exit_code",
    "utc",
}
NODE = os.uname().nodename


@pytest.fixture(scope="module", autouse=True)
def shared_memory():
    """Ranks that are killed leave MPICH's files behind."""
    yield
    remove_stale_shared_memory()


def make_folder(path: Path, **changes) -> RunFolder:
    options = {"data__height_px": 8, "data__width_px": 8, "train__evaluate": False} | changes
    return prepare(
        make_spec("1f1b", NUM_RANKS, runs_dir=str(path), parallel__micro_batches=2, **options)
    )


def launch(folder: RunFolder) -> Ended:
    argv = mpiexec_argv(NUM_RANKS, [sys.executable, "-m", "gems.engine.run", str(folder.path)])
    return run_ranks(argv, rank_environment(1), QUIET, LIMIT_S)


FAILED = re.compile(r"\[rank \d+\] ERROR failed ")


def lines_of(ended: Ended) -> list[str]:
    return [line for line in ended.tail if FAILED.match(line)]


def failure(folder: RunFolder, rank: int, exit_code: int) -> dict:
    record = read_json(folder.failed_json(rank))
    assert record.keys() == RECORD
    assert (record["rank"], record["node"], record["exit_code"]) == (rank, NODE, exit_code)
    return record


class Launched:
    """Ranks that run in the background, watched by their heartbeats."""

    def __init__(self, folder: RunFolder) -> None:
        self.folder = folder
        self.ended: Ended | None = None
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        self.ended = launch(self.folder)

    def beat(self, rank: int, step: int) -> Beat:
        """Wait until a rank is in `step` or beyond it."""
        deadline = time.monotonic() + LIMIT_S
        look = threading.Event()
        while time.monotonic() < deadline and self.ended is None:
            beat = read_beat(self.folder.heartbeat(rank))
            if beat is not None and beat.step >= step:
                return beat
            look.wait(0.002)
        raise AssertionError(f"rank {rank} never came to step {step}: {self.ended}")

    def wait(self) -> Ended:
        self._thread.join()
        assert self.ended is not None
        return self.ended


def broken_png(path: Path) -> None:
    """A PNG whose checksums are right and whose pixels cannot be decoded.

    Only who reads the image sees it.
    """
    Image.new("RGB", (16, 16)).save(path)
    data = path.read_bytes()
    at = data.index(b"IDAT")
    (length,) = struct.unpack(">I", data[at - 4 : at])
    chunk = b"IDAT" + bytes(reversed(data[at + 4 : at + 4 + length]))
    path.write_bytes(
        data[:at] + chunk + struct.pack(">I", zlib.crc32(chunk)) + data[at + 8 + length :]
    )


def image_folder(path: Path) -> Path:
    for name in ("one", "two"):
        (path / name).mkdir(parents=True)
        for number in range(6):
            Image.new("RGB", (16, 16), (40 * number, 90, 20)).save(path / name / f"{number}.png")
    return path


@pytest.mark.timeout(150)
def test_an_image_that_cannot_be_decoded_ends_all_ranks(tmp_path):
    """One rank reads images, and fails in the middle of the run.

    The other would wait for its data for ever.
    """
    path = image_folder(tmp_path / "images")
    folder = make_folder(
        tmp_path / "runs",
        data__name="folder",
        data__path=str(path),
        data__num_classes=2,
        data__train_samples=8,
        data__validation_samples=2,
        data__prefetch_steps=0,
        train__steps=50,
    )
    for name in ("one", "two"):
        broken_png(
            path / name / "3.png"
        )  # after the data were checked, which would have refused them
    ended = launch(folder)
    assert not ended.timed_out and ended.returncode == ConfigError.exit_code
    record = failure(folder, 0, ConfigError.exit_code)
    assert not folder.failed_json(1).exists()
    assert len(lines_of(ended)) == 1 and record["cause"] in lines_of(ended)[0]


@pytest.mark.timeout(150)
def test_a_failure_in_an_action_is_named(tmp_path):
    """Batch norm refuses one value a channel: here in the last feature map, on the last rank alone."""
    folder = make_folder(tmp_path)
    values = yaml.safe_load(folder.run_yaml.read_text())
    values["data"] |= {"height_px": 4, "width_px": 4}
    values["parallel"] |= {"micro_batch_size": 1}
    folder.run_yaml.write_text(yaml.safe_dump(values))
    ended = launch(folder)
    assert not ended.timed_out and ended.returncode == RankFailedError.exit_code
    record = failure(folder, 1, RankFailedError.exit_code)
    assert not folder.failed_json(0).exists()
    assert (record["step"], record["action"]) == (0, "1F0")
    assert record["cause"].startswith("ValueError: Expected more than 1 value per channel")
    assert lines_of(ended) == [
        f"[rank 1] ERROR failed on node {NODE} in step 0, action 1F0: {record['cause']}"
    ]
    assert any("Traceback" in text for text in ended.tail)


@pytest.mark.timeout(150)
def test_a_rank_that_waits_too_long_says_for_what(tmp_path):
    folder = make_folder(tmp_path, train__steps=1_000_000, train__hang_timeout_s=5.0)
    ranks = Launched(folder)
    stopped = ranks.beat(1, 3)
    os.kill(stopped.pid, signal.SIGSTOP)
    ended = ranks.wait()
    assert not ended.timed_out and ended.returncode == StalledError.exit_code
    record = failure(folder, 0, StalledError.exit_code)
    assert record["step"] >= 2 and re.fullmatch(r"rank 0 waited \d+ s for .+", record["cause"])
    (line,) = lines_of(ended)
    assert f"in step {record['step']}, action {record['action']}: rank 0 waited" in line
    hang = read_json(folder.stalled_json)
    assert (hang["rank"], hang["step"], hang["action"]) == (0, record["step"], record["action"])
    assert [(root["rank"], root["pid"], root["state"]) for root in hang["roots"]] == [
        (1, stopped.pid, "is silent")
    ]
    assert record["waits_for"] == hang["waits_for"] and "of rank 1, which is silent" in line
    assert "wait_until" in folder.stacks(0).read_text() and folder.stacks(1).read_text() == ""


@pytest.mark.timeout(150)
def test_a_killed_rank_leaves_all_parts_readable(tmp_path):
    folder = make_folder(tmp_path, train__steps=1_000_000)
    ranks = Launched(folder)
    beat = ranks.beat(1, 5)
    os.kill(beat.pid, signal.SIGKILL)
    ended = ranks.wait()
    assert not ended.timed_out and ended.returncode != 0
    last = read_beat(folder.heartbeat(1))
    assert last.pid == beat.pid and last.step >= 5, "the last mark outlives the rank"
    for rank in range(NUM_RANKS):
        part = read_part(part_path(folder.path, rank))
        steps = part.rank_steps["step"].tolist()
        # a rank writes a step before it marks the next; its peer may be one step behind it
        assert steps == list(range(len(steps))) and len(steps) >= last.step - (rank != 1)
        for step in steps:
            of_step = part.events[part.events["step"] == step]
            is_wait = of_step["kind"] == KINDS.index("INPUT")
            assert (~is_wait).sum() == 3 * 2 + 3 * 2 - 4 + 2
            # one rank waits for the images of the step, the other for the labels, before anything
            # else
            (wait,) = of_step[is_wait]
            assert (wait["stage"], wait["micro_batch"]) == (-1, -1)
            begin_ns = part.rank_steps["start_ns"][step]
            assert (
                begin_ns
                == wait["start_ns"]
                <= wait["end_ns"]
                <= of_step["start_ns"][~is_wait].min()
            )


def run_alone(folder: RunFolder, **environment: str) -> subprocess.CompletedProcess:
    """One rank without a launcher: a world of its own."""
    return python("-m", "gems.engine.run", str(folder.path), env=rank_environment(1) | environment)


@pytest.mark.timeout(150)
def test_another_number_of_ranks_is_refused(tmp_path):
    folder = make_folder(tmp_path)
    ended = run_alone(folder)
    assert ended.returncode == 2 and "Traceback" not in ended.stderr
    assert (
        failure(folder, 0, 2)["cause"]
        == "parallel=2 partitions x 1 replicas: needs 2 ranks and was started with 1; start 2 ranks"
    )


@pytest.mark.timeout(150)
def test_a_world_that_slurm_started_otherwise_is_refused(tmp_path):
    """The trap of a wrong `srun --mpi=`: N worlds of one rank each."""
    folder = make_folder(tmp_path)
    ended = run_alone(folder, SLURM_PROCID="1", SLURM_STEP_NUM_TASKS="2", SLURM_MPI_TYPE="none")
    assert ended.returncode == 2
    (line,) = [text for text in ended.stderr.splitlines() if FAILED.match(text)]
    assert "cluster.mpi=none: MPI sees a world of 1 and SLURM started 2 tasks" in line
    assert line.startswith(f"[rank 1] ERROR failed on node {NODE} before the first step (start): ")
    assert failure(folder, 1, 2)["step"] == -1


@pytest.mark.timeout(150)
def test_a_broken_run_yaml_is_refused(tmp_path):
    folder = make_folder(tmp_path)
    values = yaml.safe_load(folder.run_yaml.read_text())
    values["train"]["stepps"] = 3
    folder.run_yaml.write_text(yaml.safe_dump(values))
    ended = run_alone(folder)
    assert ended.returncode == 2 and "Traceback" not in ended.stderr
    assert failure(folder, 0, 2)["cause"].startswith("train.stepps=3: allowed: steps")


def test_a_run_needs_a_folder():
    ended = python("-m", "gems.engine.run")
    assert ended.returncode == 2 and "usage" in ended.stderr


@pytest.mark.parametrize(("schedule", "forwards_of_a_step"), [("1f1b", 2), ("gems_master", 1)])
def test_a_loss_that_is_not_finite_ends_the_run_with_a_finite_checkpoint(
    tmp_path, schedule, forwards_of_a_step
):
    spec = make_spec(
        schedule,
        NUM_RANKS,
        runs_dir=str(tmp_path),
        parallel__micro_batches=2,
        parallel__boundaries=[0, 2, 5],
        data__height_px=8,
        data__width_px=8,
        model__name="toy_fuse",
        model__width=6 * forwards_of_a_step,
        plugins=["tests.helpers.toys"],
        plugins_dir=str(ROOT),
        train__steps=9,
        train__checkpoint_steps=3,
    )
    folder = prepare(spec)
    ended = launch(folder)
    assert ended.returncode == RankFailedError.exit_code
    (line,) = lines_of(ended)
    rank = 1 if schedule == "1f1b" else int(re.search(r"at rank (\d)", line)[1])
    assert f"step 6 is not finite (gradient norm nan) at rank {rank}: the first output" in line
    assert "that is not finite is that of layer fuse" in line
    failure(folder, rank, RankFailedError.exit_code)
    newest = checkpoint_folders(folder.checkpoints)[0]
    assert newest.name[-2:] in (
        "03",
        "06",
    )  # that of step 6 is put off while a slow disk still writes the one before
    saved = [load_file(path) for path in newest.glob("*.safetensors")]
    assert all(bool(tensor.isfinite().all()) for shard in saved for tensor in shard.values())
    assert read_part(part_path(folder.path, 0)).rank_steps["step"].tolist() == list(range(6))
