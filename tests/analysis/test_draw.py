"""analysis.plots.schedule: the drawing of a schedule's file."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from analysis.__main__ import main
from analysis.plots.schedule import draw_schedule, read_schedule
from analysis.plots.timeline import LOOKS
from gems.errors import ConfigError, ScheduleError
from gems.schedule import generate
from gems.schedule.costs import DepthCosts, StageCosts, uniform
from gems.schedule.formats.schedule_json import to_json
from gems.schedule.formats.torch_csv import to_torch_csv
from gems.schedule.lower import lower
from gems.schedule.placement import linear
from gems.schedule.schedule import Schedule
from tests.helpers.drawings import with_rows

COLOURS = {(look.kinds[0], look.shade): look.colour for look in LOOKS}


def written(
    folder: Path, schedule: Schedule, costs: StageCosts | None = None, name: str = "s.json"
) -> Path:
    path = folder / name
    if path.suffix == ".csv":
        path.write_text(to_torch_csv(schedule))
    else:
        more = {} if costs is None else {"costs": asdict(costs)}
        path.write_text(json.dumps(to_json(schedule) | more))
    return path


def drawn(folder: Path, schedule: Schedule, costs: StageCosts | None = None) -> str:
    """Return the text of the SVG."""
    out = folder / "s.svg"
    draw_schedule(written(folder, schedule, costs), out)
    return out.read_text()


@pytest.mark.parametrize(
    ("name", "kinds", "shades"),
    [
        ("1f1b", "FB", (0,)),
        ("gems_master", "FB", (0, 1)),
        ("zb_v", "FIW", (0, 1)),
        ("zb_h1", "FIW", (0,)),
    ],
)
def test_kinds_have_colours_and_directions_or_stages_shades(
    tmp_path: Path, name: str, kinds: str, shades: tuple[int, ...]
) -> None:
    picture = drawn(tmp_path, generate(name, 3, 6))
    for kind in "FBIWR":
        for shade in (0, 1):
            assert (COLOURS[kind, shade] in picture) == (kind in kinds and shade in shades), (
                kind,
                shade,
            )


def test_memory_actions_are_drawn(tmp_path: Path) -> None:
    made = with_rows(
        Schedule("one", 2, linear(1), ((),)), ["0F0 0OFFLOAD0 0F1 0R1 0B1 0PREFETCH0 0B0"]
    )
    picture = drawn(tmp_path, made, DepthCosts(1, copy=1.0).stages(1))
    for key in (("R", 0), ("OFFLOAD", None), ("PREFETCH", None)):
        assert COLOURS[key] in picture
    assert COLOURS["I", 0] not in picture


def test_times_come_from_the_costs_in_the_file(tmp_path: Path) -> None:
    made = generate("gpipe", 2, 2)
    plain = draw_schedule(written(tmp_path, made), tmp_path / "a.png")
    assert plain.span == 3 * 3
    slow = draw_schedule(written(tmp_path, made, uniform(2, 2, forward=4.0)), tmp_path / "b.png")
    assert slow.span == 3 * 6
    assert (tmp_path / "a.png").stat().st_size > 5000


def test_lowered_files_and_csv_draw_the_same(tmp_path: Path) -> None:
    made = generate("1f1b", 3, 4)
    found = [
        draw_schedule(path, tmp_path / "x.svg").start
        for path in (
            written(tmp_path, made),
            written(tmp_path, lower(made), name="l.json"),
            written(tmp_path, made, name="t.csv"),
        )
    ]
    assert found[0] == found[1] == found[2]


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = written(tmp_path, generate("1f1b", 4, 8))
    out = tmp_path / "x.png"
    assert main(["draw", str(path), str(out), "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["span_units"] == 33 and answer["peak_units"] == [4, 3, 2, 1]
    assert main(["draw", str(path), str(out)]) == 0
    assert capsys.readouterr().out == f"{out}\n"


@pytest.mark.parametrize(
    ("document", "words"),
    [
        ("{", "is no schedule"),
        ('{"schema": "other"}', "allowed: gems.schedule/1"),
        (
            json.dumps(to_json(generate("gpipe", 2, 1)) | {"costs": {"forward": [1]}}),
            "are not costs of stages",
        ),
        (
            json.dumps(to_json(generate("gpipe", 2, 1)) | {"costs": asdict(uniform(3, 3))}),
            "must have 2 entries each",
        ),
        (json.dumps(to_json(generate("gpipe", 2, 1)) | {"costs": [1]}), "are not costs of stages"),
    ],
)
def test_files_that_cannot_be_drawn(tmp_path: Path, document: str, words: str) -> None:
    path = tmp_path / "s.json"
    path.write_text(document)
    with pytest.raises(ConfigError, match=words):
        read_schedule(path)


def test_what_is_not_there_or_would_not_run(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is no schedule"):
        draw_schedule(tmp_path / "none.json", tmp_path / "x.png")
    with pytest.raises(ConfigError, match=r"suffix \.txt"):
        draw_schedule(written(tmp_path, generate("gpipe", 1, 1)), tmp_path / "x.txt")
    broken = with_rows(generate("gpipe", 1, 1), ["0B0 0F0"])
    with pytest.raises(ScheduleError, match="comes before 0F0"):
        draw_schedule(written(tmp_path, broken), tmp_path / "x.png")
