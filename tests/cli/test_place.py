"""`gems place`: operators of a model on devices, with their roofline's times."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from analysis.plots.answers import placement_figure
from analysis.plots.figure import draw_answer_file
from gems.errors import ConfigError
from gems.partition.dlplacer import cp_sat
from gems.partition.dlplacer.place import TOLERANCE
from gems.profile.operator_graph import Op, OpGraph
from tests.helpers.commands import Gems, check_refusal

RUN = ("place", "machine=v100", "data=synthetic", "data.height_px=128", "data.width_px=128")
FAST = ("machine.link_bytes_per_s=50e9", "machine.link_latency_s=1e-6")
SMALL = ("model=googlenet", "model.width=4", "parallel.micro_batch_size=8")


@pytest.fixture
def made_up(monkeypatch: pytest.MonkeyPatch) -> Iterator[OpGraph]:
    """Four branches between two operators, without a child process that profiles."""
    ops = tuple(Op(f"op{v}", 1e-3, 2e-3, 1000, 100) for v in range(6))
    graph = OpGraph(ops, tuple((0, v) for v in range(1, 5)) + tuple((v, 5) for v in range(1, 5)))
    monkeypatch.setattr(
        "gems.partition.operator_placement.operators_taken", lambda spec: graph.to_json()
    )
    yield graph


def answer_of(gems: Gems, *words: str) -> dict[str, Any]:
    said = gems(*words, "--json")
    assert said.code == 0, said.err
    answer: dict[str, Any] = json.loads(said.out)
    return answer


@pytest.mark.skipif(not cp_sat.IS_INSTALLED, reason="needs OR-tools")
def test_googlenet_is_faster_on_two_devices_and_proven(gems: Gems) -> None:
    """Taken in a child process once; the next answer comes from the cache."""
    answer = answer_of(gems, *RUN, *SMALL, *FAST)
    assert answer["operators"] == 78 and answer["pieces"] == 15
    assert answer["optimal"] and answer["gap"] <= TOLERANCE
    assert 1.0 < answer["speed_up"] <= answer["closed_form_speed_up"] + 1e-9
    assert {row["device"] for row in answer["placement"]} == {0, 1}
    assert sum(answer["busy_s"]) == pytest.approx(answer["one_device_s"])
    assert answer["published_speed_up"] is None and answer["source"] == "predicted"
    more = answer_of(gems, *RUN, *SMALL, *FAST, "--devices", "4")
    assert more["step_s"] <= answer["step_s"] * (1 + TOLERANCE)


def test_the_picture_has_a_row_a_device(gems: Gems, made_up: OpGraph, tmp_path: Path) -> None:
    answer = answer_of(gems, *RUN, "model=inception_v3")
    document = tmp_path / "placement.json"
    picture = tmp_path / "placement.png"
    document.write_text(json.dumps(answer))
    figure = placement_figure(answer)
    assert [text.get_text() for text in figure.axes[0].get_yticklabels()] == [
        "device 0",
        "device 1",
    ]
    draw_answer_file(document, picture, "placement", "gems place", placement_figure)
    assert picture.stat().st_size > 1000
    document.write_text("{}")
    with pytest.raises(ConfigError, match="holds no answer of gems place"):
        draw_answer_file(document, picture, "placement", "gems place", placement_figure)


def test_the_table_says_what_was_found(gems: Gems, made_up: OpGraph) -> None:
    said = gems(*RUN, "model=inception_v3")
    assert said.code == 0, said.err
    assert "published speed-up 1.32 (recalled, not confirmed)" in said.out
    assert "links of 12.5 GB/s and 5 us" in said.out
    free = gems(
        *RUN, "model=inception_v3", "machine.link_bytes_per_s=null", "machine.link_latency_s=0"
    )
    assert "links that take no time (machine.link_bytes_per_s is not given)" in free.out
    assert "speed-up 1.500" in free.out  # 18 ms of work in 12
    assert all(f"\n{op.name} " in said.out for op in made_up.ops)


def test_a_chain_says_that_it_gains_nothing(gems: Gems, monkeypatch: pytest.MonkeyPatch) -> None:
    graph = OpGraph((Op("a", 1.0), Op("b", 1.0)), ((0, 1),))
    monkeypatch.setattr(
        "gems.partition.operator_placement.operators_taken", lambda spec: graph.to_json()
    )
    assert "a chain without branches: more devices gain nothing" in gems(*RUN, "model=vgg16").out


def test_what_does_not_fit_ends_with_3(gems: Gems, made_up: OpGraph) -> None:
    said = gems(*RUN, "model=inception_v3", "machine.device_bytes=50")
    assert said.code == 3 and "operator op0 needs 100 bytes" in said.err
    answer = answer_of(gems, *RUN, "model=inception_v3", "machine.device_bytes=300")
    assert answer["held_bytes"] == [300, 300]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("--devices", "0"), "--devices=0"),
        (("--devices", "two"), "--devices=two"),
        (("--method", "magic"), "--method=magic"),
        (("--picture", "placement.bmp"), "--picture"),
        (("profile=measured",), "profile=measured"),
        (("--method", "milp", "machine.contention=true"), "--method=milp"),
    ],
)
def test_bad_words_are_refused(
    gems: Gems, made_up: OpGraph, words: tuple[str, ...], expected: str
) -> None:
    check_refusal(gems(*RUN, "model=inception_v3", *words), expected)
