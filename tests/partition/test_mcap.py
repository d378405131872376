"""mCAP: what it measures, what it predicts, and which cut it recommends."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import pytest

from gems.config.constraints import check_boundaries
from gems.partition import mcap as module
from gems.partition.mcap import brute_force, mcap, profile, profiling_runs, recommend
from tests.helpers.problems import every_cut


def predict(
    isolated: Sequence[float], added: Sequence[float], boundaries: Sequence[int]
) -> list[float]:
    """The predicted peak of each stage: its first layer's isolated bytes and what the others add."""
    return [
        float(isolated[first] + sum(added[first + 1 : end]))
        for first, end in itertools.pairwise(boundaries)
    ]


def layers(num_layers: int, seed: int) -> tuple[list[float], list[float]]:
    rng = random.Random(seed)
    return [rng.randint(5, 50) for _ in range(num_layers)], [
        rng.randint(0, 30) for _ in range(num_layers)
    ]


@pytest.mark.parametrize("num_layers", [1, 2, 3, 5, 8, 13, 24])
def test_runs_are_cuts_and_as_many_as_layers(num_layers: int) -> None:
    for num_stages in range(1, num_layers + 1):
        runs = profiling_runs(num_layers, num_stages)
        for run in runs:
            check_boundaries(run, num_layers, num_stages)
        assert len(runs) == len(set(runs)) <= num_layers + 6
        if num_stages > 2:
            alone = {
                first for run in runs for first, end in itertools.pairwise(run) if end == first + 1
            }
            assert alone == set(range(num_layers))


@pytest.mark.parametrize(
    ("num_layers", "num_stages"), [(6, 3), (10, 4), (24, 8), (48, 8), (96, 16), (13, 7)]
)
def test_the_profile_of_an_additive_model_is_the_model(num_layers: int, num_stages: int) -> None:
    isolated, added = layers(num_layers, seed=num_layers)
    seen = profile(lambda run: predict(isolated, added, run), num_layers, num_stages)
    assert seen[0] == pytest.approx(isolated)
    assert seen[1][1:] == pytest.approx(added[1:]), "nothing is in front of layer 0"


def test_two_stages_show_no_inner_layer_alone() -> None:
    isolated = [20.0 + 10 for _ in range(6)]
    seen, added = profile(lambda run: predict(isolated, [20.0] * 6, run), 6, 2)
    assert seen == pytest.approx(isolated)
    assert added[1:] == pytest.approx([20.0] * 5)


def test_a_prediction() -> None:
    assert predict([10, 20, 30, 40], [1, 2, 3, 4], (0, 2, 3, 4)) == [12.0, 30.0, 40.0]


def test_brute_force_is_the_least_of_all_cuts() -> None:
    for seed in range(80):
        num_layers = 1 + seed % 10
        isolated, added = layers(num_layers, seed)
        for num_stages in range(1, num_layers + 1):
            every = [
                sorted(predict(isolated, added, cut), reverse=True)
                for cut in every_cut(num_layers, num_stages)
            ]
            found = brute_force(isolated, added, num_stages)
            assert sorted(predict(isolated, added, found), reverse=True) == min(every)


def test_recommendation_is_the_least_peak_where_costs_are_monotone() -> None:
    """An isolated layer costs a constant and what it adds, so that a longer stage always costs more."""
    for seed in range(60):
        num_layers = 2 + seed % 9
        _, added = layers(num_layers, seed)
        isolated = [more + 7 for more in added]
        for num_stages in range(1, num_layers + 1):
            found = check_boundaries(recommend(isolated, added, num_stages), num_layers, num_stages)
            least = max(predict(isolated, added, brute_force(isolated, added, num_stages)))
            assert max(predict(isolated, added, found)) == pytest.approx(least, abs=1.0), (
                "to a byte"
            )


def test_recommendation_settles_the_rest_again() -> None:
    """One giant layer decides the peak.

    Behind it stages are not filled up to that, but cut by their own.
    """
    added = [6.0, 6.0, 6.0, 100.0, 6.0, 6.0, 6.0, 6.0, 6.0, 6.0]
    assert recommend(added, added, 5) == (0, 3, 4, 6, 8, 10)


def test_many_cuts_are_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    isolated, added = layers(12, 0)

    def measure(run: tuple[int, ...]) -> list[float]:
        return predict(isolated, [0.0, *added[1:]], run)

    assert mcap(measure, 12, 4) == brute_force(isolated, added, 4)
    monkeypatch.setattr(module, "MAX_CUTS", 100)
    seen = profile(measure, 12, 4)
    assert mcap(measure, 12, 4) == recommend(*seen, 4)
