"""gems.memory.case: what a step waits for, against gaps that are read off by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gems.memory.case import MemoryCase, exposures
from gems.memory.plan import Choice, MemoryPlan, Segment
from gems.profile import LayerProfile
from gems.schedule.families.one_f_one_b import layer_parallel
from gems.schedule.registry import Request
from tests.helpers.profiles import profile

# three layers of 1 s forward and 2 s backward, each keeping 100 bytes that no other layer saves
LAYER = LayerProfile(
    "layer",
    "made_up",
    1.0,
    1.0,
    1.0,
    1.0,
    stash_bytes=100,
    output_bytes=10,
    output_grad_bytes=10,
    unsaved_input_bytes=10,
    forward_peak_bytes=110,
    backward_peak_bytes=20,
)
CASE = MemoryCase(
    profile([replace(LAYER, name=name) for name in "abc"]),
    layer_parallel(Request(1, 1)),
    (0, 3),
    d2h_bytes_per_s=50.0,
    h2d_bytes_per_s=25.0,
)


def _plan(segment: Segment) -> MemoryPlan:
    return MemoryPlan.by_layer("test", CASE.boundaries, {0: segment})


def test_a_copy_that_nothing_hides_is_all_exposed() -> None:
    """Out: 2 s at once. Back: 4 s on demand."""
    outcome = CASE.outcome(_plan(Segment(0, 1, Choice.OFFLOAD, free_after=0, ahead=0)))
    found = exposures(outcome)[0, 0]
    assert (found.copy_s, found.exposed_s, found.moved_bytes) == (6.0, 6.0, 100)
    assert (found.out_s, found.back_s) == (1.0, 1 + 2 + 1 + 1 + 2 + 2 + 4.0)
    assert outcome.step_s == CASE.kept.step_s + 6.0


def test_what_other_layers_hide_is_not() -> None:
    """The copy out has the two next forwards, and the copy back two backwards of 2 s each."""
    outcome = CASE.outcome(_plan(Segment(0, 1, Choice.OFFLOAD, free_after=2, ahead=2)))
    assert exposures(outcome)[0, 0].exposed_s == 0.0
    assert outcome.step_s == CASE.kept.step_s
    half = CASE.outcome(_plan(Segment(0, 1, Choice.OFFLOAD, free_after=1, ahead=1)))
    assert exposures(half)[0, 0].exposed_s == pytest.approx(1.0 + 2.0)


def test_an_awaited_copy_back_is_exposed_where_it_is_awaited() -> None:
    outcome = CASE.outcome(
        _plan(Segment(0, 1, Choice.OFFLOAD, free_after=2, ahead=2, is_awaited=True))
    )
    assert exposures(outcome)[0, 0].exposed_s == pytest.approx(2.0)


def test_a_second_run_is_counted_for_itself() -> None:
    found = exposures(CASE.outcome(_plan(Segment(0, 1, Choice.RECOMPUTE))))
    assert found[0, 0].again_s == 1.0 and found[0, 0].exposed_s == 0.0
    assert found[0, 1].again_s == 0.0
