"""The plan: against every choice by brute force, against its rivals, and its bound below all of them."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import replace

import pytest

from gems.errors import DoesNotFitError
from gems.memory.case import MemoryCase, PlanOutcome
from gems.memory.optimizer.formulation import PlanModel
from gems.memory.optimizer.milp import Program, Solution
from gems.memory.optimizer.optimal import NODES, plan, target_limit_bytes
from gems.memory.optimizer.windows import WindowOrder, with_windows
from gems.memory.plan import Choice, MemoryPlan, Segment
from gems.memory.policies.recompute import recompute
from gems.memory.policies.vdnn import vdnn_all
from gems.schedule.action import Kind
from gems.schedule.validate import validate
from tests.helpers.policy_cases import MIB, SCHEDULES, case_of, network, random_network

DISTANCES = ((0, 0), (1, 1), (2, 2))
PLAIN = (Choice.KEEP, Choice.OFFLOAD, Choice.RECOMPUTE)
CHAINS = (("cbp", 1e9, tuple(Choice)), ("bbcp", 8e9, PLAIN), ("bbbb", 20e9, PLAIN))


def every_plan(case: MemoryCase, allowed: tuple[Choice, ...]) -> Iterator[MemoryPlan]:
    """Every choice of every layer, copies at a few distances, layers that are run again apart or together."""
    for choices in itertools.product(allowed, repeat=case.profile.num_layers):
        distances = DISTANCES if Choice.OFFLOAD in choices else DISTANCES[:1]
        for free_after, ahead in distances:
            layers = [
                Segment(i, i + 1, choice, free_after, ahead) for i, choice in enumerate(choices)
            ]
            yield MemoryPlan("brute", (tuple(layers),))
        joined = [
            (first, choice)
            for first, choice in enumerate(choices)
            if not first or choice is not choices[first - 1] or not choice.is_recomputed
        ]
        if len(joined) < len(choices):
            ends = [*(first for first, _ in joined[1:]), len(choices)]
            yield MemoryPlan(
                "brute",
                (
                    tuple(
                        Segment(first, end, c, 1, 1)
                        for (first, c), end in zip(joined, ends, strict=True)
                    ),
                ),
            )


def random_plan(case: MemoryCase, seed: int) -> MemoryPlan:
    """Segment, choices and distances at random."""
    rng = random.Random(seed)
    stages = []
    for first, end in itertools.pairwise(case.boundaries):
        inner = [first, *(layer for layer in range(first + 1, end) if rng.random() < 0.7), end]
        stages.append(
            tuple(
                Segment(begin, stop, rng.choice(list(Choice)), rng.randint(0, 6), rng.randint(0, 6))
                for begin, stop in itertools.pairwise(inner)
            )
        )
    return MemoryPlan("random", tuple(stages))


@pytest.mark.parametrize(("kinds", "rate", "allowed"), CHAINS)
def test_no_choice_by_brute_force_is_faster_and_the_bound_is_below_all(
    kinds: str, rate: float, allowed: tuple[Choice, ...]
) -> None:
    case = case_of(network(kinds), rate=rate)
    outcomes = [case.outcome(each) for each in every_plan(case, allowed)]
    least = min(max(each.peak_bytes) for each in outcomes)
    most = max(case.kept.peak_bytes)
    for share in (0.05, 0.4):
        limit = int(least + share * (most - least))
        fitting = [each.step_s for each in outcomes if max(each.peak_bytes) <= limit]
        found = plan(case, limit, 0.5)
        assert max(found.outcome.peak_bytes) <= limit
        assert found.outcome.step_s <= min(fitting) * (1 + 1e-9)
        assert found.bound_s <= min(fitting) * (1 + 1e-9)
        assert found.gap == pytest.approx(found.outcome.step_s / found.bound_s - 1)


@pytest.mark.parametrize(("name", "ranks", "micro_batches"), SCHEDULES)
def test_the_bound_is_below_every_plan_that_fits(name: str, ranks: int, micro_batches: int) -> None:
    case = case_of(random_network(ranks), name, ranks, micro_batches, rate=2e9)
    outcomes = [case.outcome(random_plan(case, seed)) for seed in range(40)]
    limit = sorted(max(each.peak_bytes) for each in outcomes)[len(outcomes) // 3]
    found = plan(case, limit, 2.0)
    fitting = [each.step_s for each in outcomes if max(each.peak_bytes) <= limit]
    assert found.bound_s <= min(fitting) * (1 + 1e-9)
    assert found.outcome.step_s <= min(fitting) * (1 + 1e-9)
    assert max(found.outcome.peak_bytes) <= limit
    validate(found.outcome.schedule)


def settled(outcome: PlanOutcome) -> list[Segment]:
    """The segments of a chain's plan, without the copies of those of which none takes anything."""
    moved = {
        action.segment
        for action in outcome.schedule.rank_schedules[0]
        if action.kind is Kind.OFFLOAD
    }
    return [
        Segment(each.first, each.end, each.choice if index in moved else each.choice.uncopied)
        for index, each in enumerate(outcome.plan.stages[0])
    ]


