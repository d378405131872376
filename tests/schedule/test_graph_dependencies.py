"""Stages that form a graph: needs, transfers, validation, JSON and the time of a diamond."""

from __future__ import annotations

import itertools
import json
import random
from dataclasses import replace

import pytest

from gems.errors import ScheduleError
from gems.schedule.action import Action, Kind
from gems.schedule.costs import Network, StageCosts
from gems.schedule.dependencies import (
    boundary_of,
    dependencies,
    other_stage,
    partner_of,
    sender_of,
    transfers_after,
)
from gems.schedule.families.given_placement import forward_only, placed
from gems.schedule.formats.schedule_json import from_json, to_json
from gems.schedule.lower import compute_only, lower
from gems.schedule.memory import memory_over_time
from gems.schedule.placement import Placement
from gems.schedule.schedule import Schedule
from gems.schedule.simulate import simulate
from gems.schedule.validate import validate

# 0 is read by 1, 2 and 3, of which 2 and 3 lie on another rank; 4 reads all three
PREDECESSORS = ((), (0,), (0,), (0,), (1, 2, 3))
RANKS = ((0, 0, 1, 1, 0),)


def diamond(num_micro_batches: int = 1) -> Schedule:
    placement = Placement(2, RANKS, PREDECESSORS)
    return placed(placement, num_micro_batches, range(5), range(4, -1, -1))


def actions(*texts: str) -> tuple[Action, ...]:
    return tuple(map(Action.parse, texts))


def random_placement(seed: int, num_stages: int, num_ranks: int) -> Placement:
    rng = random.Random(seed)
    predecessors: list[set[int]] = [
        set(),
        *({rng.randrange(stage)} for stage in range(1, num_stages)),
    ]
    for stage in range(2, num_stages):
        predecessors[stage] |= {u for u in range(stage) if rng.random() < 0.2}
    for stage in range(num_stages - 1):
        if not any(stage in some for some in predecessors):
            predecessors[num_stages - 1].add(stage)
    ranks = [*range(num_ranks), *(rng.randrange(num_ranks) for _ in range(num_stages - num_ranks))]
    rng.shuffle(ranks)
    return Placement(
        num_ranks, (tuple(ranks),), tuple(tuple(sorted(some)) for some in predecessors)
    )


def test_what_each_action_needs() -> None:
    lowered = lower(diamond())
    for action, needs in {
        "2F0": ["2.0RECV_F0"],
        "3F0": ["2.0RECV_F0"],
        "1F0": ["0F0"],
        "2.0RECV_F0": ["0.2SEND_F0"],
        "0.2SEND_F0": ["0F0"],
        "4F0": ["1F0", "4.2RECV_F0", "4RECV_F0"],
        "0B0": ["0F0", "1B0", "0.2RECV_B0", "0.3RECV_B0"],
        "3B0": ["3F0", "3RECV_B0"],
        "0.3RECV_B0": ["3.0SEND_B0"],
        "3.0SEND_B0": ["3B0"],
        "4B0": ["4F0"],
    }.items():
        assert dependencies(Action.parse(action), lowered) == actions(*needs), action


def test_an_output_goes_once_to_a_rank_and_each_gradient_comes_back() -> None:
    sends = [transfers_after(action, diamond()) for action in actions("0F0", "4B0", "2B0", "1F0")]
    assert [[str(send) for send, _, _ in some] for some in sends] == [
        ["0.2SEND_F0"],
        ["4.2SEND_B0", "4SEND_B0"],
        ["2.0SEND_B0"],
        [],
    ]
    assert [[rank for _, _, rank in some] for some in sends] == [[1], [1, 1], [0], []]
    send = Action.parse("4.2SEND_B0")
    assert partner_of(send) == Action.parse("2.4RECV_B0") and partner_of(partner_of(send)) == send
    assert (boundary_of(send), sender_of(partner_of(send)), other_stage(send)) == (2, 4, 2)


