"""The tables over runs of layers, beside a plain count of what a stage of those layers holds."""

from __future__ import annotations

import pytest

from gems.profile import LayerProfile, ModelProfile
from gems.profile.spans import Spans
from tests.helpers.profiles import profile, random_profile

MADE = random_profile(9, seed=3)


def stash_of(layers: tuple[LayerProfile, ...], first: int, end: int) -> int:
    """Count the storages that a stage saves, each by the layer that makes it."""
    return sum(
        layers[i].stash_bytes
        + sum(size for ahead, size in layers[i].saved_later if i + ahead < end)
        for i in range(first, end)
    )


def spans(num_layers: int) -> list[tuple[int, int]]:
    return [(i, e) for i in range(num_layers) for e in range(i + 1, num_layers + 1)]


@pytest.mark.parametrize("span", spans(9))
def test_tables_are_counts(span: tuple[int, int]) -> None:
    first, end = span
    layers = MADE.layers
    tables = Spans(MADE)
    chosen = range(first, end)
    assert tables.stash[span] == stash_of(layers, first, end)
    assert tables.params[span] == sum(layers[i].param_bytes for i in chosen)
    assert tables.buffers[span] == sum(layers[i].buffer_bytes for i in chosen)
    assert tables.held_for_weights[span] == sum(layers[i].held_for_weights_bytes for i in chosen)
    assert tables.time_s[span] == pytest.approx(sum(layers[i].time_s for i in chosen))
    assert tables.weight_gradient_peak[span] == max(layers[i].param_bytes for i in chosen)
    assert tables.given[span] == (layers[first - 1].output_bytes if first else MADE.input_bytes)
    assert tables.handed_on[span] == layers[end - 1].output_bytes
    assert tables.given_back[span] == layers[end - 1].output_grad_bytes
    assert tables.handed_back[span] == (layers[first - 1].output_grad_bytes if first else 0)


@pytest.mark.parametrize("span", spans(9))
def test_peaks_are_those_of_the_layers_one_after_another(span: tuple[int, int]) -> None:
    first, end = span
    layers = MADE.layers
    tables = Spans(MADE)

    def forward(i: int) -> int:
        unsaved = layers[i].unsaved_input_bytes if i > first else 0
        return stash_of(layers, first, i) + unsaved + layers[i].forward_peak_bytes

    def backward(i: int) -> int:
        given = layers[end - 1].output_grad_bytes if i < end - 1 else 0
        return stash_of(layers, first, i + 1) + layers[i].backward_peak_bytes + given

    def input_gradient(i: int) -> int:
        left = sum(layers[k].held_for_weights_bytes for k in range(i + 1, end))
        return (
            stash_of(layers, first, i + 1)
            + layers[i].backward_peak_bytes
            + left
            + layers[end - 1].output_grad_bytes
        )

    assert tables.forward_peak[span] == max(map(forward, range(first, end)))
    assert tables.backward_peak[span] == max(map(backward, range(first, end)))
    assert tables.input_gradient_peak[span] == max(map(input_gradient, range(first, end)))


def test_a_tensor_that_is_saved_late_counts_from_there() -> None:
    layers = [
        LayerProfile("a", "x", stash_bytes=1, saved_later=((2, 50),)),
        *[LayerProfile("b", "x")] * 3,
    ]
    table = Spans(profile(layers)).stash
    assert [table[0, end] for end in (1, 2, 3, 4)] == [1, 1, 51, 51]
    assert table[1, 4] == 0, "who does not make it has it as an input"


def test_the_bytes_between_layers() -> None:
    made: ModelProfile = random_profile(4)
    assert Spans(made).boundary_bytes() == tuple(layer.output_bytes for layer in made.layers[:3])
