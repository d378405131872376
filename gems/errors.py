"""Errors that end a command with one clear line and the exit code of their kind."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping

MAX_CHARS = 200  # of a value in an error's line
SIGNAL_BASE = 128  # a shell's exit code for a signal is this and its number


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
        text = f"{key}={_shown(value)}: {allowed}"
        super().__init__(one_line(f"{text}; {advice}" if advice else text))

    def __reduce__(self) -> tuple[type[ConfigError], tuple[str, object, str, str]]:
        return type(self), (self.key, self.value, self.allowed, self.advice)


class TryLaterError(ConfigError):
    """A run that would be taken later.

    The queue is full, SLURM cannot be reached, or the run folder is in use.
    """


class DoesNotFitError(GemsError):
    """More memory is needed than there is.

    Names the rank, the bytes needed, the limit with its key, and what to change.
    """

    exit_code = 3

    def __init__(
        self,
        where: str,
        needed_bytes: int,
        limit_bytes: int,
        advice: str,
        key: str = "machine.device_bytes",
    ) -> None:
        self.where = where
        self.needed_bytes = needed_bytes
        self.limit_bytes = limit_bytes
        self.advice = advice
        self.key = key
        super().__init__(
            f"{where} needs {needed_bytes} bytes ({needed_bytes / 2**30:.2f} GiB), "
            f"above {key}={limit_bytes} ({limit_bytes / 2**30:.2f} GiB); {advice}"
        )

    def __reduce__(self) -> tuple[type[DoesNotFitError], tuple[str, int, int, str, str]]:
        return type(self), (self.where, self.needed_bytes, self.limit_bytes, self.advice, self.key)


class ScheduleError(GemsError):
    """A schedule that would not run: names the rank and the action at fault.

    `schedule` is the one that was validated, for a drawing of the fault; None where that is not
    known.
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


class LostPeerError(RankFailedError):
    """A message failed, most often since the rank at its other end is gone."""


class NodeFailedError(RankFailedError):
    """A job has too few nodes that can run its ranks; `faults` has the bad ones, `good` the others."""

    def __init__(
        self, text: str, good: tuple[str, ...] = (), faults: Mapping[str, str] | None = None
    ) -> None:
        self.good = good
        self.faults = dict(faults or {})
        super().__init__(text)


class StalledError(GemsError):
    """A rank waited longer than the stall limit for data that never came, or stayed as long in one action.

    `waits_for` tells in one line who waits for whom, where that was found out.
    """

    exit_code = 5
    waits_for: str | None = None


def of_the_system(error: OSError | RecursionError) -> ConfigError:
    """Describe what the system refuses.

    A file that is closed to us, a path that is too long, a disk that is full.
    """
    if isinstance(error, RecursionError):
        return ConfigError(
            "file", "a file that was read", "holds lists within lists, too deep to be read"
        )
    return ConfigError(
        "file", error.filename, f"cannot be read or written ({error.strerror or error})"
    )


def one_line(text: str) -> str:
    """Return a text on one line, with escapes for what no terminal should be sent."""
    joined = " ".join(text.split())
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode() for char in joined
    )


def _shown(value: object) -> str:
    text = str(value)
    return text if len(text) <= MAX_CHARS else f"{text[:MAX_CHARS]}... ({len(text)} characters)"


def nearest(word: str, valid: Iterable[str], count: int = 3) -> list[str]:
    """Return the `count` valid words most like `word`, best first (all of them when few)."""
    candidates = sorted(set(valid))
    close = difflib.get_close_matches(word, candidates, n=count, cutoff=0.4)
    return close or candidates[:count]


def one_of(valid: Iterable[str]) -> str:
    """Describe the allowed values of a key for an error line."""
    return "allowed: " + ", ".join(valid)
