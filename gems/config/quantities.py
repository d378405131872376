"""Sizes and times with a unit, as in machine.device_bytes=16GB or cluster.minutes=1h30min."""

from __future__ import annotations

import re

SIZES = ("_bytes", "_bytes_per_s")
MINUTES = "minutes"
_UNITS = {
    "k": 10**3,
    "M": 10**6,
    "G": 10**9,
    "T": 10**12,
    "Ki": 2**10,
    "Mi": 2**20,
    "Gi": 2**30,
    "Ti": 2**40,
}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)([kMGT]|[KMGT]i)B(?:/s)?")
_SECONDS = {"d": 86400, "h": 3600, "min": 60, "m": 60, "s": 1}
_TIME = re.compile(r"(?:\d+(?:\.\d+)?(?:d|h|min|m|s))+")
_PART = re.compile(r"(\d+(?:\.\d+)?)(d|h|min|m|s)")
_CLOCK = re.compile(r"(?:(\d+)-)?(\d+):(\d\d):(\d\d)")  # as SLURM prints a time limit
_SIZE_FORM = "with a unit: 16GB is 16 * 10^9 bytes, 16GiB 16 * 2^30"
_TIME_FORM = "with units: 90min, 1h30min, 1-02:00:00"


def is_size(key: str) -> bool:
    """Return whether a key holds bytes or bytes per second."""
    return key.endswith(SIZES)


def is_time(key: str) -> bool:
    """Return whether a key holds minutes or seconds."""
    return key.split(".")[-1] == MINUTES or (key.endswith("_s") and not key.endswith("_per_s"))


def plain_number(key: str, text: str) -> str:
    """Return a size in bytes, or a time in the key's unit, without its unit.

    Any other text as it is.
    """
    if is_size(key) and (size := _SIZE.fullmatch(text)) is not None:
        return str(round(float(size[1]) * _UNITS[size[2]]))
    seconds = _seconds(text) if is_time(key) else None
    if seconds is None:
        return text
    value = seconds / (60 if key.endswith(MINUTES) else 1)
    return str(int(value)) if value.is_integer() else repr(value)


def forms(key: str) -> str:
    """Return what a key takes on the command line besides a plain number, or nothing."""
    form = _SIZE_FORM if is_size(key) else _TIME_FORM if is_time(key) else ""
    return f", or on the command line {form}" if form else ""


def _seconds(text: str) -> float | None:
    if (clock := _CLOCK.fullmatch(text)) is not None:
        days, hours, minutes, seconds = (int(part or 0) for part in clock.groups())
        return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)
    if _TIME.fullmatch(text) is None:
        return None
    return sum(float(number) * _SECONDS[unit] for number, unit in _PART.findall(text))
