"""Pictures: looked at through their pixels and through the figure's own parts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from analysis.metrics.events import step_window
from analysis.plots.figure import save_figure
from analysis.plots.memory_curve import memory_figure, rank_curve
from analysis.plots.timeline import IDLE_COLOUR, LOOKS, timeline_figure
from gems.errors import ConfigError
from gems.trace import DTYPES, Trace, root_attributes

MS = 1_000_000
Simulate = Callable[..., Trace]


def num_pixels(path: Path, colour: str) -> int:
    """Count the pixels of a PNG that have exactly a colour #rrggbb."""
    from matplotlib.image import imread

    pixels = np.round(imread(path)[..., :3] * 255).astype(int)
    wanted = [int(colour[i : i + 2], 16) for i in (1, 3, 5)]
    return int((pixels == wanted).all(axis=-1).sum())


def colour_of(kind: str, direction: int | None = None) -> str:
    """Return the colour of a kind and direction."""
    return next(look.colour for look in LOOKS if kind in look.kinds and look.shade == direction)


def titles(figure: object) -> str:
    """Join all text above the first panel."""
    axes = figure.axes[0]  # type: ignore[attr-defined]
    return " | ".join([text.get_text() for text in axes.texts] + [axes.get_title(loc="left")])


def legend_texts(figure: object) -> list[str]:
    """Return the texts of the figure's legend."""
    return [text.get_text() for text in figure.legends[0].get_texts()]  # type: ignore[attr-defined]


def labels_in_boxes(figure: object) -> list[str]:
    """Return the micro-batch numbers that were written."""
    axes = figure.axes[0]  # type: ignore[attr-defined]
    return [text.get_text() for text in axes.texts if text.get_text().isdigit()]


@pytest.mark.parametrize(("partitions", "replicas"), [(2, 1), (2, 2), (8, 1)])
def test_both_directions_are_in_the_picture(
    simulate: Simulate, tmp_path: Path, partitions: int, replicas: int
) -> None:
    trace = simulate(
        partitions=partitions, replicas=replicas, reduce_ns=MS, step_ns=MS, link_ns=MS // 5
    )
    path = tmp_path / "timeline.png"
    save_figure(timeline_figure(trace), path)
    assert path.stat().st_size > 10_000
    for look in LOOKS:
        if not {"I", "W", "R", "OFFLOAD", "PREFETCH", "INPUT", "START_REDUCE"}.isdisjoint(
            look.kinds
        ):
            continue
        assert num_pixels(path, look.colour) > 20 * partitions, look.legend
    assert num_pixels(path, IDLE_COLOUR) > 10_000


def test_area_of_a_colour_follows_its_share_of_time(simulate: Simulate, tmp_path: Path) -> None:
    path = tmp_path / "timeline.png"
    save_figure(
        timeline_figure(simulate(name="layer_parallel", partitions=2, micro_batches=1)), path
    )
    forward, backward, idle = (
        num_pixels(path, c) for c in (colour_of("F", 0), colour_of("B", 0), IDLE_COLOUR)
    )
    assert 1.7 < backward / forward < 2.3
    assert 0.8 < idle / (forward + backward) < 1.2


def test_one_direction_needs_no_second_colour(simulate: Simulate, tmp_path: Path) -> None:
    path = tmp_path / "timeline.png"
    save_figure(timeline_figure(simulate(name="1f1b")), path)
    assert num_pixels(path, colour_of("F", 1)) == num_pixels(path, colour_of("B", 1)) == 0
    assert legend_texts(timeline_figure(simulate(name="1f1b")))[:2] == ["F", "B"]


@pytest.mark.parametrize(
    ("source", "mark"),
    [("measured", "measured"), ("emulated", "EMULATED"), ("simulated", "SIMULATED, a prediction")],
)
def test_the_source_stands_in_every_title(simulate: Simulate, source: str, mark: str) -> None:
    trace = simulate(partitions=2, source=source)
    for figure in (timeline_figure(trace), memory_figure(trace)):
        assert mark in titles(figure) and "gems_master, 2 ranks" in titles(figure)


def test_the_title_has_step_time_and_bubble(simulate: Simulate) -> None:
    text = titles(timeline_figure(simulate(name="1f1b", partitions=2, micro_batches=4)))
    assert "step 2: 15 ms, bubble 20.0 %, closed form 20.0 %" in text


def test_micro_batch_numbers_stand_where_they_fit(simulate: Simulate) -> None:
    few = labels_in_boxes(timeline_figure(simulate(partitions=2, micro_batches=4)))
    assert sorted(few) == sorted(str(m) for m in range(4) for _ in range(2 * 2))
    assert (
        labels_in_boxes(
            timeline_figure(simulate(name="1f1b", partitions=2, micro_batches=400, steps=2))
        )
        == []
    )


