"""gems.simulation.profiled_costs: the times of stages are those of their own layers, kind by kind."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gems.config.resolve import resolve, run_id
from gems.config.schema import CostConfig, ParallelConfig, RunSpec, ScheduleConfig
from gems.memory.timeline import stage_costs
from gems.profile import LayerProfile, ModelProfile
from gems.profile.spans import Spans
from gems.schedule.action import Action, Kind
from gems.schedule.placement import linear
from gems.simulation.costs import RunCosts
from gems.simulation.profiled_costs import profiled_costs

LAYERS = tuple(
    LayerProfile(
        f"layer{n}", "conv", *times, times[0], stash_bytes=100, output_bytes=10, param_bytes=4
    )
    for n, times in enumerate([(1.0, 1e-9, 5.0), (2.0, 3.0, 1.0), (1.0, 4.0, 0.5), (6.0, 1.0, 2.0)])
)
PROFILE = ModelProfile("made_up", 8, 8, 1, "float32", "cpu", "measured", LAYERS)
SPLIT = replace(PROFILE, layers=tuple(replace(layer, split_s=0.25) for layer in LAYERS))


@pytest.mark.parametrize("boundaries", [(0, 1, 4), (0, 3, 4), (0, 2, 4)])
def test_each_stage_has_its_layers_own_three_times(boundaries: tuple[int, ...]) -> None:
    spec = resolve(
        RunSpec(schedule=ScheduleConfig("zb_h1"), parallel=ParallelConfig(2, micro_batches=4))
    )
    costs = RunCosts.of(replace(spec, cost=CostConfig("profile")))
    profiled = profiled_costs(costs, PROFILE, boundaries)
    run = replace(spec, cost=profiled.cost)
    found = profiled.stages(linear(2))
    wanted = stage_costs(Spans(PROFILE), boundaries)
    for name in ("forward", "input_grad", "weight_grad", "recompute"):
        assert getattr(found, name) == pytest.approx(getattr(wanted, name)), name
    split = stage_costs(Spans(SPLIT), boundaries)
    assert sum(split.split) == pytest.approx(1.0)
    for stage in range(2):
        alone, whole = (split.time(Action(kind, stage, 0)) for kind in (Kind.I, Kind.B))
        assert alone == pytest.approx(wanted.input_grad[stage] + split.split[stage])
        assert whole == wanted.time(Action(Kind.B, stage, 0)), "a whole backward takes no more"
    assert run_id(run) == run_id(replace(spec, cost=CostConfig("profile"))), (
        "what is measured is in no identity"
    )
