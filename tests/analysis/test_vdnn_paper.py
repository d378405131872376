"""The vDNN paper's studies: calls and bytes against closed forms and torch, time-lines against hand-made ones."""

from __future__ import annotations

from dataclasses import replace
from math import prod

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from analysis.papers.vdnn_network import Call, CallKind, Device, Network, Window, network_of
from analysis.papers.vdnn_study import (
    Moment,
    Policy,
    fastest,
    offloads,
    play,
    study,
    workspace_bytes,
)
from gems.config.schema import DataConfig, ModelConfig
from gems.errors import ConfigError
from gems.memory.policies.vdnn import find_prefetch, prefetch_window
from gems.models import layers_of
from gems.models.build import build_layers

GIB = 2**30
TITAN_X = Device(5.25e12, 252e9, 12.8e9, 12.8e9)
WIDTHS = {"alexnet": 64, "overfeat": 96, "googlenet": 64, "vgg": 64}
SIDES = {"overfeat": 231}
VGG_GROUPS = ((64, 224), (128, 112), (256, 56), (512, 28), (512, 14))  # channels, side in pixels


def network(name: str, num_images: int = 1, depth: int = 16, width: int | None = None) -> Network:
    side = SIDES.get(name, 224)
    model = ModelConfig(name, depth=depth, width=width or WIDTHS[name], norm="none")
    data = DataConfig(height_px=side, width_px=side, num_classes=1000)
    return network_of(layers_of(model, data), (3, side, side), num_images)


