"""Large model support on a run's layers: by distance under a limit, and by need."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from gems.errors import DoesNotFitError
from gems.memory.case import MemoryCase
from gems.memory.plan import Choice, MemoryPlan
from gems.memory.policies.lms.distance import RankGraph, lms
from gems.memory.policies.lms.graph import Parameters, simulate
from gems.memory.policies.lms.limit import lms_limit
from gems.memory.policies.vdnn import vdnn_all
from gems.memory.storages import saved_storages
from gems.profile import ModelProfile
from gems.schedule.action import Kind
from gems.schedule.simulate import EVEN
from gems.schedule.validate import validate
from tests.helpers.policy_cases import MIB, SCHEDULES, case_of, network, random_network

POLICIES = (lms, lms_limit)
NAMES = ["lms", "lms_limit"]
NET = "cccbcccbccccl"


def between(
    profile: ModelProfile, name: str, ranks: int, micro_batches: int, share: float | None
) -> MemoryCase:
    """A case whose limit lies between a little above what vDNN needs, and what is held when all is kept.

    None for more.
    """
    case = case_of(profile, name, ranks, micro_batches)
    most = max(case.kept.peak_bytes)
    if share is None:
        return replace(case, limit_bytes=int(1.3 * most))
    least = min(most - 20 * MIB, 1.25 * max(case.outcome(vdnn_all(case)).peak_bytes))
    return replace(case, limit_bytes=int(least + share * (most - least)))


def segments(plan: MemoryPlan) -> list[Any]:
    return [one for stage in plan.stages for one in stage if one.choice is Choice.OFFLOAD]


def tuned(plan: MemoryPlan) -> dict[str, Any]:
    assert plan.counters is not None
    return dict(plan.counters["tuned"][0])


@pytest.mark.parametrize("policy", POLICIES, ids=NAMES)
@pytest.mark.parametrize(("name", "ranks", "micro_batches"), SCHEDULES)
@pytest.mark.parametrize("share", [None, 0.6, 0.3])
def test_plans_fit_and_run(
    policy: Any, name: str, ranks: int, micro_batches: int, share: float | None
) -> None:
    case = between(network(NET[:-1] + NET), name, ranks, micro_batches, share)
    plan = policy(case)
    outcome = case.outcome(plan)
    assert case.limit_bytes is not None
    assert max(outcome.peak_bytes) <= case.limit_bytes
    validate(outcome.schedule)
    assert bool(segments(plan)) == (share is not None)
    assert policy(case) == plan, "the same again"


@pytest.mark.parametrize("policy", (*POLICIES, vdnn_all), ids=(*NAMES, "vdnn_all"))
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("name", "ranks", "micro_batches"), SCHEDULES)
def test_memory_is_free_before_a_later_segment_brings_it_back(
    policy: Any, seed: int, name: str, ranks: int, micro_batches: int
) -> None:
    """What a segment's copy took may be needed by one behind it, whose copy back would find it still there."""
    case = between(random_network(seed, 24), name, ranks, micro_batches, 0.8)
    plan = vdnn_all(case, asynchronous=True) if policy is vdnn_all else policy(case)
    for row in case.lowered(plan).rank_schedules:
        back: dict[tuple[int, int, int | None], int] = {}
        for action in row:
            place = (action.direction, action.stage, action.micro_batch)
            if action.kind is Kind.PREFETCH and action.segment is not None:
                back[place] = max(back.get(place, -1), action.segment)
            if action.kind is Kind.FREE and action.segment is not None:
                assert back.get(place, -1) <= action.segment, (action, plan)


@pytest.mark.parametrize("policy", POLICIES, ids=NAMES)
def test_without_a_limit_nothing_is_moved(policy: Any) -> None:
    assert segments(policy(case_of(network(NET)))) == []


@pytest.mark.parametrize("policy", POLICIES, ids=NAMES)
def test_a_limit_below_what_one_layer_needs_is_refused(policy: Any) -> None:
    case = case_of(network(NET), limit_share=0.1)
    with pytest.raises(DoesNotFitError, match="rank 0 under lms") as caught:
        policy(case)
    assert caught.value.limit_bytes == case.limit_bytes
    assert case.limit_bytes is not None
    assert caught.value.needed_bytes > case.limit_bytes


