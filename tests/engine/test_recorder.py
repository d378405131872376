"""The recorder and the ledger; the GPU's part with stand-ins for its clock and stream."""

from __future__ import annotations

import pytest
import torch

from gems.autograd.storages import tensor_bytes
from gems.engine.supervision.recorder import COMPUTE, LINK, Recorder
from gems.schedule.action import Action, Kind
from gems.trace import COLUMNS, DTYPES, KINDS, TracePart, read_part, root_attributes
from tests.helpers.rig import ListPart

CPU = torch.device("cpu")
GPU = torch.device("cuda", 0)
NAMES = [name for name, *_ in COLUMNS["events"]]


def as_dicts(rows):
    return [dict(zip(NAMES, row, strict=True)) for row in rows]


def test_every_kind_of_action_has_a_code():
    assert set(KINDS) == {kind.value for kind in Kind} | {"INPUT"}


def test_tensor_bytes_count_a_storage_once():
    base = torch.zeros(10, dtype=torch.float64)
    assert (
        tensor_bytes([base, base[3:], base.view(2, 5), torch.zeros(3, dtype=torch.int32)])
        == 80 + 12
    )


def test_rows_name_the_action_and_what_was_held():
    part = ListPart(5)
    recorder = Recorder(part, CPU)
    recorder.begin_step(2)
    recorder.count_bytes(100)
    start = recorder.timestamp()
    recorder.compute(Action(Kind.B, 3, 1, 1, segment=4), start)
    recorder.count_bytes(-40)
    recorder.transfer(Action(Kind.SEND_B, 3, 1, 1), start, 640)
    recorder.compute(Action(Kind.STEP, 1), start)
    recorder.end_step()
    backward, link, step = as_dicts(part.rows)
    assert (link["rank"], link["step"], KINDS[link["kind"]], link["stream"]) == (
        5,
        2,
        "SEND_B",
        LINK,
    )
    assert (link["moved_bytes"], link["device_bytes"], link["segment"]) == (640, 60, -1)
    place = [backward[name] for name in ("stage", "segment", "direction", "micro_batch")]
    assert place == [3, 4, 1, 1]
    assert (backward["stream"], backward["device_bytes"], backward["moved_bytes"]) == (
        COMPUTE,
        100,
        0,
    )
    assert (KINDS[step["kind"]], step["micro_batch"]) == ("STEP", -1)
    assert start == backward["start_ns"] <= backward["end_ns"] <= step["end_ns"]


def test_what_a_broken_step_has_done_is_in_the_part_already():
    part = ListPart()
    recorder = Recorder(part, CPU)
    recorder.begin_step(0)
    start = recorder.timestamp()
    recorder.compute(Action(Kind.F, 0, 0), start)
    recorder.transfer(Action(Kind.SEND_F, 0, 0), start, 8)
    assert [KINDS[row["kind"]] for row in as_dicts(part.rows)] == ["F", "SEND_F"]


def test_waiting_for_input_is_of_a_step_or_of_a_forward():
    part = ListPart(5)
    recorder = Recorder(part, CPU)
    recorder.count_bytes(7)
    recorder.waited(3, 10, 20)
    recorder.waited(3, 20, 25, Action(Kind.F, 0, 6, 1))
    recorder.is_on = False
    recorder.waited(4, 30, 40)
    whole, single = as_dicts(part.rows)
    for row in (whole, single):
        assert (KINDS[row["kind"]], row["rank"], row["step"], row["device_bytes"]) == (
            "INPUT",
            5,
            3,
            7,
        )
    assert (whole["stage"], whole["micro_batch"], whole["start_ns"], whole["end_ns"]) == (
        -1,
        -1,
        10,
        20,
    )
    assert (single["stage"], single["direction"], single["micro_batch"]) == (0, 1, 6)


def test_rows_fit_the_trace_file(tmp_path):
    part = TracePart(tmp_path / "rank0000.h5", 0, root_attributes("measured", "x", 1))
    recorder = Recorder(part, CPU)
    recorder.begin_step(0)
    recorder.compute(Action(Kind.F, 0, 3), recorder.timestamp())
    recorder.end_step()
    part.close()
    events = read_part(tmp_path / "rank0000.h5").events
    assert events.dtype == DTYPES["events"] and events["micro_batch"].tolist() == [3]


def test_nothing_is_kept_while_it_is_off_or_without_a_file():
    part = ListPart()
    for recorder in (Recorder(part, CPU), Recorder(None, CPU)):
        recorder.is_on = False
        recorder.begin_step(0)
        recorder.compute(Action(Kind.F, 0, 0), recorder.timestamp())
        recorder.transfer(Action(Kind.SEND_F, 0, 0), recorder.timestamp(), 1)
        recorder.is_on = True
        recorder.end_step()
    assert part.rows == []


class FakeGpu:
    """A device whose work ends `lag_ms` behind the host; events are stamped on its own clock."""

    def __init__(self, monkeypatch) -> None:
        self.log: list[str] = []
        self.clock_ms = 0.0
        self.is_idle = False
        gpu = self

        class Compute:
            def query(self) -> bool:
                return gpu.is_idle

            def synchronize(self) -> None:
                gpu.log.append("stream synchronize")

        class Event:
            def __init__(self, enable_timing: bool) -> None:
                assert enable_timing

            def record(self, stream: object) -> None:
                assert isinstance(stream, Compute)
                gpu.log.append("event")
                self.ms = gpu.clock_ms

            def elapsed_time(self, later) -> float:
                assert gpu.log[-1] in ("synchronize", "read"), "read before the device was done"
                gpu.log.append("read")
                return later.ms - self.ms

        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(
            torch.cuda, "synchronize", lambda device: self.log.append("synchronize")
        )
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Compute())


def test_events_of_a_gpu_stand_on_the_host_s_clock(monkeypatch):
    gpu = FakeGpu(monkeypatch)
    part = ListPart()
    recorder = Recorder(part, GPU)
    gpu.clock_ms = 5000.0
    recorder.begin_step(0)
    assert gpu.log == ["stream synchronize", "event"], "the first stamp is of an idle device"
    base_ns = recorder._base[1]
    gpu.clock_ms = 5001.5
    recorder.count_bytes(111)
    start = recorder.timestamp()
    gpu.clock_ms = 5004.0
    recorder.compute(Action(Kind.F, 0, 0), start)
    recorder.count_bytes(111)
    recorder.transfer(Action(Kind.SEND_F, 0, 0), base_ns, 8)
    recorder.end_step()
    link, forward = as_dicts(part.rows)
    assert forward["start_ns"] - base_ns == 1_500_000 and forward["end_ns"] - base_ns == 4_000_000
    assert (forward["device_bytes"], link["device_bytes"]) == (111, 222)
    assert link["start_ns"] == base_ns <= link["end_ns"]
    gpu.log.clear()
    gpu.is_idle = True
    recorder.begin_step(1)
    assert gpu.log == ["event"], "an idle device needs no wait"


@pytest.mark.parametrize(("device", "count"), [(CPU, 0), (GPU, 1)], ids=["cpu", "cuda"])
def test_settle_waits_for_a_gpu_only(monkeypatch, device, count):
    gpu = FakeGpu(monkeypatch)
    Recorder(None, device).synchronize()
    assert gpu.log == ["synchronize"] * count
