"""Tests on the fake device: each fails that has made a race, and the end of the session shows what was counted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest

from tests.fake_cuda.children import report
from tests.fake_cuda.load import native

TOTAL: Counter[str] = Counter()
RACES: list[str] = []


@pytest.fixture(autouse=True)
def no_races() -> Iterator[None]:
    """Fail a test whose accesses to memory were not ordered by streams, events, waits and messages."""
    device = native()
    device.clear_races()
    before = Counter(device.counts())
    yield
    races = device.races()
    TOTAL.update(Counter(device.counts()) - before)
    device.clear_races()
    RACES.extend(races)
    if races:
        pytest.fail("\n".join([f"{len(races)} races on the fake device:", *dict.fromkeys(races)]), pytrace=False)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Show how often the host waited."""
    if TOTAL:
        counted = ", ".join(f"{name} {number}" for name, number in sorted(TOTAL.items()))
        terminalreporter.write_line(f"fake device: {counted}")


def pytest_sessionfinish(session: pytest.Session) -> None:
    report("pytest", dict(TOTAL), RACES)
