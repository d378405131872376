"""gems.schedule.simulate: links with levels and contention, copy engines, caps and rank-wide costs, by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gems.errors import ScheduleError
from gems.schedule import generate
from gems.schedule.action import Action
from gems.schedule.costs import Network, StageCosts
from gems.schedule.lower import lower
from gems.schedule.placement import Placement, linear
from gems.schedule.schedule import Schedule
from gems.schedule.simulate import Simulation, simulate
from gems.schedule.validate import validate
from tests.helpers.drawings import with_rows

Times = dict[str, tuple[float, float]]


def times_of(schedule: Schedule, played: Simulation) -> Times:
    """Return (start, end) by the action's words."""
    return {
        str(action): (start, end)
        for row, starts, ends in zip(schedule.rank_schedules, played.start, played.end, strict=True)
        for action, start, end in zip(row, starts, ends, strict=True)
    }


def costs_of(num_stages: int, boundary_bytes: float = 0.0, **more: tuple[float, ...]) -> StageCosts:
    one = (1.0,) * num_stages
    return StageCosts(one, one, one, one, boundary_bytes=(boundary_bytes,) * num_stages, **more)


def one_rank(row: str, num_micro_batches: int) -> Schedule:
    return with_rows(Schedule("one", num_micro_batches, linear(1), ((),)), [row])


def test_a_link_has_latency_and_a_rate() -> None:
    """F 1, message 0.5 + 8 x 0.25 = 2.5 each way, so F there at 3.5, B there until 6.5, back at 9, B until 11."""
    network = Network(latency=0.5, per_byte=0.25)
    for schedule in (generate("gpipe", 2, 1), lower(generate("gpipe", 2, 1))):
        played = simulate(schedule, costs_of(2, 8.0), network)
        times = times_of(schedule, played)
        assert (times["1F0"], times["1B0"], times["0B0"]) == ((3.5, 4.5), (4.5, 6.5), (9.0, 11.0))
        assert played.span == 11.0


@pytest.mark.parametrize(("first_rank", "slow"), [(0, (1,)), (1, (0, 2))])
def test_ranks_of_one_node_have_links_of_their_own(first_rank: int, slow: tuple[int, ...]) -> None:
    """4 ranks, 2 a node: the hop between ranks 1 and 2 leaves the node, and one rank further on those at the ends."""
    network = Network(
        latency=5.0,
        per_byte=1.0,
        ranks_per_node=2,
        node_latency=0.25,
        node_per_byte=0.5,
        first_rank=first_rank,
    )
    schedule = generate("layer_parallel", 4, 1)
    times = times_of(schedule, simulate(schedule, costs_of(4, 2.0), network))
    for stage in range(3):
        hop = 7.0 if stage in slow else 1.25
        assert times[f"{stage + 1}F0"][0] - times[f"{stage}F0"][1] == hop
        assert times[f"{stage}B0"][0] - times[f"{stage + 1}B0"][1] == hop


def fan(rows: list[str], num_stages: int, ranks: tuple[int, ...], num_ranks: int) -> Schedule:
    """Build a forward-only list of lowered rows."""
    bare = Schedule(
        "fan", 2, Placement(num_ranks, (ranks,)), ((),) * num_ranks, ("add_transfers",), True
    )
    assert num_stages == len(ranks)
    return with_rows(bare, rows)


@pytest.mark.parametrize(("has_contention", "arrivals"), [(False, (5.0, 6.0)), (True, (5.0, 9.0))])
def test_messages_of_a_rank_pass_one_at_a_time(
    has_contention: bool, arrivals: tuple[float, float]
) -> None:
    """Sent at 1 and 2, each 4 long on the wire: with contention the second waits until 5."""
    schedule = fan(["0F0 0SEND_F0 0F1 0SEND_F1", "1RECV_F0 1RECV_F1 1F0 1F1"], 2, (0, 1), 2)
    network = Network(per_byte=0.5, has_contention=has_contention)
    times = times_of(schedule, simulate(schedule, costs_of(2, 8.0), network))
    assert (times["0SEND_F0"][1], times["0SEND_F1"][1]) == arrivals
    assert (times["1F0"][0], times["1F1"][0]) == (5.0, arrivals[1])


