"""Errors that end a command with one clear line and the exit code of their kind."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class GemsError(Exception):
    """Base of every error that a user may see; `exit_code` is what the command returns."""

    exit_code = 1


class ConfigError(GemsError):
    """A configuration that cannot be run: names the key, its value, what is allowed and what to do."""

    exit_code = 2

    def __init__(self, key: str, value: object, allowed: str, advice: str = "") -> None:
        self.key = key
        self.value = value
        self.allowed = allowed
        self.advice = advice
        text = f"{key}={value}: {allowed}"
        super().__init__(" ".join((f"{text}; {advice}" if advice else text).split()))

    def __reduce__(self) -> tuple[type[ConfigError], tuple[str, object, str, str]]:
        return type(self), (self.key, self.value, self.allowed, self.advice)


class DoesNotFitError(GemsError):
    """More memory is needed than a device has: names the rank, the bytes needed, the limit and what to change."""

    exit_code = 3

    def __init__(self, where: str, needed_bytes: int, limit_bytes: int, advice: str) -> None:
        self.where = where
        self.needed_bytes = needed_bytes
        self.limit_bytes = limit_bytes
        self.advice = advice
        super().__init__(
            f"{where} needs {needed_bytes} bytes ({needed_bytes / 2**30:.2f} GiB), "
            f"above machine.device_bytes={limit_bytes} ({limit_bytes / 2**30:.2f} GiB); {advice}"
        )

    def __reduce__(self) -> tuple[type[DoesNotFitError], tuple[str, int, int, str]]:
        return type(self), (self.where, self.needed_bytes, self.limit_bytes, self.advice)


class ScheduleError(GemsError):
    """A schedule that would not run: names the rank and the action at fault.

    `schedule` is the one that was validated, for a drawing of the fault; None where that is not known.
    """

    exit_code = 2

    def __init__(self, rank: int, action: object, reason: str) -> None:
        self.schedule: object = None
        self.rank = rank
        self.action = action
        self.reason = reason
        super().__init__(f"schedule is broken at rank {rank}, action {action}: {reason}")

    def __reduce__(self) -> tuple[type[ScheduleError], tuple[int, object, str]]:
        return type(self), (self.rank, self.action, self.reason)


class RankFailedError(GemsError):
    """A rank ended before its work was done: names rank, node, step, action and cause."""

    exit_code = 4


class StalledError(GemsError):
    """A rank waited longer than the stall limit for data that never came."""

    exit_code = 5


def nearest(word: str, valid: Iterable[str], count: int = 3) -> list[str]:
    """Gives the `count` valid words most like `word`, best first (all of them when few)."""
    candidates = sorted(set(valid))
    close = difflib.get_close_matches(word, candidates, n=count, cutoff=0.4)
    return close or candidates[:count]


def one_of(valid: Iterable[str]) -> str:
    """Words the allowed values of a key for an error line."""
    return "allowed: " + ", ".join(valid)
