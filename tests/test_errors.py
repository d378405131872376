"""gems.errors: one clear line, an exit code, and the way between processes."""

from __future__ import annotations

import pickle

import pytest

from gems.errors import (
    ConfigError,
    GemsError,
    RankFailedError,
    ScheduleError,
    StalledError,
    nearest,
    one_of,
)
from gems.schedule.action import Action


def test_config_error_names_key_value_allowed_and_advice() -> None:
    error = ConfigError("parallel.partitions", 9, "must be at most 5", "use fewer")
    assert str(error) == "parallel.partitions=9: must be at most 5; use fewer"
    assert str(ConfigError("seed", None, "must be given")) == "seed=None: must be given"


def test_a_value_of_many_lines_stays_one_line() -> None:
    assert str(ConfigError("name", "a\n b\tc\r\nd", "no")) == "name=a b c d: no"
    assert (
        str(ConfigError("run folder", "r", "no yaml (line 1\n  ^)", "look\nthere"))
        == "run folder=r: no yaml (line 1 ^); look there"
    )


def test_schedule_error_names_rank_and_action() -> None:
    error = ScheduleError(3, Action.parse("2F5"), "is missing")
    assert str(error) == "schedule is broken at rank 3, action 2F5: is missing"


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (GemsError("x"), 1),
        (ConfigError("a", 1, "b"), 2),
        (ScheduleError(0, "0F0", "x"), 2),
        (RankFailedError("x"), 4),
        (StalledError("x"), 5),
    ],
)
def test_exit_codes(error: GemsError, code: int) -> None:
    assert error.exit_code == code


@pytest.mark.parametrize(
    "error",
    [
        ConfigError("a", [1], "b", "c"),
        ScheduleError(1, Action.parse("1B2/1"), "why"),
        StalledError("x"),
    ],
)
def test_errors_go_between_processes(error: GemsError) -> None:
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert str(copy) == str(error)
    assert vars(copy) == vars(error)


def test_nearest_goes_by_likeness() -> None:
    assert nearest("gpip", ["gpipe", "1f1b", "gems_mast"])[0] == "gpipe"
    assert nearest("partitons", ["parts", "partitions", "seed"])[0] == "partitions"
    assert len(nearest("a", "abcdefgh", count=2)) <= 2


def test_nearest_always_proposes_something() -> None:
    assert nearest("zzz", ["b", "a"]) == ["a", "b"]
    assert nearest("zzz", ["d", "c", "b", "a"]) == ["a", "b", "c"]
    assert nearest("", ["a"]) == ["a"]


def test_one_of() -> None:
    assert one_of(("sgd", "adam")) == "allowed: sgd, adam"
