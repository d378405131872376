"""The emulated device on one rank: times, copies and bytes as in the simulation, to the nanosecond."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from dataclasses import replace
from itertools import pairwise

import pytest

from gems.engine.emulation.executor import (
    EmulatedChannels,
    EmulatedDevice,
    EmulatedExecutor,
    EmulatedSums,
)
from gems.engine.supervision.recorder import COMPUTE, COPY_IN, COPY_OUT, LINK, Recorder
from gems.engine.transport.mpi import Transport
from gems.engine.transport.polling import Waiter
from gems.errors import ScheduleError
from gems.schedule.action import COMPUTE_KINDS, COPY_KINDS, Action, Kind
from gems.schedule.costs import DepthCosts, StageCosts, uniform
from gems.schedule.placement import Placement, linear
from gems.schedule.schedule import Schedule
from gems.schedule.simulate import simulate
from gems.trace import COLUMNS, KINDS
from tests.helpers.rig import ListPart

NAMES = [name for name, *_ in COLUMNS["events"]]
UNIT_S = 0.0005
UNIT_NS = 500_000
UNIT_BYTES = 1000
STREAMS = {Kind.OFFLOAD: COPY_OUT, Kind.PREFETCH: COPY_IN}


class Device:
    """An emulated rank in a world of one, with its events."""

    def __init__(
        self, comm, schedule, costs: StageCosts, cap=None, boundary=0.0, peers=None, stage_bytes=0
    ):
        self.part = ListPart()
        recorder = Recorder(self.part)
        self.memory = recorder.memory
        transports = [Transport(comm, 20.0) for _ in range(2)]
        self.channels = EmulatedChannels(
            schedule, 0, (boundary,) * schedule.num_stages, transports, recorder
        )
        waiter = Waiter(self.channels.poll, 0.0001, 20.0)
        sizes = (stage_bytes,) * schedule.num_stages
        sums = None if peers is None else EmulatedSums(schedule, 0, peers, sizes, recorder)
        self.emulated = EmulatedExecutor(
            schedule,
            0,
            EmulatedDevice(costs.in_units(1 / UNIT_S, 1.0), UNIT_BYTES, cap),
            self.channels,
            waiter,
            sums,
        )

    def run(self, steps: int = 1) -> list[dict]:
        for step in range(steps):
            self.emulated.run(step)
        self.channels.close()
        rows = [dict(zip(NAMES, row, strict=True)) for row in self.part.rows]
        for row in rows:
            kind = Kind(KINDS[row["kind"]])
            row["action"] = Action(
                kind,
                row["stage"],
                None if row["micro_batch"] < 0 else row["micro_batch"],
                row["direction"],
            )
        return rows


def one_rank(text: str, num_micro_batches: int, num_stages: int = 1) -> Schedule:
    row = tuple(Action.parse(word) for word in text.split())
    placement = linear(1) if num_stages == 1 else Placement(1, ((0,) * num_stages,))
    return Schedule("test", num_micro_batches, placement, (row,), ("add_step",))


COSTS = replace(DepthCosts(1, 2.0, 3.0, 1.0, recompute=1.5, copy=2.5).stages(1), boundary=(0.25,))
ROWS = {
    "whole": ("0F0 0F1 0B0 0B1 0STEP", 2, None),
    "split": ("0F0 0F1 0I0 0I1 0W0 0W1 0STEP", 2, None),
    "recomputed": ("0F0 0F1 0R0 0B0 0R1 0I1 0W1 0STEP", 2, None),
    "copied": ("0F0 0OFFLOAD0 0F1 0PREFETCH0 0B1 0B0 0STEP", 2, None),
    "copied under a cap": (
        "0F0 0OFFLOAD0 0F1 0OFFLOAD1 0F2 0B2 0PREFETCH0 0I0 0PREFETCH1 0B1 0W0 0STEP",
        3,
        2.0,
    ),
    "one at a time": ("0F0 0OFFLOAD0 0F1 0B1 0PREFETCH0 0B0 0STEP", 2, 1.0),
}


@pytest.mark.parametrize(("text", "num", "cap"), ROWS.values(), ids=ROWS)
def test_times_are_those_of_the_simulation(comm, text, num, cap):
    """Planned ends stand for ends, so a host that wakes up late changes nothing where no message is waited for."""
    schedule = one_rank(text, num)
    simulated = simulate(schedule, COSTS, cap=cap)
    rows = Device(comm, schedule, COSTS, cap).run()
    base_ns = min(row["start_ns"] for row in rows)
    found = {row["action"]: (row["start_ns"] - base_ns, row["end_ns"] - base_ns) for row in rows}
    assert found.keys() == set(schedule.rank_schedules[0])
    for action, start, end in zip(
        schedule.rank_schedules[0], simulated.start[0], simulated.end[0], strict=True
    ):
        assert found[action] == pytest.approx((start * UNIT_NS, end * UNIT_NS), abs=20), action
    assert {row["action"]: row["stream"] for row in rows} == {
        action: STREAMS.get(action.kind, COMPUTE) for action in schedule.rank_schedules[0]
    }


@pytest.mark.parametrize(("text", "num", "cap"), ROWS.values(), ids=ROWS)
def test_bytes_are_those_of_the_ledger(comm, text, num, cap):
    schedule = one_rank(text, num)
    device = Device(comm, schedule, COSTS, cap)
    rows = device.run()
    assert device.memory.held_bytes == 0
    held = {row["action"]: row["device_bytes"] for row in rows}
    assert max(held.values()) <= simulate(schedule, COSTS, cap=cap).peak[0] * UNIT_BYTES
    assert held[Action(Kind.STEP, 0)] == 0
    first = 250 if "R" in {KINDS[row["kind"]] for row in rows} else 1000
    assert held[Action(Kind.F, 0, 0)] == first
    on_host = {row["action"]: row["host_bytes"] for row in rows}
    assert max(on_host.values()) == {None: 1000, 2.0: 2000, 1.0: 1000}[cap] * ("OFFLOAD" in text)
    assert on_host[Action(Kind.STEP, 0)] == 0
    assert all(
        row["moved_bytes"] == (1000 if row["action"].kind in COPY_KINDS else 0) for row in rows
    )


def test_steps_repeat(comm):
    schedule = one_rank(*ROWS["copied under a cap"][:2])
    rows = Device(comm, schedule, COSTS, 2.0).run(steps=3)
    by_step = defaultdict(dict)
    for row in rows:
        by_step[row["step"]][row["action"]] = row["end_ns"] - row["start_ns"], row["device_bytes"]
    assert by_step[0] == by_step[1] == by_step[2] and len(by_step) == 3


def test_no_room_is_an_error_that_names_the_action(comm):
    device = Device(comm, one_rank("0F0 0F1 0B0 0B1", 2), COSTS, cap=1.0)
    with pytest.raises(ScheduleError, match=r"action 0F1: .*above the cap"):
        device.run()


class Peers:
    """Another replica that joins each sum when it is waited for."""

    size = 2

    def __init__(self) -> None:
        self.posted: list[int] = []
        self.met_ns: list[int] = []

    def post_sum(self, gradients):
        self.posted.append(len(gradients))
        return self

    def Test(self) -> bool:
        return bool(self.met_ns)

    def wait_sum(self, request) -> None:
        self.barrier()

    def barrier(self) -> None:
        self.met_ns.append(time.perf_counter_ns())


@pytest.mark.parametrize("stage_bytes", [0, 4000])
def test_the_reduction_takes_what_the_peers_take(comm, stage_bytes):
    schedule = replace(one_rank("0F0 0B0 0REDUCE_GRAD 0STEP", 1), passes=("add_reduce", "add_step"))
    peers = Peers()
    rows = Device(comm, schedule, COSTS, peers=peers, stage_bytes=stage_bytes).run()
    forward, backward, reduce, step = rows
    assert len(peers.met_ns) == 1 and peers.posted == ([1000] if stage_bytes else [])
    assert (
        backward["end_ns"]
        == reduce["start_ns"]
        <= peers.met_ns[0]
        <= reduce["end_ns"]
        == step["start_ns"]
    )
    assert forward["end_ns"] == backward["start_ns"]


def test_a_sum_that_is_started_goes_on_beside_compute(comm):
    text = "0F0 1F0 1B0 1START_REDUCE 0B0 0REDUCE_GRAD 0STEP"
    schedule = replace(one_rank(text, 1, num_stages=2), passes=("add_reduce", "add_step"))
    peers = Peers()
    rows = Device(comm, schedule, uniform(1, 2), peers=peers, stage_bytes=4000).run()
    (started,) = (row for row in rows if row["action"].kind is Kind.START_REDUCE)
    backward, last, reduce = (
        next(row for row in rows if str(row["action"]) == name)
        for name in ("1B0", "0B0", "0REDUCE_GRAD")
    )
    assert (
        peers.posted == [1000, 1000]
        and started["moved_bytes"] == 4000
        and started["stream"] == LINK
    )
    assert last["start_ns"] == backward["end_ns"] <= started["start_ns"] < last["end_ns"]
    assert last["end_ns"] <= started["end_ns"] <= reduce["end_ns"]


def messages_to_itself() -> Schedule:
    """Two stages on one rank with transfers between them, as if they were on two."""
    text = (
        "0F0 1RECV_F0 0SEND_F0 0F1 1RECV_F1 0SEND_F1 1F0 0RECV_B0 1B0 1SEND_B0 1F1 0RECV_B1 1B1"
        " 1SEND_B1 0B0 0B1"
    )
    return one_rank(text, 2, num_stages=2)


def as_if_apart(monkeypatch, schedule: Schedule) -> None:
    """Make dependencies name receives, which between stages on one rank they do not."""
    from gems.engine.emulation import executor as emulated
    from gems.schedule.dependencies import dependencies

    def through_messages(action: Action, of: Schedule) -> tuple[Action, ...]:
        receive = {Kind.F: (1, Kind.RECV_F), Kind.B: (0, Kind.RECV_B)}.get(action.kind)
        if receive is None or action.stage != receive[0]:
            return dependencies(action, of)
        return (Action(receive[1], action.stage, action.micro_batch),)

    monkeypatch.setattr(emulated, "dependencies", through_messages)


def test_messages_have_their_size_and_their_data_is_waited_for(comm, monkeypatch):
    schedule = messages_to_itself()
    as_if_apart(monkeypatch, schedule)
    device = Device(comm, schedule, uniform(1, 2), boundary=4096.0)
    rows = device.run(steps=2)
    assert device.memory.held_bytes == 0
    assert Counter(row["moved_bytes"] for row in rows if row["stream"] == LINK) == {4096: 16}
    for step in (0, 1):
        of = {row["action"]: row for row in rows if row["step"] == step}
        for m in (0, 1):
            send = of[Action(Kind.SEND_F, 0, m)]
            receive = of[Action(Kind.RECV_F, 1, m)]
            assert of[Action(Kind.F, 0, m)]["end_ns"] <= send["start_ns"] <= receive["end_ns"]
            assert receive["end_ns"] <= of[Action(Kind.F, 1, m)]["start_ns"]
            assert of[Action(Kind.RECV_B, 0, m)]["end_ns"] <= of[Action(Kind.B, 0, m)]["start_ns"]
        computes = [
            row for row in rows if row["step"] == step and row["action"].kind in COMPUTE_KINDS
        ]
        assert [row["action"] for row in computes] == [
            a for a in schedule.rank_schedules[0] if a.kind in COMPUTE_KINDS
        ]
        for earlier, later in pairwise(computes):
            assert earlier["end_ns"] <= later["start_ns"]


def test_receive_buffers_are_used_again_once_they_are_read(comm, monkeypatch):
    schedule = messages_to_itself()
    as_if_apart(monkeypatch, schedule)
    made = []
    transports = [Transport(comm, 20.0) for _ in range(2)]
    original = Transport.persistent_receive

    def persistent_receive(self, data, rank, tag):
        made.append(data.ctypes.data)
        return original(self, data, rank, tag)

    monkeypatch.setattr(Transport, "persistent_receive", persistent_receive)
    channels = EmulatedChannels(schedule, 0, (64.0, 64.0), transports, Recorder(None))
    assert len(made) == 4 and len(set(made)) == 2
    channels.close()
