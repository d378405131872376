"""What `gems verify` calls different."""

from __future__ import annotations

import math

import pytest
import torch

from gems.engine.verification import compare as module
from gems.engine.verification.compare import compare, relative_error
from tests.helpers.device import DEVICE
from tests.helpers.toys import make_spec, plan_of


def test_the_largest_error_is_relative_to_its_own_tensor():
    reference = {"a": torch.tensor([100.0, 1.0]), "b": torch.tensor([1.0, 0.5])}
    ours = {"a": torch.tensor([100.0, 1.5]), "b": torch.tensor([1.0, 0.4])}
    error, name = relative_error(ours, reference)
    assert name == "b" and error == pytest.approx(0.1, rel=1e-6)


def test_rounding_around_zero_is_measured_on_the_scale_of_the_whole():
    for size, wanted in ((1e-10, 0.2), (1e-18, 2e-18)):
        reference = {"a": torch.tensor([1.0]).double(), "bias": torch.tensor([size]).double()}
        error, name = relative_error({**reference, "bias": 3 * reference["bias"]}, reference)
        assert name == "bias" and error == pytest.approx(wanted, rel=1e-6)


@pytest.mark.parametrize("where", ["ours", "reference"])
def test_not_a_number_is_the_worst(where):
    good = {"a": torch.ones(2), "b": torch.ones(2)}
    bad = {"a": torch.tensor([1.0, math.nan]), "b": torch.ones(2) * 1.5}
    error, name = relative_error(bad, good) if where == "ours" else relative_error(good, bad)
    assert math.isnan(error) and name == "a"


def test_nothing_has_no_error():
    assert relative_error({}, {"a": torch.ones(1)}) == (0.0, "")


def test_not_a_number_in_one_step_is_not_forgotten(comm, monkeypatch):
    spec = make_spec("1f1b", 1, train__precision="float64", train__steps=3)
    assert compare(plan_of(spec), comm, DEVICE).max_rel_error <= 1e-12
    calls = []

    def once_wrong(ours, reference, floor):
        calls.append(1)
        return (
            (math.nan, "stem.conv.weight")
            if len(calls) == 5
            else relative_error(ours, reference, floor)
        )

    monkeypatch.setattr(module, "relative_error", once_wrong)
    difference = compare(plan_of(spec), comm, DEVICE)
    assert len(calls) == 9
    assert math.isnan(difference.max_rel_error) and math.isnan(difference.gradient_error)
    assert difference.worst == "stem.conv.weight at rank 0, step 1"
    assert difference.parameter_error <= 1e-12
