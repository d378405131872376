"""gems.show_schedule: the grid, the lowered list and the JSON of a configured schedule."""

from __future__ import annotations

import json

import pytest

from gems.cli import Options
from gems.config import CostConfig, ParallelConfig, RunSpec, ScheduleConfig
from gems.resolve import resolve
from gems.schedule.replay import replay, uniform_cost
from gems.schedule.schedule_json import from_json
from gems.schedule.validate import validate
from gems.show_schedule import LOWERED, show_schedule


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
    assert picture[3] == (
        "rank    3 | .. .. .. F0 B0 -- f1 .. .. .. .. .. .. .. .. .. .. .. .. "
        "b1 -- F2 B2 -- f3 .. .. .. .. .. .. .. .. .. .. .. .. b3 --"
    )
    assert "4 ranks x 1 replicas, 4 micro-batches, step 39 units (forward 1, backward 2)" in figures
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
    ("name", "span", "peak"), [("gems_master", 551, 1), ("layer_parallel", 768, 1), ("1f1b", 117, 8)]
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
    played = replay(schedule, uniform_cost(1, 2))
    assert (played.span, max(played.peak_units)) == (span, peak)
    assert schedule.has_transfers == bool(flags)
