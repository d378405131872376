"""A search over the stages of a profiled model: its unit, its cuts, and its cap in bytes."""

from __future__ import annotations

from dataclasses import replace

import pytest

import gems.plan.draft
from gems.config.schema import CostConfig, RunSpec
from gems.errors import ConfigError, DoesNotFitError
from gems.memory.plan import Choice, MemoryPlan
from gems.partition.methods import Partitioner
from gems.plan.draft import Draft
from gems.plan.evaluate import Plan, evaluate
from gems.schedule.action import Kind
from gems.schedule.lower import compute_only
from gems.schedule.placement import Placement, bidirectional, linear, v, wave
from gems.simulation.build import model_request
from gems.simulation.costs import RunCosts
from tests.simulation.conftest import NUM_LAYERS, costs_of, made_up


def peaks_of(plan: Plan) -> tuple[list[int], int]:
    """Return the peak bytes of what is saved on each rank, storage by storage, and those of a cap of 1."""
    profile = plan.profile
    compute = compute_only(plan.schedule)
    assert profile is not None
    case = Draft(plan.spec).policy.case(compute, plan.boundaries, profile)
    kept = plan.memory_plan or MemoryPlan.keeping(plan.boundaries)
    return [
        each.peak_activation_bytes for each in case.timelines(kept, plan.schedule)
    ], plan.costs.activation_bytes


@pytest.mark.parametrize("placement", [linear(2), bidirectional(2), v(2), wave(2, 4)])
def test_units_are_those_of_a_rank_and_of_the_heaviest_stage(
    spec: RunSpec, placement: Placement
) -> None:
    model = costs_of(spec, made_up(3))
    costs = model.of(placement)
    boundaries = model.cut(placement)
    assert len(boundaries) == placement.num_stages + 1 and boundaries[-1] == NUM_LAYERS
    work = sum(costs.forward) + sum(costs.input_grad) + sum(costs.weight_grad)
    assert work == pytest.approx(2 * 3)
    if placement == linear(2):
        assert max(*costs.activation, *costs.held_for_weights) == pytest.approx(1.0)
    assert all(
        0 <= part <= whole for part, whole in zip(costs.movable, costs.activation, strict=True)
    )


@pytest.mark.parametrize("actions", [[], ["recompute"], ["offload"], ["offload", "recompute"]])
@pytest.mark.parametrize("cap", [1.0, 1.5])
def test_a_run_keeps_its_cap_in_bytes(spec: RunSpec, cap: float, actions: list[str]) -> None:
    schedule = replace(spec.schedule, activation_cap=cap, memory_actions=actions)
    plan = evaluate(replace(spec, schedule=schedule))
    peaks, unit_bytes = peaks_of(plan)
    assert max(peaks) <= cap * unit_bytes
    assert plan.schedule.num_stages <= NUM_LAYERS and plan.costs.name == "profile"
    found = plan.predict()
    assert found.step.efficiency <= found.bound + 1e-9
    in_bytes = replace(schedule, activation_cap=None, activation_cap_bytes=round(cap * unit_bytes))
    assert (
        evaluate(replace(spec, schedule=in_bytes)).schedule.rank_schedules
        == plan.schedule.rank_schedules
    )


