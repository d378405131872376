"""Sizes and times with units, and values of another type than their key's."""

from __future__ import annotations

import pytest

from gems.config.compose import composed
from gems.errors import ConfigError

pytestmark = pytest.mark.cases


@pytest.mark.parametrize(
    ("word", "value"),
    [
        ("cluster.minutes=1h", 60),
        ("cluster.minutes=90min", 90),
        ("cluster.minutes=1h30m", 90),
        ("cluster.minutes=1d", 1440),
        ("cluster.minutes=1-02:00:00", 26 * 60),
        ("cluster.minutes=00:30:00", 30),
        ("train.hang_timeout_s=10min", 600),
        ("train.sample_interval_s=1.5s", 1.5),
        ("machine.device_bytes=16GB", 16 * 10**9),
        ("machine.device_bytes=1.5GiB", 3 * 2**29),
        ("machine.link_bytes_per_s=25GB/s", 25e9),
    ],
)
def test_a_unit_is_read(word: str, value: float) -> None:
    section, name = word.partition("=")[0].split(".")
    assert getattr(getattr(composed([word]), section), name) == value


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("parallel.partitions=four", "parallel.partitions=four: must be a whole number"),
        (
            "cluster.minutes=soon",
            "cluster.minutes=soon: must be a whole number, or on the command line with units",
        ),
        (
            "cluster.minutes=90s",
            "cluster.minutes=1.5: must be a whole number, or on the command line",
        ),
        (
            "cluster.minutes=1:30",
            "must be a whole number, or on the command line with units: 90min, 1h30min",
        ),
        (
            "machine.device_bytes=16G",
            "machine.device_bytes=16G: must be a whole number, or on the command line with",
        ),
        ("machine.device_bytes=lots", "16GB is 16 * 10^9 bytes, 16GiB 16 * 2^30"),
        ("train.evaluate=perhaps", "train.evaluate=perhaps: must be true or false"),
        ("optimizer.lr=fast", "optimizer.lr=fast: must be a number"),
    ],
)
def test_what_is_no_number_is_refused_with_what_is_allowed(word: str, said: str) -> None:
    with pytest.raises(ConfigError) as error:
        composed([word])
    assert said in str(error.value)


def test_a_rate_and_a_keyword_of_the_users_are_no_times() -> None:
    assert composed(["model.kwargs.window_s=1h"]).model.kwargs == {"window_s": "1h"}
