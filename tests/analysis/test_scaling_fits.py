"""The scaling study with statistics.

Intervals in table and CSV, fits on the picture, rules below the table.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from matplotlib.collections import PolyCollection

from analysis.__main__ import main
from analysis.cli.scaling import study_table, write_study
from analysis.plots.scaling import scaling_figure
from analysis.scaling.fits import fit_points
from analysis.scaling.points import Point, base_points, point_rows, read_points
from tests.helpers.planted import noisy, point

SERIAL = 0.01
Runs = Callable[..., list[Path]]


@pytest.fixture
def runs(write: Callable[..., Path]) -> Runs:
    """Return the function that writes runs of weak scaling, one for each number of replicas of 4 ranks.

    Amdahl's law.
    """
    told = {
        "git_commit": "abc",
        "versions": ["gems 0.1"],
        "hostnames": ["n0"],
        "clock_error_ns": [7, 9],
    }

    def make(*replicas: int, source: str = "measured", **attributes: object) -> list[Path]:
        return [
            write(
                source=source,
                replicas=number,
                times_ms=noisy(50 * (1 + SERIAL * (4 * number - 1)), 13, seed=number),
                attributes=told | attributes,
            )
            for number in replicas
        ]

    return make


def test_a_point_knows_its_setting_and_pools_that_of_its_runs(runs: Runs) -> None:
    first = runs(1)
    second = runs(1, git_commit="unknown", versions=["gems 0.2"], hostnames=[])
    (alone,) = read_points(first)
    assert (alone.setting.missing, alone.setting.commits) == ((), ("abc",))
    assert (alone.setting.num_warmup_steps, alone.setting.clock_error_s) == (1, pytest.approx(9e-9))
    assert alone.num_images == 12 * 16
    (pooled,) = read_points([*first, *second])
    assert pooled.setting.missing == ("git_commit", "hostnames")
    assert pooled.setting.versions == ("gems 0.1", "gems 0.2") and pooled.num_images == 24 * 16
    assert pooled.run_steps == (12, 12)
    assert [each.value for each in pooled.run_intervals_s] == [
        np.median(pooled.step_s[:12]),
        np.median(pooled.step_s[12:]),
    ]
    (paper,) = read_points(runs(2, source="simulated", hostnames=[]))
    assert paper.setting.missing == ()  # on paper there are no hosts


def test_rows_have_the_interval_the_tail_and_the_harmonic_mean(runs: Runs) -> None:
    points = read_points(runs(1, 2, 4))
    for found, row in zip(points, point_rows(points), strict=True):
        assert row["step_low_s"] < row["step_median_s"] < row["step_high_s"] <= row["step_max_s"]
        assert row["step_bounds"] == "95 % interval" and row["step_p95_s"] > row["step_median_s"]
        assert row["images_per_s_mean"] == pytest.approx(found.num_images / sum(found.step_s))
    base, *others = point_rows(points)
    assert base["parallel_efficiency_low"] == base["parallel_efficiency_high"] == 1.0
    assert all(
        row["parallel_efficiency_low"]
        < row["parallel_efficiency"]
        < row["parallel_efficiency_high"]
        for row in others
    )
    (few,) = point_rows([point(4, (1.0, 2.0, 4.0))])
    assert (few["step_low_s"], few["step_high_s"], few["step_bounds"]) == (1.0, 4.0, "range")


def test_an_efficiency_is_as_uncertain_as_both_its_times() -> None:
    base = point(4, noisy(1.0, noise=0.05))
    wide = point(8, noisy(1.25, noise=0.05))
    share = wide.efficiency_interval(base)
    assert share is not None and share.low < 0.8 < share.high
    alone = wide.step_interval_s.relative_half_width
    assert 1.1 * alone < share.relative_half_width < 2.5 * alone
    few = point(8, (1.2, 1.25, 1.3)).efficiency_interval(point(4, (0.9, 1.0, 1.1)))
    assert few is not None and few.is_range
    assert (few.low, few.value, few.high) == pytest.approx((0.9 / 1.3, 1.0 / 1.25, 1.1 / 1.2))
    assert point(8, problem=("vgg", 3, 9)).efficiency_interval(base) is None


def test_the_table_tells_intervals_from_ranges() -> None:
    lines = study_table([point(4, noisy(1.0)), point(8, (1.0, 1.2))]).splitlines()
    assert "95 % interval" in lines[1] and "p95" in lines[1]
    assert "-1.0" in lines[2] and "1.00 to 1.20" in lines[3]
    assert lines[4].startswith("a to b: fewer than 6 steps")


def bands(figure: object, panel: int) -> list[tuple[float, float]]:
    """Return where the shaded bands of a panel begin and end."""
    axes = figure.axes[panel]  # type: ignore[attr-defined]
    found = [
        each
        for each in axes.collections
        if isinstance(each, PolyCollection) and each.get_gid() == "extrapolation"
    ]
    return [
        (float(x.min()), float(x.max()))
        for x in (each.get_paths()[0].vertices[:, 0] for each in found)
    ]


def test_the_law_is_drawn_over_the_data_and_shaded_four_times_beyond(runs: Runs) -> None:
    points = read_points(runs(1, 2, 4))
    fits = fit_points(points)
    figure = scaling_figure(points, fits)
    assert bands(figure, 0) == bands(figure, 1) == [(16.0, 64.0)]
    rate, share = figure.axes
    for axes, scale in ((rate, None), (share, points[0].rank_s_per_image)):
        (curve,) = [line for line in axes.lines if line.get_linestyle() == "-."]
        ranks = np.array(curve.get_xdata())
        shown = np.array(curve.get_ydata())
        assert (ranks[0], ranks[-1]) == (4.0, 64.0)
        rates = np.array([fits[0].images_per_s(count).value for count in ranks])
        assert shown == pytest.approx(rates if scale is None else rates * scale / ranks)
    (legend,) = figure.legends
    words = [text.get_text() for text in legend.get_texts()]
    assert "law of scaling, fitted" in words and "ideal, from the base on" in words
    assert any("at most 4 times beyond the data" in word for word in words)
    assert bands(scaling_figure(points), 0) == []


def test_bars_are_the_interval(runs: Runs) -> None:
    points = read_points(runs(1, 2))
    rate, share = scaling_figure(points).axes
    for axes, expected in (
        (
            rate,
            [
                (
                    p.images_per_step / p.step_interval_s.high,
                    p.images_per_step / p.step_interval_s.low,
                )
                for p in points
            ],
        ),
        (
            share,
            [
                (b.low, b.high)
                for p in points
                if (b := p.efficiency_interval(base_points(points)[p.line]))
            ],
        ),
    ):
        shown = [bar.get_segments()[0][:, 1] for bar in axes.collections]
        assert [tuple(each) for each in shown] == [pytest.approx(bounds) for bounds in expected]


def test_of_capability_scaling_only_the_efficiency_is_fitted() -> None:
    grown = [
        point(
            ranks, noisy(1.0, seed=ranks), images_per_step=16, problem=("resnet", 3, 1024 * ranks)
        )
        for ranks in (4, 8, 16)
    ]
    figure = scaling_figure(grown, fit_points(grown))
    assert bands(figure, 0) == [] and bands(figure, 1) == [(16.0, 64.0)]


def test_neighbours_far_apart_are_not_joined() -> None:
    def joined(*points: Point) -> list[list[float]]:
        share = scaling_figure(points).axes[1]
        return [
            list(line.get_xdata())
            for line in share.lines
            if line.get_linestyle() == "-" and len(line.get_xdata()) == 2
        ]

    assert joined(point(4), point(16), point(128)) == [[4, 16]]
    assert joined(point(4), point(8, images_per_step=31)) == []


def test_the_curves_are_in_a_csv_that_goes_with_the_fits(runs: Runs, tmp_path: Path) -> None:
    folders = runs(1, 2, 4)
    study = write_study(folders, tmp_path / "out")
    assert [table.name for table in study.tables] == ["scaling.csv", "scaling-fits.csv"]
    with study.tables[1].open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert {row["schedule"] for row in rows} == {"1f1b"}
    assert max(float(row["ranks"]) for row in rows) == 64.0
    write_study(folders[:1], tmp_path / "out")
    assert not study.tables[1].exists() and study.tables[0].exists()


def test_the_command_prints_fits_and_broken_rules(
    runs: Runs, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*map(str, runs(1, 2, 4, 8, 16)), "--out", str(tmp_path / "out")]
    assert main(["scaling", *words]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("law of 1f1b: fixed_s") for line in lines)
    assert not any(line.startswith(("rule", "not fitted")) for line in lines)
    assert main(["scaling", *words, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert (answer["kind"], answer["base"][0]["ranks"]) == ("weak", 4)
    (fit,) = answer["fits"]
    assert (fit["limit_ranks"], len(fit["residuals"])) == (256, 5)
    assert [rule["number"] for rule in answer["rules"]] == list(range(1, 14))
    assert {rule["holds"] for rule in answer["rules"]} == {True, None}
