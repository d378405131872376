"""gems.schedule.edges: who sends to whom, and whether both sides keep one order."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gems.errors import ConfigError
from gems.schedule import Schedule, generate, published
from gems.schedule.action import Kind
from gems.schedule.costs import DepthCosts, Network
from gems.schedule.edges import Edge, check_message_order, edges_of
from gems.schedule.lower import lower
from gems.schedule.placement import bidirectional, linear, v
from gems.schedule.strips import with_strips


def test_edges_of_a_chain_of_ranks():
    assert edges_of(linear(3)) == [
        Edge(0, 1, False),
        Edge(1, 0, True),
        Edge(1, 2, False),
        Edge(2, 1, True),
    ]


def test_a_bidirectional_pipeline_has_both_ways_between_neighbours():
    both = [Edge(a, b, way) for a, b in ((0, 1), (1, 0)) for way in (False, True)]
    assert edges_of(bidirectional(2)) == sorted(both)


def test_stages_on_one_rank_have_no_edge_between_them():
    assert all(edge.source != edge.destination for edge in edges_of(v(4)))
    assert len(edges_of(v(4))) == 3 * 4


@pytest.mark.parametrize("name", published())
@pytest.mark.parametrize("num_ranks", [2, 3, 4, 8])
@pytest.mark.parametrize("link", [0.0, 3.0])
def test_published_schedules_keep_one_order_on_each_edge(name, num_ranks, link):
    try:
        made = generate(name, num_ranks, 2 * num_ranks)
    except ConfigError:
        pytest.skip("not for so many ranks")
    costs = DepthCosts(1).of(made.placement)
    network = Network(latency=link)
    check_message_order(lower(made, costs, network), "gloo")
    check_message_order(lower(with_strips(made, 3), None), "gloo")


@pytest.mark.parametrize("cap", [1.0, 1.25, 2.0])
@pytest.mark.parametrize("allow", [(), ("recompute", "offload")])
def test_lists_found_under_a_cap_keep_one_order(cap, allow):
    for strips in (1, 4):
        made = generate(
            "capped",
            4,
            8,
            cap=cap,
            allow=() if strips > 1 else allow,
            budget_s=0.3,
            num_strips=strips,
        )
        check_message_order(lower(made), "nccl")


def crossed(schedule: Schedule) -> Schedule:
    """Post the first two receives of rank 1 of a way in the other order."""
    row = list(schedule.rank_schedules[1])
    first, second = [place for place, action in enumerate(row) if action.kind is Kind.RECV_F][:2]
    row.insert(first, row.pop(second))
    return replace(
        schedule,
        rank_schedules=(schedule.rank_schedules[0], tuple(row), *schedule.rank_schedules[2:]),
    )


def test_another_order_on_either_side_is_refused_in_one_line():
    schedule = crossed(lower(generate("1f1b", 2, 4)))
    with pytest.raises(ConfigError) as refused:
        check_message_order(schedule, "gloo")
    assert (
        str(refused.value)
        == "machine.transport=gloo: matches messages by their order, and rank 1 of 1f1b posts"
        " 1RECV_F1 where rank 0 sends 0SEND_F0; use machine.transport=mpi or host"
    )
