"""What ranks hold, in counts, along their lists."""

from __future__ import annotations

import pytest

from gems.memory.model import HeldCounts, peak_snapshots
from gems.schedule import generate
from gems.schedule.action import Kind
from gems.schedule.costs import uniform
from gems.schedule.ledger import peaks
from gems.schedule.lower import lower
from gems.schedule.schedule import Schedule


def lowered(name: str, ranks: int, micro_batches: int, **more: int) -> Schedule:
    return lower(generate(name, ranks, micro_batches, **more))


def test_one_stage_alone_holds_its_images_and_one_stash() -> None:
    at_step, forward, backward = sorted(
        peak_snapshots(lowered("layer_parallel", 1, 3), 0),
        key=lambda m: (m.active is not None, m.kind != "F"),
    )
    held = (0, 0)
    assert (at_step.active, at_step.kind) == (None, Kind.STEP)
    assert forward.counts == ((held, HeldCounts(images=3)),)
    assert backward.counts == ((held, HeldCounts(images=3)),), (
        "the stash under backward is in the transient"
    )
    assert (forward.kind, backward.kind) == (Kind.F, Kind.B)


def test_1f1b_in_the_middle() -> None:
    snapshots = peak_snapshots(lowered("1f1b", 4, 8), 1)
    held = (0, 1)
    forwards = [dict(m.counts)[held] for m in snapshots if m.kind is Kind.F]
    backwards = [dict(m.counts)[held] for m in snapshots if m.kind is Kind.B]
    assert max(counts.stashes for counts in forwards) == 2, "P - r less the one that begins"
    assert max(counts.stashes for counts in backwards) == 2, "the third is under backward"
    assert max(counts.inputs for counts in (*forwards, *backwards)) == 4, "one more is posted ahead"
    assert all(counts.images == counts.weights == 0 for counts in forwards)


@pytest.mark.parametrize(
    ("name", "ranks", "micro_batches"),
    [
        ("1f1b", 4, 8),
        ("gpipe", 3, 5),
        ("gems_master", 4, 4),
        ("zb_h1", 4, 8),
        ("zb_v", 3, 6),
        ("chimera", 4, 8),
        ("interleaved_1f1b", 4, 8),
        ("gems_master", 3, 4),
        ("dualpipe_v", 2, 8),
    ],
)
def test_stashes_agree_with_the_ledger_of_the_schedule(
    name: str, ranks: int, micro_batches: int
) -> None:
    """In units where a stash weighs 1 and what is left for W the same: two counts of one list."""
    schedule = lowered(name, ranks, micro_batches)
    chunks = schedule.num_stages // ranks
    expected = [
        round(peak * chunks) for peak in peaks(schedule, uniform(ranks, schedule.num_stages))
    ]
    for rank in range(ranks):
        most = max(
            sum(counts.stashes + counts.weights for _, counts in snapshot.counts)
            + (snapshot.kind in (Kind.F, Kind.B, Kind.I))
            for snapshot in peak_snapshots(schedule, rank)
        )
        assert most == expected[rank]


def test_no_moment_covers_another() -> None:
    for rank in range(4):
        snapshots = peak_snapshots(lowered("zb_v", 4, 8), rank)
        for one in snapshots:
            alike = [
                m
                for m in snapshots
                if (m.active, m.kind) == (one.active, one.kind) and m is not one
            ]
            assert not any(one.covers(other) for other in alike)


def test_two_copies_of_the_middle_stage_are_two() -> None:
    counts, *_ = (snapshot.counts for snapshot in peak_snapshots(lowered("gems_master", 3, 4), 1))
    assert [held for held, _ in counts] == [(0, 1), (1, 1)]


def test_all_is_let_go() -> None:
    """After a step nothing is held but images: what is sent was gone, what was received is used up."""
    for name in ("1f1b", "zb_v", "gems_master", "interleaved_1f1b", "zb_h2"):
        schedule = lowered(name, 4, 8)
        for rank in range(4):
            (last,) = [m for m in peak_snapshots(schedule, rank) if m.active is None]
            for _, counts in last.counts:
                assert counts == HeldCounts(images=counts.images)
