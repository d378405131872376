"""What a stage keeps between I and W, what it lets go, and what it refuses."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn

from gems.autograd.storages import StashMeter
from gems.engine.stages.whole import WholeStage

FLOAT = 4


def make_stage(*modules: nn.Module, is_first: bool = False, poll=lambda: None) -> WholeStage:
    return WholeStage(nn.ModuleList(modules), is_first, poll)


def run_once(stage: WholeStage, shape: tuple[int, ...]) -> None:
    """Let the stage have its metered micro-batch behind it."""
    (out,) = stage.forward(99, (torch.rand(shape),), None, True)
    stage.backward_input(99, (torch.ones_like(out),))
    stage.backward_weight(99)


def test_what_is_held_for_the_weights_equals_a_count_by_hand():
    """Two maps with a tanh between: the input and the gradient that came are not new.

    Of the rest two tensors stay.
    """
    stage = make_stage(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    (out,) = stage.forward(0, (torch.rand(5, 8),), None, True)
    assert stage.stash_bytes == 5 * 16 * FLOAT
    assert stage.held_for_weights_bytes is None
    stage.backward_input(0, (torch.ones_like(out),))
    # what tanh gave, which the second map read, and the gradient of what the first map gave
    assert stage.held_for_weights_bytes == 2 * 5 * 16 * FLOAT
    stage.backward_weight(0)
    run_once(stage, (5, 8))
    assert stage.held_for_weights_bytes == 2 * 5 * 16 * FLOAT


def test_norms_and_layers_without_weights_hold_nothing():
    stage = make_stage(nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2))
    (out,) = stage.forward(0, (torch.rand(3, 4, 6, 6),), None, True)
    stage.backward_input(0, (torch.ones_like(out),))
    assert stage.held_for_weights_bytes == 0 and stage.still_read(0) == set()
    assert stage.modules[0].weight.grad is not None
    stage.backward_weight(0)
    assert stage.num_in_flight == 0


@pytest.mark.parametrize("is_metered", [True, False], ids=["metered", "later"])
def test_i_lets_the_stash_go_but_for_what_w_reads(is_metered):
    """Of conv, norm, ReLU, conv: the first output, which the norm read, is free after I.

    What the second conv read is not.
    """
    seen: dict[str, weakref.ref] = {}

    class Look(nn.Module):
        def __init__(self, name: str) -> None:
            super().__init__()
            self.name = name

        def forward(self, x):
            seen[self.name] = weakref.ref(x.untyped_storage())
            return x

    torch.manual_seed(0)
    stage = make_stage(
        nn.Conv2d(3, 4, 3),
        Look("convolved"),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        Look("active"),
        nn.Conv2d(4, 2, 1),
    )
    if not is_metered:
        run_once(stage, (2, 3, 6, 6))
    (out,) = stage.forward(0, (torch.rand(2, 3, 6, 6),), None, True)
    shape = out.shape
    del out
    gc.collect()
    assert seen["convolved"]() is not None and seen["active"]() is not None
    stage.backward_input(0, (torch.ones(shape),))
    gc.collect()
    assert seen["convolved"]() is None and seen["active"]() is not None
    stage.backward_weight(0)
    gc.collect()
    assert seen["active"]() is None


def test_the_input_gradient_is_not_kept_until_w():
    stage = make_stage(nn.Linear(6, 6))
    stage.forward(0, (torch.rand(3, 6),), None, True)
    gradients, (leaf,) = stage.backward_input(0, (torch.ones(3, 6),))
    assert leaf.untyped_storage().data_ptr() in stage.still_read(0)
    gone = weakref.ref(gradients[0].untyped_storage())
    del gradients
    gc.collect()
    assert gone() is None


def test_still_read_names_the_input_and_the_gradient_that_came():
    stage = make_stage(nn.Linear(6, 6), nn.Tanh())
    x = torch.rand(3, 6)
    gradient = torch.ones(3, 6)
    stage.forward(0, (x,), None, True)
    stage.backward_input(0, (gradient,))
    read = stage.still_read(0)
    assert x.untyped_storage().data_ptr() in read
    assert gradient.untyped_storage().data_ptr() not in read, "tanh made another gradient of it"


# --- changes in place
# ------------------------------------------------------------------------------------------------


class Spoil(nn.Module):
    """Changes its input in place and hands a copy on, behind a layer that has saved it."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x):
        made = self.layer(x)
        x.mul_(2.0)
        return made