@pytest.mark.parametrize("seed", range(12))
def test_any_graph_runs_in_any_order_that_its_edges_allow(seed: int) -> None:
    placement = random_placement(seed, 12, 1 + seed % 4)
    made = placed(placement, 3, range(12), range(11, -1, -1))
    lowered = validate(lower(made))
    assert compute_only(lowered).rank_schedules == made.rank_schedules
    validate(lower(forward_only(placement, 3)))
    assert from_json(json.loads(json.dumps(to_json(lowered)))) == lowered


def test_lowered_and_not_take_the_same_time() -> None:
    costs = StageCosts(
        (1.0,) * 5, (2.0,) * 5, (0.0,) * 5, (1.0,) * 5, boundary_bytes=(1.0, 2.0, 3.0, 4.0, 0.0)
    )
    network = Network(latency=0.5, per_byte=0.1)
    made = diamond()
    plain = simulate(made, costs, network)
    full = simulate(lower(made), costs, network)
    # 0F, message of 1 byte, 2F and 3F, message of 4 bytes, 4F; then back: 4B, message of 4 bytes,
    # 3B, 2B, of 1 byte, 0B
    forward = 1 + 0.6 + 2 + 0.9 + 1
    assert plain.span == pytest.approx(forward + 2 + 0.9 + 4 + 0.6 + 2)
    assert full.span == pytest.approx(plain.span)
    held = memory_over_time(lower(made), costs, full)[1].held
    assert (
        max(each.boundaries for each in held) > 0
        and held[-1].boundaries == held[-1].activations == 0
    )


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("2F0", "2F0: is missing"),
        ("0.2SEND_F0", "its data is never sent"),
        ("2.0RECV_F0", "is missing, the partner of 0.2SEND_F0"),
        ("3.0SEND_B0", "its data is never sent: 3.0SEND_B0 is missing"),
    ],
)
def test_what_is_taken_out_is_missed(text: str, expected: str) -> None:
    lowered = lower(diamond())
    gone = Action.parse(text)
    rows = tuple(
        tuple(action for action in row if action != gone) for row in lowered.rank_schedules
    )
    with pytest.raises(ScheduleError, match=expected):
        validate(replace(lowered, rank_schedules=rows))


def test_stages_of_a_graph_run_whole() -> None:
    made = diamond()
    split = tuple(
        a
        for action in made.rank_schedules[1]
        for a in ([action] if str(action) != "2B0" else actions("2I0", "2W0"))
    )
    validate(lower(replace(made, rank_schedules=(made.rank_schedules[0], split))))
    segment = tuple(
        Action.parse("2.0F0") if str(action) == "2F0" else action
        for action in made.rank_schedules[1]
    )
    with pytest.raises(ScheduleError, match="run whole"):
        validate(replace(made, rank_schedules=(made.rank_schedules[0], segment)))
    again = tuple(
        a
        for each in made.rank_schedules[1]
        for a in ([Action.parse("2R0")] * (str(each) == "2B0") + [each])
    )
    with pytest.raises(ScheduleError, match="keep what they save"):
        validate(replace(made, rank_schedules=(made.rank_schedules[0], again)))


def test_an_earlier_file_of_a_graph_is_read() -> None:
    lowered = lower(diamond())
    document = to_json(lowered)
    document["feeders"] = document.pop("predecessors")
    named = 0
    for words in itertools.chain.from_iterable(document["actions"]):
        if len(words) == 4 and "_" in words[0] and words[3] is not None:  # a neighbour, then named
            words.append(other_stage(Action(Kind(words[0]), words[1], words[3])))
            named += 1
    assert named and from_json(json.loads(json.dumps(document))) == lowered


@pytest.mark.parametrize(
    ("predecessors", "expected"),
    [
        (((), (0,)), "predecessors of 2 stages"),
        (((), (0,), ()), "stage 0 alone reads the data"),
        (((), (0,), (2,)), "must be lower stages, ascending"),
        (((), (0,), (1, 0)), "must be lower stages, ascending"),
        (((), (0,), (0,)), "the last stage alone makes the loss"),
    ],
)
def test_predecessors_that_are_no_such_graph_are_refused(
    predecessors: tuple[tuple[int, ...], ...], expected: str
) -> None:
    with pytest.raises(ValueError, match=expected):
        Placement(1, ((0, 0, 0),), predecessors)
