from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from gems.errors import ConfigError, DoesNotFitError
from gems.partition.dlplacer import cp_sat, milp
from gems.partition.dlplacer.devices import Devices, TimedPlacement
from gems.partition.dlplacer.heft import heft, timed_by_rank
from gems.partition.dlplacer.place import TOLERANCE, place
from gems.partition.dlplacer.subgraphs import (
    closed_form_s,
    cut_vertices,
    span_bound_s,
    split_at_cut_vertices,
)
from gems.profile.operator_graph import Op, OpGraph
from tests.helpers.op_graphs import best_span_s, branches, random_graph

TWO = Devices(2, 0.1, 0.2)
needs_solver = pytest.mark.skipif(not cp_sat.IS_INSTALLED, reason="needs OR-tools")
METHODS = [pytest.param("cp_sat", marks=needs_solver), "milp"]


def check(graph: OpGraph, devices: Devices, timed: TimedPlacement) -> None:
    """Holds that a placement can be: data before use, one thing at a time, and the limit."""
    end = [start + op.forward_s for start, op in zip(timed.forward_start_s, graph.ops, strict=True)]
    back = [
        start + op.backward_s for start, op in zip(timed.backward_start_s, graph.ops, strict=True)
    ]
    for u, v in graph.edges:
        crossing = timed.places[u] != timed.places[v]
        delay = devices.delay_s(graph.ops[u].output_bytes) if crossing else 0.0
        assert timed.forward_start_s[v] >= end[u] + delay - 1e-9
        assert timed.backward_start_s[u] >= back[v] + delay - 1e-9
    for starts, ends in ((timed.forward_start_s, end), (timed.backward_start_s, back)):
        for device in range(devices.num):
            spans = sorted(
                (start, stop)
                for start, stop, on in zip(starts, ends, timed.places, strict=True)
                if on == device
            )
            assert all(before[1] <= after[0] + 1e-9 for before, after in itertools.pairwise(spans))
    assert min(timed.backward_start_s) >= max(end) - 1e-9
    assert timed.span_s == pytest.approx(max(back))
    assert devices.fit(graph, timed.places)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("seed", range(6))
def test_the_answer_is_the_best_of_all(method: str, seed: int) -> None:
    graph = random_graph(seed, 6 if seed % 2 else 5)
    answer = place(graph, TWO, method=method)
    check(graph, TWO, answer.timed)
    assert answer.is_optimal
    assert answer.timed.span_s == pytest.approx(best_span_s(graph, TWO), rel=TOLERANCE)