@pytest.mark.parametrize("is_metered", [True, False], ids=["metered", "later"])
@pytest.mark.parametrize("is_split", [True, False], ids=["split", "whole"])
@pytest.mark.parametrize(
    "layer",
    [nn.Conv1d(6, 6, 1), nn.Linear(4, 4), nn.Linear(4, 4, bias=False)],
    ids=["conv", "linear", "no bias"],
)
def test_a_saved_tensor_that_is_changed_in_forward_is_refused(layer, is_split, is_metered):
    """A hook on saved tensors, as the meter's, switches autograd's own check off."""
    stage = make_stage(nn.Tanh(), Spoil(layer))
    if not is_metered:
        stage.stash_bytes = 0
    stage.forward(0, (torch.rand(2, 6, 4),), None, is_split)
    with pytest.raises(RuntimeError, match=r"in-?\s?place"):
        (stage.backward_input if is_split else stage.backward)(0, (torch.ones(2, 6, 4),))
    assert stage.num_in_flight == 0


def test_the_meter_checks_for_changes_in_place():
    x = torch.rand(3, requires_grad=True)
    with StashMeter([]):
        y = x * 1.0
        z = y * y
    y.detach().add_(1.0)
    with pytest.raises(RuntimeError, match="in place"):
        z.sum().backward()


@pytest.mark.parametrize("which", ["input", "gradient"])
def test_what_changes_between_i_and_w_is_refused(which):
    stage = make_stage(nn.Conv1d(3, 3, 1))
    x = torch.rand(2, 3, 4)
    gradient = torch.ones(2, 3, 4)
    stage.forward(0, (x,), None, True)
    stage.backward_input(0, (gradient,))
    (x if which == "input" else gradient).add_(1.0)
    with pytest.raises(RuntimeError, match=r"^0: .* changed in place"):
        stage.backward_weight(0)
    assert stage.num_in_flight == 0


def test_a_layer_in_place_behind_a_convolution_is_right():
    torch.manual_seed(0)
    stage = make_stage(nn.Conv1d(3, 3, 1), nn.ReLU(inplace=True), nn.Conv1d(3, 3, 1))
    run_once(stage, (2, 3, 4))
    whole = make_stage(nn.Conv1d(3, 3, 1), nn.ReLU(inplace=True), nn.Conv1d(3, 3, 1))
    whole.modules.load_state_dict(stage.modules.state_dict())
    for parameter in stage.modules.parameters():
        parameter.grad = None
    x = torch.randn(2, 3, 4)
    stage.forward(0, (x,), None, True)
    whole.forward(0, (x,))
    stage.backward_input(0, (torch.ones(2, 3, 4),))
    whole.backward(0, (torch.ones(2, 3, 4),))
    stage.backward_weight(0)
    pairs = zip(stage.modules.parameters(), whole.modules.parameters(), strict=True)
    assert all(torch.equal(a.grad, b.grad) for a, b in pairs)


# --- errors, messages
# ------------------------------------------------------------------------------------------------


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise ValueError("broken on purpose")


class Broken(nn.Module):
    def forward(self, x):
        return Fails.apply(x)


