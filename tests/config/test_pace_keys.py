"""machine.slow_rank, machine.slowdown and cost.input_load.

What they do to a run on paper, and where they are refused.
"""

from __future__ import annotations

import numpy as np
import pytest

from gems.config.compose import compose
from gems.config.schema import RunSpec
from gems.errors import ConfigError
from gems.plan.draft import Draft
from gems.plan.evaluate import evaluate
from gems.runs.simulated_run import simulated_trace
from gems.schedule.simulate import Pace, simulate
from gems.simulation.costs import RunCosts
from gems.trace import KINDS

BASE = ("machine=simulated", "schedule=1f1b", "parallel.partitions=4", "parallel.micro_batches=8")


def spec_of(*words: str) -> RunSpec:
    return compose([*BASE, *words])


def test_the_slow_rank_is_one_of_the_world() -> None:
    spec = spec_of(
        "parallel.replicas=3", "machine.slow_rank=6", "machine.slowdown=2", "cost.input_load=0.5"
    )
    assert [RunCosts.of(spec).pace(replica) for replica in range(3)] == [
        Pace(None, 2.0, 0.5),
        Pace(2, 2.0, 0.5),
        Pace(None, 2.0, 0.5),
    ]
    made = Draft(spec).lowered
    costs = RunCosts.of(spec)
    spans = [
        simulate(made, costs.stages(made.placement), pace=costs.pace(replica)).span
        for replica in range(3)
    ]
    assert costs.kept(made).step_s == spans[1] > spans[0] == spans[2], (
        "the slowest replica stands for all"
    )


def test_gems_simulate_knows_them() -> None:
    answer = evaluate(spec_of("cost.input_load=2"), runs=False).predict().to_json()
    assert answer["input_wait_s"] == [5, 0, 0, 0] and answer["step_units"] == 35
    slow = spec_of("machine.slow_rank=0", "machine.slowdown=3")
    assert evaluate(slow, runs=False).predict().to_json()["useful_s"] == [72, 24, 24, 24]


def test_a_search_that_recomputes_knows_them() -> None:
    words = (
        "cost=profile",
        "schedule=capped",
        "schedule.activation_cap=1",
        "schedule.memory_actions=[recompute]",
    )
    usual, slow, late = (
        evaluate(compose(["machine=simulated", "parallel.partitions=2", *words, *more]), runs=False)
        .predict()
        .to_json()
        for more in ((), ("machine.slow_rank=0", "machine.slowdown=3"), ("cost.input_load=1",))
    )
    assert slow["useful_s"][0] == pytest.approx(3 * usual["useful_s"][0])
    assert late["input_wait_s"][0] >= 1 and late["step_s"] > 1 > usual["step_s"]


def test_a_simulated_trace_shows_the_wait() -> None:
    spec = spec_of("cost.input_load=2", "train.steps=3", "benchmark.skip_steps=1")
    events = simulated_trace(spec, Draft(spec).lowered).events
    waits = events[(events["kind"] == KINDS.index("INPUT")) & (events["step"] == 0)]
    assert set(waits["rank"]) == {0} and set(waits["stage"]) == {0}
    assert waits["micro_batch"].tolist() == [0, 1, 2, 3], "F3 and later find their input ready"
    assert (waits["end_ns"] * 1e-9).tolist() == [2, 4, 6, 8]
    assert np.sum(waits["end_ns"] - waits["start_ns"]) == 5e9


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["machine.slowdown=2"], "machine.slowdown=2.0: needs machine.slow_rank"),
        (["machine.slow_rank=4"], "machine.slow_rank=4: must be below the world size, 4"),
        (
            ["machine.slow_rank=1", "machine.slowdown=0.5"],
            "machine.slowdown=0.5: must be 1 or more",
        ),
        (["machine.slow_rank=-1"], "machine.slow_rank=-1: must be 0 or more"),
        (["cost.input_load=-1"], "cost.input_load=-1.0: must be 0 or more"),
        (
            ["machine=cpu", "cost.input_load=1"],
            "cost.input_load=1.0: is for a machine without devices",
        ),
        (
            ["machine=cpu", "machine.slow_rank=1"],
            "machine.slow_rank=1: is for a machine without devices",
        ),
    ],
)
def test_what_cannot_be_is_refused(words: list[str], line: str) -> None:
    with pytest.raises(ConfigError) as caught:
        spec_of(*words)
    assert str(caught.value).startswith(line)
