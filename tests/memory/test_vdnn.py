"""vDNN's policies: which layers leave, when they come back, and in which order dyn tries."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import pairwise

import pytest

from gems.config.schema import DataConfig, MachineConfig, ModelConfig
from gems.errors import DoesNotFitError
from gems.memory.case import MemoryCase, PlanOutcome, exposures
from gems.memory.plan import Choice, MemoryPlan
from gems.memory.policies.vdnn import (
    is_classifier,
    is_conv,
    prefetch_window,
    vdnn_all,
    vdnn_conv,
    vdnn_dyn,
    without_workspace,
)
from gems.profile import LayerProfile
from gems.profile.profilers.fake import fake_profile
from gems.schedule.action import Kind
from gems.schedule.validate import validate
from tests.helpers.policy_cases import SCHEDULES, case_of, network, random_network


def listed(case: MemoryCase, plan: MemoryPlan) -> list[str]:
    """The list of rank 0 in short.

    Without stage and micro-batch, and without what follows the last backward.
    """
    return [
        f"{action.segment}{action.kind.value}"
        for action in case.lowered(plan).rank_schedules[0]
        if action.segment is not None
    ]


def copies(outcome: PlanOutcome) -> list[str]:
    return [
        str(action)
        for row in outcome.schedule.rank_schedules
        for action in row
        if action.kind is Kind.OFFLOAD
    ]


def offloaded(plan: MemoryPlan) -> list[int]:
    return [one.first for stage in plan.stages for one in stage if one.choice is Choice.OFFLOAD]


@pytest.mark.parametrize(
    ("kind", "conv", "classifier"),
    [
        ("conv", True, False),
        ("Conv2d", True, False),
        ("residual", True, False),
        ("inception", True, False),
        ("cell", True, False),
        ("reduction", True, False),
        ("Bottleneck", True, False),
        ("pool", False, False),
        ("MaxPool2d", False, False),
        ("BatchNorm2d", False, False),
        ("ReLU", False, False),
        ("lstm", False, False),
        ("Upsample", False, False),
        ("embedding", False, False),
        ("linear", False, True),
        ("Linear", False, True),
        ("head", False, True),
    ],
)
def test_what_a_layer_is(kind: str, conv: bool, classifier: bool) -> None:
    layer = LayerProfile("one", kind, param_bytes=0 if kind == "Upsample" else 10)
    assert (is_conv(layer), is_classifier(layer)) == (conv, classifier)


def test_the_published_list() -> None:
    """A copy out has the next layer to hide behind.

    A copy back the layer whose window it is in, which waits for it.
    The copy of 2 finds no time in the window of 3, since the classifier's backward comes first:
    there it is fetched.
    """
    case = case_of(network("ccpll"))
    assert listed(case, vdnn_all(case)) == [
        "0F",
        "0OFFLOAD",
        "1F",
        "1OFFLOAD",
        "0FREE",
        "2F",
        "2OFFLOAD",
        "1FREE",
        "3F",
        "2FREE",
        "4F",
        "2PREFETCH",
        "4B",
        "2AWAIT",
        "1PREFETCH",
        "3B",
        "1AWAIT",
        "2B",
        "0PREFETCH",
        "1B",
        "0AWAIT",
        "0B",
    ]


@cache
def fake_case(
    name: str, depth: int, size: int, height_px: int = 224, norm: str = "none"
) -> MemoryCase:
    """One micro-batch of a network of the zoo on one rank, nothing too small to be moved."""
    data = DataConfig(height_px=height_px, width_px=height_px)
    model = ModelConfig(name=name, depth=depth, width=64, norm=norm)
    profile = fake_profile(model, data, size, "float32", MachineConfig())
    return replace(case_of(profile), least_bytes=0)


def moved_bytes(case: MemoryCase, plan: MemoryPlan) -> int:
    return sum(one.moved_bytes for one in exposures(case.outcome(plan)).values())


def test_bytes_of_vgg16_are_those_of_its_maps() -> None:
    """The paper's VGG-16 of 256 images.

    Conv moves the X of every convolution, all those of poolings too.
    The images stay, as a stage's inputs do here; torch's poolings also save an index of 8 bytes for
    each value.
    """
    case = fake_case("vgg", 16, 256)
    side = 224
    maps = 0
    poolings = 0
    indices = 0
    for channels, convs in zip((64, 128, 256, 512, 512), (2, 2, 3, 3, 3), strict=True):
        maps += (convs - 1) * channels * side**2  # of the convolutions in a group but the first
        poolings += channels * side**2
        side //= 2
        maps += channels * side**2 if side > 7 else 0  # of the first one in the next group
        indices += channels * side**2
    assert moved_bytes(case, vdnn_conv(case)) == 256 * 4 * maps
    assert moved_bytes(case, vdnn_all(case)) == 256 * (4 * (maps + poolings) + 8 * indices)
    assert 8.4 < 256 * 4 * maps / 2**30 < 8.7, "closed form: 8.7 GiB with the images"


@pytest.mark.parametrize(
    ("name", "depth", "least", "most"),
    [
        ("alexnet", 20, 0.1, 0.3),
        ("googlenet", 20, 0.15, 0.4),
        ("overfeat", 20, 0.1, 0.3),
        ("resnet", 20, 0.3, 0.7),
    ],
)
def test_conv_moves_less_than_all_and_leaves_more_on_the_device(
    name: str, depth: int, least: float, most: float
) -> None:
    case = fake_case(name, depth, 2, 231, "batch" if name == "resnet" else "none")
    conv = vdnn_conv(case)
    everything = vdnn_all(case)
    assert conv.only_conv_inputs and not everything.only_conv_inputs
    assert least < moved_bytes(case, conv) / moved_bytes(case, everything) < most
    held = [case.outcome(plan).ranks[0].peak_activation_bytes for plan in (everything, conv)]
    assert held[0] <= held[1] < case.kept.ranks[0].peak_activation_bytes
    assert moved_bytes(case, conv) == (conv.counters or {})["offloaded_layer_bytes"]
    assert MemoryPlan.from_json(conv.to_json()).only_conv_inputs


def test_without_convolutions_nothing_is_moved() -> None:
    """A network of sequences has no X that vDNN knows."""
    assert offloaded(vdnn_conv(case_of(network("ppl")))) == []


def test_what_saves_nothing_or_little_stays() -> None:
    assert offloaded(vdnn_all(case_of(network("cicl")))) == [0, 2]
    case = replace(case_of(network("cppcl", (64, 1, 1, 64, 64))), least_bytes=2 << 20)
    assert offloaded(vdnn_all(case)) == [0, 1, 3], "the second pooling saves 1 MiB at most"


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("name", "ranks", "micro_batches"), SCHEDULES)
def test_copies_back_follow_the_window(
    seed: int, name: str, ranks: int, micro_batches: int
) -> None:
    """Each stage's own: before the backward that the window names, and waited for behind it."""
    case = case_of(random_network(seed), name, ranks, micro_batches)
    plan = vdnn_all(case)
    schedule = validate(case.lowered(plan))
    gone = set(offloaded(plan))
    windows = {
        stage: prefetch_window(
            [is_conv(layer) for layer in case.profile.layers[first:end]],
            [layer in gone for layer in range(first, end)],
        )
        for stage, (first, end) in enumerate(pairwise(case.boundaries))
    }
    found = 0
    for row in schedule.rank_schedules:
        for place, action in enumerate(row):
            if action.kind is not Kind.PREFETCH:
                continue
            window = windows[action.stage]
            at = next(other for other in row[place:] if other.kind in (Kind.B, Kind.I))
            in_window = action.segment in window
            assert at.micro_batch == action.micro_batch
            assert (
                window.index(action.segment) == at.segment
                if in_window
                else at.segment == action.segment
            )
            behind = row[row.index(at) + 1 :]
            if in_window:
                assert behind[0] == action._replace(kind=Kind.AWAIT)
            found += 1
    assert found