def test_latency_is_not_a_load_on_the_way() -> None:
    """The wire is free again once the bytes are on it.

    Sent at 1 and 2, 1 on the wire, 10 under way.
    """
    schedule = fan(["0F0 0SEND_F0 0F1 0SEND_F1", "1RECV_F0 1RECV_F1 1F0 1F1"], 2, (0, 1), 2)
    times = times_of(
        schedule,
        simulate(
            schedule, costs_of(2, 2.0), Network(latency=10, per_byte=0.5, has_contention=True)
        ),
    )
    assert (times["0SEND_F0"][1], times["0SEND_F1"][1]) == (12.0, 13.0)


def test_both_directions_of_a_link_are_free_of_each_other() -> None:
    """A rank that receives while it sends is not slowed: 1F1B's neighbours exchange both ways."""
    made = lower(generate("1f1b", 2, 4))
    network = Network(per_byte=0.125)
    free, taken = (
        simulate(made, costs_of(2, 8.0), replace(network, has_contention=way))
        for way in (False, True)
    )
    assert free == taken


def test_incoming_messages_compete_too() -> None:
    """Ranks 0 and 2 send to rank 1 at 1, 4 on the wire each.

    The second comes in when the first is through.
    """
    schedule = with_rows(
        Schedule(
            "two", 2, Placement(3, ((0, 1, 0), (2, 1, 2))), ((), (), ()), ("add_transfers",), True
        ),
        ["0F0 0SEND_F0", "1RECV_F0 1RECV_F1/1 1F0 1F1/1", "0F1/1 0SEND_F1/1"],
    )
    times = times_of(
        schedule, simulate(schedule, costs_of(3, 8.0), Network(per_byte=0.5, has_contention=True))
    )
    assert sorted((times["0SEND_F0"][1], times["0SEND_F1/1"][1])) == [5.0, 9.0]


@pytest.mark.parametrize(("ranks_per_node", "arrivals"), [(None, [5.0, 5.0]), (2, [5.0, 9.0])])
def test_ranks_of_a_node_share_its_way_out(
    ranks_per_node: int | None, arrivals: list[float]
) -> None:
    """Ranks 0 and 1 each send to one of the ranks 2 and 3 at 1, 4 long.

    Through one link the second arrives at 9.
    """
    schedule = with_rows(
        Schedule("two", 2, Placement(4, ((0, 2), (1, 3))), ((),) * 4, ("add_transfers",), True),
        ["0F0 0SEND_F0", "0F1/1 0SEND_F1/1", "1RECV_F0 1F0", "1RECV_F1/1 1F1/1"],
    )
    network = Network(per_byte=0.5, has_contention=True, ranks_per_node=ranks_per_node)
    times = times_of(schedule, simulate(schedule, costs_of(2, 8.0), network))
    assert sorted((times["0SEND_F0"][1], times["0SEND_F1/1"][1])) == arrivals


def test_contention_never_makes_a_step_faster() -> None:
    for name in ("gpipe", "1f1b", "gems_master", "interleaved_1f1b", "chimera"):
        made = lower(generate(name, 4, 8, 2))
        costs = costs_of(made.num_stages, 4.0)
        network = Network(latency=0.1, per_byte=0.3)
        free, taken = (
            simulate(made, costs, replace(network, has_contention=way)).span
            for way in (False, True)
        )
        assert taken >= free


def test_reduction_and_step_cost_what_they_cost() -> None:
    """gpipe on 2 ranks: rank 1 ends at 4 and rank 0 at 6.

    Each reduces alone, 3 and 5 long, and steps 1 and 2 long.
    """
    made = lower(generate("gpipe", 2, 1))
    played = simulate(made, costs_of(2, reduce=(3.0, 5.0), step=(1.0, 2.0)))
    times = times_of(made, played)
    assert (times["0REDUCE_GRAD"], times["0STEP"]) == ((6.0, 9.0), (9.0, 10.0))
    assert (times["1REDUCE_GRAD"], times["1STEP"]) == ((4.0, 9.0), (9.0, 11.0))
    assert played.span == 11.0
    assert played.busy == (3.0, 3.0), "neither is useful compute"


