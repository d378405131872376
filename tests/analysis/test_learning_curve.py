"""The learning curve: what is drawn of losses and validations."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from analysis.plots.learning_curve import (
    MAX_POINTS,
    learning_figure,
    step_times_figure,
    validation_curves,
)
from gems.errors import ConfigError
from gems.trace import DTYPES


def with_validations(trace, rows):
    attributes = {**trace.attributes, "metrics": ["validation_loss", "validation_dice"]}
    return replace(trace, attributes=attributes, validations=np.array(rows, DTYPES["validations"]))


def test_losses_and_metrics_have_panels(simulate) -> None:
    trace = with_validations(
        simulate(steps=4), [(2, 0, 0.5), (2, 1, 0.7), (4, 0, 0.4), (4, 1, 0.8)]
    )
    curves = validation_curves(trace)
    assert {name: values.tolist() for name, (_, values) in curves.items()} == {
        "validation_loss": [0.5, 0.4],
        "validation_dice": [0.7, 0.8],
    }
    loss, metric = learning_figure(trace).axes
    training, validation = loss.lines
    assert training.get_xdata().tolist() == [1, 2, 3, 4]
    assert training.get_ydata().tolist() == pytest.approx(trace.steps["loss"].tolist())
    assert (validation.get_xdata().tolist(), metric.lines[0].get_ydata().tolist()) == (
        [2, 4],
        [0.7, 0.8],
    )


def test_step_times_are_drawn_with_warm_up(simulate) -> None:
    trace = simulate(steps=4, warmup_steps=2)
    (axes,) = step_times_figure(trace).axes
    at, times_ms = axes.lines[0].get_data()
    assert at.tolist() == [1, 2, 3, 4] and axes.get_ylim()[0] == 0
    spans_ns = trace.steps["end_ns"] - trace.steps["start_ns"]
    assert times_ms.tolist() == pytest.approx((spans_ns * 1e-6).tolist())


def test_many_steps_are_drawn_as_means(simulate) -> None:
    trace = simulate(steps=2)
    steps = np.zeros(3 * MAX_POINTS + 1, DTYPES["steps"])
    steps["step"], steps["loss"] = np.arange(len(steps)), 1.0
    steps["loss"][:4] = [1, 2, 3, 10]
    (axes,) = learning_figure(replace(trace, steps=steps)).axes
    x, y = axes.lines[0].get_data()
    assert len(x) <= MAX_POINTS
    assert y.mean() >= 1 and y[0] == pytest.approx(np.mean([1, 2, 3, 10]))


def test_a_run_without_losses_has_no_curve(simulate) -> None:
    trace = simulate(steps=2)
    trace.steps["loss"] = np.nan
    with pytest.raises(ConfigError, match="its steps carry no loss"):
        learning_figure(trace)
