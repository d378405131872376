"""A stage against plain autograd: gradients bit by bit, what it keeps, and what it lets go."""

from __future__ import annotations

import copy
import gc
import weakref
from functools import partial
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as functional
from torch import nn

from gems.autograd.compiled import compile_layers
from gems.autograd.outputs import as_tuple
from gems.autograd.random_draws import RandomDraws
from gems.autograd.storages import StashMeter
from gems.engine.stages import whole as stage_module
from gems.engine.stages.whole import CompiledStage, WholeStage
from tests.helpers.toys import Fork, Join, Mix, Pass

LAYERS = {
    "resnet-like": lambda: [
        nn.Conv2d(3, 4, 3, padding=1),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.AvgPool2d(2),
        nn.Flatten(),
        nn.Linear(24, 3),
    ],
    "tuples": lambda: [Fork(72, 5), Pass(), Mix(72, 5), Pass(), Join(72, 5, 3)],
    "in place": lambda: [
        nn.Conv2d(3, 4, 3),
        nn.ReLU(inplace=True),
        nn.Identity(),
        nn.Flatten(),
        nn.Linear(32, 3),
    ],
}


def make_stages(modules: list[nn.Module], cuts: list[int]) -> list[WholeStage]:
    bounds = [0, *cuts, len(modules)]
    return [
        WholeStage(nn.ModuleList(modules[first:end]), first == 0, lambda: None)
        for first, end in pairwise(bounds)
    ]


def summed_loss(labels):
    return lambda logits: functional.cross_entropy(logits, labels, reduction="sum")


def batch(m: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(m)
    images = torch.randn(2, 3, 4, 6, generator=generator)
    return images, torch.randint(0, 3, (2,), generator=generator)


def gradients_of(modules: list[nn.Module]) -> list[torch.Tensor]:
    return [parameter.grad for module in modules for parameter in module.parameters()]


def forward(stages: list[WholeStage], m: int, is_split: bool = False) -> torch.Tensor:
    images, labels = batch(m)
    values: tuple[torch.Tensor, ...] = (images,)
    for stage in stages[:-1]:
        values = stage.forward(m, values, None, is_split)
    (loss,) = stages[-1].forward(m, values, summed_loss(labels), is_split)
    return loss


def backward(stages: list[WholeStage], m: int, scale: float = 0.25, is_split: bool = False) -> None:
    gradients: tuple[torch.Tensor, ...] = (torch.tensor(scale),)
    for stage in reversed(stages):
        gradients, _ = (stage.backward_input if is_split else stage.backward)(m, gradients)


CUTS = [[], [1], [2, 3], [1, 2, 3, 4]]
CASES = [(name, cuts) for name in LAYERS for cuts in CUTS if name != "in place" or 1 not in cuts]


@pytest.mark.parametrize(("name", "cuts"), CASES, ids=str)
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)], ids=str)
@pytest.mark.parametrize("is_split", [False, True], ids=["whole", "split"])
def test_gradients_equal_plain_autograd_bit_by_bit(name, cuts, order, is_split):
    torch.manual_seed(0)
    modules = LAYERS[name]()
    plain = copy.deepcopy(modules)
    stages = make_stages(modules, cuts)
    losses = [forward(stages, m, is_split) for m in range(3)]
    assert [stage.num_in_flight for stage in stages] == [3] * len(stages)
    for m in order:
        backward(stages, m, is_split=is_split)
    if is_split:
        assert [stage.num_in_flight for stage in stages] == [3] * len(stages)
        for m in order:
            for stage in stages:
                stage.backward_weight(m)
    assert [stage.num_in_flight for stage in stages] == [0] * len(stages)

    expected_losses = []
    for m in range(3):
        images, labels = batch(m)
        values: tuple[torch.Tensor, ...] = (images,)
        for module in plain:
            values = as_tuple(module(*values))
        expected_losses.append(summed_loss(labels)(values[0]))
    for m in order:
        (expected_losses[m] * 0.25).backward()
    assert losses == [loss.detach() for loss in expected_losses]
    for got, expected in zip(gradients_of(modules), gradients_of(plain), strict=True):
        assert torch.equal(got, expected)


def test_outputs_and_loss_carry_no_graph():
    stages = make_stages(LAYERS["resnet-like"](), [3])
    values = stages[0].forward(0, (batch(0)[0],))
    assert not any(tensor.requires_grad for tensor in values)
    assert not stages[1].forward(0, values, summed_loss(batch(0)[1]))[0].requires_grad


def test_images_get_no_gradient():
    (stage,) = make_stages(LAYERS["resnet-like"](), [])
    images, labels = batch(0)
    stage.forward(0, (images,), summed_loss(labels))
    gradients, leaves = stage.backward(0, (torch.tensor(1.0),))
    assert gradients == () and leaves[0].grad is None and not images.requires_grad


