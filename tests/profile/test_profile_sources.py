"""The profilers: fake tensors, this device, layers added one by one; and the roofline."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn

from gems.autograd.torch_internals import FakeTensorMode
from gems.config.schema import DataConfig, MachineConfig, ModelConfig
from gems.errors import ConfigError
from gems.profile import LayerProfile, ModelProfile
from gems.profile.profilers import measured
from gems.profile.profilers.fake import (
    Operator,
    Rates,
    Roofline,
    fake_profile,
    machine_rates,
    roofline_times,
)
from gems.profile.profilers.incremental import McapDevices, incremental_profile
from gems.profile.profilers.layer_run import LayerCall
from gems.profile.profilers.measured import (
    MAX_RUNS,
    WARM_UP_RUNS,
    Reading,
    measured_profile,
    measured_times,
    medians_s,
)
from gems.profile.spans import Spans

MODEL = ModelConfig(depth=8, version=2, block="basic")
DATA = DataConfig(height_px=32, width_px=32)
CPU = MachineConfig(device="cpu")
TIMES = ("forward_s", "input_grad_s", "weight_grad_s", "recompute_s", "cheap_s", "split_s")


@pytest.fixture(scope="module")
def fake() -> ModelProfile:
    return fake_profile(MODEL, DATA, 2, "float32", CPU)


@pytest.fixture(scope="module")
def devices() -> McapDevices:
    return McapDevices(MODEL, DATA, 2, "float32", CPU, is_fake=True)


def untimed(layer: LayerProfile) -> LayerProfile:
    return replace(layer, **dict.fromkeys(TIMES, 0.0))


def readings(*seconds: float) -> tuple[Reading, ...]:
    return tuple(partial(float, each) for each in seconds)


class Card:
    """Torch's events on a card that runs what Python has launched, in order, and on no real clock."""

    def __init__(self) -> None:
        self.python_s = 0.0
        self.done_s = 0.0
        card = self

        class Event:
            def __init__(self, enable_timing: bool) -> None:
                assert enable_timing

            def record(self) -> None:
                card.launch(0.0, 0.0)
                self.reached_s = card.done_s

            def synchronize(self) -> None:
                card.python_s = max(card.python_s, self.reached_s)

            def elapsed_time(self, later: Event) -> float:
                assert card.python_s >= later.reached_s
                return 1e3 * (later.reached_s - self.reached_s)

        self.Event = Event

    def launch(self, launch_s: float, kernel_s: float, number: int = 1) -> None:
        for _ in range(number):
            self.python_s += launch_s
            self.done_s = max(self.done_s, self.python_s) + kernel_s


