"""The example of a schedule: its closed forms hold, and it would run."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator

import pytest

from gems.errors import ConfigError
from gems.schedule.costs import uniform
from gems.schedule.lower import lower
from gems.schedule.registry import FAMILIES, Terms, generate
from gems.schedule.simulate import simulate
from gems.schedule.validate import validate


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    """Register the example, for these tests alone: others count what is registered."""
    importlib.import_module("examples.own_schedule")
    yield
    FAMILIES.entries.pop("waves")
    sys.modules.pop("examples.own_schedule")


@pytest.mark.parametrize(("num_ranks", "num_micro_batches"), [(1, 3), (2, 4), (4, 4), (4, 16)])
def test_closed_forms(num_ranks: int, num_micro_batches: int) -> None:
    schedule = validate(lower(generate("waves", num_ranks, num_micro_batches)))
    step = simulate(schedule, uniform(num_ranks, num_ranks))
    terms = Terms(num_ranks, num_micro_batches)
    family = FAMILIES["waves"]
    assert step.span == family.step_units(terms)
    assert max(step.peak) == family.peak_units(terms)


def test_what_it_cannot_serve() -> None:
    with pytest.raises(ConfigError, match="must be a multiple of 4 ranks"):
        generate("waves", 4, 6)