@needs_solver
@pytest.mark.parametrize("seed", range(4))
def test_a_limit_on_bytes_is_kept_and_the_answer_is_the_best_that_keeps_it(seed: int) -> None:
    graph = random_graph(seed, 6, 0.5)
    devices = replace(TWO, limit_bytes=-(-graph.held_bytes // 2) + 1)
    expected = best_span_s(graph, devices)
    answer = place(graph, devices)
    check(graph, devices, answer.timed)
    assert answer.timed.span_s == pytest.approx(expected, rel=TOLERANCE)
    assert answer.is_optimal


@pytest.mark.parametrize("method", METHODS)
def test_pieces_keep_the_optimum(method: str) -> None:
    """Blocks of branches, cut at their ends, and random graphs tied one behind the other."""
    for seed in range(3):
        graph = branches(1, 1, blocks=2, seed=seed)
        assert len(split_at_cut_vertices(graph)) == 3
        answer = place(graph, TWO, method=method)
        assert answer.timed.span_s == pytest.approx(best_span_s(graph, TWO), rel=TOLERANCE)


def test_a_chain_falls_into_single_operators_and_gains_nothing() -> None:
    graph = OpGraph(
        tuple(Op(str(v), 1.0, 2.0, 5) for v in range(30)), tuple((v, v + 1) for v in range(29))
    )
    answer = place(graph, TWO)
    assert answer.num_pieces == 30
    assert answer.speed_up == 1.0
    assert answer.is_optimal


@pytest.mark.parametrize("seed", range(30))
def test_cut_vertices_are_those_that_all_ways_pass(seed: int) -> None:
    graph = random_graph(seed, 8, 0.35)
    ways: list[tuple[int, ...]] = []

    def walk(way: tuple[int, ...]) -> None:
        if not graph.successors[way[-1]]:
            ways.append(way)
        for w in graph.successors[way[-1]]:
            walk((*way, w))

    for v in range(graph.num_ops):
        if not graph.predecessors[v]:
            walk((v,))
    assert set(cut_vertices(graph)) == set.intersection(*map(set, ways))
    covered = [
        v
        for subgraph in split_at_cut_vertices(graph)
        for v in subgraph.numbers[subgraph.has_entry :]
    ]
    assert covered == list(graph.order)


@pytest.mark.parametrize("seed", range(8))
def test_bounds_are_below_all_placements_and_above_the_closed_form(seed: int) -> None:
    graph = random_graph(seed, 5)
    free = Devices(2)
    bound_s = span_bound_s(graph, 2)
    assert closed_form_s(graph, 2) <= bound_s + 1e-9
    assert bound_s <= best_span_s(graph, free) + 1e-9


@pytest.mark.parametrize("seed", range(20))
def test_the_list_schedule_is_between_bound_and_one_device(seed: int) -> None:
    graph = random_graph(seed, 12)
    for devices in (TWO, Devices(4, 0.1, 0.5, has_contention=True)):
        timed = heft(graph, devices)
        assert timed is not None
        check(graph, devices, timed)
        assert span_bound_s(graph, devices.num) <= timed.span_s + 1e-9 <= graph.time_s + 2e-9


def test_contention_delays_the_second_message() -> None:
    graph = OpGraph(
        (Op("a", 1.0, 0, 1), Op("b", 1.0, 0, 1), Op("c", 1.0), Op("d", 1.0)), ((0, 2), (1, 3))
    )
    places = (0, 0, 1, 1)
    assert timed_by_rank(graph, Devices(2, 0.0, 5.0), places).forward_span_s == 8.0  # 1 + 1 + 5 + 1
    alone = timed_by_rank(graph, Devices(2, 0.0, 5.0, None, True), places)
    assert alone.forward_span_s == 12.0  # 1 + 5 + 5 + 1
    assert alone.span_s == 12.0 + 10.0


@needs_solver
def test_contention_is_solved_to_the_optimum_of_its_turns() -> None:
    graph = branches(2, 1, 1, seed=4)
    devices = Devices(2, 0.05, 0.5, None, True)
    answer = place(graph, devices)
    assert answer.is_optimal
    assert (
        answer.timed.span_s
        <= min(timed_by_rank(graph, devices, places).span_s for places in _all(graph)) + 1e-9
    )


def _all(graph: OpGraph) -> list[tuple[int, ...]]:
    return [
        tuple(number >> v & 1 for v in range(graph.num_ops)) for number in range(2**graph.num_ops)
    ]


@needs_solver
def test_many_blocks_on_four_devices_are_proven_optimal() -> None:
    answer = place(branches(1, 2, 3, 2, blocks=11, seed=3), Devices(4, 0.01, 0.02))
    assert answer.graph.num_ops == 100
    assert answer.is_optimal
    assert 1.0 < answer.speed_up < 4.0


@pytest.mark.parametrize("has_solver", [False, True])
def test_without_solvers_the_list_schedule_tells_its_gap(
    monkeypatch: pytest.MonkeyPatch, has_solver: bool
) -> None:
    monkeypatch.setattr(cp_sat, "IS_INSTALLED", False)
    monkeypatch.setattr(milp, "IS_INSTALLED", has_solver)
    graph = random_graph(5, 6)
    answer = place(graph, TWO)
    assert answer.method == ("milp" if has_solver else "heft")
    assert (
        answer.bound_s <= best_span_s(graph, TWO) * (1 + 1e-6) <= answer.timed.span_s * (1 + 2e-6)
    )
    with pytest.raises(ConfigError, match="needs OR-tools"):
        place(graph, TWO, method="cp_sat")


def test_no_time_is_the_list_schedule_with_its_gap() -> None:
    graph = random_graph(7, 10)
    answer = place(graph, TWO, budget_s=0.0)
    assert answer.bound_s <= answer.timed.span_s
    check(graph, TWO, answer.timed)


def test_what_cannot_fit_is_refused_with_the_operator() -> None:
    graph = OpGraph((Op("small", 1.0, held_bytes=3), Op("large", 1.0, held_bytes=10)), ())
    with pytest.raises(DoesNotFitError, match="operator large"):
        place(graph, replace(TWO, limit_bytes=9))
    with pytest.raises(DoesNotFitError, match="equal share"):
        place(OpGraph((Op("a", 1.0, held_bytes=9),) * 3, ()), replace(TWO, limit_bytes=9))
    with pytest.raises(DoesNotFitError, match="every placement"):
        place(OpGraph((Op("a", 1.0, held_bytes=6),) * 3, ()), replace(TWO, limit_bytes=10))


def test_unknown_methods_are_refused() -> None:
    with pytest.raises(ConfigError, match="--method=magic"):
        place(random_graph(1, 3), TWO, method="magic")
    with pytest.raises(ConfigError, match=r"machine\.contention"):
        place(random_graph(1, 3), replace(TWO, has_contention=True), method="milp")
