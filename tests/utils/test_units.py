from __future__ import annotations

import pytest

from gems.utils.units import (
    bytes_unit,
    counted,
    format_bytes,
    format_rates,
    number,
    percent,
    time_unit,
)


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (1234.6, "1235"),
        (99.96, "100.0"),
        (12.34, "12.3"),
        (1.0, "1.00"),
        (0.0, "0.00"),
        (0.01234, "0.0123"),
    ],
)
def test_numbers_keep_three_digits(value: float, shown: str) -> None:
    assert number(value) == shown


def test_units_follow_the_largest_figure() -> None:
    assert [time_unit([value, None]).name for value in (2.0, 0.02, 2e-5)] == ["s", "ms", "us"]
    assert time_unit([0.0812]).show(0.0812) == "81.2"
    assert [bytes_unit([value]).name for value in (1 << 20, 1 << 30)] == ["MiB", "GiB"]
    assert time_unit([None]).show(None) == "-"


def test_sizes_rates_shares_and_counts() -> None:
    assert [format_bytes(size) for size in (3 << 29, 3 << 19)] == ["1.500 GiB", "1.50 MiB"]
    assert format_rates(1.5e-6, 12.34e9) == "1.5 us, 12.34 GB/s"
    assert [percent(0.1234), percent(0.1234, 0), percent(None)] == ["12.3", "12", "-"]
    assert [counted(1, "rank"), counted(2, "rank"), counted(2, "pass", "es")] == [
        "1 rank",
        "2 ranks",
        "2 passes",
    ]
