"""Emulated devices on four ranks: what happens before what, over real messages."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path

import pytest

from gems.engine.emulation.run import emulate
from gems.engine.transport.mpi import broadcast, meet
from gems.errors import ConfigError
from gems.runs.folder import RunFolder
from gems.runs.heartbeat import Heartbeat
from gems.runs.prepare import prepare
from gems.schedule.action import COMPUTE_KINDS, RECV_KINDS, Action, Kind
from gems.schedule.dependencies import dependencies
from gems.schedule.formats.schedule_json import to_json
from gems.trace import KINDS, part_path, read_part
from tests.helpers.toys import make_spec

PLAIN = ("layer_parallel", "1f1b", "gems_master", "chimera", "zb_h1", "zb_v", "interleaved_1f1b")


def run_on(comm, schedule: str, partitions: int, replicas: int = 1, spoil=None, **changes):
    """Run one configuration and gives its schedule and each rank's events of the last step by action; collective."""
    path = broadcast(comm, tempfile.mkdtemp() if comm.rank == 0 else None)
    options = {
        "machine__kind": "emulated",
        "cost__unit_s": 0.0005,
        "parallel__micro_batches": 8,
    } | changes
    spec = make_spec(schedule, partitions, replicas, runs_dir=path, **options)
    folder = prepare(spec) if comm.rank == 0 else RunFolder.of(spec)
    meet(comm)
    if spoil is not None:
        folder = spoil(folder)
    heartbeat = Heartbeat(folder.heartbeat(comm.rank))
    emulate(folder, comm, heartbeat)
    heartbeat.close()
    made = folder.read_schedule()
    meet(comm)
    return made, [events_of(folder.path, rank) for rank in range(comm.size)]


def events_of(path: Path, rank: int) -> dict[Action, dict[str, int]]:
    events = read_part(part_path(path, rank)).events
    last = events[events["step"] == events["step"].max()]
    return {
        Action(
            Kind(KINDS[row["kind"]]),
            int(row["stage"]),
            None if row["micro_batch"] < 0 else int(row["micro_batch"]),
            int(row["direction"]),
        ): {name: int(row[name]) for name in ("start_ns", "end_ns", "moved_bytes", "device_bytes")}
        for row in last
    }


@pytest.mark.parametrize("name", PLAIN)
def test_data_is_there_before_it_is_used(comm, name):
    """Clocks of one host are one clock, so times of different ranks may be compared as they are."""
    schedule, events = run_on(comm, name, 4, cost__boundary_bytes=100_000)
    for rank, action in schedule.actions():
        if action.kind is Kind.START_REDUCE:  # which with one replica sums nothing
            continue
        mine = events[rank][action]
        for need in dependencies(action, schedule):
            theirs = events[schedule.rank_of(need)][need]
            assert theirs["end_ns" if need.kind in COMPUTE_KINDS else "start_ns"] <= mine["end_ns"]
            if action.kind in COMPUTE_KINDS:
                assert theirs["end_ns"] <= mine["start_ns"], (rank, action, need)


def test_messages_take_the_time_of_the_links(comm):
    schedule, events = run_on(comm, "1f1b", 4, cost__link=2.0)
    seen = 0
    for rank, action in schedule.actions():
        receives = [need for need in dependencies(action, schedule) if action.kind in COMPUTE_KINDS]
        for send in (
            send
            for need in receives
            if need.kind in RECV_KINDS
            for send in dependencies(need, schedule)
        ):
            sent_ns = events[schedule.rank_of(send)][send]["start_ns"]
            assert events[rank][action]["start_ns"] >= sent_ns + 1_000_000, (rank, action)
            seen += 1
    assert seen == 2 * 3 * 8  # F and B over three links


@pytest.mark.parametrize("param_bytes", [0, 400_000])
def test_nobody_steps_before_all_copies_have_reduced(comm, param_bytes):
    schedule, events = run_on(comm, "gems_master", 2, 2, cost__param_bytes=param_bytes)
    reductions = [
        next(row for action, row in mine.items() if action.kind is Kind.REDUCE_GRAD)
        for mine in events
    ]
    for rank in range(comm.size):
        group = schedule.placement.reduce_group(rank % 2, 2)
        assert reductions[rank]["end_ns"] >= max(reductions[peer]["start_ns"] for peer in group)


def test_a_sum_starts_beside_compute_and_ends_with_the_reduction(comm):
    schedule, events = run_on(comm, "interleaved_1f1b", 2, 2, cost__param_bytes=400_000)
    for world_rank, mine in enumerate(events):
        row = schedule.rank_schedules[world_rank % 2]
        (started,) = (action for action in row if action.kind is Kind.START_REDUCE)
        (reduce,) = (action for action in row if action.kind is Kind.REDUCE_GRAD)
        after = row[row.index(started) + 1]
        assert mine[started]["moved_bytes"] == 200_000
        assert mine[started]["start_ns"] < mine[after]["end_ns"]
        assert mine[started]["end_ns"] <= mine[reduce]["end_ns"]


def test_a_rank_with_another_list_is_refused_everywhere(comm):
    def spoil(folder: RunFolder) -> RunFolder:
        if comm.rank != 2:
            return folder
        schedule = folder.read_schedule()
        rows = (schedule.rank_schedules[0][::-1], *schedule.rank_schedules[1:])
        return _Spoilt(folder.path, to_json(replace(schedule, rank_schedules=rows)))

    with pytest.raises(ConfigError, match="rank 2 has another schedule than rank 0"):
        run_on(comm, "1f1b", 4, spoil=spoil)


class _Spoilt(RunFolder):
    def __init__(self, path: Path, document: dict) -> None:
        super().__init__(path)
        object.__setattr__(self, "document", document)

    def read_schedule(self):
        from gems.schedule.formats.schedule_json import from_json

        return from_json(self.document)
