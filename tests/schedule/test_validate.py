"""gems.schedule.validate: each broken schedule is refused by rank and action."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gems.errors import ScheduleError
from gems.schedule import generate
from gems.schedule.action import Kind
from gems.schedule.costs import uniform
from gems.schedule.ledger import peaks
from gems.schedule.lower import lower
from gems.schedule.placement import Placement, bidirectional, linear
from gems.schedule.schedule import Schedule
from gems.schedule.validate import validate
from tests.helpers.drawings import edited, text_of, with_rows

PLAIN = generate("gems_mast", 3, 2)
ONE_WAY = lower(generate("1f1b", 3, 3))
TWO_WAYS = lower(PLAIN)
LOOPED = lower(generate("interleaved_1f1b", 2, 2))
SPLIT = with_rows(
    Schedule("split", 2, linear(2), ((), ())),
    ["0F0 0F1 0I0 0W0 0I1 0W1", "1F0 1I0 1W0 1F1 1I1 1W1"],
)
MEMORY = with_rows(
    Schedule("memory", 2, linear(1), ((),)), ["0F0 0OFFLOAD0 0F1 0R1 0B1 0PREFETCH0 0B0"]
)
INPUTS = with_rows(
    Schedule("inputs", 1, linear(1), ((),)),
    ["0.0F0 0.1F0 0.1OFFLOAD0 0.1FREE0 0.1PREFETCH0 0.1R0 0.1B0 0.0B0"],
)

# what: (schedule, rank whose row is edited, old words, new words, rank and action in the error, its
# words)
BROKEN = {
    "missing receive": (
        ONE_WAY,
        1,
        "1RECV_F0 1RECV_F1",
        "1RECV_F1",
        1,
        "1RECV_F0",
        "is missing, the partner of 0SEND_F0 on rank 0",
    ),
    "missing send": (
        ONE_WAY,
        0,
        "0F0 0SEND_F0",
        "0F0",
        0,
        "0F0",
        "never sent: 0SEND_F0 is missing",
    ),
    "send before its compute": (
        ONE_WAY,
        0,
        "0F0 0SEND_F0",
        "0SEND_F0 0F0",
        0,
        "0SEND_F0",
        "comes before 0F0",
    ),
    "forward before its receive": (
        ONE_WAY,
        1,
        "1RECV_F0 1RECV_F1 1F0",
        "1RECV_F1 1F0 1RECV_F0",
        1,
        "1F0",
        "comes before 1RECV_F0",
    ),
    "backward before its receive": (
        ONE_WAY,
        0,
        "0RECV_B0 0F2 0SEND_F2 0RECV_B1 0B0",
        "0F2 0SEND_F2 0RECV_B1 0B0 0RECV_B0",
        0,
        "0B0",
        "comes before 0RECV_B0",
    ),
    "backward before forward": (
        ONE_WAY,
        2,
        "2F0 2RECV_F1 2B0",
        "2B0 2RECV_F1 2F0",
        2,
        "2B0",
        "comes before 2F0",
    ),
    "forwards out of order": (
        SPLIT,
        0,
        "0F0 0F1",
        "0F1 0F0",
        0,
        "0F0",
        "comes after 0F1, a later micro-batch",
    ),
    "on the wrong rank": (
        ONE_WAY,
        0,
        "0F0",
        "0F0 1F0",
        0,
        "1F0",
        "stage 1 in direction 0 is on rank 1",
    ),
    "twice": (ONE_WAY, 0, "0F1", "0F1 0F1", 0, "0F1", "twice"),
    "missing micro-batch": (PLAIN, 2, "0F1/1", "", 0, "0F1", "is missing"),
    "missing forward": (PLAIN, 1, "1F0", "", 1, "1F0", "is missing"),
    "missing backward": (ONE_WAY, 2, "2B1", "", 2, "2B1", "is missing"),
    "one stage in the other direction": (PLAIN, 1, "1F0", "1F0/1", 1, "1F0", "is missing"),
    "unknown stage": (ONE_WAY, 0, "0F0", "0F0 7F0", 0, "7F0", "no such stage"),
    "unknown micro-batch": (ONE_WAY, 1, "1F2", "1F9", 1, "1F9", "from 0 to 2"),
    "a segment that no policy made": (PLAIN, 0, "0F0", "0F0 0.1F0", 0, "0.1F0", "has no place"),
    "receive of data that nobody makes": (
        ONE_WAY,
        2,
        "2F2",
        "2RECV_B2 2F2",
        2,
        "2RECV_B2",
        "no rank makes or needs",
    ),
    "send of data that nobody needs": (
        ONE_WAY,
        0,
        "0B2",
        "0B2 0SEND_B2",
        0,
        "0SEND_B2",
        "no rank makes or needs",
    ),
    "transfer among compute only": (
        PLAIN,
        0,
        "0F0",
        "0F0 0SEND_F0",
        0,
        "0SEND_F0",
        "no rank makes or needs",
    ),
    "reduced before the last backward": (
        ONE_WAY,
        0,
        "0B2 0REDUCE_GRAD",
        "0REDUCE_GRAD 0B2",
        0,
        "0REDUCE_GRAD",
        "comes before 0B2",
    ),
    "reduction missing": (
        ONE_WAY,
        1,
        "1REDUCE_GRAD 1STEP",
        "1STEP",
        1,
        "1REDUCE_GRAD",
        "stands 0 times",
    ),
    "reduction twice": (
        ONE_WAY,
        1,
        "1REDUCE_GRAD",
        "1REDUCE_GRAD 1REDUCE_GRAD",
        1,
        "1REDUCE_GRAD",
        "stands 2 times",
    ),
    "reduction of another stage": (
        TWO_WAYS,
        2,
        "0REDUCE_GRAD",
        "2REDUCE_GRAD",
        2,
        "0REDUCE_GRAD",
        "must stand in the list 1 times",
    ),
    "step missing": (
        ONE_WAY,
        2,
        "2REDUCE_GRAD 2STEP",
        "2REDUCE_GRAD",
        2,
        "2STEP",
        "stands 0 times",
    ),
    "step before the reduction": (
        ONE_WAY,
        2,
        "2REDUCE_GRAD 2STEP",
        "2STEP 2REDUCE_GRAD",
        2,
        "2STEP",
        "comes before 2REDUCE_GRAD",
    ),
    "no weight gradient": (SPLIT, 1, "1W0 1F1", "1F1", 1, "1W0", "is missing"),
    "no input gradient": (SPLIT, 1, "1I0", "", 1, "1B0", "is missing"),
    "weight gradient first": (SPLIT, 0, "0I1 0W1", "0W1 0I1", 0, "0W1", "comes before 0I1"),
    "whole and split": (SPLIT, 1, "1I0", "1I0 1B0", 1, "1B0", "has no place"),
    "a half of a whole backward": (ONE_WAY, 2, "2B1", "2B1 2W1", 2, "2W1", "has no place"),
    "recomputed before the forward": (
        MEMORY,
        0,
        "0F1 0R1",
        "0R1 0F1",
        0,
        "0R1",
        "comes before 0F1",
    ),
    "never copied back": (MEMORY, 0, "0PREFETCH0", "", 0, "0PREFETCH0", "is missing"),
    "never copied out": (MEMORY, 0, "0OFFLOAD0", "", 0, "0OFFLOAD0", "is missing"),
    "copied back first": (
        MEMORY,
        0,
        "0F0 0OFFLOAD0 0F1",
        "0F0 0F1 0PREFETCH0 0OFFLOAD0",
        0,
        "0PREFETCH0",
        "twice",
    ),
    "copied and recomputed": (
        MEMORY,
        0,
        "0R1",
        "0R1 0OFFLOAD1 0PREFETCH1",
        0,
        "0OFFLOAD1",
        "has no place",
    ),
    "recomputed before its inputs are back": (
        INPUTS,
        0,
        "0.1PREFETCH0 0.1R0",
        "0.1R0 0.1PREFETCH0",
        0,
        "0.1R0",
        "comes before 0.1PREFETCH0",
    ),
    "deadlock": (
        ONE_WAY,
        0,
        "0F1 0SEND_F1 0RECV_B0 0F2 0SEND_F2 0RECV_B1 0B0",
        "0RECV_B0 0B0 0F1 0SEND_F1 0RECV_B1 0F2 0SEND_F2",
        0,
        "0B0",
        "waits for 0RECV_B0, which never comes",
    ),
    "started before its last backward": (
        LOOPED,
        0,
        "2B1 2SEND_B1 2START_REDUCE",
        "2START_REDUCE 2B1 2SEND_B1",
        0,
        "2START_REDUCE",
        "comes before 2B1",
    ),
    "started after the reduction": (
        LOOPED,
        0,
        "0REDUCE_GRAD",
        "0REDUCE_GRAD 0START_REDUCE",
        0,
        "0START_REDUCE",
        "comes after the reduction",
    ),
    "started twice": (
        LOOPED,
        0,
        "2START_REDUCE",
        "2START_REDUCE 2START_REDUCE",
        0,
        "2START_REDUCE",
        "that once",
    ),
    "started elsewhere": (
        LOOPED,
        0,
        "2START_REDUCE",
        "1START_REDUCE",
        0,
        "1START_REDUCE",
        "a stage of this rank",
    ),
    "started in two directions": (
        TWO_WAYS,
        0,
        "0REDUCE_GRAD",
        "0START_REDUCE 0REDUCE_GRAD",
        0,
        "0START_REDUCE",
        "in one direction",
    ),
    "deadlock at the reduction": (
        TWO_WAYS,
        0,
        "2B1/1 2SEND_B1/1 0REDUCE_GRAD",
        "2B1/1 0REDUCE_GRAD 2SEND_B1/1",
        0,
        "0REDUCE_GRAD",
        "waits for its peers",
    ),
}


@pytest.mark.parametrize("what", BROKEN)
def test_broken_schedules(what: str) -> None:
    schedule, rank, old, new, named_rank, named_action, words = BROKEN[what]
    assert validate(schedule) is schedule
    with pytest.raises(ScheduleError) as error:
        validate(edited(schedule, rank, old, new))
    assert (error.value.rank, str(error.value.action)) == (named_rank, named_action), error.value
    assert words in error.value.reason
    assert f"rank {named_rank}, action {named_action}: " in str(error.value)


@pytest.mark.parametrize(
    "made", [generate("gpipe", 4, 3), generate("1f1b", 4, 8), SPLIT, TWO_WAYS], ids=str
)
def test_a_cap_is_kept_or_refused(made: Schedule) -> None:
    """The largest peak is a cap that is kept.

    A hair less is not, and the rank with that peak is named.
    """
    costs = uniform(made.num_ranks, made.num_stages)
    held = peaks(made, costs)
    assert validate(made, costs, cap=max(held)) is made
    with pytest.raises(ScheduleError, match="above the cap of") as error:
        validate(made, costs, cap=max(held) - 0.01)
    assert held[error.value.rank] == max(held)


def test_collectives_come_in_the_same_order_on_all_peers() -> None:
    """Peers reduce once, behind all else.

    Whoever reduces out of turn is named, so that no two orders can meet.
    """
    made = lower(generate("gems_mast", 4, 4, 2))
    for rank in range(4):
        row = made.rank_schedules[rank]
        reduce = row[-2]
        last = max(i for i, action in enumerate(row) if action.kind is Kind.B)
        turned = (*row[:last], reduce, *row[last:-2], row[-1])
        with pytest.raises(ScheduleError, match="on which it rests") as error:
            validate(
                replace(
                    made,
                    rank_schedules=(
                        *made.rank_schedules[:rank],
                        turned,
                        *made.rank_schedules[rank + 1 :],
                    ),
                )
            )
        assert (error.value.rank, error.value.action) == (rank, reduce)


def test_a_circle_of_waiting_ranks_is_named_by_one_of_its_own() -> None:
    """Ranks 5 and 6 of 8 wait for each other, and all others for them."""
    made = generate("gpipe", 8, 2)
    texts = text_of(made)
    texts[5] = "5F0 5B0 5F1 5B1"
    with pytest.raises(ScheduleError, match="waits for 6B0, which never comes") as error:
        validate(with_rows(made, texts))
    assert (error.value.rank, str(error.value.action)) == (5, "5B0")


def test_a_micro_batch_that_runs_nowhere() -> None:
    without = [
        " ".join(word for word in text.split() if "1" not in word[1:]) for text in text_of(ONE_WAY)
    ]
    with pytest.raises(ScheduleError, match="rank 0, action 0F1: is missing"):
        validate(with_rows(ONE_WAY, without))


@pytest.mark.parametrize("which", [0, 1])
def test_a_micro_batch_in_both_directions(which: int) -> None:
    """Micro-batch 0 goes down, micro-batch 1 up; here one of them does both."""
    made = generate("gems_mast", 2, 2)
    other = {0: "/1", 1: ""}[which]
    texts = [
        f"{text} {1 - rank if not which else rank}F{which}{other}"
        f" {1 - rank if not which else rank}B{which}{other}"
        for rank, text in enumerate(text_of(made))
    ]
    with pytest.raises(ScheduleError, match="has no place in this step") as error:
        validate(with_rows(made, texts))
    assert error.value.action.micro_batch == which


def test_a_backward_in_a_forward_only_step() -> None:
    made = replace(generate("gpipe", 2, 1), forward_only=True)
    with pytest.raises(ScheduleError, match="0B0: has no place"):
        validate(made)


def test_a_rank_schedule_too_few() -> None:
    with pytest.raises(ScheduleError, match="2 rank schedules for 3 ranks"):
        validate(replace(ONE_WAY, rank_schedules=ONE_WAY.rank_schedules[:2]))


def test_a_rank_without_a_stage() -> None:
    with pytest.raises(ScheduleError, match="rank 1, action none: this rank holds no stage"):
        validate(Schedule("idle", 0, Placement(3, ((0, 2),)), ((), (), ())))


def test_peers_hold_the_same_stages() -> None:
    """Ranks that share one stage and not the others could not reduce in one go."""
    turned = Placement(3, ((0, 1, 2), (1, 2, 0)))
    with pytest.raises(ScheduleError, match=r"rank 1.*shares stage 0 with rank 0"):
        validate(Schedule("turned", 0, turned, ((), (), ())))
    validate(Schedule("mirrored", 0, bidirectional(3), ((), (), ())))


def test_the_passes_say_what_must_be_there() -> None:
    """The same rows are whole or not by the passes that they claim."""
    claims = replace(generate("gpipe", 2, 1), passes=("add_transfers",))
    with pytest.raises(ScheduleError, match="0F0: its data is never sent"):
        validate(claims)
    with pytest.raises(ScheduleError, match="must stand in the list 0 times"):
        validate(replace(ONE_WAY, passes=("add_transfers",)))
    with pytest.raises(ScheduleError, match="no rank makes or needs"):
        validate(replace(ONE_WAY, passes=("add_reduce", "add_step")))


def test_scale() -> None:
    """64 ranks x 256 micro-batches, about 100 000 actions."""
    lowered = validate(lower(generate("gems_master", 64, 256, 4)))
    assert sum(map(len, lowered.rank_schedules)) == 2 * 64 * 256 + 2 * 2 * 63 * 256 + 2 * 64
