"""The auxiliary classifier of Inception v3.

An exact sum of two losses that travels as a second tensor.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from gems.config.schema import DataConfig
from gems.models import layers_of
from gems.models.blocks.heads import joined_scores
from gems.models.build import boundary_shapes, build_layers
from tests.helpers.zoo import SMALL, run_all

MODEL, _ = SMALL["inception_v3_auxiliary"]


def losses(main: Tensor, auxiliary: Tensor, labels: Tensor, weight: float) -> tuple[Tensor, Tensor]:
    """Return the loss through the joined scores, and the sum that it stands for."""
    scores = joined_scores(main, auxiliary, weight)
    separate = functional.cross_entropy(main, labels, reduction="sum")
    separate = separate + weight * functional.cross_entropy(auxiliary, labels, reduction="sum")
    return functional.cross_entropy(scores, labels, reduction="sum"), separate


@pytest.mark.parametrize("scale", [0.01, 1.0, 10.0])
@pytest.mark.parametrize("weight", [0.3, 1.0])
@pytest.mark.parametrize("num_classes", [2, 7])
def test_the_loss_and_its_gradients_are_those_of_the_sum(
    scale: float, weight: float, num_classes: int
) -> None:
    random = torch.Generator().manual_seed(0)
    main, auxiliary = (
        (
            scale * torch.randn(16, num_classes, dtype=torch.float64, generator=random)
        ).requires_grad_()
        for _ in range(2)
    )
    labels = torch.randint(num_classes, (16,), generator=random)
    joined, separate = losses(main, auxiliary, labels, weight)
    torch.testing.assert_close(joined, separate, rtol=1e-12, atol=1e-12)
    found = torch.autograd.grad(joined, (main, auxiliary))
    expected = torch.autograd.grad(separate, (main, auxiliary))
    torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("label", [0, 1])
def test_certain_logits_keep_the_loss_and_its_gradient_finite(
    dtype: torch.dtype, label: int
) -> None:
    """Both classifiers are sure of class 0: nothing is left for the last column."""
    main, auxiliary = (
        torch.tensor([[200.0, 0.0, 0.0]], dtype=dtype, requires_grad=True) for _ in range(2)
    )
    joined, separate = losses(main, auxiliary, torch.tensor([label]), 0.3)
    torch.testing.assert_close(joined, separate, rtol=1e-2, atol=1e-5, check_dtype=False)
    found = torch.autograd.grad(joined, (main, auxiliary))
    expected = torch.autograd.grad(separate, (main, auxiliary))
    torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-5)


def test_the_logits_cross_every_boundary_behind_the_auxiliary_layer() -> None:
    layers = layers_of(MODEL, DataConfig(num_classes=5))
    names = {
        layer.name: tuple((spec.name, len(spec.shape)) for spec in specs)
        for layer, specs in zip(layers, boundary_shapes(layers, (1, 3, 107, 107)), strict=True)
    }
    assert names["mixed6e"] == (("mixed6e", 4),)
    for name in ("auxiliary", "mixed7a", "mixed7b", "mixed7c"):
        assert names[name] == ((f"{name}.main", 4), (f"{name}.auxiliary", 2))
    assert names["head"] == (("head", 2),)


@pytest.mark.parametrize("side_px", [75, 299, 347])
def test_training_gives_joined_scores_and_evaluation_the_main_logits(side_px: int) -> None:
    layers = layers_of(MODEL, DataConfig(num_classes=5))
    modules = build_layers(layers, 0, len(layers), seed=0)
    images = torch.randn(2, 3, side_px, side_px, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        values = run_all(modules[:-1], images)
        head = modules[-1]
        main = head.eval()(*values)
        scores = head.train()(*values)
    assert main.shape == (2, 5)
    assert scores.shape == (2, 6)
    torch.testing.assert_close(scores, joined_scores(main, values[1], 0.3))
    torch.testing.assert_close(scores.exp().sum(1), torch.ones(2))


def test_the_layer_hands_on_the_very_map_it_was_given() -> None:
    layers = layers_of(MODEL, DataConfig(num_classes=5))
    index = [layer.name for layer in layers].index("auxiliary")
    (module,) = build_layers(layers, index, index + 1, seed=0)
    x = torch.randn(2, 96, 17, 17)
    kept, logits = module(x)
    assert kept is x
    assert logits.shape == (2, 5)
    # at the published 17x17 the last map of the classifier is 1x1, as in the paper's figure 8
    assert module.features(functional.avg_pool2d(x, 5, 3)).shape[2:] == (1, 1)


def test_both_classifiers_learn() -> None:
    """The weights behind either output move, so that the auxiliary loss reaches its own layer."""
    layers = layers_of(MODEL, DataConfig(num_classes=5))
    modules = build_layers(layers, 0, len(layers), seed=0)
    values = run_all(modules, torch.randn(2, 3, 75, 75, generator=torch.Generator().manual_seed(0)))
    functional.cross_entropy(values[0], torch.tensor([0, 3])).backward()
    by_name = dict(zip((layer.name for layer in layers), modules, strict=True))
    assert by_name["auxiliary"].linear.weight.grad.abs().max() > 0
    assert by_name["head"].linear.weight.grad.abs().max() > 0
