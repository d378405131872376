"""Planning: bounds are below what is simulated, and the search gives what simulating everything gives."""

from __future__ import annotations

from dataclasses import replace
from statistics import median

import pytest

from gems.schedule import CAPPED
from gems.schedule.lower import lower
from gems.search.best_first import TooLarge, TooSlow, search
from gems.search.bounds import held_at_once, least_step_s
from gems.search.candidate import KEEP, Candidate, candidates
from gems.search.choice import PARTS, Choice, reasons
from gems.search.evaluate import Planner
from tests.helpers.planners import NUM_LAYERS, made_up, planner

SEEDS = range(2)
LONG = ("plan", "segment")


def space(num_gpus: int = 4, batch: int = 4) -> list[Candidate]:
    """A small one, without what takes long."""
    found = candidates(num_gpus, batch, NUM_LAYERS)
    return [
        one
        for one in found
        if one.schedule != CAPPED
        and one.memory not in LONG
        and one.how not in LONG
        and one.micro_batch_size <= 2
    ]


def scored(judge: Planner, asked: list[Candidate]) -> dict[Candidate, Choice | TooLarge | None]:
    return {one: judge.evaluate(one) for one in asked}


@pytest.mark.parametrize("seed", SEEDS)
def test_bounds_hold_whatever_the_cut(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    made_up(monkeypatch, seed)
    judge = planner()
    near = []
    for one in space(4, 8):
        if one.memory != KEEP:
            continue
        choice = judge.evaluate(one)
        if choice is None:
            continue
        assert isinstance(choice, Choice)
        first = judge.rules().least_s(one)
        assert first <= judge.rules().refined_s(one) <= choice.step_s * (1 + 1e-9), one
        assert judge.least_bytes(one) <= max(choice.peak_bytes), one
        near.append(first / choice.step_s)
    assert median(near) > 0.5  # they say something


@pytest.mark.parametrize("seed", SEEDS)
def test_bounds_hold_under_policies(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    made_up(monkeypatch, seed, decay=0.7)
    kept = [
        result
        for result in scored(planner(), [one for one in space() if one.memory == KEEP]).values()
    ]
    least = min(max(result.peak_bytes) for result in kept if isinstance(result, Choice))
    judge = planner(least)
    seen = 0
    for one in [one for one in space(4, 4) if one.memory != KEEP][seed::2]:
        choice = judge.evaluate(one)
        if isinstance(choice, Choice):
            seen += 1
            assert judge.rules().refined_s(one) <= choice.step_s * (1 + 1e-9), one
            assert judge.least_bytes(one) <= max(choice.peak_bytes) <= least, one
    assert seen


@pytest.mark.parametrize(("seed", "share"), [(0, 0.6), (1, 1.5), (1, None)])
def test_the_search_is_that_of_the_whole_space(
    seed: int, share: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    made_up(monkeypatch, seed)
    asked = space(4, 4)[::2]
    unlimited = [each for each in scored(planner(), asked).values() if isinstance(each, Choice)]
    limit = (
        None if share is None else round(share * min(max(each.peak_bytes) for each in unlimited))
    )
    judge = planner(limit)
    everything = [each for each in scored(judge, asked).values() if isinstance(each, Choice)]
    found = search(asked, judge.rules(), 10)
    expected = sorted(each.step_s for each in everything)[:10]
    assert [each.step_s for each in found.best] == pytest.approx(expected, rel=1e-12)
    assert found.is_exact
    if limit is not None:
        assert all(max(each.peak_bytes) <= limit for each in found.best)


def test_what_a_choice_holds_is_what_the_cut_says(monkeypatch: pytest.MonkeyPatch) -> None:
    made_up(monkeypatch, 1)
    judge = planner()
    one = Candidate(4, 1, "1f1b", 1, 8)
    choice = judge.evaluate(one)
    assert isinstance(choice, Choice)
    made = judge._draft(one, choice.boundaries)
    case = made.partitioner.case(lower(made.compute))
    assert choice.peak_bytes == case.peak_bytes(choice.boundaries)
    fewest = one.family.least_in_flight(one.terms())
    assert fewest == [4, 3, 2, 1]
    assert all(
        held >= count for held, count in zip(held_at_once(made.compute), fewest, strict=True)
    )


def test_a_tight_limit_moves_the_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    made_up(monkeypatch, 2, decay=0.8)
    one = Candidate(4, 1, "1f1b", 1, 8)
    free = planner().evaluate(one)
    assert isinstance(free, Choice)
    limit = round(0.97 * max(free.peak_bytes))
    held = planner(limit).evaluate(one)
    assert isinstance(held, Choice)
    assert held.boundaries != free.boundaries and max(held.peak_bytes) <= limit
    assert isinstance(planner(1000).evaluate(one), TooLarge)


def test_no_policy_where_keeping_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    made_up(monkeypatch, 3)
    assert (
        planner().evaluate(Candidate(2, 2, "1f1b", 1, 2, memory="recompute", how="stage")) is None
    )


def test_what_is_slower_than_asked_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only then: what is given up is slower, with all partitions and policies, and what is not is judged as ever."""
    made_up(monkeypatch, 1)
    asked = space(4, 4)
    free = [each for each in scored(planner(), asked).values() if isinstance(each, Choice)]
    limit = min(max(each.peak_bytes) for each in free)
    whole = scored(planner(limit), asked)
    worst_s = median(each.step_s for each in whole.values() if isinstance(each, Choice))
    judge = planner(limit)
    num_slow = 0
    for one, expected in whole.items():
        result = judge.evaluate(one, worst_s)
        if isinstance(result, TooSlow):
            num_slow += 1
            assert not isinstance(expected, Choice) or expected.step_s > worst_s
        elif isinstance(result, Choice) and isinstance(expected, Choice):
            assert result.step_s == expected.step_s
    assert num_slow


def test_reasons_are_the_parts_of_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    made_up(monkeypatch, 0)
    judge = planner(None, "machine.link_latency_s=0.03")
    first, slow = (judge.evaluate(Candidate(4, 1, name, 1, 8)) for name in ("1f1b", "gems_master"))
    assert isinstance(first, Choice) and isinstance(slow, Choice)
    for choice in (first, slow):
        assert sum(choice.parts_s[part] for part in PARTS) == pytest.approx(choice.step_s)
        assert set(choice.parts_s) == set(PARTS)
    assert reasons(first, first) == []
    said = reasons(first, slow)
    assert len(said) <= 3 and any("bubble" in word for word in said)
    more = slow.parts_s["waiting"] - first.parts_s["waiting"]
    assert f"bubble {1e3 * more:.3g} ms ({100 * more / first.step_s:.1f} %) more" in said


def test_replicas_pay_for_their_all_reduce(monkeypatch: pytest.MonkeyPatch) -> None:
    made_up(monkeypatch, 0)
    one = Candidate(1, 4, "1f1b", 1, 2)
    slow, fast = (
        planner(None, f"machine.link_bytes_per_s={rate}").evaluate(one) for rate in (500, 50000)
    )
    assert isinstance(slow, Choice) and isinstance(fast, Choice)
    assert slow.parts_s["all_reduce"] > 50 * fast.parts_s["all_reduce"] > 0
    assert slow.step_s - fast.step_s == pytest.approx(
        slow.parts_s["all_reduce"] - fast.parts_s["all_reduce"]
    )


def test_epochs_rank_by_the_time_to_the_target(monkeypatch: pytest.MonkeyPatch) -> None:
    made_up(monkeypatch, 0)
    spec = planner().spec
    judge = Planner(spec, None, lambda batch: 10.0 if batch == 8 else 100.0)
    small, large = (judge.evaluate(Candidate(1, 4, "1f1b", 2, n)) for n in (1, 2))
    assert isinstance(small, Choice) and isinstance(large, Choice)
    assert small.score_s == pytest.approx(small.step_s * 10 * spec.data.train_samples / 8)
    assert small.score_s < large.score_s and small.images_per_s < large.images_per_s
    assert any("more epochs" in word for word in reasons(small, large))
    load = judge.model(2).load
    assert least_step_s(small.candidate, load) <= small.step_s


@pytest.mark.parametrize("seed", SEEDS)
def test_estimates_are_of_the_size_of_what_is_held(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under a limit at which nothing can be kept, so that every policy is judged, and beside what keeping holds."""
    made_up(monkeypatch, seed)
    pairs = []
    for limit in (None, 1):
        judge = planner(limit)
        for one in space(4, 8)[::2]:
            result = judge.evaluate(one)
            held = (
                max(result.peak_bytes)
                if isinstance(result, Choice)
                else getattr(result, "needed_bytes", 0)
            )
            if held > judge.least_bytes(one):  # it was cut and simulated
                pairs.append(judge.estimated_bytes(one) / held)
    assert len(pairs) > 50
    assert 0.5 < median(pairs) < 2.0
    assert sum(0.33 < ratio < 3.0 for ratio in pairs) > 0.9 * len(pairs)


def test_what_is_likely_too_large_is_tried_last(monkeypatch: pytest.MonkeyPatch) -> None:
    made_up(monkeypatch, 0)
    many, few = (Candidate(4, 1, "1f1b", 1, 8, cap, memory="vdnn_dyn") for cap in (None, 1.0))
    judge = planner(round(planner().estimated_bytes(few)))
    assert judge.is_unlikely(many) and not judge.is_unlikely(few)
    assert judge.rules().priority(few) < judge.rules().priority(many)
    no_host = planner(None, "machine.host_bytes=1000")
    assert no_host.is_unlikely(few) and not no_host.is_unlikely(
        replace(few, memory="recompute", how="segment")
    )
