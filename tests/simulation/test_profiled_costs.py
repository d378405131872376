"""gems.simulation.profiled_costs: the times of stages are those of their own layers, kind by kind."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gems.config.resolve import resolve, run_id
from gems.config.schema import CostConfig, ParallelConfig, RunSpec, ScheduleConfig
from gems.memory.timeline import stage_costs
from gems.profile import LayerProfile, ModelProfile
from gems.profile.spans import Spans
from gems.schedule.placement import linear
from gems.simulation.costs import schedule_costs
from gems.simulation.profiled_costs import profiled_costs

LAYERS = tuple(
    LayerProfile(f"layer{n}", "conv", *times, times[0], stash_bytes=100, output_bytes=10, param_bytes=4)
    for n, times in enumerate([(1.0, 1e-9, 5.0), (2.0, 3.0, 1.0), (1.0, 4.0, 0.5), (6.0, 1.0, 2.0)])
)
PROFILE = ModelProfile("made_up", 8, 8, 1, "float32", "cpu", "measured", LAYERS)
SPLIT = replace(PROFILE, layers=tuple(replace(layer, split_s=0.25) for layer in LAYERS))


@pytest.mark.parametrize("boundaries", [(0, 1, 4), (0, 3, 4), (0, 2, 4)])
def test_each_stage_has_its_layers_own_three_times(boundaries: tuple[int, ...]) -> None:
    spec = resolve(RunSpec(schedule=ScheduleConfig("zb_h1"), parallel=ParallelConfig(2, micro_batches=4)))
    run = replace(spec, cost=profiled_costs(replace(spec, cost=CostConfig("profile")), PROFILE, boundaries))
    found, wanted = schedule_costs(run, linear(2)), stage_costs(Spans(PROFILE), boundaries)
    for name in ("forward", "input_grad", "weight_grad", "recompute"):
        assert getattr(found, name) == pytest.approx(getattr(wanted, name)), name
    whole, apart = (stage_costs(Spans(SPLIT), boundaries, is_split) for is_split in (False, True))
    assert whole == wanted, "a whole backward takes no more"
    assert sum(apart.input_grad) == pytest.approx(sum(wanted.input_grad) + 1.0)
    assert apart.weight_grad == wanted.weight_grad
    assert run_id(run) == run_id(replace(spec, cost=CostConfig("profile"))), "what is measured is in no identity"