def test_a_first_stage_without_parameters_has_nothing_to_do_in_backward():
    modules = [nn.Flatten(), nn.Linear(72, 3)]
    stages = make_stages(modules, [1])
    forward(stages, 0)
    backward(stages, 0, 1.0)
    images, labels = batch(0)
    expected = copy.deepcopy(modules[1])
    expected.zero_grad()
    summed_loss(labels)(expected(images.flatten(1))).backward()
    assert torch.equal(modules[1].weight.grad, expected.weight.grad)


def test_integer_inputs_get_no_gradient_and_unused_ones_get_zeros():
    class Half(nn.Module):
        def forward(self, x, index, unused):
            return x * index, index

    stage = WholeStage(nn.ModuleList([Half()]), is_first=False, poll=lambda: None)
    x = torch.rand(3)
    index = torch.tensor([1, 2, 3])
    unused = torch.rand(2)
    outputs = stage.forward(0, (x, index, unused))
    assert outputs[1].dtype is torch.int64
    gradients, leaves = stage.backward(0, (torch.ones(3),))
    assert len(gradients) == 2 and len(leaves) == 3
    assert torch.equal(gradients[0], index.float()) and torch.equal(gradients[1], torch.zeros(2))


def test_a_gradient_too_many_is_refused():
    (stage,) = make_stages([nn.Linear(4, 4)], [])
    stage.forward(0, (torch.rand(1, 4),))
    with pytest.raises(ValueError, match="zip"):
        stage.backward(0, (torch.ones(1, 4), torch.ones(1, 4)))


@pytest.mark.parametrize("is_first_run", [True, False], ids=["metered", "later"])
def test_the_stash_does_not_keep_the_output(is_first_run):
    """A linear map saves its input and weight alone, so its output may go once it has been sent."""
    stage = WholeStage(nn.ModuleList([nn.Linear(8, 8)]), is_first=False, poll=lambda: None)
    if not is_first_run:
        stage.forward(0, (torch.rand(2, 8),))
        stage.backward(0, (torch.ones(2, 8),))
    (output,) = stage.forward(1, (torch.rand(2, 8),))
    storage = weakref.ref(output.untyped_storage())
    del output
    gc.collect()
    assert storage() is None, "something keeps the memory of the output"
    assert stage.num_in_flight == 1


