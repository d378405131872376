"""gems.profile.profilers.meter.

Bytes of layers that can be counted by hand, on real and on fake tensors.
"""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from gems.config.schema import DataConfig, ModelConfig
from gems.models import layers_of
from gems.models.build import build_layer
from gems.profile.profilers.fake import made_fake, on_meta
from gems.profile.profilers.layer_run import Gradient, LayerCall, training_loss
from gems.profile.profilers.live_bytes import LiveBytes
from gems.profile.profilers.meter import LayerMeter, meter, meter_backward
from tests.helpers.profiled import Cell, Down, Flat

X = 2 * 3 * 8 * 8 * 4  # bytes of the input
Y = 2 * 5 * 8 * 8 * 4  # bytes of five feature maps
CONV = (5 * 3 * 9 + 5) * 4  # bytes of its weight and bias
both = pytest.mark.parametrize("is_fake", [False, True], ids=["real", "fake"])


def tensors(is_fake: bool):
    return FakeTensorMode() if is_fake else nullcontext()


def fresh(found: LayerMeter, is_given: bool = False) -> tuple[Gradient, ...]:
    layouts = [output.layout for output in found.outputs]
    return tuple(
        Gradient.fresh(each.shape, each.dtype, number, is_given)
        for number, each in enumerate(layouts)
    )


class TestForward:
    @both
    def test_conv_and_relu(self, is_fake: bool) -> None:
        with tensors(is_fake):
            found = meter(
                LayerCall(
                    nn.Sequential(nn.Conv2d(3, 5, 3, padding=1), nn.ReLU()),
                    [torch.randn(2, 3, 8, 8)],
                )
            )
        assert (found.layer.param_bytes, found.layer.buffer_bytes) == (CONV, 0)
        assert found.saved_inputs == (0,), "the convolution saves its input"
        assert found.layer.stash_bytes == Y, "ReLU saves its result, and nobody the convolution's"
        assert found.outputs[0].is_saved and found.left_bytes == Y
        assert found.layer.forward_peak_bytes == 2 * Y
        assert found.layer.held_for_weights_bytes == X + Y, (
            "the weight's gradient needs the input and ReLU's gradient"
        )

    @both
    def test_inputs_of_convolutions(self, is_fake: bool) -> None:
        """Of conv, norm, activation, conv and pooling: the images and what the activation gave."""
        with tensors(is_fake):
            layers = [
                nn.Conv2d(3, 5, 3, padding=1),
                nn.BatchNorm2d(5),
                nn.ReLU(),
                nn.Conv2d(5, 5, 1),
                nn.MaxPool2d(2),
            ]
            found = meter(LayerCall(nn.Sequential(*layers), [torch.randn(2, 3, 8, 8)]))
            cell = meter(LayerCall(Cell(8), [torch.randn(2, 8, 8, 8), torch.randn(2, 8, 8, 8)]))
        assert found.conv_inputs == (0,) and not found.outputs[0].is_conv_input
        large = {(one.num_bytes, one.count) for one in found.inner if one.conv_savers}
        assert large == {(Y, 1)}, "not what norm and pooling read"
        assert sum(one.count for one in found.inner if one.num_bytes == Y) == 3
        assert cell.saved_inputs == (1,) and cell.conv_inputs == (), "a pooling saves it"

    @both
    def test_linear(self, is_fake: bool) -> None:
        with tensors(is_fake):
            found = meter(LayerCall(nn.Linear(100, 10), [torch.randn(4, 100)]))
        assert (found.layer.param_bytes, found.layer.stash_bytes, found.saved_inputs) == (
            (1000 + 10) * 4,
            0,
            (0,),
        )
        assert found.layer.forward_peak_bytes == 4 * 10 * 4
        assert found.layer.held_for_weights_bytes == 4 * 110 * 4

    @both
    @pytest.mark.parametrize("task", ["classification", "regression"])
    def test_what_the_loss_is_given_and_saves(self, is_fake: bool, task: str) -> None:
        loss = partial(training_loss, task=task)
        with tensors(is_fake):
            found = meter(LayerCall(nn.Linear(100, 10), [torch.randn(4, 100)], loss=loss)).layer
            inner = meter(LayerCall(nn.Linear(100, 10), [torch.randn(4, 100)])).layer
        scores = 4 * 10 * 4
        assert (found.score_bytes, found.score_grad_bytes) == (scores, scores)
        assert found.stash_bytes - found.loss_bytes == inner.stash_bytes == 0
        assert (inner.score_bytes, inner.score_grad_bytes, inner.loss_bytes) == (0, 0, 0)

    @both
    def test_identity_and_view_make_nothing(self, is_fake: bool) -> None:
        with tensors(is_fake):
            x = torch.randn(2, 3, 8, 8)
            same = meter(LayerCall(nn.Identity(), [x]))
            view = meter(LayerCall(Flat(), [x]))
        assert (same.outputs[0].same_as, same.outputs[0].given, same.outputs[0].made) == (
            0,
            0,
            None,
        )
        assert (view.outputs[0].same_as, view.outputs[0].given, view.outputs[0].made) == (
            None,
            0,
            None,
        )
        for found in (same, view):
            assert (found.layer.forward_peak_bytes, found.layer.stash_bytes, found.left_bytes) == (
                0,
                0,
                0,
            )

    @both
    def test_a_carried_tensor_is_no_new_memory(self, is_fake: bool) -> None:
        with tensors(is_fake):
            x = torch.randn(2, 3, 8, 8)
            skip = torch.randn(2, 4, 4, 4)
            found = meter(LayerCall(Down(3, 5), [x, skip]))
        half, carried, full = found.outputs
        assert (carried.same_as, carried.given, carried.made) == (1, 1, None)
        assert (half.made, full.made, full.is_saved) == (0, 1, True)
        assert found.left_bytes == found.layer.stash_bytes + Y // 4, (
            "the half is saved by nobody here"
        )

    def test_one_tensor_given_twice_is_one(self) -> None:
        x = torch.randn(2, 8, 8, 8)
        once, twice = (
            meter(LayerCall(Cell(8), [x, other])) for other in (torch.randn(2, 8, 8, 8), x)
        )
        assert once.outputs[1].same_as == twice.outputs[1].same_as == 0
        assert (once.saved_inputs, twice.saved_inputs) == ((1,), (0, 1)), (
            "pooling saves the older one"
        )

    def test_a_parameter_of_a_first_layer_without_any_is_no_obstacle(self) -> None:
        x = torch.randn(2, 3, 8, 8)
        call = LayerCall(nn.ReLU(), [x], is_first=True)
        found = meter(call)
        assert (found.layer.stash_bytes, found.layer.forward_peak_bytes) == (0, X)
        assert meter_backward(call, fresh(found)).peak_bytes == 0


