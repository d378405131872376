"""All-reduces: closed forms of rings and trees, what a schedule hides of them, and links that nodes share."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gems.schedule import generate
from gems.schedule.action import Action, Kind
from gems.schedule.costs import Network, StageCosts, uniform
from gems.schedule.lower import lower
from gems.schedule.placement import bidirectional
from gems.schedule.replicas import all_reduce, hierarchical, ring, trees
from gems.schedule.simulate import Pace, simulate

FLAT = Network(latency=3.0, per_byte=0.5)
NODES = Network(latency=3.0, per_byte=0.5, ranks_per_node=4, node_latency=1.0, node_per_byte=0.1)
SHARED = replace(NODES, has_contention=True)


class TestClosedForms:
    @pytest.mark.parametrize("num", [2, 3, 8, 512])
    def test_a_ring(self, num: int) -> None:
        found = ring(FLAT, range(num), 1000.0)
        assert found.time == pytest.approx(2 * (num - 1) * 3 + 2 * (num - 1) / num * 500)
        assert found.link_time == pytest.approx(2 * (num - 1) / num * 500)

    def test_a_ring_in_a_node_uses_its_links_alone(self) -> None:
        found = all_reduce(NODES, (4, 5, 7), 600.0)
        assert (found.time, found.link_time) == (pytest.approx(2 * 2 * 1 + 2 * 2 / 3 * 60), 0.0)

    def test_two_levels(self) -> None:
        """4 ranks on each of 3 nodes.

        Each scatters a quarter, and 4 rings of 3 go between the nodes.
        """
        inside = 2 * 3 * (1 + 800 / 4 * 0.1)
        between = 2 * 2 * 3 + 2 * 2 / 3 * 800 * 0.5
        assert hierarchical(SHARED, range(12), 800.0).time == pytest.approx(inside + between)
        own = hierarchical(NODES, range(12), 800.0)
        assert own.time == pytest.approx(inside + 2 * 2 * 3 + 2 * 2 / 3 * 800 * 0.5 / 4)
        assert own.link_time == pytest.approx(2 * 2 / 3 * 800 * 0.5 / 4)

    def test_a_node_with_fewer_ranks_has_larger_parts(self) -> None:
        uneven = hierarchical(NODES, (0, 1, 2, 4), 600.0)
        assert uneven.time == pytest.approx(2 * 2 * (1 + 600 / 3 * 0.1) + 2 * 3 + 600 * 0.5)

    def test_one_rank_a_node_is_a_ring_of_nodes(self) -> None:
        group = (0, 4, 8)
        assert hierarchical(SHARED, group, 90.0).time == ring(SHARED, group, 90.0).time

    def test_trees_over_nodes(self) -> None:
        """4 ranks on each of 3 nodes.

        A chain of 3 links in a node, trees of 2 levels, and all bytes up and down.
        """
        depth = 2 * 3 * 1 + 2 * 2 * 3
        assert trees(SHARED, range(12), 800.0).time == pytest.approx(depth + 2 * 800 * 0.5)
        own = trees(NODES, range(12), 800.0)
        assert own.link_time == pytest.approx(2 * 800 * 0.5 / 4)
        assert own.time == pytest.approx(depth + 2 * 800 * 0.5 / 4)
        slow_inside = replace(NODES, node_per_byte=0.3)
        assert trees(slow_inside, range(12), 800.0).time == pytest.approx(depth + 2 * 800 * 0.3)
        assert trees(NODES, range(4), 800.0).time == pytest.approx(2 * 3 * 1 + 2 * 80)

    def test_the_fastest_one_is_taken(self) -> None:
        groups = {"trees": range(1024), "ring": range(64), "hierarchical": range(8)}
        sizes = {"trees": 1.0, "ring": 1e7, "hierarchical": 100.0}
        for name, group in groups.items():
            found = all_reduce(SHARED, group, sizes[name])
            assert found.algorithm == name
            assert found.time == min(
                form(SHARED, group, sizes[name]).time for form in (ring, hierarchical, trees)
            )

    def test_nobody_to_sum_with(self) -> None:
        assert all_reduce(NODES, (3,), 1e6).time == 0.0


def gems_costs(num_ranks: int, reduce: float, link: float = 0.0) -> StageCosts:
    pairs = tuple(reduce if stage < (num_ranks + 1) // 2 else 0.0 for stage in range(num_ranks))
    links = tuple(link if cost else 0.0 for cost in pairs)
    return replace(uniform(num_ranks, num_ranks), reduce=pairs, reduce_link=links)


class TestOverlap:
    @pytest.mark.parametrize("num_ranks", [4, 6, 8])
    @pytest.mark.parametrize("reduce", [0.0, 1.0, 3.0, 7.5])
    def test_a_pair_of_gems_is_final_before_the_end(self, num_ranks: int, reduce: float) -> None:
        """The last micro-batch ends on rank 0 or P-1, so pair {i, P-1-i} has i backward times to hide its sum."""
        made = lower(generate("gems_master", num_ranks, 4))
        b = 2.0
        alone = simulate(made, gems_costs(num_ranks, 0.0)).span
        exposed = max(max(0.0, reduce - i * b) for i in range(num_ranks // 2))
        assert simulate(made, gems_costs(num_ranks, reduce)).span == pytest.approx(alone + exposed)


class TestSharedLinks:
    def test_sums_of_one_node_pass_its_link_one_after_another(self) -> None:
        """P=4 on one node of 4, with replicas on others.

        Pair {1, 2} is final 2 before {0, 3} and fills the link for 5.
        """
        made = lower(generate("gems_master", 4, 2))
        alone = simulate(made, gems_costs(4, 0.0)).span
        costs = gems_costs(4, 6.0, 5.0)
        assert simulate(made, costs, replace(SHARED, node_latency=0.0)).span == pytest.approx(
            alone - 2 + 5 + 6
        )
        assert simulate(made, costs, replace(NODES, node_latency=0.0)).span == pytest.approx(
            alone + 6
        )

    def test_messages_out_of_a_node_share_its_link(self) -> None:
        """Ranks 1 and 2 of nodes of 2 exchange a forward and, in the other direction, a backward at the same time."""
        network = Network(per_byte=1.0, ranks_per_node=2, has_contention=True)
        assert network.lanes(0, 1) == (0, 1)
        assert network.lanes(1, 2) == (-1, -2) == network.lanes(0, 3)
        assert replace(network, first_rank=1).lanes(0, 1) == (-1, -2)
        assert replace(network, ranks_per_node=None).lanes(1, 2) == (1, 2)

    def test_the_placement_decides_which_nodes_a_sum_uses(self) -> None:
        assert bidirectional(8).peers_of(0) == (0, 7)
        made = lower(generate("gems_master", 8, 2))
        costs = gems_costs(8, 5.0, 5.0)
        network = replace(SHARED, latency=0.0, node_latency=0.0, per_byte=0.0, node_per_byte=0.0)
        alone = simulate(made, gems_costs(8, 0.0), network).span
        # All four pairs lie across the two nodes: the innermost is final 6 before the end, and each
        # takes 5.
        assert simulate(made, costs, network).span == pytest.approx(alone - 6 + 4 * 5)


class TestSlowRanks:
    def test_compute_takes_longer_and_useful_compute_does_not(self) -> None:
        made = lower(generate("1f1b", 1, 4))
        costs = uniform(1, 1)
        plain = simulate(made, costs)
        slow = simulate(made, costs, pace=Pace(slowdowns=(1.5,)))
        assert slow.span == pytest.approx(1.5 * plain.span)
        assert (slow.busy, slow.efficiency) == (plain.busy, pytest.approx(1 / 1.5))

    def test_a_reduction_waits_for_another_replica(self) -> None:
        made = lower(generate("gems_master", 4, 4))
        costs = gems_costs(4, 3.0)
        alone = simulate(made, costs)
        outer = Action(Kind.REDUCE_GRAD, 0)
        assert simulate(made, costs, pace=Pace(late={outer: alone.span + 7})).span == pytest.approx(
            alone.span + 10
        )
        assert simulate(made, costs, pace=Pace(late={outer: 0.0})).span == alone.span


class TestStartedSums:
    """Two stages on each of two ranks.

    The sum of the first to end runs beside the backwards of the other.
    """

    MADE = lower(generate("interleaved_1f1b", 2, 4))

    def test_a_sum_costs_what_sticks_out(self) -> None:
        costs = uniform(2, 4)
        alone = simulate(self.MADE, costs)
        row = self.MADE.rank_schedules[0]
        started = next(i for i, action in enumerate(row) if action.kind is Kind.START_REDUCE)
        left = alone.start[0][-2] - alone.start[0][started]
        assert row[started].stage == 2 and left > 1
        for sum_s, more in ((left, 0.0), (left + 3, 3.0)):
            early = simulate(self.MADE, replace(costs, reduce=(0.0, 0.0, sum_s, 0.0)))
            assert early.span == pytest.approx(alone.span + more)
            assert early.end[0][started] == pytest.approx(alone.start[0][started] + sum_s)

    def test_sums_of_a_rank_follow_each_other(self) -> None:
        costs = replace(uniform(2, 4), reduce=(2.0, 0.0, 50.0, 0.0))
        played = simulate(self.MADE, costs)
        started = next(
            i for i, a in enumerate(self.MADE.rank_schedules[0]) if a.kind is Kind.START_REDUCE
        )
        assert played.end[0][-1] == pytest.approx(played.start[0][started] + 52.0)

    def test_it_waits_for_another_replica(self) -> None:
        costs = replace(uniform(2, 4), reduce=(0.0, 0.0, 3.0, 0.0))
        late = simulate(self.MADE, costs, pace=Pace(late={Action(Kind.START_REDUCE, 2): 100.0}))
        assert late.span == pytest.approx(103.0)
