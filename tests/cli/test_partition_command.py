"""`gems partition`: one cut, all methods side by side with a picture, the largest model, and `cost=profile`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gems.partition.methods import METHODS
from gems.plan import draft
from gems.profile import ModelProfile
from tests.helpers.commands import Gems, check_refusal
from tests.helpers.profiles import random_profile

RUN = ("data=synthetic", "model=resnet20_v1", "parallel.partitions=4", "parallel.micro_batches=8")
PLAIN_RUN = (*RUN, "schedule=1f1b")


@pytest.fixture
def gems_(gems: Gems, monkeypatch: pytest.MonkeyPatch) -> Gems:
    """Run commands on ResNet-20 with a made-up profile; deeper ones have more of the same."""

    def profile_of(spec: object) -> ModelProfile:
        depth = spec.model.depth  # type: ignore[attr-defined]
        return random_profile((depth - 2) // 2 + 2, seed=5, decay=0.9)

    monkeypatch.setattr(draft, "profile_of", profile_of)
    return gems


def test_one_cut(gems_: Gems) -> None:
    said = gems_("partition", *PLAIN_RUN, "--json")
    assert said.code == 0, said.err
    answer = json.loads(said.out)
    assert answer["method"] == "exact" and answer["optimal"] and answer["gap"] == 0.0
    assert answer["boundaries"][0] == 0 and answer["boundaries"][-1] == 11
    assert answer["bound"] == pytest.approx(max(answer["peak_bytes"]), rel=1e-6)
    assert (answer["source"], answer["stages"], answer["partitions"]) == ("predicted", 4, 4)
    assert len(answer["reserved_bytes"]) == 4 and min(answer["reserved_bytes"]) >= 2 << 20
    assert answer["images_per_s"] == pytest.approx(8 / answer["step_s"])


def test_the_table_says_where_and_how_sure(gems_: Gems) -> None:
    said = gems_("partition", *PLAIN_RUN)
    assert said.code == 0 and "picture" not in said.out
    row = next(line for line in said.out.splitlines() if line.startswith("exact  "))
    assert row.endswith("optimal")
    assert "even: layers a stage 3 3 3 2" in gems_("partition", *PLAIN_RUN, "partition=even").out


@pytest.mark.parametrize("schedule", ["1f1b", "gems_master", "zb_v"])
def test_all_methods_side_by_side(gems_: Gems, schedule: str) -> None:
    words = () if schedule == "1f1b" else ("parallel.replications=null",)
    said = gems_("partition", *RUN, f"schedule={schedule}", *words, "--compare", "--json")
    assert said.code == 0, said.err
    methods = json.loads(said.out)["methods"]
    plain = [] if schedule == "1f1b" else ["exact_plain"]
    assert [each["method"] for each in methods] == [*METHODS, *plain]
    ours = methods[0]
    for each in methods:
        assert each["peak_ratio"] == pytest.approx(
            max(each["peak_bytes"]) / max(ours["peak_bytes"])
        )
        assert each["peak_ratio"] >= 1
        assert sum(each["layers_per_stage"]) == 11


@pytest.mark.usefixtures("warm")
def test_the_picture(gems_: Gems, tmp_path: Path) -> None:
    said = gems_("partition", *PLAIN_RUN, "--compare", "--picture", "cuts.svg")
    assert said.code == 0, said.err
    assert said.out.splitlines()[-1] == "picture: cuts.svg"
    text = (tmp_path / "cuts.svg").read_text()
    assert text.startswith("<?xml") and len(text) > 10_000


def test_a_picture_that_cannot_be_written(gems_: Gems) -> None:
    said = gems_("partition", *PLAIN_RUN, "--picture", "cuts.txt")
    check_refusal(said, "--picture=cuts.txt: allowed: .png, .pdf, .svg")
    said = gems_("partition", *PLAIN_RUN, "--picture", "no/such/cuts.png")
    check_refusal(said, "--picture=no/such/cuts.png: its folder does not exist")


def test_what_does_not_fit_has_its_exit_code(gems_: Gems) -> None:
    said = gems_("partition", *PLAIN_RUN, "machine.device_bytes=1kB")
    assert said.code == 3
    assert (
        "layer" in said.err
        and "machine.device_bytes=1000" in said.err
        and len(said.err.splitlines()) == 1
    )


def test_the_largest(gems_: Gems) -> None:
    said = gems_(
        "partition", *PLAIN_RUN, "--largest", "depth", "machine.device_bytes=60kB", "--json"
    )
    assert said.code == 0, said.err
    answer = json.loads(said.out)
    depths = {each["method"]: each["depth"] for each in answer["methods"]}
    assert depths["exact"] == max(depths.values()) > 8
    assert set(answer["parameters_over"]) == {"torchgpipe_size", "torchgpipe_time"}
    shown = gems_("partition", *PLAIN_RUN, "--largest", "depth", "machine.device_bytes=60kB")
    assert f"{depths['exact']}" in shown.out and "ours over torchgpipe_size" in shown.out


def test_the_largest_needs_a_limit(gems_: Gems) -> None:
    check_refusal(
        gems_("partition", *PLAIN_RUN, "--largest", "depth"),
        "machine.device_bytes=null: must be given",
    )


def test_costs_from_a_profile(gems_: Gems) -> None:
    """In seconds and bytes; useful time is that of the layers, whatever the cut."""
    made = random_profile(11, seed=5, decay=0.9)
    total_s = 8 * sum(layer.time_s for layer in made.layers)
    for schedule in ("1f1b", "capped"):
        cap = ("schedule.activation_cap=4", "schedule.budget_s=0.5") if schedule == "capped" else ()
        said = gems_("simulate", *RUN, f"schedule={schedule}", *cap, "cost=profile", "--json")
        assert said.code == 0, said.err
        answer = json.loads(said.out)
        assert sum(answer["useful_s"]) == pytest.approx(total_s, rel=1e-6)
        assert total_s / 4 <= answer["step_s"] <= total_s
        assert all(peak > 0 for peak in answer["peak_bytes"])


def test_a_cap_in_bytes_of_a_profile(gems_: Gems) -> None:
    free = json.loads(gems_("simulate", *PLAIN_RUN, "cost=profile", "--json").out)
    limit = round(max(free["peak_activation_bytes"]))
    words = (*RUN, "schedule=capped", "schedule.budget_s=0.5", "cost=profile", "--json")
    said = gems_("simulate", *words, f"schedule.activation_cap_bytes={limit}")
    assert said.code == 0, said.err
    capped = json.loads(said.out)
    assert max(capped["peak_activation_bytes"]) <= limit * (1 + 1e-6)