def vgg_map_floats(more: int) -> int:
    """Count images and feature maps of VGG-16 with `more` convolutions a group, by hand."""
    convs = (2, 2, 3, 3, 3)
    total = 3 * 224**2
    for (channels, side), count in zip(VGG_GROUPS, convs, strict=True):
        total += (count + more) * channels * side**2 + channels * (side // 2) ** 2
    return total


# the prefetch window


@pytest.mark.parametrize(
    ("kinds", "offloaded", "expected"),
    [
        ("ccc", "111", (None, 0, 1)),  # one ahead; nobody brings the last
        ("ccc", "100", (None, 0, None)),  # conv 1 ends the search of layer 2
        ("cpc", "100", (None, None, 0)),  # past a pooling to the next convolution
        ("cppc", "1110", (None, 0, 1, 2)),
        ("cpcp", "1010", (None, None, 0, 2)),  # layer 2 brings 0: what it found by 3 is on its way
        ("cc", "00", (None, None)),
        ("pppp", "1000", (None, None, None, 0)),  # no convolution: up to the first layer
        ("", "", ()),
    ],
)
def test_window_by_hand(kinds: str, offloaded: str, expected: tuple[int | None, ...]) -> None:
    assert (
        prefetch_window([kind == "c" for kind in kinds], [mark == "1" for mark in offloaded])
        == expected
    )


def test_a_convolution_on_its_way_ends_the_search() -> None:
    assert find_prefetch(2, [True, True, True], [True, True, False], [False, True, False]) is None
    assert find_prefetch(2, [True, False, True], [True, True, False], [False, True, False]) == 0


@given(st.lists(st.tuples(st.booleans(), st.booleans()), max_size=12))
def test_every_input_but_the_last_comes_once_and_in_time(marks: list[tuple[bool, bool]]) -> None:
    is_conv = [mark[0] for mark in marks]
    leaves = [mark[1] for mark in marks]
    window = prefetch_window(is_conv, leaves)
    came = {found: layer for layer, found in enumerate(window) if found is not None}
    assert len(came) == sum(found is not None for found in window)
    assert set(came) == {layer for layer, left in enumerate(leaves[:-1]) if left}
    for found, layer in came.items():
        assert found < layer and not any(is_conv[found + 1 : layer])


# bytes and operations


@pytest.mark.parametrize(("depth", "more"), [(16, 0), (116, 20), (416, 80)])
def test_vgg_maps_are_those_of_the_closed_form(depth: int, more: int) -> None:
    assert network("vgg", 32, depth).map_bytes == 4 * 32 * vgg_map_floats(more)


def test_vgg16_of_256_images_needs_the_published_bytes() -> None:
    vgg = network("vgg", 256)
    assert sum(vgg.buffer_bytes) / GIB == pytest.approx(
        14.53, abs=0.01
    )  # with the classifier's features
    assert vgg.gradient_bytes == 2 * 4 * 256 * 64 * 224**2
    assert vgg.param_bytes == 4 * 138_357_544
    found = study(vgg, TITAN_X)
    last_bytes = 4 * 256 * 512 * 7**2
    into_pools = sum(4 * 256 * channels * side**2 for channels, side in VGG_GROUPS)
    assert found.steps[Policy.NONE].offloaded_bytes == 0
    assert found.steps[Policy.ALL].offloaded_bytes == vgg.map_bytes - last_bytes
    assert found.steps[Policy.CONV].offloaded_bytes == vgg.map_bytes - last_bytes - into_pools
    assert found.steps[Policy.ALL].offloaded_bytes / GIB == pytest.approx(14.5, abs=0.05)
    assert found.steps[Policy.CONV].offloaded_bytes / GIB == pytest.approx(8.7, abs=0.05)
    assert (found.maps_bytes + found.gradients_bytes) / found.total_bytes == pytest.approx(
        0.952, abs=0.001
    )
    assert found.feature_share == pytest.approx(0.96, abs=0.01)


def test_vgg416_needs_the_published_bytes() -> None:
    assert study(network("vgg", 32, 416), TITAN_X).total_bytes == pytest.approx(67.1e9, rel=0.05)


def test_vgg16_computes_what_is_known_of_it() -> None:
    convs = [call.flops for call in network("vgg").calls if call.kind is CallKind.CONV]
    assert (len(convs), sum(convs)) == (13, 2 * 15_346_630_656)


@pytest.mark.parametrize("name", WIDTHS)
def test_calls_are_those_that_torch_runs(name: str) -> None:
    """Hooks on the zoo's own modules see the same convolutions, poolings and norms, with outputs of the same size."""
    side = SIDES.get(name, 224)
    model = ModelConfig(name, depth=16, width=WIDTHS[name], norm="none")
    layers = layers_of(model, DataConfig(height_px=side, width_px=side, num_classes=10))
    made = nn.Sequential(*build_layers(layers, 0, len(layers), seed=0, device="meta"))
    seen: list[tuple[str, int]] = []
    kinds = {
        nn.Conv2d: "conv",
        nn.MaxPool2d: "pool",
        nn.LocalResponseNorm: "norm",
        nn.Linear: "linear",
    }
    for module in made.modules():
        if type(module) in kinds:
            module.register_forward_hook(
                lambda each, _, out: seen.append((kinds[type(each)], out.numel()))
            )
    with torch.no_grad():
        made(torch.zeros(2, 3, side, side, device="meta"))
    network = network_of(layers, (3, side, side), 2)
    calls = [call for call in network.calls if call.kind is not CallKind.RELU]
    assert [kind for kind, _ in seen] == [call.kind.value for call in calls]
    for call, (_, numel) in zip(calls, seen, strict=True):
        if call.window is not None:
            assert prod((2, call.window.channels, *call.window.out_px)) == numel
        else:
            assert network.buffer_bytes[call.writes] == 4 * numel
    assert network.param_bytes == sum(4 * parameter.numel() for parameter in made.parameters())


def test_branches_read_one_map_and_write_into_one() -> None:
    calls = [call for call in network("googlenet").calls if call.name.startswith("inception3a")]
    given = calls[0].reads
    assert [
        call.name for call in calls if call.reads == given and call.kind is not CallKind.RELU
    ] == ["inception3a.1", "inception3a.2", "inception3a.3", "inception3a.4.pool"]
    joined = [
        call for call in calls if call.writes == calls[0].writes and call.kind is CallKind.CONV
    ]
    assert sum(call.window.channels for call in joined if call.window) == 256
    leaving = offloads(network("googlenet"), Policy.CONV)
    by_call = dict(zip((call.name for call in network("googlenet").calls), leaving, strict=True))
    assert (
        by_call["inception3a.4.pool"] and not by_call["inception3a.1"]
    )  # the last reader takes it along


def test_another_kind_of_network_is_refused() -> None:
    with pytest.raises(ConfigError, match="chains of convolution"):
        network_of(layers_of(ModelConfig("resnet"), DataConfig()), (3, 32, 32), 1)
    with pytest.raises(ConfigError, match="without norm"):
        network_of(
            layers_of(ModelConfig("vgg", depth=16, norm="batch"), DataConfig()), (3, 32, 32), 1
        )


# workspace


def test_spectra_of_alexnets_second_convolution() -> None:
    window = Window(128, 64, 192, (5, 5), 1, (2, 2), (27, 27), (27, 27))
    seconds, spectra_bytes = fastest(window, TITAN_X)
    assert spectra_bytes == 8 * 32 * 17 * (128 * 64 + 64 * 192 + 128 * 192)
    assert seconds < window.flops / TITAN_X.flops_per_s
    assert fastest(replace(window, stride=2), TITAN_X)[1] == 0
    assert (
        fastest(window, replace(TITAN_X, memory_bytes_per_s=1e9))[1] == 0
    )  # spectra are too slow to write


def test_a_map_above_256_px_goes_by_tiles() -> None:
    window = Window(8, 64, 64, (3, 3), 1, (1, 1), (300, 300), (300, 300))
    assert fastest(window, TITAN_X)[1] == 8 * 32 * 17 * (10**2 * 8 * 128 + 64 * 64)
    assert fastest(replace(window, kernel=(33, 33)), TITAN_X)[1] == 0


def test_the_workspace_is_the_largest_of_all() -> None:
    alexnet = network("alexnet", 128)
    each = [fastest(call.window, TITAN_X)[1] for call in alexnet.calls if call.window]
    assert workspace_bytes(alexnet, TITAN_X) == max(each) > sorted(each)[-2]


# time-lines


def tiny() -> Network:
    """Two convolutions with their ReLUs, a pooling and the classifier, on a device of 1 flop/s and 1 byte/s."""
    window = Window(1, 1, 1, (1, 1), 1, (0, 0), (1, 1), (1, 1))
    kinds = CallKind
    calls = (
        Call("conv1", kinds.CONV, 0, 1, flops=10, window=window),
        Call("conv1.relu", kinds.RELU, 1, 1),
        Call("conv2", kinds.CONV, 1, 2, flops=4, window=window),
        Call("conv2.relu", kinds.RELU, 2, 2),
        Call("pool", kinds.POOL, 2, 3, moved_bytes=2),
        Call("fc", kinds.LINEAR, 3, 4, flops=1),
    )
    return Network(calls, (3, 6, 8, 2, 100))


ONE = Device(1.0, 1.0, 1.0, 1.0)


def test_all_on_a_tiny_network_by_hand() -> None:
    assert offloads(tiny(), Policy.ALL) == (True, False, True, False, True, False)
    assert play(tiny(), Policy.ALL, ONE).moments == (
        Moment(10, 3 + 6),  # conv1, its copy of 3 s hidden
        Moment(0, 6),
        Moment(6, 6 + 8),  # conv2 of 4 s waits for the copy of its input
        Moment(0, 8),
        Moment(8, 8 + 2),
        Moment(1, 2),  # fc: its input stays, its output is not managed
        Moment(8, 2 + 2 + 8),  # fc brings the pooling's input
        Moment(6, 8 + 2 + 2 + 8 + 6),  # the pooling brings conv2's
        Moment(0, 8 + 8 + 6),  # the ReLU needs map and gradient, behind it the map goes
        Moment(8, 8 + 6 + 6 + 3),  # conv2 brings the images
        Moment(0, 6 + 6 + 3),
        Moment(10, 6 + 3),  # no gradient of the images
    )


def test_what_compute_takes_is_forward_and_backward() -> None:
    played = play(tiny(), Policy.NONE, ONE)
    assert played.step_s == played.compute_s == (10 + 4 + 2 + 1) + (10 + 8 + 4 + 2)
    assert played.loss == 0.0


def test_conv_leaves_what_the_pooling_reads() -> None:
    assert offloads(tiny(), Policy.CONV) == (True, False, True, False, False, False)
    played = play(tiny(), Policy.CONV, ONE)
    assert played.offloaded_bytes == 3 + 6
    assert played.moments[6:8] == (Moment(6, 8 + 2 + 2 + 6), Moment(4, 8 + 2 + 2 + 8 + 6))


def test_an_input_that_nobody_brings_is_waited_for() -> None:
    only = Network(tiny().calls[:1], (3, 6))
    assert play(only, Policy.ALL, ONE).moments == (Moment(10, 9), Moment(3, 9), Moment(10, 9))


def test_averages_and_peak_are_of_the_moments() -> None:
    played = play(tiny(), Policy.ALL, ONE)
    assert played.peak_bytes == 26
    timed = [(10, 9), (6, 14), (8, 10), (1, 2), (8, 12), (6, 26), (8, 23), (10, 9)]
    assert played.average_bytes == pytest.approx(
        sum(s * b for s, b in timed) / sum(s for s, _ in timed)
    )
    assert played.call_average_bytes == pytest.approx(sum(b for _, b in timed) / 8)


@pytest.mark.parametrize("flops_per_s", [5.2e12, 5.25e12, 5.3e12])
def test_losses_of_vgg16_bracket_the_published_18_percent(flops_per_s: float) -> None:
    vgg = network("vgg", 256)
    device = replace(TITAN_X, flops_per_s=flops_per_s)
    assert (
        0.02
        < play(vgg, Policy.CONV, device).loss
        < 0.18
        < play(vgg, Policy.ALL, device).loss
        < 0.21
    )


@pytest.mark.parametrize("name", WIDTHS)
def test_less_stays_and_more_is_lost_from_none_to_conv_to_all(name: str) -> None:
    each = [
        play(network(name, 64), policy, TITAN_X)
        for policy in (Policy.NONE, Policy.CONV, Policy.ALL)
    ]
    for less, more in zip(each[1:], each[:-1], strict=True):
        assert (
            less.average_bytes < more.average_bytes
            and less.call_average_bytes < more.call_average_bytes
        )
        assert less.peak_bytes <= more.peak_bytes
        assert less.loss > more.loss or more.loss == pytest.approx(less.loss)


@pytest.mark.parametrize("policy", [Policy.CONV, Policy.ALL])
def test_a_faster_link_loses_less(policy: Policy) -> None:
    vgg = network("vgg", 64)
    losses = []
    for rate in (3e9, 12.8e9, 50e9, 1e15):
        losses.append(
            play(vgg, policy, replace(TITAN_X, d2h_bytes_per_s=rate, h2d_bytes_per_s=rate)).loss
        )
    assert losses == sorted(losses, reverse=True) and losses[0] > 0.1
    assert losses[-1] == pytest.approx(0.0, abs=1e-6)


def test_what_is_saved_is_of_the_managed_bytes() -> None:
    found = study(network("overfeat", 128), TITAN_X)
    assert found.workspace_bytes > 0
    assert found.saved(found.managed_bytes) == 0.0 and found.saved(0) == 1.0
    held = found.steps[Policy.ALL].average_bytes
    assert found.saved(held) > found.saved(held, has_workspace=False)
