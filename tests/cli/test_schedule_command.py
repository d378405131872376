"""gems.cli.schedule: the grid, the lowered list and the JSON of a configured schedule."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gems.cli.framework import Options
from gems.cli.schedule import LOWERED, TORCH, show_schedule
from gems.config.resolve import resolve
from gems.config.schema import CostConfig, ParallelConfig, RunSpec, ScheduleConfig
from gems.errors import ConfigError, ScheduleError
from gems.schedule.formats.schedule_json import from_json
from gems.schedule.validate import validate
from tests.helpers.drawings import play, uniform_cost
from tests.helpers.processes import python

ROOT = Path(__file__).resolve().parents[2]


def spec_of(name: str, partitions: int, micro_batches: int, **cost: float) -> RunSpec:
    return resolve(
        RunSpec(
            schedule=ScheduleConfig(name=name),
            parallel=ParallelConfig(partitions=partitions, micro_batches=micro_batches),
            cost=CostConfig(**cost),
        )
    )


def test_grid_and_one_line_of_figures(capsys: pytest.CaptureFixture[str]) -> None:
    assert show_schedule(spec_of("gems_master", 4, 4), Options()) == 0
    out, err = capsys.readouterr()
    *picture, figures = out.splitlines()
    assert err == ""
    assert len(picture) == 4
    assert (
        picture[3] == "rank    3 | .. .. .. F0 B0 -- f1 .. .. .. .. .. .. .. .. .. .. .. .. "
        "b1 -- F2 B2 -- f3 .. .. .. .. .. .. .. .. .. .. .. .. b3 --"
    )
    assert (
        "4 ranks x 1 replicas, 4 stages, 4 micro-batches, step 39 units (forward 1, backward 2)"
        in figures
    )
    assert "efficiency 0.308, peak 1 micro-batches" in figures


def test_costs_scale_the_figures_and_not_the_picture(capsys: pytest.CaptureFixture[str]) -> None:
    show_schedule(spec_of("1f1b", 3, 4), Options())
    one = capsys.readouterr().out.splitlines()
    show_schedule(spec_of("1f1b", 3, 4, forward=10, input_grad=10, weight_grad=10), Options())
    ten = capsys.readouterr().out.splitlines()
    assert one[:-1] == ten[:-1]
    assert "step 18 units" in one[-1] and "step 180 units" in ten[-1]


def test_a_link_takes_its_time(capsys: pytest.CaptureFixture[str]) -> None:
    show_schedule(spec_of("layer_parallel", 2, 1, link=4), Options())
    assert "step 14 units" in capsys.readouterr().out


def test_lowered_shows_what_ranks_run(capsys: pytest.CaptureFixture[str]) -> None:
    show_schedule(spec_of("gpipe", 2, 1), Options(flags=frozenset({LOWERED})))
    assert capsys.readouterr().out.splitlines() == [
        "rank    0 | 0RECV_B0 0F0 0SEND_F0 0B0 0REDUCE_GRAD 0STEP",
        "rank    1 | 1RECV_F0 1F0 1B0 1SEND_B0 1REDUCE_GRAD 1STEP",
    ]


@pytest.mark.parametrize(
    ("name", "span", "peak"),
    [("gems_master", 551, 1), ("layer_parallel", 768, 1), ("1f1b", 117, 8)],
)
@pytest.mark.parametrize("flags", [(), (LOWERED,)])
def test_json_replays_to_the_published_figures(
    capsys: pytest.CaptureFixture[str], name: str, span: int, peak: int, flags: tuple[str, ...]
) -> None:
    """8 ranks, 32 micro-batches, f = 1, b = 2, from the JSON that another program would read."""
    show_schedule(spec_of(name, 8, 32), Options(json=True, flags=frozenset(flags)))
    out, err = capsys.readouterr()
    assert err == "" and out.count("\n") == 1
    schedule = validate(from_json(json.loads(out)))
    played = play(schedule, uniform_cost(1, 2))
    assert (played.span, max(played.peak)) == (span, peak)
    assert schedule.has_transfers == bool(flags)


def written(tmp_path: Path, document: object, name: str = "made.json") -> str:
    path = tmp_path / name
    path.write_text(document if isinstance(document, str) else json.dumps(document))
    return str(path)


def spec_of_file(path: str, partitions: int, micro_batches: int) -> RunSpec:
    return resolve(
        RunSpec(
            schedule=ScheduleConfig(name="file", path=path),
            parallel=ParallelConfig(partitions=partitions, micro_batches=micro_batches),
        )
    )


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved_1f1b", "zb_v"])
def test_torchs_csv_comes_back_as_the_same_schedule(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, name: str
) -> None:
    show_schedule(spec_of(name, 4, 8), Options())
    picture = capsys.readouterr().out.splitlines()[:-1]
    show_schedule(spec_of(name, 4, 8), Options(flags=frozenset({TORCH})))
    path = written(tmp_path, capsys.readouterr().out, "made.csv")
    show_schedule(spec_of_file(path, 4, 8), Options())
    assert capsys.readouterr().out.splitlines()[:-1] == picture


def test_torchs_csv_cannot_say_two_directions(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(
        ConfigError, match="format=torch: cannot say schedule gems_master: it runs 2 directions"
    ):
        show_schedule(spec_of("gems_master", 4, 4), Options(flags=frozenset({TORCH})))
    assert capsys.readouterr().out == ""


def test_the_json_carries_the_costs_of_the_stages(capsys: pytest.CaptureFixture[str]) -> None:
    show_schedule(spec_of("interleaved_1f1b", 2, 4, forward=3.0), Options(json=True))
    costs = json.loads(capsys.readouterr().out)["costs"]
    assert costs["forward"] == [1.5] * 4 and costs["activation"] == [0.5] * 4


@pytest.mark.parametrize("flags", [(), (LOWERED,)])
def test_a_broken_file_is_drawn_before_the_error(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, flags: tuple[str, ...]
) -> None:
    """Rank 0 wants its first gradient too early.

    The fault is marked, also among the transfers of a lowered list.
    """
    show_schedule(spec_of("gpipe", 2, 2), Options(json=True, flags=frozenset(flags)))
    document = json.loads(capsys.readouterr().out)
    row = document["actions"][0]
    row.remove(["B", 0, 0, 0])
    row.insert(1 + next(i for i, action in enumerate(row) if action[0] == "F"), ["B", 0, 0, 0])
    with pytest.raises(ScheduleError):
        show_schedule(spec_of_file(written(tmp_path, document), 2, 2), Options())
    out, err = capsys.readouterr()
    assert out == ""
    assert "!0B0!" in err and err.splitlines()[0].startswith("step")


@pytest.mark.usefixtures("warm")
def test_the_command_ends_with_the_one_line(tmp_path: Path) -> None:
    broken = {
        "schema": "gems.schedule/1",
        "name": "bad",
        "ranks": 1,
        "stages": 1,
        "micro_batches": 1,
        "directions": 1,
        "placement": [[0]],
        "actions": [[["B", 0, 0, 0], ["F", 0, 0, 0]]],
    }
    words = [
        "schedule",
        "schedule=file",
        f"schedule.path={written(tmp_path, broken)}",
        "parallel.micro_batches=1",
    ]
    ended = python("-m", "gems", *words)
    assert (ended.returncode, ended.stdout) == (2, "")
    *picture, line = ended.stderr.splitlines()
    assert picture[1] == "rank    0 | !0B0!"
    assert (
        line == "gems: schedule is broken at rank 0, action 0B0: comes before 0F0, which it needs"
    )


@pytest.mark.parametrize(
    ("text", "name", "words"),
    [
        ("1X1\n", "made.csv", "is no compute action"),
        ("{}", "made.json", "holds no schedule|schema"),
        ("{", "made.json", "holds no schedule"),
    ],
)
def test_files_that_hold_no_schedule(tmp_path: Path, text: str, name: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        show_schedule(spec_of_file(written(tmp_path, text, name), 1, 1), Options())
