"""The entrance of a segment: inputs that the graph does not hold, and their gradients."""

from __future__ import annotations

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from gems.engine.stages.segment_input import SegmentInput


def weak(tensor: torch.Tensor) -> StorageWeakRef:
    return StorageWeakRef(tensor.untyped_storage())


def test_the_graph_does_not_hold_what_it_is_given():
    x = torch.randn(4, 4)
    memory = weak(x)
    segment_input, values = SegmentInput.enter([x], [True])
    out = values[0].sum()
    del x, values
    assert memory.expired()
    out.backward()
    (gradient,) = segment_input.gradients(is_first=False)
    assert torch.equal(gradient, torch.ones(4, 4))


def test_a_leaf_would_be_held():
    """Why there is an entrance: the same with a leaf."""
    x = torch.randn(4, 4).requires_grad_()
    memory = weak(x)
    out = x.sum()
    del x
    assert not memory.expired()
    out.backward()


def test_inputs_may_be_changed_in_place_as_the_first_thing():
    x = torch.tensor([-1.0, 2.0])
    segment_input, (value,) = SegmentInput.enter([x], [True])
    torch.relu_(value).sum().backward()
    assert torch.equal(x, torch.tensor([0.0, 2.0])), "it is the same memory"
    assert torch.equal(segment_input.gradients(True)[0], torch.tensor([0.0, 1.0]))


def test_gradients_are_those_of_leaves_in_their_layout():
    x = torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last)
    y = torch.randn(5)
    index = torch.tensor([1, 2])
    leaves = [x.detach().requires_grad_(), y.detach().requires_grad_()]
    (leaves[0].mean() + 0 * leaves[1][0]).backward()
    segment_input, values = SegmentInput.enter([x, index, y], [True, False, True])
    assert values[1].requires_grad is False and torch.equal(values[1], index)
    (values[0].mean() + 0 * values[2][0]).backward()
    got = segment_input.gradients(is_first=True)
    for gradient, leaf in zip(got, leaves, strict=True):
        assert torch.equal(gradient, leaf.grad) and gradient.stride() == leaf.grad.stride()
    assert segment_input.gradients(is_first=True)[0].abs().max() == 0, "they are given once"


@pytest.mark.parametrize("is_whole", [False, True])
def test_an_input_without_use_has_no_gradient_inside_of_a_stage_and_zeros_at_its_end(is_whole):
    x = torch.randn(3)
    y = torch.randn(2)
    segment_input, values = SegmentInput.enter([x, y], [True, True])
    values[0].sum().backward()
    first, second = segment_input.gradients(is_whole)
    assert torch.equal(first, torch.ones(3))
    assert (second is None) != is_whole
    if is_whole:
        assert torch.equal(second, torch.zeros(2))


def test_what_wants_no_gradient_has_none():
    x = torch.randn(3)
    y = torch.randn(3)
    segment_input, values = SegmentInput.enter([x, y], [False, True])
    assert not values[0].requires_grad
    (values[0] * values[1]).sum().backward()
    inside = segment_input.gradients(is_first=False)
    assert inside[0] is None and torch.equal(inside[1], x)
