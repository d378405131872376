"""Figures for people: a unit that suits the size, and the number in it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

MIB = 1 << 20
GIB = 1 << 30
UNKNOWN = "-"


@dataclass(frozen=True, slots=True)
class Unit:
    """A unit's name and its size in the base unit."""

    name: str
    size: float

    def show(self, value: float | None) -> str:
        """Return the number in this unit, in three to four digits; `-` for None."""
        return UNKNOWN if value is None else number(value / self.size)


def number(value: float) -> str:
    """Return a number in at least three digits: 1234, 123, 12.3, 1.23, 0.0123."""
    size = abs(value)
    if size >= 100:
        return f"{value:.0f}"
    if size >= 10:
        return f"{value:.1f}"
    return f"{value:.2f}" if size >= 1 or not size else f"{value:.3g}"


def counted(count: int, noun: str, plural: str = "s") -> str:
    """Return `1 rank`, `2 ranks`."""
    return f"{count} {noun}" + ("" if count == 1 else plural)


def time_unit(values_s: Iterable[float | None]) -> Unit:
    """Return s, ms or us by the largest of times in seconds."""
    largest = max((abs(value) for value in values_s if value is not None), default=0.0)
    if largest >= 1.0:
        return Unit("s", 1.0)
    return Unit("ms", 1e-3) if largest >= 1e-3 else Unit("us", 1e-6)


def bytes_unit(values_bytes: Iterable[float | None]) -> Unit:
    """Return MiB, or GiB where the largest figure reaches one."""
    largest = max((value for value in values_bytes if value is not None), default=0.0)
    return Unit("GiB", GIB) if largest >= GIB else Unit("MiB", MIB)
