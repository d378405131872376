"""Tests on the fake device: each fails that has made a race, and the end of the session shows what was counted."""

from __future__ import annotations

import json
import os
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.fake_cuda.children import REPORTS, report
from tests.fake_cuda.load import native
from tests.mpi.world import IN_RANK

TOTAL: Counter[str] = Counter()
RACES: list[str] = []


@pytest.fixture(autouse=True, scope="session")
def reports_of_children() -> Iterator[None]:
    """Let the processes that tests start say what they have counted, if nobody has asked for it yet."""
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        if REPORTS not in os.environ:
            patch.setenv(REPORTS, folder)
        yield


def _reports() -> set[Path]:
    return {path for path in Path(os.environ[REPORTS]).iterdir() if path.stem != str(os.getpid())}


def _races_of(path: Path) -> list[str]:
    return [race for line in path.read_text().splitlines() for race in json.loads(line)["races"]]


@pytest.fixture(autouse=True)
def no_races(reports_of_children: None) -> Iterator[None]:
    """Fail a test whose accesses to memory were not ordered by streams, events, waits and messages."""
    device = native()
    device.clear_races()
    known = _reports()
    before = Counter(device.counts())
    yield
    races = device.races() + [race for path in _reports() - known for race in _races_of(path)]
    TOTAL.update(Counter(device.counts()) - before)
    device.clear_races()
    RACES.extend(races)
    if races:
        pytest.fail(
            "\n".join([f"{len(races)} races on the fake device:", *dict.fromkeys(races)]),
            pytrace=False,
        )


@pytest.fixture
def clean_device() -> Iterator[None]:
    """Leave the device as it was, in whatever state a test has put it."""
    yield
    torch.cuda.synchronize()
    device = native()
    device.set_late(False, 0)
    device.clear_races()
    device.limit(0, 0)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Show how often the host waited."""
    if TOTAL:
        counted = ", ".join(f"{name} {number}" for name, number in sorted(TOTAL.items()))
        terminalreporter.write_line(f"fake device: {counted}")


def pytest_sessionfinish(session: pytest.Session) -> None:
    if not IN_RANK:  # which tests.fake_cuda started, and reports
        report("pytest", dict(TOTAL), RACES)