def test_a_smaller_limit_swaps_more() -> None:
    found = [
        len(segments(lms(case_of(network(NET), limit_share=share))))
        for share in (0.95, 0.8, 0.65, 0.5)
    ]
    assert found == sorted(found)
    assert found[0] < found[-1]


def test_lms_swaps_what_is_farthest_from_its_backward() -> None:
    plan = lms(case_of(network("ccccccccccl"), limit_share=0.7))
    gone = [one.first for one in segments(plan)]
    assert gone == list(range(1, len(gone) + 1)), "the first layer's output leaves with its reader"


def test_lms_has_less_of_the_device_with_replicas() -> None:
    case = case_of(network(NET), limit_share=0.8)
    assert case.limit_bytes is not None
    room = case.limit_bytes - sum(case.static_blocks(0))
    assert lms(case).counters["ratio"] == 0.9  # type: ignore[index]
    two = lms(replace(case, paces=(EVEN, EVEN)))
    assert two.counters["ratio"] == 0.8  # type: ignore[index]
    assert tuned(two)["room_bytes"] <= int(0.8 * room) < int(0.9 * room)
    assert len(segments(two)) >= len(segments(lms(case)))
    assert lms(replace(case, paces=(EVEN, EVEN)), ratio=0.95).counters["ratio"] == 0.95  # type: ignore[index]


@pytest.mark.parametrize(
    ("mode", "free_after", "is_ahead"), [(0, 1, True), (1, 0, True), (2, 1, False), (3, 0, False)]
)
def test_synchronisation_becomes_distances(mode: int, free_after: int, is_ahead: bool) -> None:
    plan = lms(
        case_of(network(NET)), swapout_threshold=6, swapin_ahead=4, swapin_groupby=0, sync_mode=mode
    )
    found = segments(plan)
    assert found
    assert {one.free_after for one in found} == {free_after}
    assert {one.ahead for one in found} == ({4} if is_ahead else {0})


@pytest.mark.parametrize("threshold", [1, 5, 9, 14, 30])
def test_a_threshold_says_which_layers_leave(threshold: int) -> None:
    """Of a chain of L layers, layer i has its forward on level i and its backward on level 2L-1-i."""
    profile = network("cccccccccc")
    plan = lms(
        case_of(profile), swapout_threshold=threshold, swapin_ahead=1, swapin_groupby=0, sync_mode=0
    )
    last = profile.num_layers - 1
    expected = [
        owner
        for owner in range(last + 1)
        # what leaves with a layer is the output of the one before; the last one's own output goes
        # with itself
        if any(
            2 * last + 1 - owner - maker > threshold
            for maker in ([owner - 1] if owner > 0 else []) + ([owner] if owner == last else [])
        )
    ]
    gone = {one.first for one in segments(plan)}
    assert gone <= set(expected)
    assert {owner for owner in expected if owner < last} <= gone


def test_the_graph_holds_what_the_layers_save() -> None:
    """Kept whole, the peak of the play is that of the stored bytes and of what passes at the turn."""
    case = case_of(network("cpcbccl"))
    graph = RankGraph(case, 0).graph
    assert graph.num_levels == 2 * case.profile.num_layers
    saved = sum(one.total_bytes for one in saved_storages(case.profile, 0, case.profile.num_layers))
    peak = simulate(graph, Parameters(graph.num_levels), float("inf")).peak_bytes
    assert (
        saved <= peak <= saved + 2 * max(layer.output_grad_bytes for layer in case.profile.layers)
    )