def test_time_runs_from_the_step_start_in_ms(simulate: Simulate) -> None:
    figure = timeline_figure(simulate(name="1f1b", partitions=2, micro_batches=4), step=1)
    axes = figure.axes[0]
    assert axes.get_xlim() == pytest.approx((0.0, 15.0))
    assert "(ms)" in axes.get_xlabel()


def test_lanes_are_capped_and_the_title_says_so(simulate: Simulate) -> None:
    figure = timeline_figure(simulate(name="gpipe", partitions=65, micro_batches=2, steps=2))
    assert "65 ranks (64 shown)" in titles(figure)
    lanes = figure.axes[0].get_ylim()
    assert lanes[0] - lanes[1] == pytest.approx(64.1)


def test_default_step_is_the_last_counted_whole_one(simulate: Simulate) -> None:
    trace = simulate(partitions=2, steps=4, warmup_steps=1)
    trace.steps = trace.steps[:3]
    assert step_window(trace).step == 2
    trace.steps["is_warmup"] = [0, 0, 1]
    assert step_window(trace).step == 1
    trace.steps["is_warmup"] = 1
    assert (step_window(trace).step, step_window(trace).is_warmup) == (2, True)


def test_a_step_that_is_not_whole_is_drawn_and_named(simulate: Simulate) -> None:
    trace = simulate(partitions=2, steps=2, warmup_steps=0)
    trace.steps = trace.steps[:0]
    window = step_window(trace)
    assert (window.step, window.is_whole, window.bubble) == (1, False, None)
    for figure in (timeline_figure(trace), memory_figure(trace)):
        assert "not whole" in titles(figure) and "bubble" not in titles(figure)


def test_no_such_step_is_refused(simulate: Simulate) -> None:
    with pytest.raises(ConfigError, match="step=9: allowed: 0 to 2"):
        timeline_figure(simulate(partitions=2), step=9)
    with pytest.raises(ConfigError, match="holds no events"):
        timeline_figure(Trace(attributes=root_attributes("measured", "x", 1)))


def test_the_curve_follows_the_ledger(simulate: Simulate) -> None:
    trace = simulate(name="gpipe", partitions=1, micro_batches=2)
    curve = rank_curve(trace, step_window(trace), 0)
    assert curve is not None
    weights = 5 << 20
    stash = 3 << 20
    at = dict(zip(np.round(curve.time_ms).tolist(), curve.held_bytes.tolist(), strict=True))
    assert at == {
        0: weights,
        1: weights + stash,
        2: weights + 2 * stash,
        4: weights + stash,
        6: weights,
    }
    assert curve.peak_bytes == weights + 2 * stash


def test_the_curve_takes_a_transfer_when_it_is_complete(simulate: Simulate) -> None:
    trace = simulate(name="1f1b", partitions=2, micro_batches=4, link_ns=MS // 2)
    curve = rank_curve(trace, step_window(trace), 0)
    assert curve is not None
    assert (np.diff(curve.time_ms) >= 0).all()
    assert len(curve.time_ms) == 2 + int(
        ((trace.events["rank"] == 0) & (trace.events["step"] == 2)).sum()
    )


def test_a_curve_begins_with_what_was_held_before_the_step(simulate: Simulate) -> None:
    trace = simulate(name="gpipe", partitions=1, micro_batches=2)
    trace.events["device_bytes"][trace.events["step"] == 1] = 77
    curve = rank_curve(trace, step_window(trace, 2), 0)
    assert curve is not None and curve.held_bytes[0] == 77


def test_memory_has_a_panel_a_rank_with_its_peaks(simulate: Simulate, tmp_path: Path) -> None:
    trace = simulate(name="1f1b", partitions=4, micro_batches=8)
    trace.samples = np.array([(0, 0, 3 << 30, 300 << 20, 1.0, 0.5)], DTYPES["samples"])
    figure = memory_figure(trace)
    texts = [axes.texts[0].get_text() for axes in figure.axes]
    assert texts[0] == "rank 0: peak 17.0 MiB\nresident 300 MiB\ndriver 3.00 GiB"
    assert texts[1:] == ["rank 1: peak 14.0 MiB", "rank 2: peak 11.0 MiB", "rank 3: peak 8.00 MiB"]
    assert "peaks 8.00 to 17.0 MiB" in titles(figure)
    path = tmp_path / "memory.png"
    save_figure(figure, path)
    assert path.stat().st_size > 10_000
    assert num_pixels(path, "#d6e6f3") > 50_000


def test_memory_of_many_ranks_shows_the_highest(simulate: Simulate) -> None:
    figure = memory_figure(simulate(name="1f1b", partitions=20, micro_batches=20, steps=2))
    assert [axes.texts[0].get_text().split(":")[0] for axes in figure.axes] == [
        f"rank {r}" for r in range(16)
    ]
    assert "the 16 highest of 20 ranks" in titles(figure)


def test_memory_without_a_ledger_is_refused(simulate: Simulate) -> None:
    trace = simulate(partitions=2)
    trace.events["device_bytes"] = -1
    with pytest.raises(ConfigError, match="device_bytes"):
        memory_figure(trace)
