"""gems.utils.start_up: the collector rests while a program starts, and a script's own choice is left alone."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from gems.utils import start_up


@pytest.fixture(autouse=True)
def collector() -> Iterator[None]:
    yield
    gc.unfreeze()
    gc.enable()


def test_a_program_collects_what_it_makes_after_its_start() -> None:
    start_up.begin()
    assert not gc.isenabled()
    start_up.end()
    assert gc.isenabled() and gc.get_freeze_count() > 0


def test_a_script_without_a_collector_gets_none() -> None:
    gc.disable()
    start_up.end()
    assert not gc.isenabled()