@pytest.mark.parametrize(
    ("name", "ranks", "micro_batches", "order"),
    [
        ("interleaved_1f1b", 2, 4, "0F 2F 2B 0B"),
        ("gems_master", 2, 4, "0F 0B 1F 1B"),
        ("1f1b", 3, 6, "0F 0B"),
        ("zb_v", 2, 4, "0F 3F 3B 0B"),
    ],
)
def test_the_graph_follows_the_list(name: str, ranks: int, micro_batches: int, order: str) -> None:
    """One micro-batch of each stage of rank 0, one operation behind the other."""
    case = case_of(random_network(1), name, ranks, micro_batches)
    spans = list(pairwise(case.boundaries))
    graph = RankGraph(case, 0)
    runs = [(int(run[:-1]), run[-1]) for run in order.split()]
    num = sum(spans[stage][1] - spans[stage][0] for stage, _ in runs)
    assert graph.graph.levels == tuple(range(num))
    saved = [saved_storages(case.profile, *spans[stage]) for stage, kind in runs if kind == "F"]
    peaks = simulate(graph.graph, Parameters(num), float("inf")).peak_bytes
    together = [sum(one.total_bytes for one in each) for each in saved]
    nested = order.endswith("0B")
    assert peaks >= (sum(together) if nested else max(together))
    if not nested:
        assert peaks < sum(together)


def test_lms_on_several_ranks_tunes_each() -> None:
    """The first rank has the larger images and swaps more."""
    sizes = (96, 96, 96, 96, 48, 48, 48, 48, 24, 24, 24, 24)
    plan = lms(case_of(network("cccccccccccc", sizes), "1f1b", 3, 6, 0.6))
    assert plan.counters is not None
    assert [entry["ranks"] for entry in plan.counters["tuned"]] == [[0], [1], [2]]
    gone = [sum(one.choice is Choice.OFFLOAD for one in stage) for stage in plan.stages]
    assert gone[0] > gone[2] == 0


def test_both_directions_share_the_parameters_of_a_stage() -> None:
    plan = lms(case_of(network(NET), "gems_master", 4, 8, 0.8))
    assert plan.counters is not None
    assert sorted(entry["ranks"] for entry in plan.counters["tuned"]) == [[0, 3], [1, 2]]


def needs(case: MemoryCase, **options: Any) -> list[dict[str, Any]]:
    counters = lms_limit(case, **options).counters
    assert counters is not None
    return [dict(rank) for rank in counters["ranks"]]


def test_lms_limit_learns_the_step() -> None:
    """In the first step nothing is copied ahead of need.

    In the repeated one all that is reclaimed is.
    """
    (rank,) = needs(case_of(network("ccccccccccccl"), limit_share=0.7))
    first = rank["first"]
    steady = rank["steady"]
    assert first["speculative"] == 0 < first["reclaimed"]
    assert steady["speculative"] - steady["speculative_missed"] == steady["reclaimed"] > 0
    assert steady["reclaimed_bytes"] == steady["paged_in_bytes"]
    assert steady["alloc_distribution.cudamalloc"] == 0 < first["alloc_distribution.cudamalloc"]
    assert 2 <= rank["steps"] <= 8


def test_lms_limit_comes_back_on_demand() -> None:
    found = segments(lms_limit(case_of(network("ccccccccccccl"), limit_share=0.7)))
    assert {one.ahead for one in found} == {0}
    assert all(one.free_after >= 0 for one in found)


def test_the_limit_of_the_allocator() -> None:
    """None and 0 are 0.95 of the device; a limit of its own counts as it is, in megabyte segments."""
    case = case_of(network(NET), limit_share=1.3)
    assert case.limit_bytes is not None
    default = int(0.95 * case.limit_bytes)
    assert [needs(case, limit_bytes=limit)[0]["limit_bytes"] for limit in (None, 0)] == [
        default,
        default,
    ]
    assert needs(case, limit_bytes=case.limit_bytes)[0]["limit_bytes"] == case.limit_bytes
    assert needs(replace(case, limit_bytes=None))[0]["limit_bytes"] is None


def test_the_order_of_reclaim_is_the_callers() -> None:
    """Of unequal storages the one that fits best is another than the least recently used."""
    profile = network("ccccccccccccl", (96, 24, 80, 32, 72, 40, 64, 48, 64, 48, 72, 40, 64))
    case = case_of(profile, limit_share=0.75)
    first, size = (lms_limit(case, reclaim=reclaim) for reclaim in ("first", "size"))
    assert segments(first) != segments(size)
