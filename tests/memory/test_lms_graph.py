"""Levels, candidates, groups and control operations of the graph that large model support sees."""

from __future__ import annotations

import pytest

from gems.memory.policies.lms.graph import Graph, Parameters, Return, Swap, Tensor

# 0 -> 1 -> 2 -> 4 and 0 -> 3 -> 4, then 4 -> 5 -> ... -> 9; 0 is read again by 7 and 9
LINKS = [(0, 1), (1, 2), (2, 4), (0, 3), (3, 4), (4, 5), (5, 6), (6, 7), (7, 8), (8, 9)]


def graph_of(*more: Tensor) -> Graph:
    return Graph(
        10, (*(Tensor(1, maker, (reader,), is_movable=False) for maker, reader in LINKS), *more)
    )


def test_a_tensor_read_before_it_is_made_is_refused() -> None:
    with pytest.raises(ValueError, match="before it is made"):
        Graph(3, (Tensor(1, 1, (0,)),))
    with pytest.raises(ValueError, match="not there"):
        Graph(3, (Tensor(1, 1, (3,)),))


def test_the_control_operation() -> None:
    """The latest more than `ahead` levels before the reader that leads to it.

    Of one level the first.
    """
    graph = graph_of()
    assert graph.control(0, 9, 0) == 8
    assert graph.control(0, 9, 1) == 7
    assert graph.control(0, 9, 6) == 1, "of level 1 both lead there"
    assert graph.control(0, 9, 7) is None, "level 0 is the maker's"
    assert graph.control(0, 2, 0) == 1, "3 is of the same level and does not lead there"
    assert graph.control(4, 9, 4) is None


def test_levels_of_other_branches_are_no_control() -> None:
    """A reader whose longest way is short has none beyond its maker, however many levels there are."""
    spine = (Tensor(1, op, (op + 1,), False) for op in range(14))
    graph = Graph(17, (*spine, Tensor(1, 0, (15,), False), Tensor(1, 15, (16,), False)))
    assert graph.levels[16] == 2
    assert graph.control(0, 16, 0) == 15, "1 is of its level, and leads elsewhere"
    assert graph.control(0, 16, 1) is None


def test_swaps_name_what_leaves_and_what_comes_back() -> None:
    graph = graph_of(
        Tensor(8, 0, (3, 7, 9)), Tensor(8, 5, (9,)), Tensor(8, 1, (9,), is_movable=False)
    )
    assert graph.swaps(Parameters(3, 1, 0)) == (
        Swap(10, 3, (Return(10, (7,), 5), Return(10, (9,), 7))),
        Swap(11, 5, (Return(11, (9,), 7),)),
    )
    assert graph.swaps(Parameters(3, 1, 2, 2)) == (
        Swap(10, 3, (Return(10, (7, 9), None),)),
        Swap(11, 5, (Return(11, (9,), None),)),
    )
    assert graph.swaps(Parameters(5, 1, 0))[0].last_near == 3
    assert graph.swaps(Parameters(8, 1, 0)) == ()