def test_copies_run_beside_compute_and_one_at_a_time() -> None:
    """Two copies out of 3 each: the second begins when the first ends, and compute goes on.

    B waits for the way back.
    """
    made = one_rank("0F0 0OFFLOAD0 0F1 0OFFLOAD1 0PREFETCH1 0B1 0PREFETCH0 0B0", 2)
    played = simulate(validate(made), costs_of(1, copy=(3.0,)))
    times = times_of(made, played)
    assert (times["0F0"], times["0F1"]) == ((0, 1), (1, 2))
    assert (times["0OFFLOAD0"], times["0OFFLOAD1"]) == ((1, 4), (4, 7))
    assert (times["0PREFETCH1"], times["0B1"]) == ((7, 10), (10, 12))
    assert (times["0PREFETCH0"], times["0B0"]) == ((12, 15), (15, 17))
    assert played.peak == (2.0,)


def test_under_a_cap_a_forward_waits_for_room() -> None:
    """Room for one: F1 starts when the copy of F0's activations has left, at 4, and the copy back when B1 has ended."""
    made = one_rank("0F0 0OFFLOAD0 0F1 0B1 0PREFETCH0 0B0", 2)
    played = simulate(made, costs_of(1, copy=(3.0,)), cap=1.0)
    times = times_of(made, played)
    assert (times["0F1"], times["0B1"]) == ((4, 5), (5, 7))
    assert (times["0PREFETCH0"], times["0B0"]) == ((7, 10), (10, 12))
    assert played.peak == (1.0,)
    assert simulate(made, costs_of(1, copy=(3.0,))).span == 9.0, (
        "without a cap nothing waits for room"
    )


def test_room_that_never_comes() -> None:
    made = one_rank("0F0 0F1 0B0 0B1", 2)
    with pytest.raises(
        ScheduleError, match=r"rank 0, action 0F1: brings 1 to 1 held, above the cap of 1"
    ) as error:
        simulate(made, costs_of(1), cap=1.0)
    assert error.value.action == Action.parse("0F1")
    with pytest.raises(ScheduleError, match="0F0: brings 1 to 0 held, above the cap"):
        simulate(made, costs_of(1), cap=0.5)
    assert simulate(made, costs_of(1), cap=2.0).peak == (2.0,)


def test_recomputation_keeps_the_boundary_and_is_not_useful() -> None:
    """Three micro-batches that keep a quarter each until R brings the rest back, one at a time."""
    made = one_rank("0F0 0F1 0F2 0R0 0B0 0R1 0B1 0R2 0B2", 3)
    played = simulate(validate(made), costs_of(1, boundary=(0.25,), recompute=(0.5,)), cap=1.5)
    assert played.span == 3 * (1 + 0.5 + 2)
    assert played.busy == (9.0,)
    assert played.peak == (1.5,)
    assert played.efficiency == pytest.approx(9 / 10.5)


def test_what_is_held_between_the_two_halves_of_a_backward() -> None:
    """I lets go of all but what W needs: with 0.25 held, four forwards and inputs fit under 1.75.

    With 1 they do not.
    """
    made = one_rank("0F0 0I0 0F1 0I1 0F2 0I2 0F3 0I3 0W0 0W1 0W2 0W3", 4)
    assert simulate(validate(made), costs_of(1, held_for_weights=(0.25,)), cap=1.75).peak == (1.75,)
    assert simulate(made, costs_of(1)).peak == (4.0,)
    with pytest.raises(ScheduleError, match="0F1: brings 1 to 1 held"):
        simulate(made, costs_of(1), cap=1.75)


def test_receives_may_be_posted_in_any_order() -> None:
    """Rank 1 posts the second message's buffer first; each message finds its own."""
    schedule = fan(["0F0 0SEND_F0 0F1 0SEND_F1", "1RECV_F1 1RECV_F0 1F0 1F1"], 2, (0, 1), 2)
    times = times_of(schedule, simulate(schedule, costs_of(2), Network(latency=0.5)))
    assert (times["1F0"][0], times["1F1"][0]) == (1.5, 2.5)
