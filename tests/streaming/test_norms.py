"""Norms of training in strips.

By strip as one process by the same rows, and running statistics that advance once.
"""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from gems.streaming.errors import StreamingError
from gems.streaming.ghost_norm import GhostBatchNorm2d
from gems.streaming.strip_sample import StripSample
from tests.helpers.strips_rig import (
    DTYPE,
    TOLERANCE,
    Function,
    Layers,
    cut_stages,
    relative,
    run_strips,
    spans,
)

CHANNELS = 4
WIDTH = 7
SAMPLES = 2


def ghost_layers() -> Layers:
    torch.manual_seed(0)
    first = nn.Sequential(
        nn.Conv2d(CHANNELS, 6, 3, padding=1, bias=False), GhostBatchNorm2d(6), nn.ReLU()
    )
    second = nn.Sequential(nn.Conv2d(6, 5, 3, 2, padding=1, bias=False), GhostBatchNorm2d(5))
    return [("first", first.to(DTYPE)), ("second", second.to(DTYPE))]


def statistics(layers: Layers) -> list[torch.Tensor]:
    return [buffer.clone() for _, module in layers for buffer in module.buffers()]


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.integers(1, 7), min_size=1, max_size=6),
    st.sampled_from([1, 30, 60]),
    st.sampled_from([1, 2]),
)
def test_norms_by_strip_are_those_of_one_process_over_the_same_rows(
    rows: list[int], least: int, num_stages: int
) -> None:
    ends = tuple(sum(rows[: place + 1]) for place in range(len(rows)))
    layers = ghost_layers()
    whole = ghost_layers()
    image = torch.randn(SAMPLES, CHANNELS, ends[-1], WIDTH, dtype=DTYPE)
    stages = cut_stages(layers, image, ends, num_stages, min_positions=least)
    norm_ends = {name: each for stage in stages for name, each in stage.norm_ends.items()}
    assert sorted(norm_ends) == ["first.1", "second.1"]
    columns = {"first.1": WIDTH, "second.1": (WIDTH + 1) // 2}
    for name, module in whole:
        module[1].row_ends = norm_ends[f"{name}.1"]
        thick = [
            end - begin for begin, end in pairwise((0, *norm_ends[f"{name}.1"])) if begin < end
        ]
        at_least = least - (2 + 2) * SAMPLES * columns[f"{name}.1"]  # but for what the kernels lag
        assert all(each * SAMPLES * columns[f"{name}.1"] >= at_least for each in thick[:-1])

    leaf = image.clone().requires_grad_()
    wanted = whole[1][1](whole[0][1](leaf))
    back = torch.randn_like(wanted)
    wanted.backward(back)
    (made,), gradient = run_strips(stages, image, ends, [back])
    errors = [relative(made, wanted), relative(gradient, leaf.grad)]
    for (_, ours), (_, reference) in zip(layers, whole, strict=True):
        pairs = zip(ours.parameters(), reference.parameters(), strict=True)
        errors += [relative(one.grad, other.grad) for one, other in pairs if one.grad is not None]
    errors += [
        relative(one, other)
        for one, other in zip(statistics(layers), statistics(whole), strict=True)
    ]
    assert max(errors) <= 100 * TOLERANCE  # a strip of few values divides by a small deviation


def test_a_strip_that_runs_again_leaves_statistics_and_counters_alone() -> None:
    torch.manual_seed(0)
    head = nn.Sequential(
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(5, 4), nn.BatchNorm1d(4), nn.ReLU()
    )
    layers = [*ghost_layers(), ("head", head.to(DTYPE))]
    ends = (5, 9, 14)
    image = torch.randn(SAMPLES, CHANNELS, 14, WIDTH, dtype=DTYPE)
    (stage,) = cut_stages(layers, image, ends)

    def train(is_run_again: bool) -> list[torch.Tensor]:
        for _, module in layers:
            for norm in module.modules():
                if isinstance(norm, nn.modules.batchnorm._BatchNorm):
                    norm.reset_running_stats()
        sample = StripSample(stage, None)
        carried = []
        parts = [image[:, :, slice(*each)].clone() for each in spans(ends)]
        for part in parts:
            carried.append(sample.carried)
            outputs = sample.forward([part], is_run_again=is_run_again)
        after = statistics(layers)
        for strip in reversed(range(3)):
            if is_run_again:
                sample.run_again(strip, [parts[strip]], carried[strip])
            sample.backward([torch.ones_like(outputs[0]) if strip == 2 else None])
        assert all(
            torch.equal(one, other) for one, other in zip(after, statistics(layers), strict=True)
        )
        return after

    kept = train(False)
    again = train(True)
    assert all(torch.equal(one, other) for one, other in zip(kept, again, strict=True))
    assert int(head[3].num_batches_tracked) == 1


def test_a_linear_map_over_rows_waits_for_as_many_strips_as_a_convolution() -> None:
    linear = Function(
        lambda self, x: self.linear(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2),
        linear=nn.Linear(CHANNELS, 3, dtype=DTYPE),
    )
    image = torch.randn(1, CHANNELS, 8, WIDTH, dtype=DTYPE)
    (stage,) = cut_stages([("linear", linear)], image, (2, 4, 6, 8), min_positions=4 * WIDTH)
    assert stage.outputs[0].ends == ((0, 4, 4, 8),)
    back = torch.randn(1, 3, 8, WIDTH, dtype=DTYPE)
    (made,), _ = run_strips([stage], image, (2, 4, 6, 8), [back])
    torch.testing.assert_close(made, linear(image))


def test_a_norm_of_a_single_value_in_a_strip_is_refused_with_its_name() -> None:
    image = torch.randn(1, CHANNELS, 4, 1, dtype=DTYPE)
    with pytest.raises(
        StreamingError,
        match=r"norm \(GhostBatchNorm2d: batch_norm\) has a single value .*fewer strips",
    ):
        cut_stages([("norm", GhostBatchNorm2d(CHANNELS))], image, (1, 2, 3, 4))


def test_a_spectral_norm_that_runs_again_reads_the_vectors_of_its_own_image() -> None:
    ends = (5, 9, 14)
    images = torch.randn(
        2, SAMPLES, CHANNELS, 14, WIDTH, dtype=DTYPE, generator=torch.Generator().manual_seed(1)
    )

    def train(is_run_again: bool) -> list[torch.Tensor | None]:
        torch.manual_seed(0)
        conv = nn.utils.parametrizations.spectral_norm(nn.Conv2d(CHANNELS, 8, 3)).to(DTYPE)
        for vector in (conv.parametrizations.weight[0]._u, conv.parametrizations.weight[0]._v):
            vector.copy_(
                nn.functional.normalize(torch.randn_like(vector), dim=0)
            )  # far from their limits
        (stage,) = cut_stages([("conv", conv)], images[0], ends)
        samples = [StripSample(stage, None) for _ in images]
        carried = []
        for image, sample in zip(images, samples, strict=True):
            for strip in spans(ends):
                carried.append(sample.carried)
                sample.forward([image[:, :, slice(*strip)]], is_run_again=is_run_again)
        for number, (image, sample) in enumerate(zip(images, samples, strict=True)):
            for strip in reversed(range(3)):
                if is_run_again:
                    sample.run_again(
                        strip,
                        [image[:, :, slice(*spans(ends)[strip])]],
                        carried[3 * number + strip],
                    )
                sample.backward([torch.ones(stage.outputs[0].strip_shape(strip), dtype=DTYPE)])
        return [*(each.grad for each in conv.parameters()), *conv.buffers()]

    for again, kept in zip(train(True), train(False), strict=True):
        assert relative(again, kept) <= TOLERANCE