@pytest.mark.parametrize(("name", "ranks", "micro_batches"), SCHEDULES)
@pytest.mark.parametrize("rate", [2e8, 3e9, 2e10])
def test_asynchronous_waits_less(name: str, ranks: int, micro_batches: int, rate: float) -> None:
    case = case_of(network("cpcbbcpcbccl"), name, ranks, micro_batches, rate=rate)
    published = case.outcome(vdnn_all(case))
    free = case.outcome(vdnn_all(case, asynchronous=True))
    assert free.step_s <= published.step_s * (1 + 1e-9)
    assert not any(
        action.kind is Kind.AWAIT for row in free.schedule.rank_schedules for action in row
    )
    assert set(offloaded(free.plan)) == set(offloaded(published.plan))
    assert sorted(copies(free)) == sorted(copies(published)), "no copy is given up for it"
    validate(free.schedule)
    if rate == 3e9 and ranks == 1:
        assert free.step_s < 0.99 * published.step_s


def test_dyn_takes_the_first_that_fits() -> None:
    """Poolings that save much make all smaller than conv."""
    case = case_of(network("cpcpcpcpcpcpl"))
    peaks = [
        max(case.outcome(plan).peak_bytes)
        for plan in (
            vdnn_all(case),
            vdnn_conv(case),
            MemoryPlan.by_layer("keep", case.boundaries, {}),
        )
    ]
    assert peaks == sorted(set(peaks)), "the trials differ"
    found = []
    for limit in (None, peaks[2], peaks[2] - 1, peaks[1], peaks[1] - 1, peaks[0]):
        counters = vdnn_dyn(replace(case, limit_bytes=limit)).counters
        assert counters is not None and counters["cudnn_benchmark"] is True
        found.append(counters["trial"])
    assert found == ["none", "none", "conv", "conv", "all", "all"]
    with pytest.raises(DoesNotFitError, match="rank 0 under vdnn_all") as caught:
        vdnn_dyn(replace(case, limit_bytes=peaks[0] - 1))
    assert (caught.value.needed_bytes, caught.value.limit_bytes) == (peaks[0], peaks[0] - 1)