@pytest.mark.parametrize("is_whole_copies", [False, True], ids=["fluid", "whole"])
@pytest.mark.parametrize("seed", range(8))
def test_the_programme_knows_every_plan_and_takes_none_for_slower_than_it_is(
    seed: int, is_whole_copies: bool
) -> None:
    case = case_of(random_network(seed, letters="cupb"), rate=3e9)
    compared = 0
    for number in range(8):
        made = random_plan(case, 100 * seed + number)
        apart = [
            replace(each, first=first, end=first + 1)
            for each in made.stages[0]
            for first in range(each.first, each.end)
        ]
        cut = [each for each in made.stages[0] if each.choice.is_recomputed]
        single = [each for each in apart if not each.choice.is_recomputed]
        stage = tuple(sorted([*cut, *single], key=lambda each: each.first))
        outcome = case.outcome(MemoryPlan("random", (stage,)))
        model = PlanModel(case, max(outcome.peak_bytes), is_whole_copies=is_whole_copies)
        chosen = {(each.first, each.end, each.choice) for each in settled(outcome)}
        options = {
            (option.first, option.end, option.choice): at
            for option, at in model.blocks[0].at.items()
        }
        if not chosen <= options.keys():
            continue
        for option, at in options.items():
            model.program.constrain(
                {at: 1.0}, low=float(option in chosen), high=float(option in chosen)
            )
        found = model.solve(is_whole=True, node_limit=50)
        assert found is not None, "a plan that is there fits"
        assert found[1] <= outcome.step_s * (1 + 1e-6)
        compared += 1
    assert compared > 2


@pytest.mark.parametrize("way", WindowOrder)
def test_windows_keep_the_limit_and_take_no_time(way: WindowOrder) -> None:
    case = case_of(network("ccccccccl"), rate=4e9)
    layers = {layer: Segment(layer, layer + 1, Choice.OFFLOAD) for layer in range(9)}
    bare = MemoryPlan.by_layer("test", case.boundaries, layers)
    tight = with_windows(bare, 0, case.outcome)
    assert not any(each.free_after or each.ahead for each in tight.plan.stages[0]), (
        "nothing fits: as tight as can be"
    )
    for share in (0.1, 0.4, 0.8):
        limit = int(max(tight.peak_bytes) * (1 - share) + max(case.kept.peak_bytes) * share)
        found = with_windows(bare, limit, case.outcome, [way])
        assert max(found.peak_bytes) <= limit
        assert found.step_s < tight.step_s


def test_copies_out_are_waited_for_in_the_order_in_which_they_leave() -> None:
    case = case_of(network("ccccccccl"), rate=4e9)
    layers = {layer: Segment(layer, layer + 1, Choice.OFFLOAD) for layer in range(9)}
    bare = MemoryPlan.by_layer("test", case.boundaries, layers)
    row = with_windows(bare, target_limit_bytes(case, 0.4), case.outcome).schedule.rank_schedules[0]
    for one, other in itertools.pairwise(action for action in row if action.kind is Kind.FREE):
        left = [row.index(action._replace(kind=Kind.OFFLOAD)) for action in (one, other)]
        between = row[row.index(one) : row.index(other)]
        assert left[0] < left[1] or all(action.kind is Kind.FREE for action in between)