class TestMeasured:
    @pytest.mark.parametrize("min_timed_s, runs", [(1e9, MAX_RUNS), (0.0, 3)])
    def test_small_layers_run_more_often_than_they_are_asked_to(
        self, monkeypatch: pytest.MonkeyPatch, min_timed_s: float, runs: int
    ) -> None:
        taken = [9.0] * (WARM_UP_RUNS + 1) + [1.0, 3.0, 2.5] + [2.5] * MAX_RUNS
        times = iter(taken)
        monkeypatch.setattr(measured, "MIN_TIMED_S", min_timed_s)
        assert medians_s(lambda: readings(next(times), 5.0), 3) == (2.5, 5.0)
        assert len(list(times)) == len(taken) - WARM_UP_RUNS - 1 - runs

    @pytest.mark.parametrize(
        "forward, backward, expected",
        [
            # launch and kernel of each, and the medians. The card is slower; Python is, by 80 of a
            # run altogether, in which each part ends with a kernel that the next one hides; Python
            # is in the forward alone, which the kernels of the backward before hide
            ((1.0, 2.0), (1.0, 4.0), (20.0, 40.0)),
            ((3.0, 2.0), (5.0, 4.0), (28.0, 52.0)),
            ((3.0, 2.0), (1.0, 4.0), (20.0, 40.0)),
        ],
    )
    def test_a_card_is_timed_with_the_launches_that_its_queue_does_not_hide(
        self,
        monkeypatch: pytest.MonkeyPatch,
        forward: tuple[float, float],
        backward: tuple[float, float],
        expected: tuple[float, float],
    ) -> None:
        card = Card()
        monkeypatch.setattr(torch.cuda, "Event", card.Event)
        clock = measured._cuda_clock
        times = medians_s(
            lambda: tuple(
                clock(partial(card.launch, *kernel, number=10)) for kernel in (forward, backward)
            ),
            5,
        )
        assert times == pytest.approx(expected)

    def test_gradients_apart_take_longer_only_where_a_layer_can_be_split(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        clock = iter(range(1, 10**6))
        monkeypatch.setattr(measured, "_clock", lambda run: (run(), *readings(next(clock)))[1])
        x = torch.randn(2, 3, 8, 8)
        conv = nn.Conv2d(3, 4, 3)
        norm = nn.BatchNorm2d(3)
        conv_times, norm_times = (
            measured_times(LayerCall(module, [x]), 1) for module in (conv, norm)
        )
        assert conv_times.split_s > 0 == norm_times.split_s

    def test_the_heap_of_a_processor_is_that_of_a_run(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        told: list[bool] = []
        monkeypatch.setattr(measured, "keep_freed_memory", lambda: told.append(True))
        assert measured.open_device(CPU) == torch.device("cpu") and told == [True]


class TestFake:
    def test_its_bytes_are_those_of_real_tensors(self, fake: ModelProfile) -> None:
        real = measured_profile(MODEL, DATA, 2, "float32", CPU, repetitions=1)
        assert [untimed(layer) for layer in real.layers] == [
            untimed(layer) for layer in fake.layers
        ]
        assert (real.source, real.input_bytes) == ("measured", fake.input_bytes)
        assert all(
            layer.forward_s > 0 and layer.input_grad_s >= 0 <= layer.weight_grad_s
            for layer in real.layers
        )

    def test_any_resolution_takes_no_memory(self) -> None:
        huge = fake_profile(
            MODEL, DataConfig(height_px=65536, width_px=65536), 1, "float32", CPU, True
        )
        assert huge.facts["peak_bytes"] > 2**40

    def test_the_tracker_sees_the_whole_that_the_layers_make_up(self, fake: ModelProfile) -> None:
        gpu = fake_profile(MODEL, DATA, 2, "float32", MachineConfig(device="cuda"), True)
        spans = Spans(gpu)
        end = gpu.num_layers
        moving = max(spans.forward_peak[0, end], spans.backward_peak[0, end])
        summed = 2 * spans.params[0, end] + spans.buffers[0, end] + gpu.input_bytes + moving
        assert gpu.facts["peak_bytes"] == pytest.approx(summed, rel=0.02)

    def test_the_first_layer_gives_no_input_gradient(self, fake: ModelProfile) -> None:
        assert fake.layers[0].input_grad_s == 0 < fake.layers[0].weight_grad_s

    def test_it_has_all_parameters(self, fake: ModelProfile) -> None:
        from gems.models import layers_of
        from gems.models.build import build_layers

        layers = layers_of(MODEL, DATA)
        whole = nn.ModuleList(build_layers(layers, 0, len(layers), 0, device="meta"))
        assert sum(layer.param_bytes for layer in fake.layers) == 4 * sum(
            p.numel() for p in whole.parameters()
        )

    def test_bfloat16_halves_what_is_saved(self, fake: ModelProfile) -> None:
        machine = replace(CPU, bfloat16_flops_per_s=1e12)
        half = fake_profile(MODEL, DATA, 2, "bfloat16", machine)
        assert half.input_bytes * 2 == fake.input_bytes
        assert Spans(half).stash[0, -1] == pytest.approx(Spans(fake).stash[0, -1] / 2, rel=0.01)


class TestRoofline:
    def test_a_matrix_product_takes_its_flops_or_its_bytes(self) -> None:
        a = torch.empty(64, 128, device="meta")
        b = torch.empty(128, 32, device="meta")
        flops = 2 * 64 * 128 * 32
        moved = 4 * (64 * 128 + 128 * 32 + 64 * 32)
        for rates, seconds in ((Rates(1.0, 1e30), flops), (Rates(1e30, 1.0), moved)):
            with Roofline(rates) as roofline:
                a @ b
            assert (roofline.flops, roofline.moved_bytes, roofline.seconds) == (
                flops,
                moved,
                seconds,
            )

    def test_a_view_takes_no_time(self) -> None:
        with Roofline(Rates(1.0, 1.0)) as roofline:
            torch.empty(4, 6, device="meta").view(24).t()
        assert roofline.seconds == 4 * 24, "what remains is the writing of the tensor itself"

    def test_both_gradients_of_a_convolution_take_the_forwards_flops(self) -> None:
        module = nn.Conv2d(8, 8, 3, padding=1, bias=False)
        x = torch.randn(1, 8, 16, 16)
        times = roofline_times(LayerCall(module, [x]), Rates(1.0, 1e30))
        flops = 2 * 8 * 8 * 9 * 16 * 16
        assert times.forward_s == flops == times.recompute_s
        assert (times.input_grad_s, times.weight_grad_s) == pytest.approx((flops, flops), rel=0.1)
        assert (
            roofline_times(LayerCall(module, [x], is_first=True), Rates(1.0, 1e30)).input_grad_s
            == 0
        )

    def test_an_operator_takes_its_least_time_and_few_channels_slow_bytes(self) -> None:
        rates = Rates(1.0, 1.0, launch_s=0.0, operator_s=5.0, half_rate_channels=8.0)
        assert rates.seconds(3, 4) == 5.0
        assert rates.seconds(3, 6) == 6.0
        assert rates.seconds(3, 6, channels=8) == 12.0
        assert rates.seconds(13, 6, channels=8) == 13.0, "flops are as fast"

    def test_a_pass_waits_for_the_host_or_the_device(self) -> None:
        operators = [Operator(10, 0), Operator(20, 0), Operator(1, 0)]
        for launch_s, seconds in ((None, 31.0), (0.0, 31.0), (10.0, 31.0), (11.0, 33.0)):
            assert Rates(1.0, 1.0, launch_s).pass_s(operators) == seconds

    def test_launches_are_counted_by_pass(self) -> None:
        """A convolution, a batch norm and a ReLU: two gradients of the first, three of parameters.

        Its forward counts the batches that the norm has seen.
        """
        with FakeTensorMode():
            module = nn.Sequential(nn.Conv2d(8, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU())
            call = LayerCall(module, [torch.empty(2, 8, 16, 16)])
            times = roofline_times(call, Rates(1e30, 1e30, launch_s=1.0))
            channels = roofline_times(call, Rates(1e30, 1.0, 0.0, half_rate_channels=1e6))
            wide = roofline_times(call, Rates(1e30, 1.0, 0.0))
        assert (times.forward_s, times.input_grad_s, times.weight_grad_s) == (4.0, 3.0, 4.0)
        assert times.cheap_s == 3.0
        norm_and_conv = 4 * (2 * 8 * 16 * 16 + 4 * 8 * 9 + 3 * 2 * 4 * 14 * 14)
        narrow = channels.forward_s - wide.forward_s
        assert narrow == pytest.approx(norm_and_conv * 1e6 / 4, rel=1e-2)

    def test_costs_of_launches_count_only_with_a_launch(self) -> None:
        gpu = MachineConfig(device="cuda", flops_per_s=1e12, bfloat16_flops_per_s=2e12)
        more = {"operator_s": 1.0, "operator_efficiency": 0.5, "half_rate_channels": 4.0}
        assert machine_rates(replace(gpu, **more), torch.float32) == machine_rates(
            gpu, torch.float32
        )
        known = replace(gpu, launch_s=2.0, **more)
        assert machine_rates(known, torch.float32) == Rates(5e11, 5e9, 2.0, 1.0, 4.0)
        assert machine_rates(known, torch.bfloat16) == Rates(1e12, 5e9, 2.0, 1.0, 4.0)
        low = replace(known, bfloat16_launch_s=3.0, bfloat16_half_rate_channels=0.0)
        assert machine_rates(low, torch.bfloat16) == Rates(1e12, 5e9, 3.0, 1.0, 0.0)

    def test_a_dtype_without_a_rate_is_refused(self) -> None:
        with pytest.raises(ConfigError, match=r"machine\.bfloat16_flops_per_s=null: must be given"):
            machine_rates(CPU, torch.bfloat16)
        assert machine_rates(CPU, torch.float64).flops_per_s == CPU.flops_per_s / 2


class TestIncremental:
    def test_a_devices_peak_is_what_the_tables_say(
        self, fake: ModelProfile, devices: McapDevices
    ) -> None:
        spans = Spans(fake)
        num = fake.num_layers
        for first in range(num):
            for end in range(first + 1, num + 1):
                moving = max(spans.forward_peak[first, end], spans.backward_peak[first, end])
                told = (
                    3 * spans.params[first, end]
                    + spans.buffers[first, end]
                    + spans.given[first, end]
                    + moving
                )
                assert devices.peak_bytes(first, end) == told

    def test_layers_are_added_until_the_device_has_its_share(
        self, fake: ModelProfile, devices: McapDevices
    ) -> None:
        found = incremental_profile(fake, devices.peak_bytes, layers_per_device=2)
        isolated = found.facts["isolated"]
        added = found.facts["added"]
        assert found.source == "incremental" and found.layers == fake.layers
        for layer in range(0, fake.num_layers, 2):
            assert added[layer] == isolated[layer] == devices.peak_bytes(layer, layer + 1)
        for layer in range(1, fake.num_layers, 2):
            assert added[layer] == devices.peak_bytes(layer - 1, layer + 1) - isolated[layer - 1]

    def test_layers_are_added_until_the_device_is_full(
        self, fake: ModelProfile, devices: McapDevices
    ) -> None:
        num = fake.num_layers
        limit = max(devices.peak_bytes(layer, layer + 1) for layer in range(num))
        facts = incremental_profile(fake, devices.peak_bytes, device_bytes=limit).facts
        total = 0
        peaks = []
        for layer, more in enumerate(facts["added"]):
            total = more if more == facts["isolated"][layer] else total + more
            peaks.append(total)
        assert max(peaks) == limit, "no device holds more than it may"
        whole = incremental_profile(fake, devices.peak_bytes).facts["added"]
        assert sum(whole) == devices.peak_bytes(0, num) > limit
