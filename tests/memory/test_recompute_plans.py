"""Plans that run forward again: whole stages, segments of near-equal bytes, and what is cheap."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import combinations, pairwise

import pytest

from gems.config.schema import MemoryConfig
from gems.errors import ConfigError, DoesNotFitError
from gems.memory.plan import Choice, MemoryPlan
from gems.memory.policies.recompute import keep_last, least_largest, lets_go, recompute, run_again
from gems.memory.registry import plan_within
from gems.schedule.action import Kind
from gems.schedule.costs import Network
from gems.schedule.validate import validate
from tests.helpers.policy_cases import MIB, SCHEDULES, case_of, network, random_network


def choices(plan: MemoryPlan) -> list[list[Choice]]:
    return [[one.choice for one in stage] for stage in plan.stages]


@pytest.mark.parametrize("seed", range(30))
def test_the_largest_part_is_least(seed: int) -> None:
    rng = random.Random(seed)
    sizes = [rng.choice((0, 1, 5, rng.randint(1, 100))) for _ in range(rng.randint(1, 9))]
    parts = rng.randint(1, len(sizes))
    ends = least_largest(sizes, parts)
    assert len(ends) <= parts and ends[-1] == len(sizes)
    assert all(low < high for low, high in pairwise((0, *ends)))

    def largest(cut: tuple[int, ...]) -> int:
        return max(sum(sizes[low:high]) for low, high in pairwise((0, *cut)))

    best = min(
        largest((*inner, len(sizes)))
        for count in range(parts)
        for inner in combinations(range(1, len(sizes)), count)
    )
    assert largest(ends) == best


@pytest.mark.parametrize("how", ["stage", "segment", "selective"])
@pytest.mark.parametrize(("name", "ranks", "micro_batches"), SCHEDULES)
def test_plans_run(how: str, name: str, ranks: int, micro_batches: int) -> None:
    case = case_of(random_network(4), name, ranks, micro_batches)
    plan = recompute(case, how)
    assert plan.boundaries == case.boundaries
    outcome = case.outcome(plan)
    validate(outcome.schedule)
    assert any(action.kind is Kind.R for row in outcome.schedule.rank_schedules for action in row)


def test_a_stage_keeps_its_inputs_only() -> None:
    """Of several micro-batches in flight; the one that is run again is there once more, as a whole."""
    case = case_of(network("ccccccccl"), "gpipe", 2, 4)
    plan = recompute(case, "stage")
    assert choices(plan) == [[Choice.RECOMPUTE]] * 2
    outcome = case.outcome(plan)
    for now, kept in zip(outcome.ranks, case.kept.ranks, strict=True):
        assert now.peak_activation_bytes <= kept.peak_activation_bytes / 4
    again = sum(layer.recompute_s for layer in case.profile.layers)
    assert outcome.step_s > case.kept.step_s + again / 2


def test_segments_are_as_many_as_the_root_of_the_layers() -> None:
    case = case_of(network("c" * 25))
    assert [len(stage) for stage in recompute(case, "segment").stages] == [5]
    assert [len(stage) for stage in recompute(case, "segment", 3).stages] == [3]
    assert [len(stage) for stage in recompute(case, "segment", 99).stages] == [25]


def test_segments_hold_far_less_than_the_chain() -> None:
    case = case_of(network("c" * 25))
    outcome = case.outcome(recompute(case, "segment"))
    stash = case.kept.ranks[0].peak_activation_bytes
    assert outcome.ranks[0].peak_activation_bytes <= stash * (2 * 5) / 25


def test_inputs_that_leave_hold_less_of_many_micro_batches() -> None:
    """For the same second runs, with copies beside them."""
    case = case_of(network("c" * 16), "gpipe", 1, 6, rate=1e12)
    plans = [recompute(case, offload_inputs=chosen) for chosen in (False, True)]
    stay, leave = map(case.outcome, plans)
    assert choices(leave.plan) == [[Choice.OFFLOAD_INPUTS] * 4]
    assert leave.ranks[0].peak_activation_bytes < stay.ranks[0].peak_activation_bytes / 2
    assert leave.step_s == pytest.approx(stay.step_s, rel=0.01)
    fullest = max(leave.peak_bytes)
    memory = MemoryConfig("recompute", offload_inputs=True)
    assert (
        plan_within(memory, replace(case, limit_bytes=fullest))
        == plans[1]
        == plan_within(memory, case)
    )


def test_inputs_of_whole_stages_leave_too_where_they_are_received() -> None:
    case = case_of(network("c" * 16), "gpipe", 4, 8, rate=1e12)
    stay, leave = (
        case.outcome(recompute(case, "stage", offload_inputs=chosen)) for chosen in (False, True)
    )
    assert choices(leave.plan) == [[Choice.OFFLOAD_INPUTS]] * 4
    assert leave.peak_bytes[0] == stay.peak_bytes[0] and leave.host_bytes[0] == 0, (
        "the images of the step"
    )
    assert all(leave.peak_bytes[rank] < stay.peak_bytes[rank] - 4 * 64 * MIB for rank in (1, 2, 3))
    assert leave.step_s == pytest.approx(stay.step_s, rel=0.01)


def test_it_is_run_again_where_other_micro_batches_come_between() -> None:
    """Of 1F1B only the last stage has its backward right behind its forward."""
    case = case_of(network("c" * 18), "1f1b", 3, 6)
    found = choices(recompute(case, "segment"))
    assert [stage[-1] for stage in found] == [Choice.RECOMPUTE, Choice.RECOMPUTE, Choice.KEEP]


@pytest.mark.parametrize(("name", "ranks", "micro_batches"), SCHEDULES)
@pytest.mark.parametrize(
    "links", [Network(), Network(latency=0.1, per_byte=1e-3, has_contention=True)]
)
def test_a_last_segment_is_kept_where_nothing_is_lost(
    name: str, ranks: int, micro_batches: int, links: Network
) -> None:
    """One stage after the other, the last first, beside playing every plan whole."""
    case = replace(case_of(random_network(7), name, ranks, micro_batches), network=links)
    plan = run_again(case)
    best = case.outcome(plan)
    for stage in reversed(range(len(plan.stages))):
        segments = (*plan.stages[stage][:-1], replace(plan.stages[stage][-1], choice=Choice.KEEP))
        other = replace(plan, stages=(*plan.stages[:stage], segments, *plan.stages[stage + 1 :]))
        outcome = case.outcome(other)
        is_higher = any(
            new > old for new, old in zip(outcome.peak_bytes, best.peak_bytes, strict=True)
        )
        if not is_higher and outcome.step_s <= best.step_s:
            plan = other
            best = outcome
    again = run_again(case)
    found = keep_last(case, again, tuple(case.peak_bytes(again)))
    assert found == plan == recompute(case)
    assert tuple(case.peak_bytes(found)) == best.peak_bytes


def test_a_limit_ends_the_work_on_segments_early() -> None:
    case = case_of(network("ccccccccl"), "1f1b", 2, 4)
    memory = MemoryConfig("recompute")
    plan = recompute(case)
    fullest = max(case.peak_bytes(plan))
    assert (
        plan_within(memory, replace(case, limit_bytes=fullest)) == plan == plan_within(memory, case)
    )
    with pytest.raises(DoesNotFitError, match="under memory=recompute"):
        plan_within(memory, replace(case, limit_bytes=fullest - 1))


def test_cheap_is_what_lets_something_go() -> None:
    """A block has an inner map that is no product.

    Of the others each saved map is a product, or the next layer's.
    """
    case = case_of(network("bbclb"))
    assert [lets_go(layer) for layer in case.profile.layers] == [True, True, False, False, True]
    plan = recompute(case, "selective")
    assert choices(plan) == [[Choice.SELECTIVE, Choice.SELECTIVE, Choice.KEEP, Choice.SELECTIVE]], (
        "kept neighbours are joined"
    )
    assert [one.end - one.first for one in plan.stages[0]] == [1, 1, 2, 1]


def test_cheap_costs_less_time_and_more_memory() -> None:
    case = case_of(network("b" * 16), "gpipe", 1, 4)
    cheap, segment = (case.outcome(recompute(case, how)) for how in ("selective", "segment"))
    assert case.kept.step_s < cheap.step_s < segment.step_s
    assert segment.peak_bytes[0] < cheap.peak_bytes[0] < case.kept.peak_bytes[0]


def test_cheap_in_segments_lets_go_what_layers_hand_to_each_other() -> None:
    case = case_of(network("cp" * 8), "gpipe", 1, 4)
    single = case.outcome(recompute(case, "selective"))
    joined = case.outcome(recompute(case, "selective", 2))
    assert joined.ranks[0].peak_activation_bytes < single.ranks[0].peak_activation_bytes
    assert {choice for stage in choices(joined.plan) for choice in stage} <= {
        Choice.SELECTIVE,
        Choice.KEEP,
    }


@pytest.mark.parametrize(
    ("how", "segments", "key"),
    [("layer", None, "memory.recompute"), ("segment", 0, "memory.segments")],
)
def test_what_there_is_not_is_refused(how: str, segments: int | None, key: str) -> None:
    with pytest.raises(ConfigError, match=key):
        recompute(case_of(network("cccl")), how, segments)
