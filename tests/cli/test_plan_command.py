"""`gems plan`: the table, the JSON, the experiment that it writes, and what it refuses."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

import gems.errors
import gems.plan.draft
import gems.search.infeasibility
from gems.config.compose import compose
from gems.config.resolve import run_id
from gems.config.schema import RunSpec
from gems.plan.evaluate import evaluate, simulate
from tests.helpers.commands import Gems, check_refusal
from tests.helpers.planners import NUM_LAYERS, RUN, made_up, sized
from tests.helpers.profiles import random_profile

ASKED = ("plan", *RUN, "parallel.gpus=4", "--global-batch", "4", "--budget", "2")


@pytest.fixture
def gems_(gems: Gems, monkeypatch: pytest.MonkeyPatch) -> Gems:
    """Run commands on a made-up model."""
    made_up(monkeypatch, 5)
    return gems


def test_json(gems_: Gems) -> None:
    said = gems_(*ASKED, "--top", "5", "--json")
    assert said.code == 0, said.err
    answer = json.loads(said.out)
    choices = answer["choices"]
    assert (answer["source"], answer["gpus"], len(choices)) == ("simulated", 4, 5)
    assert [choice["step_s"] for choice in choices] == sorted(
        choice["step_s"] for choice in choices
    )
    for choice in choices:
        assert choice["images_per_s"] == pytest.approx(4 / choice["step_s"])
        assert len(choice["peak_bytes"]) == choice["partitions"] and choice["global_batch"] == 4
        assert choice["partitions"] * choice["replicas"] == 4
        assert sum(choice["parts_s"].values()) == pytest.approx(choice["step_s"])
        assert "cost=profile" in choice["overrides"]
    assert choices[0]["loses_by"] == [] and all(choice["loses_by"] for choice in choices[1:])
    counted = ("simulated", "too_large", "pruned_by_bytes", "pruned_by_time", "impossible", "left")
    assert sum(answer[name] for name in counted) == answer["candidates"]


def test_the_table_says_how_far_it_looked(gems_: Gems) -> None:
    said = gems_(*ASKED, "machine.device_bytes=40000")
    assert said.code == 0, said.err
    lines = said.out.splitlines()
    assert "4 GPUs" in lines[0] and "a prediction" in lines[0]
    assert len(lines) == 14 and lines[2].split()[0] == "1" and "more" in lines[11]
    assert "left out by bytes" in lines[-2] and "rates of machine=auto" in lines[-1]


def test_what_is_written_runs_as_planned(
    gems_: Gems, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "experiment"
    folder.mkdir()
    path = folder / "small_planned.yaml"
    said = gems_(
        *ASKED, "machine.device_bytes=12000", "model.width=8", "--json", "--write", str(path)
    )
    assert said.code == 0, said.err
    first = json.loads(said.out)["choices"][0]
    assert path.read_text().startswith("# @package _global_\n# Made by `gems plan`")
    spec = compose([f"hydra.searchpath=['file://{tmp_path}']", "experiment=small_planned"])
    assert (
        spec.name == "small_planned" and spec.parallel.global_batch == 4 and spec.model.width == 8
    )
    by_words = compose(
        [
            *RUN,
            "machine.device_bytes=12000",
            "model.width=8",
            "name=small_planned",
            *first["overrides"],
        ]
    )
    assert run_id(spec) == run_id(by_words)

    def profile_of(spec: RunSpec) -> object:
        return sized(random_profile(NUM_LAYERS, 5, 0.9), spec.parallel.micro_batch_size)

    monkeypatch.setattr(gems.plan.draft, "profile_of", profile_of)
    made = evaluate(spec)
    assert list(made.boundaries) == first["boundaries"]


def test_steps_under_noise_are_those_that_simulate_prints(
    gems_: Gems, monkeypatch: pytest.MonkeyPatch
) -> None:
    noise = "machine.noise=0.1"
    said = gems_(*ASKED, noise, "machine.device_bytes=12000", "--top", "3", "--json")
    assert said.code == 0, said.err
    choices = json.loads(said.out)["choices"]
    assert [choice["step_s"] for choice in choices] == sorted(
        choice["step_s"] for choice in choices
    )

    def profile_of(spec: RunSpec) -> object:
        return sized(random_profile(NUM_LAYERS, 5, 0.9), spec.parallel.micro_batch_size)

    monkeypatch.setattr(gems.plan.draft, "profile_of", profile_of)
    for choice in choices:
        words = [*RUN, "machine.device_bytes=12000", *choice["overrides"]]
        noisy, quiet = (simulate(compose([*words, *more])).step_s for more in ([noise], []))
        assert (
            choice["step_s"] == pytest.approx(noisy, rel=1e-9) and abs(noisy - quiet) > 1e-6 * quiet
        )


def test_what_does_not_fit_says_what_would(gems_: Gems, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both questions are answered long before these limits.

    A busy machine may need more than the usual ones.
    """
    monkeypatch.setattr(gems.search.infeasibility, "MIN_S", 60.0)
    said = gems_(*ASKED, "machine.device_bytes=2000")
    assert said.code == 3 and said.out == ""
    (line,) = said.err.strip().splitlines()
    assert "configurations on 4 GPUs needs" in line and "machine.device_bytes=2000" in line
    assert "devices of" in line and "GiB work (" in line
    needed = int(line.split(" needs ")[1].split()[0])
    again = gems_(*ASKED[:-1], "3", f"machine.device_bytes={needed}", "--json")
    assert again.code == 0, again.err