@pytest.mark.parametrize("is_first_run", [True, False], ids=["metered", "later"])
def test_backward_frees_what_forward_kept(is_first_run):
    """Also of the first run, whose saved tensors are metered.

    A hook must not tie a graph to itself.
    """
    kept = []

    class Square(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            out = x * x
            middle = x + 1
            kept.append(weakref.ref(middle.untyped_storage()))
            kept.append(weakref.ref(out.untyped_storage()))
            ctx.save_for_backward(x, middle, out)
            return out

        @staticmethod
        def backward(ctx, gradient):
            x, _, _ = ctx.saved_tensors
            return 2 * x * gradient

    class Layer(nn.Module):
        def forward(self, x):
            return Square.apply(x)

    stage = WholeStage(nn.ModuleList([Layer()]), is_first=False, poll=lambda: None)
    if not is_first_run:
        stage.forward(0, (torch.rand(4),))
        stage.backward(0, (torch.ones(4),))
        kept.clear()
    stage.forward(1, (torch.rand(4),))
    assert all(reference() is not None for reference in kept)
    gradients, leaves = stage.backward(1, (torch.ones(4),))
    assert torch.equal(gradients[0], 2 * leaves[0].detach())
    gc.collect()
    assert all(reference() is None for reference in kept)


def test_stash_bytes_equal_a_count_by_hand():
    """Saved: of conv its input (the leaf, not new) and of tanh, mul and linear the tensors named below."""

    class Scale(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("mask", torch.ones(4, 4, 6))

        def forward(self, x):
            return x * self.mask

    modules = [nn.Conv2d(3, 4, 3, padding=1), nn.Tanh(), Scale(), nn.Flatten(), nn.Linear(96, 5)]
    stage = WholeStage(nn.ModuleList(modules), is_first=False, poll=lambda: None)
    assert stage.stash_bytes is None
    stage.forward(0, (torch.rand(2, 3, 4, 6),))
    feature = 2 * 4 * 4 * 6 * 4
    # tanh keeps its output; x * mask keeps the mask alone (a buffer, not new); the linear map keeps
    # its input
    assert stage.stash_bytes == feature + feature
    stage.forward(1, (torch.rand(2, 3, 4, 6),))
    assert stage.stash_bytes == 2 * feature


def test_stash_bytes_count_a_storage_once():
    x = torch.rand(4, 4, requires_grad=True)
    with StashMeter([]) as meter:
        y = x.exp()
        z = y * y.t() * y[:2].sum()
    assert z.requires_grad
    per_tensor = 4 * 4 * 4
    # exp keeps y; y * y.t() keeps y twice; the last product keeps the first one and the sum; sum
    # keeps nothing
    assert meter.saved_bytes == 2 * per_tensor + 4


def test_the_meter_changes_no_gradient_and_ends_with_its_block():
    x = torch.rand(5, requires_grad=True)
    with StashMeter([]) as meter:
        y = x.tanh()
    x.exp().sum().backward()
    before = meter.saved_bytes
    x.grad = None
    y.sum().backward()
    assert before == 5 * 4
    assert torch.allclose(x.grad, 1 - x.detach().tanh() ** 2)


@pytest.mark.parametrize(("every_s", "num_polls"), [(0.0, 3), (1000.0, 0)])
def test_messages_move_between_long_layers_in_forward_backward_and_evaluation(
    monkeypatch, every_s, num_polls
):
    monkeypatch.setattr("gems.engine.stages.whole.POLL_EVERY_S", every_s)
    calls = []
    stage = WholeStage(
        nn.ModuleList([nn.Linear(4, 4) for _ in range(3)]), False, lambda: calls.append(1)
    )
    stage.forward(0, (torch.rand(1, 4),))
    assert len(calls) == num_polls
    stage.backward(0, (torch.ones(1, 4),))
    assert len(calls) == 2 * num_polls
    stage.infer((torch.rand(1, 4),))
    assert len(calls) == 2 * num_polls + 3


def test_evaluation_keeps_nothing():
    (stage,) = make_stages(LAYERS["resnet-like"](), [])
    stage.modules.eval()
    images, _ = batch(0)
    logits = stage.infer((images,))
    assert not logits.requires_grad and stage.num_in_flight == 0
    values = images
    with torch.no_grad():
        for module in stage.modules:
            values = module(values)
    assert torch.equal(logits, values)


def test_state_bytes_count_parameters_gradients_and_buffers():
    stage = WholeStage(nn.ModuleList([nn.Linear(4, 3), nn.BatchNorm1d(3)]), True, lambda: None)
    parameters = (4 * 3 + 3 + 3 + 3) * 4
    buffers = (3 + 3) * 4 + 8
    assert stage.state_bytes == 2 * parameters + buffers


@pytest.fixture
def no_kernels(monkeypatch):
    """Trace layers and their backward as torch.compile does, and run what was traced without making kernels of it."""
    monkeypatch.setattr(
        stage_module, "compile_layers", partial(compile_layers, backend="aot_eager")
    )


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("name", "cuts"), [("resnet-like", [2]), ("tuples", [1, 2, 3, 4]), ("in place", [])], ids=str
)
def test_compiled_layers_keep_exactness_and_what_stages_promise(name, cuts, no_kernels):
    torch.manual_seed(0)
    modules = [module.double() for module in LAYERS[name]()]
    draws = RandomDraws(0)
    for module in modules:
        draws.watch("layer", module)
    plain = copy.deepcopy(modules)
    bounds = [0, *cuts, len(modules)]
    stages: list[WholeStage] = [
        CompiledStage(nn.ModuleList(modules[first:end]), first == 0, lambda: None, draws.is_drawing)
        for first, end in pairwise(bounds)
    ]
    expected = [
        WholeStage(nn.ModuleList(plain[first:end]), first == 0, lambda: None)
        for first, end in pairwise(bounds)
    ]
    for kind in (stages, expected):
        for stage in kind:
            stage.modules.train()
    for m in range(2):
        (images, labels), values, others = batch(m), (), ()
        values = others = (images.double(),)
        for stage, other in zip(stages, expected, strict=True):
            loss = summed_loss(labels) if stage is stages[-1] else None
            values = stage.forward(m, values, loss)
            others = other.forward(m, others, loss)
            for got, wanted in zip(values, others, strict=True):
                torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-12)
    assert [stage.num_in_flight for stage in stages] == [2] * len(stages)
    assert all(stage.stash_bytes is not None for stage in stages) and any(
        stage.stash_bytes for stage in stages
    )
    for m in (1, 0):
        scale: tuple[torch.Tensor, ...] = (torch.tensor(0.25, dtype=torch.float64),)
        backward_of = scale
        others = scale
        for stage, other in zip(reversed(stages), reversed(expected), strict=True):
            backward_of, _ = stage.backward(m, backward_of)
            others, _ = other.backward(m, others)
    for got, wanted in zip(gradients_of(modules), gradients_of(plain), strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-12)
    for one, other in zip(
        nn.ModuleList(modules).buffers(), nn.ModuleList(plain).buffers(), strict=True
    ):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
