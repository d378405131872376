"""A user's wrapper of stages, from one file outside of the package, in runs of two ranks."""

from __future__ import annotations

from collections import Counter

import pytest

from gems.engine.verification.compare import compare
from gems.schedule.action import Kind
from tests.helpers import counting_stages
from tests.helpers.device import DEVICE
from tests.mpi.conftest import plan_once, sub_world
from tests.mpi.test_strips import POLICIES, strip_spec

METHODS = {
    Kind.F: "forward",
    Kind.R: "recompute",
    Kind.B: "backward",
    Kind.I: "backward_input",
    Kind.W: "backward_weight",
}
SEGMENTS = {"memory__name": "recompute", "memory__recompute": "segment"}
CASES = {
    "whole": ("frozen", "gems_master", 1, {}),
    "segments": ("frozen", "1f1b", 1, SEGMENTS),
    "split": ("frozen", "zb_h1", 1, {}),
    "strips, recomputed, split": ("standardised", "zb_h1", 3, POLICIES["recompute"]),
}


@pytest.mark.parametrize("case", CASES)
def test_each_action_calls_the_wrapper_once_and_gradients_stay(comm, case):
    name, schedule, strips, more = CASES[case]
    spec = strip_spec(name, schedule, 2, 1, strips, 37, train__stage_wrappers=["counting"], **more)
    part = sub_world(comm, 2)
    if part is None:
        return
    made = plan_once(part, spec)
    counting_stages.calls.clear()
    found = compare(made.for_ranks, part, DEVICE)
    assert found.max_rel_error <= 1e-12, found
    of_a_step = Counter(
        (action.direction, action.stage, action.segment, METHODS[action.kind])
        for action in made.schedule.rank_schedules[part.rank]
        if action.kind in METHODS
    )
    calls = counting_stages.calls
    steps, rest = divmod(calls.total(), of_a_step.total())
    assert steps >= 1 and rest == 0
    assert calls == {key: count * steps for key, count in of_a_step.items()}
