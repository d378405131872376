"""Each wait, event and record of the engine is taken out in turn, and a race or a wrong number must show.

Run by test_fake_cuda.py, on the fake device.
"""

from __future__ import annotations

import linecache
import os
import sys
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from gems.autograd.mixed import Mixed
from gems.engine.device import Arrival
from gems.engine.offload.host_copies import CudaCopier
from gems.engine.stages.graphed_segment import SharedSlot
from gems.engine.supervision.recorder import Recorder
from tests.fake_cuda.load import native
from tests.fake_cuda.workloads import WORKLOADS, Numbers

SEEDS = range(1, 1 + int(os.environ.get("GEMS_FAKE_CUDA_SEEDS", "2")))


@dataclass(frozen=True)
class Mutant:
    """A call at one line of the engine that does nothing; `function` tells equal lines apart."""

    workload: str
    owner: Any
    method: str
    file: str
    line: str
    function: str

    def __str__(self) -> str:
        return f"{self.file}:{self.function}, {self.line} ({self.workload})"


COPIES = "offload/host_copies.py"
STORE = "offload/activation_store.py"
STATE = "checkpoint/state.py"
STAGING = "transport/staging.py"
RECORDER = "supervision/recorder.py"
DEVICE_PY = "engine/device.py"
LOADER = "engine/batch_loader.py"
GRAPHS = "stages/layer_graphs.py"
STRIPS = "stages/graphed_strips.py"
STORED_STRIPS = "stages/graphed_stored_strips.py"
INTERNALS = "autograd/torch_internals.py"
SUM = "optimization/gradient_sum.py"
MUTANTS = [
    Mutant(
        "offload", torch.cuda.Stream, "wait_stream", COPIES, "self._out.wait_stream(", "copy_out"
    ),
    Mutant("offload", torch.cuda.Event, "record", COPIES, "end.record(self._out)", "copy_out"),
    Mutant("offload", torch.cuda.Stream, "wait_stream", COPIES, "self._in.wait_stream(", "copy_in"),
    Mutant("offload", torch.cuda.Event, "record", COPIES, "end.record(self._in)", "copy_in"),
    Mutant("offload", torch.cuda.Stream, "wait_event", COPIES, ".wait_event(copy.end)", "wait"),
    Mutant("offload", CudaCopier, "wait", STORE, "self._copier.wait(copy)", "_free"),
    Mutant(
        "fetch_on_demand",
        CudaCopier,
        "wait",
        STORE,
        "self._copier.wait(saved.coming)",
        "_wait_for_copy_in",
    ),
    Mutant("broken_step", CudaCopier, "synchronize", STORE, "self._copier.synchronize()", "reset"),
    Mutant(
        "broken_step",
        torch.cuda.Stream,
        "synchronize",
        COPIES,
        "self._out.synchronize()",
        "synchronize",
    ),
    Mutant(
        "staged_messages",
        torch.cuda.Stream,
        "wait_stream",
        STAGING,
        "self._out.wait_stream(",
        "sending",
    ),
    Mutant(
        "staged_messages", torch.cuda.Stream, "record_event", STAGING, ".record_event()", "_now"
    ),
    Mutant(
        "staged_messages", torch.cuda.Stream, "wait_event", DEVICE_PY, "stream.wait_event(", "take"
    ),
    Mutant(
        "staged_messages", torch.Tensor, "record_stream", DEVICE_PY, "tensor.record_stream(", "take"
    ),
    Mutant(
        "staged_messages",
        torch.cuda.Stream,
        "record_event",
        DEVICE_PY,
        ".record_event()",
        "add_piece",
    ),
    Mutant(
        "loaded_images", torch.cuda.Stream, "record_event", DEVICE_PY, ".record_event()", "begin"
    ),
    Mutant("loaded_images", Arrival, "take", LOADER, "arrivals[m].take()", "<lambda>"),
    Mutant("offload", Arrival, "take", LOADER, "arrivals[m].take()", "<lambda>"),
    Mutant(
        "direct_messages", torch.cuda.Stream, "record_event", STAGING, ".record_event()", "_now"
    ),
    Mutant(
        "self_test",
        torch.cuda,
        "synchronize",
        STAGING,
        "torch.cuda.synchronize(device)",
        "_self_test",
    ),
    Mutant(
        "checkpoints",
        torch.cuda.Stream,
        "wait_stream",
        STATE,
        "self._stream.wait_stream(computing)",
        "begin",
    ),
    Mutant("checkpoints", torch.cuda.Stream, "wait_event", STATE, "computing.wait_event(", "begin"),
    Mutant(
        "checkpoints",
        torch.cuda.Stream,
        "record_event",
        STATE,
        "computing.wait_event(self._stream",
        "begin",
    ),
    Mutant(
        "checkpoints",
        torch.cuda.Stream,
        "record_event",
        STATE,
        "self._copied = self._stream",
        "begin",
    ),
    Mutant(
        "checkpoints",
        torch.cuda.Event,
        "synchronize",
        STATE,
        "self._copied.synchronize()",
        "host_tensors",
    ),
    Mutant(
        "checkpoints",
        torch.cuda.Stream,
        "wait_event",
        STATE,
        ".wait_event(self._copied)",
        "_wait_for_copies",
    ),
    Mutant(
        "reduced_gradients",
        torch.cuda.Stream,
        "wait_stream",
        SUM,
        "self._streams[0].wait_stream(",
        "start",
    ),
    Mutant(
        "reduced_gradients", torch.cuda.Event, "synchronize", SUM, "event.synchronize()", "post"
    ),
    Mutant(
        "reduced_gradients",
        torch.cuda.Stream,
        "wait_stream",
        SUM,
        ".wait_stream(self._streams[1])",
        "finish",
    ),
    Mutant("graphs", torch.Tensor, "copy_", GRAPHS, "statics[0].data.copy_(", "fill"),
    Mutant("graphs", Mixed, "refresh", GRAPHS, "mixed.refresh()", "forward"),
    Mutant("spilled_graphs", torch, "_foreach_copy_", INTERNALS, "_foreach_copy_(", "copy_all"),
    Mutant("spilled_graphs", CudaCopier, "wait", STORE, "self._copier.wait(copy)", "_free"),
    Mutant("graphs_of_strips", torch.Tensor, "copy_", STRIPS, "static.data.copy_(tensor)", "_put"),
    Mutant(
        "graphs_of_stored_strips", SharedSlot, "take", STORED_STRIPS, "self._slot.take()", "replay"
    ),
    Mutant("graphs", Arrival, "take", LOADER, "arrivals[m].take()", "<lambda>"),
    Mutant("recorded_times", Recorder, "synchronize", RECORDER, "self.synchronize()", "end_step"),
]
_wanted: dict[str, Numbers] = {}