def test_what_fits_is_found_even_if_the_search_had_no_time(
    gems_: Gems, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gems.search.infeasibility, "MIN_S", 60.0)
    said = gems_(*ASKED[:-1], "0.001", "machine.device_bytes=12000", "--json")
    assert said.code == 0, said.err
    found = json.loads(said.out)
    assert (
        len(found["choices"]) == 1
        and found["simulated"] == 1
        and found["left"]
        and not found["is_exact"]
    )
    assert max(found["choices"][0]["peak_bytes"]) <= 12000


def test_the_epochs_of_batches_decide(
    gems_: Gems, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    module = ModuleType("gems.search.hybrid.inputs")
    law = SimpleNamespace(epochs=lambda batch: {4: 10.0, 8: 11.0}[batch])
    monkeypatch.setattr(module, "read_epochs", lambda path: SimpleNamespace(law=law), raising=False)
    monkeypatch.setitem(sys.modules, "gems.search.hybrid.inputs", module)
    words = [
        "plan",
        *RUN,
        "parallel.gpus=4",
        "--budget",
        "2",
        "--global-batch",
        "4,8",
        "--epochs",
        "some.csv",
        "--json",
    ]
    said = gems_(*words)
    assert said.code == 0, said.err
    choices = json.loads(said.out)["choices"]
    assert {choice["epochs"] for choice in choices} <= {10.0, 11.0}
    assert [choice["to_target_s"] for choice in choices] == sorted(
        choice["to_target_s"] for choice in choices
    )


def test_hybrid_is_another_planner(gems_: Gems, monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("gems.cli.plan_hybrid")
    monkeypatch.setattr(
        module, "show_hybrid", lambda spec, options: len(options.chosen) + 40, raising=False
    )
    monkeypatch.setitem(sys.modules, "gems.cli.plan_hybrid", module)
    assert gems_("plan", *RUN, "--hybrid", "--speedup", "2=1.3").code == 41


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--top", "0"], "--top=0: must be a whole number"),
        (["--top", "x"], "--top=x: must be a whole number"),
        (["--budget", "nan"], "--budget=nan: must be seconds above 0"),
        (["--global-batch", "2,4"], "several compare by the time to a target"),
        (["--global-batch", "-3"], "--global-batch=-3"),
        (["--write", "plan.txt"], "must be a file NAME.yaml"),
        (["--write", "no/such/plan.yaml"], "must be a file NAME.yaml in an existing folder"),
        (["--global-batch", "4096"], "data.train_samples=1024: must be 4096 or more"),
        (["parallel.gpus=0"], "parallel.gpus=0: must be 1 or more"),
        (["parallel.gpus=-1"], "parallel.gpus=-1"),
        (["parallel.gpus=1000", "--global-batch", "7"], "has no split over 1000 GPUs"),
    ],
)
def test_bad_options_are_one_line(gems_: Gems, words: list[str], line: str) -> None:
    check_refusal(gems_("plan", *RUN, "parallel.gpus=4", *words), line)


def test_a_run_is_held_to_its_gpus() -> None:
    spec = compose(
        [
            "data=synthetic",
            "schedule=1f1b",
            "machine=simulated",
            "parallel.partitions=4",
            "parallel.gpus=4",
        ]
    )
    assert evaluate(spec).schedule.num_ranks == 4
    assert run_id(spec) == run_id(
        compose(["data=synthetic", "schedule=1f1b", "machine=simulated", "parallel.partitions=4"])
    )
    other = compose(
        [
            "data=synthetic",
            "schedule=1f1b",
            "machine=simulated",
            "parallel.partitions=4",
            "parallel.gpus=8",
        ]
    )
    with pytest.raises(
        gems.errors.ConfigError, match=r"parallel.gpus=8: must be partitions x replicas = 4 x 1"
    ):
        evaluate(other)
