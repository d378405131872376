"""Figures for people: suitable units, numbers with few digits, shares in percent."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any, TypeVar, cast

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30
UNKNOWN = "-"
T = TypeVar("T")
SIDES = ("depth_px", "height_px", "width_px")  # of a sample; an image has no depth


@dataclass(frozen=True, slots=True)
class Unit:
    """The name of a unit and its size in the base unit."""

    name: str
    size: float

    def show(self, value: float | None) -> str:
        """Return the number in this unit, with three to four digits; `-` for None."""
        return UNKNOWN if value is None else number(value / self.size)


MS = Unit("ms", 1e-3)
UNITS = Unit("units", 1.0)


def time_unit(values_s: Iterable[float | None], is_in_units: bool = False) -> Unit:
    """Return s, ms or us by the largest of times in seconds, or units if `is_in_units`."""
    if is_in_units:
        return UNITS
    largest = max((abs(value) for value in values_s if value is not None), default=0.0)
    if largest >= 1.0:
        return Unit("s", 1.0)
    return MS if largest >= 1e-3 else Unit("us", 1e-6)


def bytes_unit(values_bytes: Iterable[float | None]) -> Unit:
    """Return MiB, or GiB if the largest figure reaches one."""
    largest = max((value for value in values_bytes if value is not None), default=0.0)
    return Unit("GiB", GIB) if largest >= GIB else Unit("MiB", MIB)


def number(value: float) -> str:
    """Return a number with at least three digits: 1234, 123, 12.3, 1.23, 0.0123."""
    size = abs(value)
    if size >= 100:
        return f"{value:.0f}"
    if size >= 10:
        return f"{value:.1f}"
    return f"{value:.2f}" if size >= 1 or not size else f"{value:.3g}"


def counted(count: int, noun: str, plural: str = "s") -> str:
    """Return a count and a noun, such as `1 rank` or `2 ranks`; `plural` is the ending."""
    return f"{count} {noun}" + ("" if count == 1 else plural)


def format_bytes(num_bytes: float) -> str:
    """Return bytes as `1.500 GiB` or, below 1 GiB, `12.34 MiB`."""
    return f"{num_bytes / GIB:.3f} GiB" if num_bytes >= GIB else f"{num_bytes / MIB:.2f} MiB"


def format_rates(latency_s: float, bytes_per_s: float) -> str:
    """Return the latency and bandwidth of a link as `1.5 us, 12.34 GB/s`."""
    return f"{1e6 * latency_s:.1f} us, {bytes_per_s / 1e9:.2f} GB/s"


def sides_of(sample: object) -> dict[str, int]:
    """Return the sides that a sample has, by name."""
    sides = ((name, getattr(sample, name)) for name in SIDES)
    return {name: side for name, side in sides if side is not None}


def with_sides(sample: T, sides_px: Iterable[int]) -> T:
    """Return a dataclass of samples with other sizes along the same axes."""
    sides = dict(zip(sides_of(sample), sides_px, strict=True))
    return cast(T, replace(cast(Any, sample), **sides))


def format_size(facts: Mapping[str, object], between: str = "x") -> str:
    """Return the sides in a mapping as `512x512`, or of a volume as `64x512x512`."""
    return between.join(str(facts[name]) for name in SIDES if facts.get(name) is not None)


def percent(share: float | None, digits: int = 1) -> str:
    """Return a fraction of 1 in percent, without the sign; `-` for None."""
    return UNKNOWN if share is None else f"{100 * share:.{digits}f}"


def now_utc(timespec: str = "seconds") -> str:
    """Return the current time in the format of files: 2026-11-21T12:00:00+00:00."""
    return datetime.now(UTC).isoformat(timespec=timespec)