pytestmark = pytest.mark.usefixtures("clean_device")


def take_out(monkeypatch: pytest.MonkeyPatch, mutant: Mutant) -> list[str]:
    """Make the call of a mutant do nothing, and return the list of the calls that were left out."""
    original = getattr(mutant.owner, mutant.method)
    left_out = []

    def call(*given: Any, **named: Any) -> Any:
        frame = sys._getframe(1)
        line = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
        is_here = (
            frame.f_code.co_filename.endswith(mutant.file)
            and frame.f_code.co_name == mutant.function
        )
        if not (is_here and mutant.line in line):
            return original(*given, **named)
        left_out.append(line)
        return torch.cuda.Event() if mutant.method == "record_event" else None

    monkeypatch.setattr(mutant.owner, mutant.method, call)
    return left_out


def run(workload: str, seed: int | None) -> Numbers:
    """Run a workload from the same random state, on a device that is late by a seed or not at all."""
    torch.manual_seed(1)
    native().set_late(seed is not None, seed or 0)
    try:
        return WORKLOADS[workload]()
    finally:
        native().set_late(False, 0)


def wanted(workload: str) -> Numbers:
    if workload not in _wanted:
        _wanted[workload] = run(workload, None)
        assert not native().races()
    return _wanted[workload]


def is_equal(found: Numbers, expected: Numbers) -> bool:
    return len(found) == len(expected) and all(map(torch.equal, found, expected))


@pytest.mark.parametrize("workload", WORKLOADS)
def test_the_engine_as_it_is_has_no_race_and_the_same_numbers_on_a_late_device(workload):
    expected = wanted(workload)
    for seed in SEEDS:
        assert is_equal(run(workload, seed), expected), f"seed {seed}"
    assert not native().races()


def shown_by(mutant: Mutant) -> list[str]:
    """Return how a mutant shows: as a race, and as the seeds of a late device with wrong numbers."""
    shown = []
    run(mutant.workload, None)
    if native().races():
        shown.append("race: " + native().races()[0])
    native().clear_races()
    for seed in SEEDS:
        try:
            is_right = is_equal(run(mutant.workload, seed), _wanted[mutant.workload])
        except Exception as error:
            shown.append(f"late {seed}: {error}")
        else:
            shown += [] if is_right else [f"late {seed}: wrong numbers"]
    return shown


@pytest.mark.parametrize("mutant", MUTANTS, ids=str)
def test_a_wait_that_is_taken_out_shows(mutant, monkeypatch, record_property):
    wanted(mutant.workload)
    left_out = take_out(monkeypatch, mutant)
    shown = shown_by(mutant)
    assert left_out, "the engine has no such call any more"
    record_property("shown", shown)
    print(f"{mutant}: {shown}")
    assert shown
