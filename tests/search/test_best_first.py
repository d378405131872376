"""The best-first search gives what scoring everything gives."""

from __future__ import annotations

from dataclasses import dataclass, replace

from hypothesis import given, settings
from hypothesis import strategies as st

from gems.search.best_first import Rules, TooLarge, TooSlow, search


@dataclass(frozen=True)
class Case:
    """A made-up candidate: its score, how far its two bounds are below, what becomes of it, and its bytes."""

    score_s: float
    slack: float
    fate: str
    priority: int
    most_bytes: int = 0


CASES = st.lists(
    st.builds(
        Case,
        st.integers(1, 30).map(float),
        st.floats(0.0, 1.0),
        st.sampled_from(["fits", "fits", "large", "pruned", "none"]),
        st.integers(0, 3),
        st.integers(0, 3),
    ),
    max_size=40,
)


def rules(evaluated: list[Case]) -> Rules[Case, Case]:
    def evaluate(case: Case, worst_s: float) -> Case | TooLarge | None:
        evaluated.append(case)
        return {"fits": case, "large": TooLarge(round(case.score_s))}.get(case.fate)

    return Rules(
        lambda case: case.score_s * case.slack / 2,
        lambda case: case.score_s * case.slack,
        lambda case: case.fate == "pruned",
        evaluate,
        lambda case: case.priority,
    )


@settings(max_examples=150, deadline=None)
@given(CASES, st.integers(1, 6))
def test_it_is_exact_and_counts_everything(cases: list[Case], num_best: int) -> None:
    evaluated: list[Case] = []
    found = search(cases, rules(evaluated), num_best)
    expected = sorted((case.score_s, case.most_bytes) for case in cases if case.fate == "fits")[
        :num_best
    ]
    assert [(case.score_s, case.most_bytes) for case in found.best] == expected
    counted = (
        found.num_simulated
        + found.num_too_large
        + found.num_pruned_bytes
        + found.num_pruned_time
        + found.num_impossible
        + found.num_left
    )
    assert counted == found.num_candidates == len(cases)
    assert found.is_exact and found.num_left == 0
    assert len(evaluated) == found.num_simulated + found.num_too_large + found.num_impossible
    large = [round(case.score_s) for case in evaluated if case.fate == "large"]
    assert found.least_needed_bytes == min(large, default=None)


def test_tight_bounds_leave_most_unscored() -> None:
    cases = [Case(float(score), 1.0, "fits", 0) for score in range(100, 0, -1)]
    evaluated: list[Case] = []
    found = search(cases, rules(evaluated), 3)
    assert [case.score_s for case in found.best] == [1, 2, 3]
    assert found.num_pruned_time == 97 and len(evaluated) == 3


def test_of_those_that_are_as_fast_the_one_of_fewest_bytes_is_first() -> None:
    sums = [
        Case(0.1 + 0.2, 1.0, "fits", 0, 4),
        Case(0.3, 1.0, "fits", 0, 7),
        Case(0.1 + 0.1 + 0.1, 1.0, "fits", 0, 2),
    ]
    slower = Case(0.3 * (1 + 1e-6), 1.0, "fits", 0, 1)
    found = search([slower, *sums], rules([]), 3)
    assert [case.most_bytes for case in found.best] == [2, 4, 7]


def test_a_search_that_ends_early_says_so() -> None:
    cases = [Case(float(score), 0.0, "fits", 0) for score in range(1, 11)]
    evaluated: list[Case] = []
    found = search(cases, rules(evaluated), 2, lambda: len(evaluated) == 4)
    assert not found.is_exact
    assert found.num_left == 6 and len(found.best) == 2


def test_what_is_quick_comes_first() -> None:
    cases = [Case(1.0, 1.0, "fits", 3), Case(5.0, 1.0, "fits", 0), Case(2.0, 1.0, "fits", 1)]
    evaluated: list[Case] = []
    search(cases, rules(evaluated), 3)
    assert [case.priority for case in evaluated] == [0, 1, 3]


@settings(max_examples=50, deadline=None)
@given(CASES, st.integers(1, 6))
def test_an_evaluation_may_end_where_it_is_too_slow(cases: list[Case], num_best: int) -> None:
    whole = rules([])

    def evaluate(case: Case, worst_s: float) -> Case | TooLarge | TooSlow | None:
        return TooSlow() if case.score_s > worst_s else whole.evaluate(case, worst_s)

    found = search(cases, replace(whole, evaluate=evaluate), num_best)
    assert found.best == search(cases, whole, num_best).best
    assert found.is_exact