def test_dyn_gives_up_workspace_last() -> None:
    """Where the profile tells what a GPU's convolutions use beside their results."""
    case = case_of(network("cpcpcpcpcpcpl", spare=800, device="A GPU"))
    lean = replace(case, profile=without_workspace(case.profile))
    fast = max(case.outcome(vdnn_all(case)).peak_bytes)
    conv, everything = (
        max(lean.outcome(policy(case)).peak_bytes) for policy in (vdnn_conv, vdnn_all)
    )
    assert everything < conv < fast
    found = []
    for limit in (fast, fast - 1, conv, conv - 1, everything):
        counters = vdnn_dyn(replace(case, limit_bytes=limit)).counters
        assert counters is not None
        found.append((counters["trial"], counters["cudnn_benchmark"]))
    assert found == [
        ("all", True),
        ("conv", False),
        ("conv", False),
        ("all", False),
        ("all", False),
    ]


def test_workspace_is_only_taken_from_what_a_gpu_was_measured_to_use() -> None:
    on_cpu = network("ccpl", spare=10)
    assert without_workspace(on_cpu) is on_cpu
    on_gpu = replace(on_cpu, device="A GPU")
    before = on_gpu.layers
    after = without_workspace(on_gpu).layers
    assert [
        b.forward_peak_bytes - a.forward_peak_bytes for b, a in zip(before, after, strict=True)
    ] == [10 << 20, 10 << 20, 0, 0]
    assert all(layer.forward_peak_bytes >= layer.kept_bytes for layer in after)
