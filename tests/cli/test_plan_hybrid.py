"""`gems plan --hybrid`: rows by devices from simulated steps, given files, what does not fit, and bad options."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import gems.plan.draft
from gems.cli.framework import Verb
from gems.config.compose import compose
from gems.plan.draft import Draft
from gems.plan.evaluate import simulate
from gems.profile import ModelProfile
from gems.search.hybrid.inputs import read_speedups
from gems.search.hybrid.worker_step import Worker
from gems.simulation.costs import RunCosts
from tests.helpers.commands import Gems, check_refusal
from tests.helpers.profiles import random_profile

PLAN = {
    "plan": Verb(
        "gems.cli.plan_hybrid:show_hybrid",
        "how to spend devices",
        flags=("--hybrid",),
        choices={"--epochs": (), "--efficiency": (), "--speedup": ()},
    )
}
ON_PAPER = (
    "machine=simulated",
    "schedule=1f1b",
    "parallel.micro_batches=8",
    "parallel.micro_batch_size=2",
    "cost.unit_s=0.01",
)
BYTES = ("cost.activation_bytes=1000", "cost.param_bytes=100000", "parallel.partitions=4")
LINKS = ("cost.param_bytes=1000000", "machine.link_bytes_per_s=1e8", "machine.link_latency_s=1e-4")


@pytest.fixture
def gems_(gems: Gems) -> Gems:
    return lambda *words: gems("plan", "--hybrid", *words, verbs=PLAN)


def answer_of(gems_: Gems, *words: str) -> dict[str, Any]:
    said = gems_(*words, "--json")
    assert said.code == 0, said.err
    answer: dict[str, Any] = json.loads(said.out)
    return answer


def written(text: str, name: str) -> str:
    Path(name).write_text(text)
    return name


def test_speedups_are_those_of_the_schedule(gems_: Gems) -> None:
    answer = answer_of(gems_, *ON_PAPER)
    assert (answer["schema"], answer["source"], answer["speedup_source"]) == (
        "gems.hybrid/1",
        "predicted",
        "simulated",
    )
    assert {int(ways): each["value"] for ways, each in answer["speedups"].items()} == pytest.approx(
        {ways: ways * 8 / (8 + ways - 1) for ways in (2, 4, 8)}
    )
    assert [row["devices"] for row in answer["rows"]] == [2**k for k in range(11)]
    one = answer["rows"][0]["choices"][0]
    assert one["time_s"]["value"] == pytest.approx(
        answer["steps"]["1"]["step_s"] * answer["samples_per_epoch"] / 16
    )
    assert all(row["choices"][0]["ways"] == 1 for row in answer["rows"]), (
        "epochs are not given, and links are free"
    )
    assert [each["devices"] for each in answer["crossings"]] == [None] * 3


def test_epochs_make_hybrid_win_from_the_crossing_on(gems_: Gems) -> None:
    epochs = written('{"e_min": 3, "b_crit": 512, "samples_per_epoch": 10000}', "epochs.json")
    answer = answer_of(gems_, *ON_PAPER, "--epochs", epochs)
    two = answer["crossings"][0]
    speedup = 16 / 9
    place = (2 - speedup) / (speedup - 1) * 512 / 16
    assert answer["samples_per_epoch"] == 10000 and two["ways"] == 2
    assert two["devices"] == 2 * int(place / 2 + 1)
    best = {row["devices"]: row["choices"][0]["ways"] for row in answer["rows"]}
    assert best[two["below"]] == 1 and best[two["listed"]] > 1 and best[1024] == 8
    for row in answer["rows"]:
        for choice in row["choices"]:
            product = choice["step_s"] * choice["steps_per_epoch"] * choice["epochs"]
            assert choice["time_s"]["value"] == pytest.approx(product), "C = T x S x E"
            assert choice["images_per_s"] == pytest.approx(
                choice["global_batch"] / choice["step_s"]
            )
            assert choice["gpu_hours"]["value"] == pytest.approx(
                choice["time_s"]["value"] * row["devices"] / 3600
            )
    said = gems_(*ON_PAPER, "--epochs", epochs)
    assert f"2 ways: faster than data parallelism from {two['devices']} devices on" in said.out
    assert (
        "E(B) = E_min (1 + B / B_crit): E_min 3, B_crit 512 samples" in said.out
        and "nearly fastest: " in said.out
    )
    assert (
        answer["picks"]["fastest"]["devices"] == 1024
        and answer["picks"]["cheapest"]["devices"] == 1
    )


@pytest.mark.cases
def test_units_are_no_hours(gems_: Gems) -> None:
    said = gems_(*ON_PAPER[:-1])
    assert said.code == 0, said.err
    assert "time [units]" in said.out and "GPU-units" in said.out and " h and " not in said.out


def test_more_parts_are_smaller_parts(gems_: Gems) -> None:
    spec = compose([*ON_PAPER, *BYTES])
    eight = Worker(spec).with_degree(8)
    one = Worker(spec).with_degree(1)
    assert eight.cost.forward == 0.5 and one.cost.forward == 4.0
    assert (eight.cost.param_bytes, one.cost.activation_bytes) == (50000, 4000)
    assert Worker(spec).with_degree(4).cost == spec.cost


def test_efficiency_is_that_of_the_simulated_replicas() -> None:
    spec = compose([*ON_PAPER, *LINKS])
    modelled = Worker(spec).efficiency()
    assert modelled(1, 2) == 1.0
    for ways, workers in ((1, 4), (2, 16)):
        many = Worker(spec).with_degree(ways)
        spans = []
        for replicas in (1, workers):
            many.parallel.replicas = replicas
            spans.append(RunCosts.of(many).kept(Draft(many).lowered).simulation.span)
        assert modelled(workers, ways) == pytest.approx(spans[0] / spans[1])
        assert modelled(workers, ways) < 1.0


def test_a_worker_that_does_not_fit_is_left_out(gems_: Gems) -> None:
    spec = compose([*ON_PAPER, *BYTES])
    peaks = {ways: Worker(spec).step(ways, simulate).peak_bytes for ways in (1, 2, 4, 8)}
    assert None not in peaks.values()
    limit = (peaks[1] or 0) - 1
    answer = answer_of(gems_, *ON_PAPER, *BYTES, f"machine.device_bytes={limit}")
    assert {ways: step["fits"] for ways, step in answer["steps"].items()} == {
        ways: step["peak_bytes"] <= limit for ways, step in answer["steps"].items()
    }
    assert not answer["steps"]["1"]["fits"] and answer["steps"]["4"]["fits"]
    assert all(
        "does not" not in row["left_out"] and "1" in row["left_out"] for row in answer["rows"]
    )
    assert "above machine.device_bytes" in answer["rows"][3]["left_out"]["1"]
    assert (
        answer["crossings"] == [] and answer["rows"][-1]["choices"][0]["over_data_parallel"] is None
    )
    said = gems_(*ON_PAPER, *BYTES, f"machine.device_bytes={limit}")
    assert "which does not fit" in said.out.splitlines()[5]
    assert said.out.count("left out N x 1, which does not fit: ") == 1


def test_nothing_fits(gems_: Gems) -> None:
    check_refusal(
        gems_(*ON_PAPER, *BYTES, "machine.device_bytes=10"),
        "--hybrid",
        "above machine.device_bytes",
    )


def test_given_speedups_and_efficiency(gems_: Gems) -> None:
    efficiency = written("workers,efficiency\n1,1\n4,0.9\n64,0.5\n", "efficiency.csv")
    answer = answer_of(
        gems_, *ON_PAPER, "--speedup", "2:1.2:1.3:1.4,3:1.9", "--efficiency", efficiency
    )
    assert (answer["speedup_source"], answer["efficiency_source"]) == ("given", "given")
    assert answer["speedups"]["2"] == {"value": 1.3, "low": 1.2, "high": 1.4} and set(
        answer["speedups"]
    ) == {"2", "3"}
    rows = {row["devices"]: row for row in answer["rows"]}
    assert {3, 6, 96} <= set(rows) and "known from 1 to 64 workers" in rows[128]["left_out"]["1"]
    (two,) = (each for each in rows[64]["choices"] if each["ways"] == 2)
    assert two["over_data_parallel"]["value"] == pytest.approx(1.3 / 2 * (0.5 + 0.4 / 4) / 0.5)
    assert (
        two["over_data_parallel"]["low"]
        < two["over_data_parallel"]["value"]
        < two["over_data_parallel"]["high"]
    )
    assert read_speedups("2:1.3")[2].value == 1.3


def test_a_real_model_has_the_costs_of_its_profile(
    gems_: Gems, monkeypatch: pytest.MonkeyPatch
) -> None:
    def profile_of(spec: object) -> ModelProfile:
        return random_profile(11, seed=5, decay=0.9)

    monkeypatch.setattr(gems.plan.draft, "profile_of", profile_of)
    run = ("data=synthetic", "model=resnet20_v1", "schedule=1f1b", "parallel.micro_batches=4")
    answer = answer_of(gems_, *run)
    layers = random_profile(11, seed=5, decay=0.9).layers
    assert answer["steps"]["1"]["step_s"] == pytest.approx(
        4 * sum(layer.time_s for layer in layers)
    )
    assert 1.0 < answer["speedups"]["2"]["value"] < 2.0
    limit = (
        answer["steps"]["1"]["peak_bytes"] - 1
    )  # which a cut into four keeps, if not the fastest one
    held = answer_of(gems_, *run, f"machine.device_bytes={limit}")
    assert not held["steps"]["1"]["fits"] and held["steps"]["4"]["fits"]
    assert held["steps"]["1"]["step_s"] == answer["steps"]["1"]["step_s"]
    with_policy = answer_of(gems_, *run, "memory=recompute", f"machine.device_bytes={limit}")
    assert with_policy["steps"]["1"]["fits"], "under a policy it does"
    assert with_policy["steps"]["1"]["step_s"] > answer["steps"]["1"]["step_s"]
    sixteen = answer_of(gems_, *run, "--speedup", "16:3")
    assert "16" in sixteen["speedups"] and "16" not in sixteen["steps"], (
        "more stages than layers cannot be simulated"
    )


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("--epochs", "none.json"), "--epochs=none.json: cannot be read"),
        (("--efficiency", "none.csv"), "--efficiency=none.csv: cannot be read"),
        (("--speedup", "two"), "--speedup=two"),
    ],
)
def test_bad_options_are_one_line(gems_: Gems, words: tuple[str, ...], why: str) -> None:
    check_refusal(gems_(*ON_PAPER, *words), why)
