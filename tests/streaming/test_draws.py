"""Random numbers of strips: the same for any division of the image, and where that can be as without strips."""

from __future__ import annotations

import zlib
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from gems.autograd.random_draws import RandomDraws
from gems.streaming.strip_run import RunMode
from tests.helpers.strips_rig import DTYPE, Function, cut_stages, relative, run_strips, run_whole

HEIGHT = 12


def drawing(*modules: nn.Module) -> list[tuple[str, nn.Module]]:
    torch.manual_seed(1)
    return [("a", nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), *modules).to(DTYPE).train())]


def played(
    layers: list[tuple[str, nn.Module]], ends: tuple[int, ...], seed: int = 7
) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    image = torch.randn(2, 3, HEIGHT, 5, dtype=DTYPE)
    draws = RandomDraws(seed)
    draws.at(3, 5)
    stages = cut_stages(layers, image, ends)
    given = [torch.ones(stages[0].outputs[0].shape, dtype=DTYPE)]
    (output,), gradient = run_strips(stages, image, ends, given, draws.seed_of)
    return output, gradient


def test_the_rows_of_dropout_do_not_depend_on_the_strips() -> None:
    layers = drawing(nn.Dropout(0.4), nn.Conv2d(4, 4, 3, padding=1), nn.Dropout(0.4))
    whole = played(layers, (HEIGHT,))
    for ends in ((3, 7, HEIGHT), tuple(range(1, HEIGHT + 1))):
        assert all(
            relative(one, other) <= 1e-12
            for one, other in zip(played(layers, ends), whole, strict=True)
        )
    assert relative(played(layers, (HEIGHT,), seed=8)[0], whole[0]) > 0.1
    output = played(drawing(nn.Dropout(0.4)), (5, HEIGHT))[0]
    assert 0.3 < float((output == 0).double().mean()) < 0.5


def stochastic_depth(self: nn.Module, x: Tensor) -> Tensor:
    noise = torch.empty(x.shape[0], 1, 1, 1, dtype=x.dtype, device=x.device).bernoulli_(0.5)
    return x * noise.div_(0.5)


@pytest.mark.parametrize(
    "module",
    [
        lambda: nn.Dropout2d(0.5),
        lambda: Function(stochastic_depth),
        lambda: nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.5)),
    ],
    ids=["channels", "stochastic_depth", "head"],
)
def test_what_is_drawn_once_an_image_is_drawn_as_without_strips(
    module: Callable[[], nn.Module],
) -> None:
    layers = drawing(module())
    torch.manual_seed(0)
    image = torch.randn(2, 3, HEIGHT, 5, dtype=DTYPE)
    draws = RandomDraws(7)
    draws.at(3, 5)
    output, _ = played(layers, (1, 6, HEIGHT))
    draws.watch("a", layers[0][1])
    (whole,) = run_whole(layers, image)
    assert relative(output, whole) <= 1e-12


def test_layers_draw_apart() -> None:
    """Each from its own stream, though it is the first call in each."""
    layers = [("a", nn.Dropout2d(0.5)), ("b", nn.Dropout2d(0.5))]
    torch.manual_seed(0)
    image = torch.randn(2, 3, HEIGHT, 5, dtype=DTYPE)
    draws = RandomDraws(7, has_paths=True)
    draws.at(3, 5)
    seeds = {
        zlib.crc32(name.encode()): zlib.crc32(draws.name_of(name, "").encode())
        for name, _ in layers
    }
    given = [torch.ones(image.shape, dtype=DTYPE)]
    stages = cut_stages(layers, image, (6, HEIGHT))
    (output,), _ = run_strips(
        stages, image, (6, HEIGHT), given, lambda name: draws.seed_of(seeds[name])
    )
    for name, layer in layers:
        draws.watch(name, layer)
    (whole,) = run_whole(layers, image)
    assert relative(output, whole) <= 1e-12


def test_seeds_are_asked_for() -> None:
    image = torch.randn(2, 3, HEIGHT, 5, dtype=DTYPE)
    (stage,) = cut_stages(drawing(nn.Dropout(0.4)), image, (6, HEIGHT))
    with pytest.raises(ValueError, match="give the seeds"):
        stage.forward(0, [image[:, :, :6]])
    asked: list[int] = []
    stage.forward(0, [image[:, :, :6]], (), RunMode(lambda name: asked.append(name) or 1))
    assert set(asked) == {zlib.crc32(b"a.1")}
