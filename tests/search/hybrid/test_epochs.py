"""Epochs by global batch: the table, the noise scale, and its fit."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gems.errors import ConfigError
from gems.search.hybrid.epochs import EQUAL_EPOCHS, EpochTable, NoiseScale, fit_noise_scale
from gems.search.hybrid.quantity import Z95, Quantity, band, is_exact

TABLE = EpochTable.of({2048: 4, 4096: 7, 8192: 12, 16384: 23})


def test_a_table_gives_its_own_points_and_a_power_law_between_them() -> None:
    assert [TABLE.epochs(batch) for batch in TABLE.global_batches] == [4, 7, 12, 23]
    assert TABLE.epochs(math.sqrt(4096 * 8192)) == pytest.approx(math.sqrt(7 * 12))
    assert TABLE.epochs(2048 * 2**0.25) == pytest.approx(4 * (7 / 4) ** 0.25)


@pytest.mark.parametrize("batch", [2047.0, 16385.0, 1.0, 1e9])
def test_outside_of_the_table_nothing_is_known_unless_told(batch: float) -> None:
    with pytest.raises(ConfigError, match="known from 2048 to 16384 samples"):
        TABLE.epochs(batch)
    on = EpochTable(TABLE.global_batches, TABLE.numbers, beyond=True)
    first = (2048, 4, 7 / 4)
    last = (16384, 23, 23 / 12)
    base, epochs, ratio = first if batch < 2048 else last
    assert on.epochs(batch) == pytest.approx(epochs * ratio ** math.log2(batch / base))
    assert on.is_extrapolated(batch) and not on.is_extrapolated(5000)


def test_one_row_is_known_at_its_own_batch() -> None:
    one = EpochTable.of({64: 3})
    assert one.epochs(64) == 3
    with pytest.raises(ConfigError):
        one.epochs(65)
    assert EpochTable.of({64: 3}, beyond=True).epochs(1e6) == 3


@pytest.mark.parametrize(
    ("batches", "numbers"),
    [
        ((), ()),
        ((2.0, 1.0), (1.0, 1.0)),
        ((1.0, 1.0), (1.0, 1.0)),
        ((0.0,), (1.0,)),
        ((1.0,), (1.0, 2.0)),
    ],
)
def test_a_table_that_is_none_is_refused(
    batches: tuple[float, ...], numbers: tuple[float, ...]
) -> None:
    with pytest.raises(ValueError, match="must have"):
        EpochTable(batches, tuple(map(Quantity.exact, numbers)))


@pytest.mark.parametrize(
    "figures",
    [(1, 2, 3), (1, 0.5, 0.9), (0, 0, 0), (1, 1, math.inf), (1, math.nan, 2), (-1, -2, 0)],
)
def test_a_quantity_lies_in_its_interval(figures: tuple[float, float, float]) -> None:
    with pytest.raises(ValueError, match="interval"):
        Quantity(*figures)


def test_draws_of_a_quantity_have_its_interval() -> None:
    each = Quantity(2.0, 1.0, 3.0)
    assert (
        each.at(0.0) == 2.0
        and each.at(-Z95) == pytest.approx(1.0)
        and each.at(Z95) == pytest.approx(3.0)
    )
    rng = np.random.default_rng(0)
    found = band(2.0, [each.drawn(rng).value for _ in range(4000)])
    assert (found.low, found.high) == pytest.approx((1.0, 3.0), rel=0.06)
    assert Quantity.exact(2.0).drawn(rng).value == 2.0 and is_exact(band(1.0, []))


def test_draws_of_a_noise_scale_are_correlated() -> None:
    law = NoiseScale(Quantity(2.0, 1.0, 4.0), Quantity(100.0, 50.0, 200.0), correlation=0.9)
    rng = np.random.default_rng(0)
    drawn = [law.drawn(rng) for _ in range(3000)]
    logs = np.log([(each.least_epochs.value, each.critical_batch.value) for each in drawn])
    assert np.corrcoef(logs.T)[0, 1] == pytest.approx(0.9, abs=0.02)
    assert np.quantile(np.exp(logs[:, 1]), [0.025, 0.975]) == pytest.approx([50, 200], rel=0.1)


@settings(max_examples=60, deadline=None)
@given(
    least=st.floats(0.1, 1000),
    critical=st.floats(1, 1e6),
    spots=st.sets(st.integers(-4, 4), min_size=2, max_size=6),
)
def test_the_fit_finds_what_was_planted(least: float, critical: float, spots: set[int]) -> None:
    law = NoiseScale(Quantity.exact(least), Quantity.exact(critical))
    batches = [critical * 2.0**spot for spot in spots]
    fit = fit_noise_scale([(batch, law.epochs(batch)) for batch in batches])
    assert fit.law.least_epochs.value == pytest.approx(least, rel=1e-6)
    assert fit.law.critical_batch.value == pytest.approx(critical, rel=1e-6)
    assert max(map(abs, fit.residuals)) < 1e-6
    assert fit.law.measured == (min(batches), max(batches))


def test_intervals_of_noisy_runs_hold_the_planted_figures() -> None:
    law = NoiseScale(Quantity.exact(3.0), Quantity.exact(500.0))
    rng = np.random.default_rng(1)
    batches = [32, 64, 128, 256, 512, 1024, 2048, 4096]
    least = 0
    critical = 0
    num = 200
    for _ in range(num):
        noise = np.exp(0.05 * rng.standard_normal(len(batches)))
        found = fit_noise_scale(
            [(batch, law.epochs(batch) * each) for batch, each in zip(batches, noise, strict=True)]
        ).law
        least += found.least_epochs.low <= 3.0 <= found.least_epochs.high
        critical += found.critical_batch.low <= 500.0 <= found.critical_batch.high
    assert least / num > 0.89 and critical / num > 0.89
    assert min(least, critical) / num < 1.0, "an interval that always holds is too wide"


def test_two_runs_have_no_interval() -> None:
    law = fit_noise_scale([(64, 2.0), (128, 3.0)]).law
    assert is_exact(law)
    assert (law.least_epochs.value, law.critical_batch.value) == pytest.approx((1.0, 64.0))


@pytest.mark.parametrize(
    ("runs", "why"),
    [
        ([(64, 2.0)], "two global batches"),
        ([(64, 2.0), (64, 3.0)], "two global batches"),
        ([(64, 2.0), (128, 2.0)], "do not grow"),
        ([(64, 3.0), (128, 2.0)], "do not grow"),
        ([(64, 1.0), (128, 4.0)], "grow faster"),
    ],
)
def test_runs_without_a_noise_scale_are_refused(runs: list[tuple[float, float]], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        fit_noise_scale(runs)


def test_a_law_is_extrapolated_from_four_times_its_runs_on() -> None:
    law = fit_noise_scale([(64, 2.0), (128, 3.0)]).law
    assert [law.is_extrapolated(batch) for batch in (15, 16, 512, 513)] == [
        True,
        False,
        False,
        True,
    ]
    assert not EQUAL_EPOCHS.is_extrapolated(1e9) and EQUAL_EPOCHS.epochs(5.0) == 1.0