def test_a_cap_in_bytes_has_room_for_the_slots_of_graphs(
    spec: RunSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    unit_bytes = costs_of(spec, made_up(3)).unit_bytes

    def capped(cap_bytes: int) -> Plan:
        schedule = replace(spec.schedule, activation_cap=None, activation_cap_bytes=cap_bytes)
        return evaluate(replace(spec, schedule=schedule))

    eager = capped(3 * unit_bytes)
    assert max(peaks_of(eager)[0]) <= 3 * unit_bytes < max(held_by_graphs(eager))
    captured = made_up(3).captured(True)
    monkeypatch.setattr(gems.plan.draft, "profile_of", lambda spec: captured)
    plan = capped(3 * unit_bytes)
    assert max(held_by_graphs(plan)) <= 3 * unit_bytes
    assert held_by_graphs(plan) == [rank.peak_activation_bytes for rank in plan.memory.ranks]
    with pytest.raises(ConfigError, match="leaves no schedule whose CUDA graphs fit"):
        capped(unit_bytes)


def held_by_graphs(plan: Plan) -> list[int]:
    """Return the peak activation bytes of each rank of a plan if its actions are graphs."""
    assert plan.profile is not None
    case = Draft(plan.spec).policy.case(
        compute_only(plan.schedule), plan.boundaries, plan.profile.captured(True)
    )
    kept = plan.memory_plan or MemoryPlan.keeping(plan.boundaries)
    return [each.peak_activation_bytes for each in case.timelines(kept, plan.schedule)]


def test_a_list_with_actions_has_its_memory_plan(spec: RunSpec) -> None:
    """One segment a stage, whose copies are waited for.

    The device's limit holds for what the list leaves on it.
    """
    asked = replace(spec, schedule=replace(spec.schedule, memory_actions=["offload"]))
    plan = evaluate(asked)
    assert plan.memory_plan is not None
    assert [len(stage) for stage in plan.memory_plan.stages] == [1] * plan.schedule.num_stages
    kinds = [action.kind for _, action in plan.schedule.actions()]
    assert kinds.count(Kind.OFFLOAD) == kinds.count(Kind.FREE) == kinds.count(Kind.PREFETCH) > 0
    assert {segment.choice for stage in plan.memory_plan.stages for segment in stage} <= {
        Choice.OFFLOAD,
        Choice.KEEP,
    }
    peak = max(plan.memory.peak_bytes)
    assert (
        evaluate(replace(asked, machine=replace(spec.machine, device_bytes=peak))).schedule
        == plan.schedule
    )
    with pytest.raises(
        DoesNotFitError, match=r"under schedule=capped.*lower schedule.activation_cap"
    ):
        evaluate(replace(asked, machine=replace(spec.machine, device_bytes=peak - 1)))


def test_a_search_depends_on_all_that_its_cuts_do(spec: RunSpec) -> None:
    """What the optimizer keeps of the weights is a part of the peak bytes that some methods balance."""
    adam = replace(spec, optimizer=replace(spec.optimizer, name="adam"))
    assert repr(costs_of(adam, made_up(3))) != repr(costs_of(spec, made_up(3)))


def test_the_unit_is_found_once(spec: RunSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    model = costs_of(spec, made_up(3))
    unit_bytes = model.unit_bytes
    monkeypatch.setattr(Partitioner, "partition", None)
    assert model.with_cut(linear(2), (0, 5, NUM_LAYERS)).unit_bytes == unit_bytes
    assert model_request(RunCosts.of(spec), costs_of(spec, made_up(3)), spec.seed).cap == 1.0, (
        "no unit is needed for a cap in units"
    )


def test_given_boundaries_are_those_of_the_schedule(spec: RunSpec) -> None:
    cut = [0, 3, 5, 8, NUM_LAYERS]
    spec = replace(spec, schedule=replace(spec.schedule, activation_cap=2.0))
    given = replace(spec, parallel=replace(spec.parallel, boundaries=cut))
    plan = evaluate(given)
    assert plan.boundaries == tuple(cut) and plan.schedule.num_stages == 4
    with pytest.raises(ConfigError, match=r"parallel.boundaries=of 3 stages: must make one of"):
        evaluate(replace(spec, parallel=replace(spec.parallel, boundaries=[0, 3, 5, NUM_LAYERS])))


def test_configured_costs_are_searched_as_they_are(spec: RunSpec) -> None:
    costs = CostConfig(times=[2.0, 1.0])
    plan = evaluate(replace(spec, cost=costs))
    assert plan.costs == costs
    paper = Draft(
        replace(spec, cost=costs, schedule=replace(spec.schedule, max_stages=NUM_LAYERS))
    ).search_result
    assert "boundaries" not in paper


def test_costs_of_stages_may_be_given(spec: RunSpec) -> None:
    stages = {
        "forward": [1.0, 2.0],
        "input_grad": [1.0, 1.0],
        "weight_grad": [0.5, 0.0],
        "activation": [1.0, 0.25],
    }
    costs = RunCosts.of(replace(spec, cost=CostConfig(stages=stages))).stages(linear(2))
    assert (costs.forward, costs.activation) == ((1.0, 2.0), (1.0, 0.25))
    assert costs.movable == costs.held_for_weights == costs.activation
    with pytest.raises(ConfigError, match=r"cost.stages=of 2 stages: must be of 3"):
        RunCosts.of(replace(spec, cost=CostConfig(stages=stages))).stages(linear(3))