def test_an_error_in_i_leaves_nothing_behind():
    layers = [nn.Linear(4, 4), Broken(), nn.Linear(4, 4)]
    stage = make_stage(*layers)
    x = torch.rand(3, 4)
    kept = weakref.ref(stage.forward(0, (x,), None, True)[0].untyped_storage())
    with pytest.raises(ValueError, match="on purpose"):
        stage.backward_input(0, (torch.ones(3, 4),))
    gc.collect()
    assert stage.num_in_flight == 0 and kept() is None
    assert all(parameter.grad is None for parameter in stage.modules.parameters())
    # layers run plain again
    assert type(layers[0](x).grad_fn).__name__ == "AddmmBackward0"


def test_an_error_in_forward_leaves_the_layers_plain():
    class Raises(nn.Module):
        def forward(self, x):
            raise ValueError("broken on purpose")

    layers = [nn.Linear(4, 4), Raises()]
    stage = make_stage(*layers)
    with pytest.raises(ValueError, match="on purpose"):
        stage.forward(0, (torch.rand(3, 4),), None, True)
    assert stage.num_in_flight == 0
    assert type(layers[0](torch.rand(3, 4)).grad_fn).__name__ == "AddmmBackward0"


def test_reset_drops_what_waits_for_its_backward():
    stage = make_stage(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    for m in range(2):
        stage.forward(m, (torch.rand(3, 4),), None, True)
    stage.backward_input(0, (torch.ones(3, 4),))
    waiting = [weakref.ref(tensor.untyped_storage()) for tensor in stage._deferred[0].tensors()]
    assert stage.num_in_flight == 2 and len(waiting) == 4
    stage.reset()
    gc.collect()
    assert stage.num_in_flight == 0 and not any(storage() for storage in waiting)


def test_messages_move_between_layers_in_both_halves(monkeypatch):
    monkeypatch.setattr("gems.engine.stages.whole.POLL_EVERY_S", 0.0)
    calls: list[int] = []
    stage = make_stage(*(nn.Linear(4, 4) for _ in range(3)), poll=lambda: calls.append(1))
    stage.forward(0, (torch.rand(1, 4),), None, True)
    stage.backward_input(0, (torch.ones(1, 4),))
    assert len(calls) == 6
    stage.backward_weight(0)
    assert len(calls) == 9


def test_whole_and_split_micro_batches_may_alternate():
    torch.manual_seed(0)
    split, whole = (make_stage(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)) for _ in range(2))
    whole.modules.load_state_dict(split.modules.state_dict())
    for m in range(4):
        x = torch.randn(3, 4)
        gradient = torch.randn(3, 4)
        split.forward(m, (x,), None, m % 2 == 0)
        whole.forward(m, (x,))
        (split.backward_input if m % 2 == 0 else split.backward)(m, (gradient,))
        whole.backward(m, (gradient,))
        if m % 2 == 0:
            split.backward_weight(m)
    pairs = zip(split.modules.parameters(), whole.modules.parameters(), strict=True)
    assert all(torch.equal(a.grad, b.grad) for a, b in pairs)


def test_recomputation_inside_a_layer_is_split_too():
    from torch.utils.checkpoint import checkpoint

    class Again(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))

        def forward(self, x):
            return checkpoint(self.inner, x, use_reentrant=False)

    torch.manual_seed(0)
    split, whole = (make_stage(Again()) for _ in range(2))
    whole.modules.load_state_dict(split.modules.state_dict())
    for m in range(2):
        x = torch.randn(3, 4)
        gradient = torch.randn(3, 4)
        split.forward(m, (x,), None, True)
        whole.forward(m, (x,))
        before = [None if p.grad is None else p.grad.clone() for p in split.modules.parameters()]
        assert torch.equal(
            split.backward_input(m, (gradient,))[0][0], whole.backward(m, (gradient,))[0][0]
        )
        assert all(
            (p.grad is None) if b is None else torch.equal(p.grad, b)
            for p, b in zip(split.modules.parameters(), before, strict=True)
        )
        split.backward_weight(m)
    pairs = zip(split.modules.parameters(), whole.modules.parameters(), strict=True)
    assert all(torch.equal(a.grad, b.grad) for a, b in pairs)