class TestBackward:
    @both
    def test_conv_and_relu(self, is_fake: bool) -> None:
        with tensors(is_fake):
            module = nn.Sequential(nn.Conv2d(3, 5, 3, padding=1), nn.ReLU())
            x = torch.randn(2, 3, 8, 8)
            call = LayerCall(module, [x])
            found = meter(call)
            dying = meter_backward(call, fresh(found))
            held = meter_backward(call, fresh(found, is_given=True))
            first = meter_backward(LayerCall(module, [x], is_first=True), fresh(found))
        relu = 2 * Y  # the output's gradient and ReLU's own
        conv = (
            Y + X + CONV - Y
        )  # ReLU's gradient, the input's, the weights'; meanwhile the stash is free
        assert dying.peak_bytes == max(relu, conv)
        assert held.peak_bytes == max(Y, conv), "what the stage was given is counted by the stage"
        assert first.peak_bytes == max(relu, conv - X)
        assert [lies.is_given for lies in dying.input_gradients if lies] == [False]
        assert first.input_gradients == (None,)

    def test_a_carried_gradient_passes_as_it_is(self) -> None:
        x = torch.randn(2, 3, 8, 8)
        skip = torch.randn(2, 4, 4, 4)
        call = LayerCall(Down(3, 5), [x, skip])
        given = fresh(meter(call), is_given=True)
        _, passed = meter_backward(call, given).input_gradients
        assert passed is not None and passed.is_given and passed.storage_bytes == 2 * 4 * 4 * 4 * 4

    def test_an_output_that_nothing_reads_has_no_gradient(self) -> None:
        x = torch.randn(2, 8, 8, 8)
        older = torch.randn(2, 8, 8, 8)
        call = LayerCall(Cell(8), [x, older])
        newest, carried = fresh(meter(call))
        with_it = meter_backward(call, (newest, carried))
        without = meter_backward(call, (newest, None))
        assert with_it.peak_bytes - without.peak_bytes == 2 * 8 * 8 * 8 * 4

    @both
    def test_the_engine_adds_two_gradients_in_place(self, is_fake: bool) -> None:
        """Three uses of one tensor: at most the sum so far, a new gradient and what makes it are live at once."""
        with tensors(is_fake):
            x = torch.randn(100, requires_grad=True)
            y = (x * 2).view(100)
            given = torch.ones(100)
            z = y.sin() + y.cos() + y.exp()
            with LiveBytes([given]) as live:
                torch.autograd.backward([z], [given])
        assert live.peak_bytes == 4 * 400

    def test_real_equals_fake_on_a_residual_block(self) -> None:
        found = []
        layer = layers_of(ModelConfig(depth=20, version=2), DataConfig())[1]
        for is_fake in (False, True):
            block = on_meta(layer, torch.float32) if is_fake else build_layer(layer, 1, 0)
            with tensors(is_fake):
                block = made_fake(block) if is_fake else block
                x = torch.randn(2, 16, 8, 8)
                call = LayerCall(block, [x])
                forward = meter(call)
                found.append((forward, meter_backward(call, fresh(forward))))
        assert found[0] == found[1]
