"""gems.plan.evaluate: cut, schedule and memory plan of a run together, kept in the cache and in the run folder."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import yaml

import gems.plan.draft
from gems.config.schema import CostConfig, MemoryConfig, ProfileConfig, RunSpec, ScheduleConfig
from gems.errors import ConfigError, DoesNotFitError
from gems.memory.plan import Choice, MemoryPlan
from gems.partition.links import machine_links
from gems.plan.evaluate import evaluate
from gems.profile import ModelProfile
from gems.runs.prepare import prepare
from gems.schedule.action import Kind
from gems.schedule.lower import compute_only, lower
from gems.schedule.simulate import simulate
from gems.utils.atomic_io import read_json
from tests.helpers import toys
from tests.helpers.profiles import random_profile


@pytest.fixture
def spec(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> RunSpec:
    """A small ResNet on two ranks with a made-up profile, under vdnn_all."""

    def profile_of(spec: object) -> ModelProfile:
        return random_profile(5, seed=3, decay=0.9)

    monkeypatch.setattr(gems.plan.draft, "profile_of", profile_of)
    made = toys.make_spec("1f1b", 2)
    memory = MemoryConfig("vdnn_all", min_offload_bytes=0)
    return replace(
        made, memory=memory, runs_dir=str(tmp_path / "runs"), cache_dir=str(tmp_path / "cache")
    )


def test_actions_of_the_policy_are_in_the_list(spec: RunSpec) -> None:
    made = evaluate(spec)
    assert made.schedule.has_any(Kind.OFFLOAD) and made.schedule.has_any(Kind.FREE)
    plan = made.memory_plan
    assert plan is not None and plan.policy == "vdnn_all" and plan.boundaries == made.boundaries
    assert made.schedule.num_segments == tuple(map(len, plan.stages))


def test_kept_activations_need_no_plan(spec: RunSpec) -> None:
    made = evaluate(replace(spec, memory=MemoryConfig()))
    assert made.memory_plan is None and made.schedule.num_segments == (None, None)


@pytest.fixture
def strips(tmp_path: Path) -> RunSpec:
    """A ResNet without norms on two ranks, in strips."""
    norm = replace(toys.make_spec("1f1b", 2).model, norm="none", depth=8)
    return replace(
        toys.make_spec("1f1b", 2, model=norm, parallel__strips=3), cache_dir=str(tmp_path / "cache")
    )


def test_strips_are_cut_as_whole_micro_batches_and_hold_what_is_predicted_of_them(
    strips: RunSpec,
) -> None:
    whole = evaluate(replace(strips, parallel=replace(strips.parallel, strips=1)))
    plan = evaluate(strips)
    assert (
        plan.boundaries == whole.boundaries
        and plan.schedule.num_strips == 3
        and plan.memory_plan is None
    )
    peak = plan.peak
    assert peak is not None
    fits = replace(strips, machine=replace(strips.machine, device_bytes=peak.device_bytes))
    assert evaluate(fits).schedule.rank_schedules == plan.schedule.rank_schedules
    small = replace(strips, machine=replace(strips.machine, device_bytes=peak.device_bytes - 1))
    with pytest.raises(DoesNotFitError, match=f"rank {peak.rank} of 2 under memory=keep"):
        evaluate(small)


def test_under_a_policy_each_strip_of_a_stage_leaves_or_is_run_again(strips: RunSpec) -> None:
    kept = evaluate(strips).peak
    assert kept is not None
    again = evaluate(replace(strips, memory=MemoryConfig("recompute", recompute="strip")))
    peak = again.peak
    plan = again.memory_plan
    assert peak is not None and peak.device_bytes < kept.device_bytes
    assert (
        plan is not None
        and plan.boundaries == again.boundaries
        and again.schedule.num_segments == (1, 1)
    )
    counts = Counter(
        (action.stage, action.micro_batch % 3)
        for _, action in again.schedule.actions()
        if action.kind is Kind.R
    )
    # the last strip of an image on the last stage has its backward at once
    every = {(stage, strip): 4 for stage in (0, 1) for strip in range(3)}
    assert counts == {place: number for place, number in every.items() if place != (1, 2)}
    away = evaluate(replace(strips, memory=MemoryConfig("vdnn_all", min_offload_bytes=0)))
    assert away.schedule.has_any(Kind.OFFLOAD) and away.peak.host_bytes > 0
    limit = (peak.device_bytes + kept.device_bytes) // 2
    found = evaluate(
        replace(strips, memory=MemoryConfig("plan", limit_bytes=limit, min_offload_bytes=0))
    )
    assert found.peak.device_bytes <= limit and found.memory.step_s <= again.memory.step_s
    with pytest.raises(DoesNotFitError, match=r"under memory=plan .*memory.limit_bytes=1000"):
        evaluate(replace(strips, memory=MemoryConfig("plan", limit_bytes=1000)))


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        (
            {
                "schedule__name": "capped",
                "schedule__activation_cap": 1.0,
                "schedule__memory_actions": ["recompute"],
            },
            "with schedule.memory_actions",
        ),
        ({"parallel__strips": 13}, "with data.height_px=12, which is less than its 13 parts"),
    ],
)
def test_what_does_not_train_in_strips_is_refused(changes: dict, why: str) -> None:
    spec = toys.make_spec("1f1b", 2, **{"parallel__strips": 2, **changes})
    with pytest.raises(ConfigError, match=f"must be 1 for a run that trains {why}"):
        evaluate(spec)


def test_receives_are_early_for_slow_links_if_the_device_has_room(spec: RunSpec) -> None:
    """The cut is the same; the buffers of early receives may be what a device has no room for."""
    roomy = replace(spec.machine, device_bytes=10**9)
    kept = replace(
        spec,
        schedule=ScheduleConfig("gpipe"),
        memory=MemoryConfig(),
        cost=CostConfig(link=8.0),
        machine=roomy,
    )
    early = evaluate(kept)
    fewest = evaluate(replace(kept, cost=CostConfig()))
    assert (
        early.schedule.rank_schedules
        != fewest.schedule.rank_schedules
        == lower(compute_only(early.schedule)).rank_schedules
    )
    assert early.boundaries == fewest.boundaries
    most = early.peak
    least = fewest.peak
    assert most is not None and least is not None and most.device_bytes > least.device_bytes
    for device_bytes, expected in ((most.device_bytes, early), (least.device_bytes, fewest)):
        made = evaluate(replace(kept, machine=replace(roomy, device_bytes=device_bytes)))
        assert made.schedule.rank_schedules == expected.schedule.rank_schedules


def test_a_policy_has_early_receives_if_they_are_faster(spec: RunSpec) -> None:
    slow = replace(spec, machine=replace(spec.machine, link_latency_s=2.0))
    early = evaluate(slow).memory
    fewest = lower(compute_only(early.schedule))
    assert early.schedule.rank_schedules != fewest.rank_schedules
    assert early.step_s < simulate(fewest, early.costs, machine_links(slow.machine)).span


def test_a_device_too_small_for_keeping_is_no_matter_for_the_cut(spec: RunSpec) -> None:
    """The cut leaves the limit to the policy, which either keeps it or says by how much it does not."""
    whole = evaluate(
        replace(spec, memory=replace(spec.memory, name="recompute", recompute="stage"))
    )
    most = max(whole.memory.peak_bytes)
    fits = replace(
        spec,
        machine=replace(spec.machine, device_bytes=most),
        partition=replace(spec.partition, name="exact"),
    )
    assert evaluate(
        replace(fits, memory=MemoryConfig("plan", min_offload_bytes=0, budget_s=0.5))
    ).peak_bytes
    small = replace(spec, machine=replace(spec.machine, device_bytes=100))
    with pytest.raises(
        DoesNotFitError, match=r"rank \d of 2 under memory=vdnn_all needs \d+ bytes"
    ):
        evaluate(small)


def test_host_memory_is_that_of_a_node(spec: RunSpec) -> None:
    made = evaluate(spec)
    together = 2 * max(made.memory.host_bytes)
    evaluate(replace(spec, machine=replace(spec.machine, host_bytes=together)))
    with pytest.raises(
        DoesNotFitError, match=f"2 ranks on a node .* above machine.host_bytes={together - 1}"
    ):
        evaluate(replace(spec, machine=replace(spec.machine, host_bytes=together - 1)))


def test_a_plan_is_made_once(spec: RunSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    first = evaluate(spec)
    monkeypatch.setattr(gems.simulation.memory_case, "plan_of", None)
    assert evaluate(spec).memory_plan == first.memory_plan


def test_the_run_folder_has_plan_and_prediction(spec: RunSpec) -> None:
    folder = prepare(spec)
    made = evaluate(spec)
    plan = folder.read_memory_plan()
    assert plan == made.memory_plan and isinstance(plan, MemoryPlan)
    assert plan.stages[0][0].choice is Choice.OFFLOAD
    assert folder.read_schedule().rank_schedules == made.schedule.rank_schedules
    predicted = read_json(folder.memory_json)["predicted"]
    assert predicted["peak_bytes"] == list(made.memory.peak_bytes)
    kept = prepare(replace(spec, name="kept", memory=MemoryConfig()))
    assert kept.read_memory_plan() is None and not kept.memory_json.exists()


def test_the_step_of_a_policy_has_the_all_reduce_of_its_replicas(spec: RunSpec) -> None:
    """Over slow links the gradients of four replicas take most of the step.

    A rank holds what it held alone.
    """
    spec = replace(spec, machine=replace(spec.machine, link_bytes_per_s=1e3))
    alone, many = (
        evaluate(replace(spec, parallel=replace(spec.parallel, replicas=n))).memory for n in (1, 4)
    )
    assert not any(alone.costs.reduce) and min(many.costs.reduce) > 0
    least = min(many.costs.reduce)
    most = max(many.costs.reduce)
    assert alone.step_s + least <= many.step_s <= alone.step_s + most
    assert (
        many.peak_bytes == alone.peak_bytes
        and many.schedule.rank_schedules == alone.schedule.rank_schedules
    )


def test_the_step_of_a_policy_is_that_of_the_replica_that_lies_worst(spec: RunSpec) -> None:
    """On nodes of three ranks the second pipeline of two crosses from one node to the next."""
    machine = replace(spec.machine, ranks_per_node=3, link_latency_s=100.0)
    first, both = (
        evaluate(replace(spec, machine=machine, parallel=replace(spec.parallel, replicas=n))).memory
        for n in (1, 2)
    )
    assert both.step_s - max(both.costs.reduce) > first.step_s + 100


def test_the_all_reduces_of_a_node_share_its_links(spec: RunSpec) -> None:
    """Two pipelines, a node each.

    Both of its ranks reduce with the other node at once, over one link or over two.
    """
    machine = replace(spec.machine, ranks_per_node=2, link_bytes_per_s=10.0)
    spec = replace(spec, machine=machine, parallel=replace(spec.parallel, replicas=2))
    free = evaluate(spec).memory
    shared = evaluate(replace(spec, machine=replace(machine, contention=True))).memory
    assert shared.step_s > free.step_s + 0.5 * min(shared.costs.reduce_link) > free.step_s


def test_two_caches_are_one_run(
    spec: RunSpec, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """What is measured enters the plan, costs.json and profile.json, and never the identity."""

    def profile_of(spec: RunSpec) -> ModelProfile:
        return random_profile(
            5, seed=1 if spec.cache_dir == str(tmp_path / "one") else 2, decay=0.9
        )

    monkeypatch.setattr(gems.plan.draft, "profile_of", profile_of)
    asked = replace(
        spec, memory=MemoryConfig(), cost=CostConfig("profile"), profile=ProfileConfig("measured")
    )
    one, other = (replace(asked, cache_dir=str(tmp_path / name)) for name in ("one", "other"))
    assert evaluate(one).costs != evaluate(other).costs
    folder = prepare(one)
    assert folder.read_spec() == one and folder.read_run().cost == evaluate(one).costs
    assert prepare(other) == folder and len(list((tmp_path / "runs").iterdir())) == 1
    assert folder.read_spec().cost == asked.cost and folder.read_run().cost == evaluate(other).costs
    assert yaml.safe_load(folder.traced_yaml())["cost"] == asdict(evaluate(other).costs)


def test_configured_costs_need_no_file(spec: RunSpec) -> None:
    folder = prepare(spec)
    assert not folder.costs_json.exists() and folder.read_run() == folder.read_spec() == spec
    assert folder.traced_yaml() == folder.run_yaml.read_text()


def test_costs_in_the_run_yaml_of_an_earlier_version_are_read(spec: RunSpec) -> None:
    """Costs of a profile used to be in run.yaml itself."""
    earlier = replace(spec, cost=CostConfig("profile", times=[1.0, 2.0], activation_bytes=5))
    folder = prepare(earlier)
    assert folder.read_run().cost == earlier.cost == evaluate(earlier).costs


@pytest.mark.parametrize(
    ("schedule", "changes", "why"),
    [
        ("1f1b", {"train__cuda_graphs": True}, "train.cuda_graphs=true, which"),
        ("1f1b", {"parallel__strips": 2}, "parallel.strips=2, for which"),
        ("1f1b", {"parallel__strips": 0}, "parallel.strips=0, for which"),
        ("1f1b", {"memory": MemoryConfig("recompute")}, "memory=recompute, which"),
        ("1f1b", {"train__precision": "bf16_mixed"}, "train.precision=bf16_mixed, whose"),
        (
            "capped",
            {"schedule__activation_cap_bytes": 10**6},
            "schedule.activation_cap_bytes=1000000, which",
        ),
        (
            "zb_h1",
            {},
            "schedule=zb_h1, which runs the backward of each layer in two parts; use a schedule",
        ),
        ("gems_zb", {}, "schedule=gems_zb, which"),
    ],
)
def test_compiled_layers_exclude_what_takes_them_apart(
    schedule: str, changes: dict[str, object], why: str
) -> None:
    plain = toys.make_spec(schedule, 2, **changes)
    spec = replace(plain, train=replace(plain.train, compile=True))
    with pytest.raises(ConfigError, match=f"^train.compile=true: excludes {why}"):
        evaluate(spec)


def test_timed_waits_are_not_compiled() -> None:
    plain = toys.make_spec("zb_h1", 2, machine__kind="emulated")
    assert evaluate(
        replace(plain, train=replace(plain.train, compile=True))
    ).schedule.has_split_backward


def test_a_schedule_with_a_whole_backward_is_planned_as_without_compiled_layers() -> None:
    plain = toys.make_spec("gems_master", 2)
    spec = replace(plain, train=replace(plain.train, compile=True))
    assert evaluate(spec).schedule.rank_schedules == evaluate(plain).schedule.rank_schedules
