"""Pictures of very many boxes: what share of each column they cover, and the colour of that."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from analysis.metrics.events import by_rank
from analysis.plots import timeline
from analysis.plots.figure import save_figure
from analysis.plots.memory_curve import MAX_COLUMNS, Curve, thinned
from analysis.plots.timeline import LOOKS, blended, coverage, shaded, timeline_figure
from gems.trace import Trace

MS = 1_000_000
Simulate = Callable[..., Trace]


def test_shares_of_columns_by_hand() -> None:
    start = np.array([0.25, 1.5, 2.0, 5.5])
    end = np.array([0.75, 3.25, 3.0, 9.0])
    found = coverage(start, end, np.array([0, 0, 1, 1]), 2, 6)
    assert found == pytest.approx(np.array([[0.5, 0.5, 1.0, 0.25, 0, 0], [0, 0, 1, 0, 0, 0.5]]))


def test_shares_add_up_to_the_boxes() -> None:
    drawn = np.random.default_rng(0)
    start = drawn.uniform(-5, 100, 5000)
    end = start + drawn.exponential(2.0, 5000)
    row = drawn.integers(0, 7, 5000)
    found = coverage(start, end, row, 7, 90)
    inside = np.clip(end, 0, 90) - np.clip(start, 0, 90)
    assert found.sum(axis=1) == pytest.approx(np.bincount(row, inside, minlength=7))
    assert (found > -1e-9).all()


def test_colours_are_means_and_as_opaque_as_covered() -> None:
    colours = np.array([[1.0, 0.0, 0.0], [0.0, 0.0, 1.0]])
    shares = np.array([[0.5, 0.0, 2.0], [0.0, 0.0, 2.0]])
    assert blended(shares, colours) == pytest.approx(
        np.array([[1.0, 0, 0, 0.5], [0, 0, 0, 0], [0.5, 0, 0.5, 1.0]])
    )


def test_a_dense_timeline_looks_like_that_of_boxes(
    simulate: Simulate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wide boxes are the same either way but for the numbers in them and the white edges."""
    from matplotlib.image import imread

    trace = simulate(link_ns=MS // 5, reduce_ns=MS)
    pixels = []
    for name, most in (("boxes", 40_000), ("dense", 0)):
        monkeypatch.setattr(timeline, "MAX_BOXES", most)
        monkeypatch.setattr(timeline, "_label_boxes", lambda *_: None)
        save_figure(timeline_figure(trace), tmp_path / f"{name}.png")
        pixels.append(imread(tmp_path / f"{name}.png")[..., :3])
    is_alike = np.abs(pixels[0] - pixels[1]).max(axis=-1) < 0.1
    assert is_alike.mean() > 0.97
    assert len(timeline_figure(trace).axes[0].images) == 4 * 3, (
        "a strip a rank for compute, sends and receives"
    )


def test_stages_of_a_rank_are_shaded_by_their_place(simulate: Simulate) -> None:
    events = simulate(name="1f1b").events
    assert shaded(events)[1] == () and not shaded(events)[0]["direction"].any()
    moved = events.copy()
    moved["stage"] = events["stage"] + 4 * (events["micro_batch"] % 2)
    shades, words = shaded(moved)
    is_forward = moved["kind"] == 0
    assert words == ("1st stage of a rank", "2nd stage")
    assert (shades["direction"][is_forward] == moved["micro_batch"][is_forward] % 2).all()
    assert {look.shade for look in LOOKS if "F" in look.kinds} == {0, 1}


def test_a_long_curve_keeps_its_ends_and_extremes() -> None:
    drawn = np.random.default_rng(1)
    count = 60_000
    held = drawn.integers(0, 1 << 40, count)
    time_ms = np.sort(drawn.uniform(0.0, 50.0, count))
    none = np.zeros(count, np.int64)
    curve = Curve(3, time_ms, held, none, none)
    short = thinned(curve)
    assert len(short.time_ms) < 4 * (MAX_COLUMNS + 1) and (np.diff(short.time_ms) >= 0).all()
    assert short.peak_bytes == curve.peak_bytes and short.held_bytes.min() == held.min()
    assert (short.time_ms[0], short.time_ms[-1]) == (time_ms[0], time_ms[-1])
    for low in np.linspace(0, 49, 25):
        inside, kept = ((t >= low) & (t < low + 1.0) for t in (time_ms, short.time_ms))
        assert short.held_bytes[kept].max() > 0.99 * held[inside].max()
    small = Curve(0, time_ms[:100], held[:100], none[:100], none[:100])
    assert thinned(small) is small


def test_events_are_parted_by_rank_whatever_their_order(simulate: Simulate) -> None:
    events = simulate().events
    mixed = events[np.random.default_rng(2).permutation(len(events))]
    for given in (events, mixed):
        parts = by_rank(given)
        assert list(parts) == [0, 1, 2, 3] and sum(map(len, parts.values())) == len(events)
        assert all((part["rank"] == rank).all() for rank, part in parts.items())
    assert by_rank(events[:0]) == {}