@pytest.mark.parametrize(("name", "ranks", "micro_batches"), SCHEDULES[:3])
def test_the_plan_is_never_slower_than_its_rivals_at_their_own_peak(
    name: str, ranks: int, micro_batches: int
) -> None:
    case = case_of(random_network(7), name, ranks, micro_batches, rate=3e9)
    for rival in (vdnn_all(case), vdnn_all(case, asynchronous=True), recompute(case)):
        outcome = case.outcome(rival)
        limit = max(outcome.peak_bytes)
        found = plan(case, limit, 0.2, [rival])
        assert found.outcome.step_s <= outcome.step_s
        assert max(found.outcome.peak_bytes) <= limit


def test_the_outcome_is_that_of_the_plan() -> None:
    case = case_of(random_network(3), rate=2e9)
    limit = target_limit_bytes(case, 0.4)
    found = plan(case, limit, 0.3)
    again = case.outcome(found.plan)
    assert (again.step_s, again.peak_bytes) == (found.outcome.step_s, found.outcome.peak_bytes)
    assert found.plan.policy == found.outcome.plan.policy == "plan"


def test_what_fits_is_kept() -> None:
    case = case_of(random_network(1))
    found = plan(case, max(case.kept.peak_bytes), 1.0)
    assert found.outcome.step_s == case.kept.step_s
    assert found.gap == 0.0
    assert {segment.choice for segment in found.plan.stages[0]} == {Choice.KEEP}


def test_inputs_leave_and_come_back_for_a_recompute_where_no_other_choice_is_as_fast() -> None:
    """Too many micro-batches for their inputs to stay, and too slow a link for all that the layers save."""
    case = case_of(network("bbb"), "gpipe", 1, 4, rate=1e9)
    others = tuple(choice for choice in Choice if choice is not Choice.OFFLOAD_INPUTS)
    outcomes = [case.outcome(each) for each in every_plan(case, others)]
    least = min(max(each.peak_bytes) for each in outcomes)
    most = max(case.kept.peak_bytes)
    limit = int(least + 0.1 * (most - least))
    fastest_s = min(each.step_s for each in outcomes if max(each.peak_bytes) <= limit)
    found = plan(case, limit, 1.0)
    assert max(found.outcome.peak_bytes) <= limit
    assert any(each.choice is Choice.OFFLOAD_INPUTS for each in found.plan.stages[0])
    assert found.bound_s <= found.outcome.step_s < fastest_s / 2


def test_a_fast_link_hides_every_copy() -> None:
    case = case_of(network("ccccccccl"), rate=1e12)
    found = plan(case, target_limit_bytes(case, 0.5), 1.0)
    assert found.outcome.step_s == pytest.approx(case.kept.step_s, rel=2e-3)
    assert found.outcome.schedule.has_any(Kind.OFFLOAD)
    assert not found.outcome.schedule.has_any(Kind.R)


def test_without_a_link_worth_the_name_layers_are_run_again() -> None:
    case = case_of(network("bbbbbbbbl"), rate=1e6)
    found = plan(case, target_limit_bytes(case, 0.5), 1.0)
    assert found.outcome.schedule.has_any(Kind.R)
    assert not found.outcome.schedule.has_any(Kind.OFFLOAD)


def test_windows_hold_nothing_longer_than_their_copies_last() -> None:
    case = case_of(network("ccccccccl"), rate=1e12)
    found = plan(case, target_limit_bytes(case, 0.3), 1.0)
    offloaded = [segment for segment in found.plan.stages[0] if segment.choice is Choice.OFFLOAD]
    assert offloaded
    assert all(segment.free_after <= 1 and segment.ahead <= 2 for segment in offloaded)
    moved = {
        action.segment
        for action in found.outcome.schedule.rank_schedules[0]
        if action.kind is Kind.OFFLOAD
    }
    assert len(moved) == len(offloaded), "what no copy takes is kept"


