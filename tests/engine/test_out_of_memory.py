"""A rank out of memory tells what its allocator and its own count held, what was predicted, and what to change."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml

from gems.config.schema import MemoryConfig
from gems.data import open_dataset
from gems.engine.batch_loader import BatchLoader, ReadShare
from gems.engine.rank import Rank
from gems.engine.supervision.failure import report_failure
from gems.engine.supervision.out_of_memory import (
    NOTE,
    MemoryState,
    explain_out_of_memory,
    note_memory,
)
from gems.engine.supervision.recorder import Recorder
from gems.engine.transport.mpi import Comm
from gems.engine.transport.staging import ALLOCATOR_SETTINGS
from gems.launch.local_launcher import QUIET, mpiexec_argv, rank_environment, run_ranks
from gems.runs.failure_cause import FailureCause, classify_error
from gems.runs.folder import RunFolder
from gems.runs.prepare import prepare
from gems.utils.atomic_io import read_json
from gems.utils.units import GIB, MIB
from tests.helpers.device import DEVICE, NAME, ON_GPU
from tests.helpers.toys import make_spec, plan_of

HUGE = 10**14  # bytes that no machine gives
ASKED = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 15.00 GiB of"
    " which 512.00 MiB is free. Including non-PyTorch memory, this process has 14.50 GiB memory in"
    " use."
)


def full(allocated: int, reserved: int, fragments: int) -> torch.OutOfMemoryError:
    """Return an error at which a rank has noted what it held."""
    error = torch.OutOfMemoryError(ASKED)
    counted = {"weights": GIB, "optimizer state": 0, "activations": 9 * GIB, "messages": 512 * MIB}
    setattr(error, NOTE, MemoryState(counted, allocated, reserved, fragments))
    return error


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    """The folder of a run on two ranks whose peaks are predicted."""
    spec = make_spec(
        "1f1b", 2, 2, parallel__micro_batches=2, runs_dir=str(tmp_path), partition__name="exact"
    )
    return prepare(spec)


@pytest.mark.skipif(ON_GPU, reason="the numbers are those of a device that is made up")
def test_one_line_tells_both_views_the_prediction_and_what_to_change(folder, capfd):
    folder.write_boundaries((0, 3, 5), (11 * GIB, 13 * GIB))
    assert report_failure(folder, 3, full(11 * GIB, 14 * GIB, 256 * MIB)) == 4, (
        "rank 3 is the second of a replica"
    )
    (line,) = (line for line in capfd.readouterr().err.splitlines() if "ERROR failed" in line)
    views = (
        "2.000 GiB were asked for; torch's allocator has given out 11.000 GiB, and has 3.000 GiB"
        " more reserved (256.00 MiB in fragments); the rank counts 10.500 GiB: weights 1.000 GiB,"
        " activations 9.000 GiB, messages 512.00 MiB; the predicted peak is 13.000 GiB"
    )
    assert f"; {views}; to change: memory=plan with machine.device_bytes" in line
    assert (
        "parallel.micro_batch_size: fewer images at once, now 2" in line
        and "expandable" not in line
    )
    assert "parallel.strips: images in more strips of rows, now 1" in line
    record = read_json(folder.failed_json(3))["memory"]
    assert (record["text"], record["asked_bytes"], record["predicted_peak_bytes"]) == (
        views,
        2 * GIB,
        13 * GIB,
    )
    assert (record["allocated_bytes"], record["reserved_bytes"]) == (11 * GIB, 14 * GIB)
    assert record["counted_bytes"]["activations"] == 9 * GIB


def test_fragments_that_would_have_been_enough_are_the_reason(folder, monkeypatch):
    for name in ALLOCATOR_SETTINGS:
        monkeypatch.delenv(name, raising=False)
    told = explain_out_of_memory(full(9 * GIB, 14 * GIB, 3 * GIB), folder, 0)
    assert told is not None and "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True" in told.advice[0]
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    told = explain_out_of_memory(full(9 * GIB, 14 * GIB, 3 * GIB), folder, 0)
    assert told is not None and not any("expandable" in each for each in told.advice)


def test_a_policy_in_use_is_not_advised_again(tmp_path):
    memory = MemoryConfig("recompute")
    folder = prepare(
        make_spec("1f1b", 1, runs_dir=str(tmp_path), memory=memory, parallel__micro_batch_size=1)
    )
    told = explain_out_of_memory(torch.OutOfMemoryError(ASKED), folder, 0)
    assert (
        told is not None
        and told.advice[0] == "a smaller memory.limit_bytes, now under memory=recompute"
    )
    assert not any("micro_batch_size" in each for each in told.advice)
    assert told.predicted_peak_bytes, "of the policy's plan"
    assert "the rank was outside of a step" in told.describe()


@pytest.mark.parametrize(
    ("partitions", "changes"), [(1, {}), (2, {"partition__name": "exact", "train__compile": True})]
)
def test_without_a_profile_or_of_compiled_layers_no_peak_was_predicted(
    tmp_path, partitions, changes
):
    folder = prepare(make_spec("1f1b", partitions, runs_dir=str(tmp_path), **changes))
    told = explain_out_of_memory(torch.OutOfMemoryError("CUDA out of memory."), folder, 0)
    assert told is not None and (told.predicted_peak_bytes, told.asked_bytes) == (None, None)
    assert "no peak was predicted" in told.describe()


def test_a_folder_that_is_gone_leaves_what_the_rank_knows(tmp_path):
    told = explain_out_of_memory(full(GIB, 2 * GIB, 0), RunFolder(tmp_path / "gone"), 0)
    assert told is not None and "activations 9.000 GiB" in told.describe() and told.advice


def test_other_errors_have_no_such_line(tmp_path):
    error = ValueError("two words")
    note_memory(error, Recorder(None, DEVICE))
    assert not hasattr(error, NOTE) and explain_out_of_memory(error, RunFolder(tmp_path), 0) is None


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        (
            (
                "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate"
                " memory: you tried to allocate 4000 bytes. Error code 12 (Cannot allocate memory)"
            ),
            FailureCause.HOST_MEMORY,
        ),
        (
            "DefaultCPUAllocator: not enough memory: you tried to allocate 4000 bytes.",
            FailureCause.HOST_MEMORY,
        ),
        ("CUDA error: out of memory", FailureCause.DEVICE_MEMORY),
        ("mat1 and mat2 shapes cannot be multiplied", FailureCause.EXCEPTION),
    ],
)
def test_the_allocators_words_show_a_full_memory(text: str, cause: FailureCause):
    assert classify_error(RuntimeError(text)).cause is cause


def test_the_recorder_counts_by_kind():
    recorder = Recorder(None, None)
    activations = recorder.open_counter("activations")
    again = recorder.open_counter("activations")
    recorder.weights.count_bytes(10)
    recorder.optimizer.set_bytes(5)
    activations.count_bytes(3)
    again.count_bytes(4)
    recorder.count_bytes(2)
    assert recorder.memory.held_bytes == 24
    assert recorder.held_by_kind() == {
        "weights": 10,
        "optimizer state": 5,
        "activations": 7,
        "messages": 2,
    }


def test_a_step_notes_what_it_held_before_it_is_freed(comm: Comm, tmp_path):
    """The second forward asks for more than there is, while the activations of the first are held."""
    spec = make_spec("gpipe", 1, parallel__micro_batches=2)
    rank = Rank.open(plan_of(spec), comm, DEVICE)
    micro_batches = range(2)
    dataset = open_dataset(spec.data, spec.seed)
    loader = BatchLoader(spec, dataset, ReadShare(0, micro_batches, micro_batches), DEVICE)
    calls = []

    def fill(module: object, inputs: object) -> None:
        calls.append(module)
        if len(calls) == 2:
            torch.empty(HUGE, dtype=torch.uint8, device=DEVICE)

    rank.stages.modules[0, 0][-1].register_forward_pre_hook(fill)
    rank.stages.set_training(True)
    with pytest.raises(RuntimeError) as caught:
        rank.train.run(0, loader.batch(0))
    loader.close()
    told = explain_out_of_memory(caught.value, RunFolder(tmp_path), 0)
    assert told is not None and told.asked_bytes == HUGE and told.state.counted_bytes is not None
    held = told.state.counted_bytes
    (stage,) = rank.train.stages.values()
    assert held["activations"] == stage.stash_bytes and held["weights"] == stage.state_bytes
    assert held["samples"] > 0 and rank.train.activations.held_bytes == 0
    if ON_GPU:
        assert told.state.allocated_bytes is not None
        assert told.state.allocated_bytes >= held["activations"] + held["weights"]
    else:
        assert told.state.process_bytes is not None and told.state.process_bytes > sum(
            held.values()
        )


@pytest.mark.skipif(
    NAME != "fake_cuda", reason="needs a device whose allocator counts small blocks"
)
@pytest.mark.timeout(150)
def test_a_run_that_fills_its_device_tells_both_views(tmp_path):
    """The plan is made without a limit, and the device has two thirds of what was predicted."""
    spec = make_spec(
        "gpipe",
        2,
        runs_dir=str(tmp_path),
        parallel__micro_batches=8,
        data__height_px=64,
        data__width_px=64,
        partition__name="exact",
        train__evaluate=False,
    )
    folder = prepare(spec)
    peaks = [folder.predicted_peak_bytes(rank) for rank in range(2)]
    limit = 2 * min(peaks) // 3
    values = yaml.safe_load(folder.run_yaml.read_text())
    values["machine"]["device_bytes"] = limit
    folder.run_yaml.write_text(yaml.safe_dump(values))
    argv = mpiexec_argv(2, [sys.executable, "-m", "gems.engine.run", str(folder.path)])
    ended = run_ranks(argv, rank_environment(1), QUIET, 100)
    assert ended.returncode == 4, "\n".join(ended.tail)
    record = next(read_json(path) for path in sorted(folder.path.glob("FAILED.rank*.json")))
    memory = SimpleNamespace(**record["memory"])
    assert (
        record["kind"] == "OutOfMemoryError"
        and memory.predicted_peak_bytes == peaks[record["rank"]]
    )
    assert memory.limit_bytes == limit and 0 < memory.asked_bytes < limit
    assert (
        memory.allocated_bytes
        <= memory.reserved_bytes
        <= limit
        < memory.reserved_bytes + memory.asked_bytes
    )
    counted = memory.counted_bytes
    assert counted["activations"] > 0 and counted["weights"] > 0
    assert 0.5 * memory.allocated_bytes < sum(counted.values()) <= memory.allocated_bytes
    assert f"; {memory.text}; to change: memory=plan" in "\n".join(ended.tail)
