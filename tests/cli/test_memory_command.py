"""Test `gems memory`.

Covers one policy's table, all policies side by side with a picture, and what simulate and schedule
make of it.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gems.memory.registry import POLICIES
from gems.plan import draft
from gems.profile import ModelProfile
from tests.helpers.commands import Gems, check_refusal
from tests.helpers.profiles import random_profile

RUN = (
    "data=synthetic",
    "model=resnet20_v1",
    "parallel.partitions=2",
    "parallel.micro_batches=4",
    "schedule=1f1b",
    "memory.min_offload_bytes=0",
    "machine.d2h_bytes_per_s=2000",
    "machine.h2d_bytes_per_s=2000",
)
NUM_LAYERS = 11


@pytest.fixture
def gems_(gems: Gems, monkeypatch: pytest.MonkeyPatch) -> Gems:
    """Run commands on ResNet-20 with a made-up profile."""

    def profile_of(spec: object) -> ModelProfile:
        return random_profile(NUM_LAYERS, seed=5, decay=0.9)

    monkeypatch.setattr(draft, "profile_of", profile_of)
    return gems


def test_one_policy(gems_: Gems) -> None:
    said = gems_("memory", *RUN, "memory=vdnn_all", "--json")
    assert said.code == 0, said.err
    answer = json.loads(said.out)
    (entry,) = answer["choices"]
    assert (answer["source"], answer["partitions"], entry["policy"]) == ("predicted", 2, "vdnn_all")
    assert len(entry["peak_bytes"]) == len(entry["host_bytes"]) == 2
    assert entry["saved"] > 0.2 and entry["overhead"] > 0 and max(entry["host_bytes"]) > 0
    assert [row["first"] for row in entry["segments"]] == list(range(NUM_LAYERS))
    moved = [
        row for row in entry["segments"] if row["choice"] == "offload" and row["out_s"] is not None
    ]
    assert moved and all(
        row["moved_bytes"] > 0 and 0 < row["out_s"] < row["back_s"] for row in moved
    )
    assert all(row["exposed_s"] >= 0 for row in moved)


def test_the_table_has_a_row_a_segment(gems_: Gems) -> None:
    said = gems_("memory", *RUN, "memory=recompute", "memory.recompute=stage")
    assert said.code == 0, said.err
    rows = [line for line in said.out.splitlines() if " recompute " in line]
    assert len(rows) == 2 and "layer0 .. " in rows[0] and "layer10" in rows[1]
    assert "% of activations saved" in said.out


def test_the_table_says_when_inputs_leave_and_that_they_are_run_through_again(gems_: Gems) -> None:
    words = ("memory", *RUN, "memory=recompute", "memory.segments=3", "memory.offload_inputs=true")
    (entry,) = json.loads(gems_(*words, "--json").out)["choices"]
    moved = [row for row in entry["segments"] if row["moved_bytes"]]
    assert (
        moved
        and {row["choice"] for row in moved} == {"offload_inputs"}
        and max(entry["host_bytes"]) > 0
    )
    assert all(row["again_s"] > 0 and 0 < row["out_s"] < row["back_s"] for row in moved)
    lines = [line for line in gems_(*words).out.splitlines() if " offload_inputs " in line]
    times = [[f"{1e3 * row[name]:.3f}" for name in ("out_s", "back_s", "again_s")] for row in moved]
    assert all(any(all(time in line for time in each) for line in lines) for each in times)


def test_all_policies_side_by_side(gems_: Gems, tmp_path: Path) -> None:
    kept = json.loads(gems_("memory", *RUN, "memory=keep", "--json").out)["choices"][0]
    limit = int(0.8 * max(kept["peak_bytes"]))
    words = (*RUN, f"memory.limit_bytes={limit}", "memory.budget_s=0.5", "--compare")
    answer = json.loads(gems_("memory", *words, "--json").out)
    found = {entry["policy"]: entry for entry in answer["choices"]}
    assert set(found) | set(answer["refused"]) == set(POLICIES)
    assert not found["keep"]["fits"] and found["keep"]["saved"] == 0.0
    order = [(not entry["fits"], round(entry["step_s"], 9)) for entry in answer["choices"]]
    assert order == sorted(order)
    plan = found["plan"]
    assert plan["fits"] and max(plan["peak_bytes"]) <= limit
    assert all(plan["step_s"] <= entry["step_s"] for entry in answer["choices"] if entry["fits"])
    said = gems_("memory", *words, "--picture", "memory.png")
    assert said.code == 0 and "picture: memory.png" in said.out
    assert (tmp_path / "memory.png").stat().st_size > 10_000


def test_without_a_limit_those_that_need_one_say_so(gems_: Gems) -> None:
    answer = json.loads(gems_("memory", *RUN, "--compare", "--json").out)
    assert "memory.limit_bytes" in answer["refused"]["plan"]
    assert {"keep", "vdnn_all", "vdnn_conv", "recompute"} <= {
        entry["policy"] for entry in answer["choices"]
    }


def test_simulate_gives_the_peaks_of_the_policy(gems_: Gems) -> None:
    entry = json.loads(gems_("memory", *RUN, "memory=vdnn_all", "--json").out)["choices"][0]
    found = json.loads(gems_("simulate", *RUN, "memory=vdnn_all", "--json").out)
    assert found["memory"] == "vdnn_all"
    assert found["peak_bytes"] == entry["peak_bytes"] and found["step_s"] == entry["step_s"]
    assert found["peak_host_bytes"] == entry["host_bytes"]
    assert 0 < found["efficiency"] <= found["bound"] <= 1
    said = gems_("simulate", *RUN, "memory=vdnn_all")
    assert said.code == 0 and "largest possible efficiency" in said.out


@pytest.mark.parametrize("schedule", ["1f1b", "gems_master", "zb_h1", "interleaved_1f1b"])
def test_simulate_gives_the_peaks_of_keeping_all_with_the_costs_of_a_profile(
    gems_: Gems, schedule: str
) -> None:
    words = (*RUN[:-3], f"schedule={schedule}", "memory=keep", "cost=profile", "--json")
    entry = json.loads(gems_("memory", *words).out)["choices"][0]
    found = json.loads(gems_("simulate", *words).out)
    assert found["peak_bytes"] == entry["peak_bytes"]
    assert max(found["peak_activation_bytes"]) < max(found["peak_bytes"])


def test_every_answer_knows_the_slots_of_cuda_graphs(gems: Gems) -> None:
    peaks: dict[tuple[str, str], list[int]] = {}
    for device in ("cpu", "cuda"):
        for graphs in ("true", "false"):
            words = (
                *("data=synthetic", "data.height_px=32", "data.width_px=32", "model=resnet20_v1"),
                *("parallel.partitions=2", "parallel.micro_batches=4", "cost=profile"),
                "schedule=interleaved_1f1b",
                f"machine.device={device}",
                f"train.cuda_graphs={graphs}",
                "--json",
            )
            (keep,) = json.loads(gems("memory", *words, "memory=keep").out)["choices"]
            (again,) = json.loads(gems("memory", *words, "memory=recompute").out)["choices"]
            assert json.loads(gems("simulate", *words).out)["peak_bytes"] == keep["peak_bytes"]
            peaks[device, graphs] = keep["peak_bytes"] + again["peak_bytes"]
    assert peaks["cpu", "true"] == peaks["cpu", "false"]
    assert all(map(int.__gt__, peaks["cuda", "true"], peaks["cuda", "false"]))


def test_replicas_reduce_gradients_under_every_policy(gems_: Gems) -> None:
    """Reduce gradients over slow links, where a policy costs a smaller share of the step.

    The step of three replicas is the all-reduce for the most part.
    """
    links = "machine.link_bytes_per_s=2000"
    alone, many = (
        json.loads(
            gems_("memory", *RUN, links, f"parallel.replicas={n}", "memory=vdnn_all", "--json").out
        )["choices"][0]
        for n in (1, 3)
    )
    assert many["step_s"] > alone["step_s"] and many["peak_bytes"] == alone["peak_bytes"]
    assert 0 < many["overhead"] < alone["overhead"]
    simulated = json.loads(
        gems_("simulate", *RUN, links, "parallel.replicas=3", "memory=vdnn_all", "--json").out
    )
    assert (
        simulated["step_s"] == many["step_s"] and simulated["images_per_s"] == many["images_per_s"]
    )
    assert max(simulated["reduce_s"]) > 0


@pytest.mark.cases
def test_the_step_under_noise_is_that_of_simulate(gems_: Gems) -> None:
    words = (*RUN, "machine.noise=0.1", "memory=vdnn_all", "--json")
    found = json.loads(gems_("simulate", *words).out)
    assert json.loads(gems_("memory", *words).out)["choices"][0]["step_s"] == found["step_s"]
    assert found["step_low_s"] < found["step_s"]


def test_schedule_shows_segments_and_copies(gems_: Gems) -> None:
    said = gems_("schedule", *RUN, "memory=vdnn_all")
    assert said.code == 0 and "0.0F0 0.0OFFLOAD0" in said.out and "PREFETCH0" in said.out
    document = json.loads(gems_("schedule", *RUN, "memory=vdnn_all", "level=lowered", "--json").out)
    assert ["OFFLOAD", 0, 0, 0, 0] in document["actions"][0]
    assert len(document["costs"]["segments"]) == 2
    words = ("memory=recompute", "memory.recompute=segment", "memory.segments=1")
    check_refusal(gems_("schedule", *RUN, "memory=vdnn_all", "format=torch"), "format", "copies")
    check_refusal(gems_("schedule", *RUN, *words, "format=torch"), "format", "recomputes")


@pytest.mark.parametrize(
    ("words", "key", "text"),
    [
        (("memory=plan",), "memory.limit_bytes", "memory.target_reduction"),
        (("memory=lms",), "memory.limit_bytes", "must be given"),
        (("memory=vdnn_al",), "memory", "vdnn_all"),
        (("memory=plan", "memory.target_reduction=1.5"), "memory.target_reduction", "at most 1"),
        (
            ("memory=lms", "memory.limit_bytes=1GB", "memory.sync_mode=4"),
            "memory.sync_mode",
            "at most 3",
        ),
        (("memory=recompute", "memory.recompute=half"), "memory.recompute", "selective"),
        (
            ("memory=recompute", "memory.recompute=selective", "memory.offload_inputs=true"),
            "memory.offload_inputs",
            "memory.recompute=segment",
        ),
        (("memory=vdnn_all", "machine=emulated"), "memory", "real"),
        (("memory=vdnn_all", "--picture", "x.gif"), "--picture", ".png"),
    ],
)
def test_bad_input(gems_: Gems, words: tuple[str, ...], key: str, text: str) -> None:
    check_refusal(gems_("memory", *RUN, *words), key, text)


def test_what_does_not_fit_is_refused_with_the_bytes(gems_: Gems) -> None:
    said = gems_("simulate", *RUN, "memory=vdnn_all", "machine.device_bytes=1000")
    assert said.code == 3 and "under memory=vdnn_all needs" in said.err
    said = gems_("simulate", *RUN, "memory=vdnn_all", "machine.host_bytes=10")
    assert said.code == 3 and "above machine.host_bytes=10" in said.err


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("memory.target_reduction=0.99", "with memory.target_reduction=0.99 needs"),
        ("memory.limit_bytes=1000", "above memory.limit_bytes=1000 "),
        ("machine.device_bytes=1000", "above machine.device_bytes=1000 "),
    ],
)
def test_the_refusal_names_the_key_that_sets_the_limit(gems_: Gems, words: str, text: str) -> None:
    said = gems_("simulate", *RUN, "memory=plan", "memory.budget_s=0.2", words)
    assert said.code == 3 and text in said.err