def test_the_same_plan_comes_out_again() -> None:
    found = [
        plan(case, target_limit_bytes(case, 0.4), 0.5)
        for case in [case_of(random_network(5), rate=2e9)] * 2
    ]
    assert found[0].plan == found[1].plan
    assert found[0].bound_s == found[1].bound_s


def test_a_chain_is_within_5_percent_of_its_bound() -> None:
    for rate in (2e9, 8e9):
        case = case_of(
            network("ccpccpcccpcccl", [64, 64, 32, 64, 64, 32, 48, 48, 48, 24, 24, 24, 24, 16]),
            rate=rate,
        )
        assert plan(case, target_limit_bytes(case, 0.4), 2.0).gap < 0.05


def test_a_larger_budget_follows_the_programme_further(monkeypatch: pytest.MonkeyPatch) -> None:
    case = case_of(random_network(11), rate=2e9)
    solve = Program.solve
    nodes = []

    def counted(
        self: Program, is_whole: bool, node_limit: int = 0, gap: float = 0.0
    ) -> Solution | None:
        nodes.append(node_limit)
        return solve(self, is_whole, node_limit, gap)

    monkeypatch.setattr(Program, "solve", counted)
    found = {}
    for budget_s in (0.5, 10.0, 12.0):
        nodes.clear()
        found[budget_s] = (plan(case, target_limit_bytes(case, 0.4), budget_s), max(nodes))
    assert found[0.5][1] == found[10.0][1] == NODES < found[12.0][1]
    assert found[12.0][0].bound_s >= found[10.0][0].bound_s
    assert found[12.0][0].outcome.step_s <= found[0.5][0].outcome.step_s


def test_a_saving_is_of_what_comes_and_goes() -> None:
    case = case_of(network("ccccl"))
    kept = max(case.kept.peak_bytes)
    static = min(point.device_bytes for point in case.kept.ranks[0].points)
    assert target_limit_bytes(case, 0.0) == kept
    assert target_limit_bytes(case, 1.0) == static
    assert target_limit_bytes(case, 0.5) == (kept + static) // 2


def test_a_limit_below_the_largest_layer_is_refused_with_its_name() -> None:
    case = case_of(network("cccbcl", [8, 8, 8, 256, 8, 8]))
    with pytest.raises(DoesNotFitError, match="largest layer b3 needs") as found:
        plan(case, target_limit_bytes(case, 0.95), 0.5)
    least = [case.outcome(replace(each, policy="x")) for each in (vdnn_all(case), recompute(case))]
    assert found.value.needed_bytes <= min(max(each.peak_bytes) for each in least)
    assert found.value.needed_bytes > found.value.limit_bytes


def test_the_programme_knows_inputs_of_stages_that_leave() -> None:
    """With the bytes of such a plan it takes it for no slower than it is.

    With inputs that stay nothing is as fast.
    """
    case = replace(case_of(network("cbbb"), "gpipe", 2, 6, rate=1e8), boundaries=(0, 1, 4))

    def of(choice: Choice) -> MemoryPlan:
        return MemoryPlan("test", ((Segment(0, 1),), (Segment(1, 4, choice, 0, 0),)))

    leaving = case.outcome(of(Choice.OFFLOAD_INPUTS))
    staying = case.outcome(of(Choice.RECOMPUTE))
    assert leaving.peak_bytes[1] == max(leaving.peak_bytes) == staying.peak_bytes[1] - 5 * 64 * MIB
    assert leaving.host_bytes[1] == 6 * 64 * MIB
    bounds_s = []
    for choice in (Choice.OFFLOAD_INPUTS, Choice.RECOMPUTE):
        model = PlanModel(case, max(leaving.peak_bytes), moves_all=False)
        chosen = {
            (each.first, each.end, each.choice) for stage in of(choice).stages for each in stage
        }
        for block in model.blocks:
            for option, at in block.at.items():
                value = float((option.first, option.end, option.choice) in chosen)
                model.program.constrain({at: 1.0}, low=value, high=value)
        found = model.solve(is_whole=True, node_limit=50)
        assert found is not None
        bounds_s.append(found[1])
    assert bounds_s[0] <= leaving.step_s < bounds_s[1]
