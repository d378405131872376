"""Scaling studies from traces.

The points, their efficiencies, the kind of scaling, the table and the picture.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path

import h5py
import pytest

from analysis.__main__ import main
from analysis.cli.scaling import study_table, write_study
from analysis.plots.scaling import scaling_figure
from analysis.scaling.points import (
    Point,
    agreements,
    base_points,
    point_rows,
    read_point,
    read_points,
    scaling_kind,
    title,
)
from gems.errors import ConfigError

Write = Callable[..., Path]


def efficiencies(points: list[Point]) -> list[float | None]:
    bases = base_points(points)
    return [point.efficiency(bases[point.line]) for point in points]


def test_a_point_has_the_median_of_the_steps_after_warm_up(write: Write) -> None:
    point = read_point(write(times_ms=(90.0, 10.0, 30.0, 12.0), replicas=2, warmup_steps=1))
    assert point.step_s == pytest.approx((0.010, 0.030, 0.012))
    assert point.step_median_s == pytest.approx(0.012)
    assert (point.ranks, point.images_per_step, point.source, point.line) == (
        8,
        32,
        "measured",
        "1f1b",
    )
    assert point.images_per_s == pytest.approx(32 / 0.012)
    assert point.compute_efficiency is None


def test_compute_efficiency_is_useful_compute_over_ranks_and_step_time(write: Write) -> None:
    """8 micro-batches of 3 units on 4 ranks in 30 units."""
    point = read_point(write(source="simulated", times_ms=(30.0, 30.0), unit_s=0.001))
    assert point.compute_efficiency == pytest.approx(8 * 3 / 30)


def test_strong_scaling_by_its_definition(write: Write) -> None:
    """T(p0) p0 / (T(p) p)."""
    points = read_points(
        [
            write(partitions=2, times_ms=(9, 40)),
            write(partitions=4, times_ms=(9, 25)),
            write(partitions=8, times_ms=(9, 20)),
        ]
    )
    assert scaling_kind(points) == "strong"
    assert efficiencies(points) == pytest.approx([1.0, 40 * 2 / (25 * 4), 40 * 2 / (20 * 8)])
    assert title(points)[0] == "strong scaling, 16 images a step"


def test_weak_scaling_by_its_definition(write: Write) -> None:
    """T(p0) / T(p)."""
    points = read_points(
        [write(replicas=n, times_ms=(9, time)) for n, time in ((4, 16), (1, 10), (2, 12.5))]
    )
    assert scaling_kind(points) == "weak"
    assert [point.ranks for point in points] == [4, 8, 16]
    assert efficiencies(points) == pytest.approx([1.0, 10 / 12.5, 10 / 16])
    assert title(points)[0] == "weak scaling, 4 images a rank"


def test_batch_and_ranks_that_change_apart_are_neither(write: Write) -> None:
    points = read_points([write(), write(replicas=2, micro_batches=6)])
    assert scaling_kind(points) == "mixed" and "change independently" in title(points)[0]


def test_one_number_of_ranks_is_a_comparison(write: Write) -> None:
    points = read_points([write(), write("gems_master")])
    assert scaling_kind(points) == "comparison" and title(points)[0] == "schedules on 4 ranks"


def test_a_model_that_grows_is_capability_scaling_and_never_weak(write: Write) -> None:
    """A part of the model is as large on 8 ranks as on 4, so an image costs twice.

    The work of it counts.
    """
    points = read_points(
        [
            write(partitions=n, source="emulated", times_ms=(9, time))
            for n, time in ((4, 33), (8, 45))
        ]
    )
    assert scaling_kind(points) == "capability"
    assert efficiencies(points) == pytest.approx([1.0, (2 / 45 / 8) / (1 / 33 / 4)])
    same = read_points(
        [
            write(partitions=4, source="emulated"),
            write(partitions=8, source="emulated", unit_s=0.0005),
        ]
    )
    assert scaling_kind(same) == "strong"


def test_larger_images_of_one_model_count_by_their_pixels(write: Write) -> None:
    small = {"height_px": 32, "width_px": 32}
    large = {"height_px": 64, "width_px": 64}
    points = read_points([write(data=small), write(partitions=16, data=large, times_ms=(9, 12.5))])
    assert scaling_kind(points) == "capability"
    assert efficiencies(points) == pytest.approx([1.0, 10 / 12.5])
    deeper = read_points([write(model={"depth": 20}), write(partitions=8, model={"depth": 56})])
    assert (scaling_kind(deeper), efficiencies(deeper)) == ("capability", [1.0, None])


def test_the_base_is_the_smallest_point_and_rather_a_real_one(write: Write) -> None:
    points = read_points(
        [
            write(source="simulated", times_ms=(9, 8), unit_s=0.001),
            write(source="emulated", times_ms=(9, 10), unit_s=0.001),
            write(source="simulated", times_ms=(9, 8), replicas=2, unit_s=0.001),
            write("gpipe", source="simulated", replicas=2, times_ms=(9, 8)),
        ]
    )
    bases = base_points(points)
    assert {line: (base.ranks, base.source) for line, base in bases.items()} == {
        "1f1b": (4, "emulated"),
        "gpipe": (8, "simulated"),
    }
    assert efficiencies(points) == pytest.approx([1.0, 10 / 8, 10 / 8, 1.0])


def test_a_prediction_is_held_against_the_same_point_alone(write: Write) -> None:
    points = read_points(
        [
            write(source="emulated", times_ms=(9, 20)),
            write(source="simulated", times_ms=(9, 19)),
            write(source="simulated", replicas=2),
            write(source="simulated", micro_batches=16),
            write(source="measured", replicas=2, times_ms=(9, 20)),
            write("gpipe", source="emulated"),
            write(source="simulated", times_ms=(9, 19), unit_s=0.002),
        ]
    )
    found = [
        (each["source"], each["ranks"], round(each["error"], 6)) for each in agreements(points)
    ]
    assert found == [("emulated", 4, -0.05), ("measured", 8, -0.5)]
    assert "off by -50.0 to -5.0 % (2 points)" in title(points)[1]


def test_runs_of_one_point_are_put_together(write: Write) -> None:
    points = read_points([write(times_ms=(9, 10, 12)), write(times_ms=(9, 14)), write(replicas=2)])
    assert [len(point.step_s) for point in points] == [3, 1]
    assert points[0].step_median_s == pytest.approx(0.012)
    assert points[0].signatures == ("run0", "run1")


def test_lines_are_told_apart_by_cap_and_by_pipelines(write: Write) -> None:
    points = read_points(
        [
            write("capped", schedule={"activation_cap": 1.0}),
            write("capped", schedule={"activation_cap": 1.5}),
            write("capped", schedule={"activation_cap_bytes": 99, "memory_actions": ["recompute"]}),
            write("gems_master", parallel={"parts": 2}),
            write(partitions=4, replicas=2),
            write(partitions=8),
        ]
    )
    assert [point.line for point in points] == [
        "1f1b, pipelines of 4",
        "1f1b, pipelines of 8",
        "capped, cap 1",
        "capped, cap 1.5",
        "capped, cap 99 bytes, with recompute",
        "gems_master, 2 parts",
    ]


def test_the_csv_has_a_line_a_point_with_units_and_the_base(write: Write, tmp_path: Path) -> None:
    runs = [
        write(times_ms=(9, 10, 12, 11)),
        write(replicas=2, source="simulated", times_ms=(9, 12.5)),
    ]
    study = write_study(runs, tmp_path / "new" / "out")
    with study.tables[0].open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["schedule"], row["source"], row["ranks"]) for row in rows] == [
        ("1f1b", "measured", "4"),
        ("1f1b", "simulated", "8"),
    ]
    first, second = ({key: float(row[key]) for key in row if key.endswith("_s")} for row in rows)
    assert [first[key] for key in ("step_median_s", "step_min_s", "step_max_s")] == pytest.approx(
        [0.011, 0.010, 0.012]
    )
    assert second["base_images_per_s"] == first["images_per_s"] == pytest.approx(16 / 0.011)
    assert float(rows[1]["parallel_efficiency"]) == pytest.approx(11 / 12.5)
    assert rows[0]["compute_efficiency"] == ""
    assert {row["scaling"] for row in rows} == {"weak"}
    for picture, start in zip(study.pictures, (b"\x89PNG", b"%PDF"), strict=True):
        assert picture.read_bytes().startswith(start) and picture.stat().st_size > 10_000
    assert sorted(path.name for path in study.tables[0].parent.iterdir()) == [
        "scaling.csv",
        "scaling.pdf",
        "scaling.png",
    ]


def test_the_picture_tells_sources_apart_and_states_the_base(write: Write) -> None:
    runs = [
        write(source=source, replicas=n, times_ms=(9, 10, 12))
        for source, n in (
            ("measured", 1),
            ("emulated", 1),
            ("emulated", 2),
            ("simulated", 2),
            ("simulated", 8),
        )
    ]
    figure = scaling_figure(read_points(runs))
    rate, share = figure.axes
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == [
        "1f1b (base 1455 images/s on 4 ranks, measured)",
        "measured",
        "emulated: real messages, timed waits for compute",
        "simulated: a prediction",
        "ideal, from the base on",
    ]
    marked = [line for line in share.lines if line.get_marker() in ("o", "s", "^")]
    assert [(line.get_marker(), *line.get_xdata()) for line in marked] == [
        ("o", 4),
        ("s", 4),
        ("s", 8),
        ("^", 8),
        ("^", 32),
    ]
    joins = [line for line in share.lines if list(line.get_xdata()) in ([4, 8], [8, 32])]
    assert [line.is_dashed() for line in joins] == [False, True]
    ideal = next(line for line in rate.lines if list(line.get_xdata()) == [4, 32])
    assert ideal.get_ydata()[1] == pytest.approx(8 * ideal.get_ydata()[0])
    assert (rate.get_xscale(), rate.get_yscale(), share.get_yscale()) == ("log", "log", "linear")
    assert [tick.get_text() for tick in share.get_xticklabels()] == ["4", "8", "32"]
    assert share.get_ylim()[0] == 0.0
    shown = " ".join(
        text.get_text()
        for axes in figure.axes
        for text in [*axes.texts, axes.title, axes._left_title]
    )
    assert "weak scaling, 4 images a rank" in shown and "warm-up left out" in shown


def test_a_comparison_has_a_picture_too(write: Write) -> None:
    figure = scaling_figure(read_points([write(), write("gpipe", times_ms=(9, 11))]))
    assert [len(axes.lines) > 0 for axes in figure.axes] == [True, True]


def test_the_command_prints_table_and_paths(
    write: Write, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = [
        str(write(source="emulated", times_ms=(9, 30))),
        str(write(source="emulated", replicas=2) / "trace.h5"),
    ]
    assert main(["scaling", *runs]) == 0
    out, err = capsys.readouterr()
    lines = out.splitlines()
    assert err == "" and lines[0] == "weak scaling, 4 images a rank"
    shown = " ".join(lines[2].split())
    assert shown == "1f1b emulated 4 533 30.0 30.0 to 30.0 30.0 100.0 80.0"
    assert lines[4] == "a to b: fewer than 6 steps, so their range and no interval"
    assert lines[5] == "base of 1f1b: 533 images/s on 4 ranks, emulated"
    assert lines[6].startswith("not fitted: the law needs points on 3 numbers of ranks")
    assert [line.split(",")[0] for line in lines[7:-3]] == [
        "rule 5",
        "rule 9",
        "rule 11",
        "rule 13",
    ]
    assert lines[-3:] == [str(tmp_path / f"scaling.{kind}") for kind in ("png", "pdf", "csv")]
    assert main(["scaling", *runs, "--out", str(tmp_path / "o"), "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert (answer["scaling"], len(answer["points"]), answer["agreement"]) == ("weak", 2, [])
    assert answer["csv"] == str(tmp_path / "o" / "scaling.csv")
    assert answer["points"] == point_rows(read_points(map(Path, runs)))


def test_the_table_has_a_dash_where_nothing_is_known(write: Write) -> None:
    table = study_table(read_points([write(), write(partitions=8, model={"depth": 56})]))
    assert table.splitlines()[3].split()[-2:] == ["-", "-"]
    assert "  -  " in study_table(read_points([write(source="simulated")])).splitlines()[2]


def test_bad_input_is_one_line(
    write: Write, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(*words: str | Path) -> str:
        assert main(["scaling", *map(str, words)]) == 2
        out, err = capsys.readouterr()
        assert out == "" and len(err.splitlines()) == 1
        return err

    good = write()
    assert "RUN" in refused()
    assert "has no trace.h5" in refused(good, tmp_path)
    assert "holds no whole step after warm-up" in refused(
        good, write(times_ms=(9, 10), warmup_steps=2)
    )
    torn = write()
    (torn / "trace.h5").write_bytes(b"torn")
    assert "not a readable trace file" in refused(torn)
    nameless = write()
    with h5py.File(nameless / "trace.h5", "a") as file:
        del file["run_yaml"]
        file["run_yaml"] = ""
    assert "holds no configuration" in refused(nameless)
    (tmp_path / "file").touch()
    assert "cannot be written" in refused(good, "--out", tmp_path / "file" / "out")


def test_keys_of_a_later_version_are_passed_over(write: Write) -> None:
    point = read_point(write(parallel={"threads": 3}, cost={"of_tomorrow": 1}))
    assert point.partitions == 4
    with pytest.raises(ConfigError, match=r"run_yaml\.parallel"):
        folder = write()
        with h5py.File(folder / "trace.h5", "a") as file:
            del file["run_yaml"]
            file["run_yaml"] = "parallel: [1]"
        read_point(folder)


def test_two_models_of_one_study_are_two_lines_of_weak_scaling(write: Write) -> None:
    deep = {"model": {"depth": 56}, "cost": {"name": "profile"}}
    points = read_points(
        [
            write(
                "gems_master", "simulated", partitions=partitions, replicas=replicas, **of_the_rest
            )
            for partitions, of_the_rest in ((4, {"cost": {"name": "profile"}}), (8, deep))
            for replicas in (2, 4)
        ]
    )
    assert {point.line for point in points} == {
        "gems_master, resnet-20-v1",
        "gems_master, resnet-56-v1",
    }
    assert (
        scaling_kind(points) == "weak" and title(points)[0] == "weak scaling, 2 or 4 images a rank"
    )
    bases = base_points(points)
    assert [bases[point.line].ranks for point in points] == [8, 8, 16, 16]
