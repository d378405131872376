"""Every image classifier cut into stages gives the gradients of the whole to the bit.

And the check can fail.
"""

from __future__ import annotations

import pytest
from torch import Tensor, nn

import gems.models
from gems.config.schema import DataConfig, ModelConfig
from gems.models import MODELS, Layer, ModelFamily
from tests.helpers.cutting import assert_cut_equals_whole
from tests.helpers.zoo import SMALL


@pytest.mark.parametrize("is_split", [False, True], ids=["whole_backward", "split_backward"])
@pytest.mark.parametrize("name", SMALL)
def test_cut_in_four_equals_whole(name: str, is_split: bool) -> None:
    model, least_px = SMALL[name]
    data = DataConfig(height_px=least_px, width_px=least_px + 3, num_classes=5)
    assert_cut_equals_whole(model, data, parts=4, is_split=is_split)


@pytest.mark.parametrize("name", ["googlenet_batch", "inception_v3_auxiliary", "vgg11_batch"])
def test_each_layer_a_stage_of_its_own(name: str) -> None:
    model, least_px = SMALL[name]
    data = DataConfig(height_px=least_px, width_px=least_px, num_classes=5)
    assert_cut_equals_whole(model, data, parts=len(gems.models.layers_of(model, data)))


class Pooled(nn.Module):
    """A linear map that may be faulty.

    With an unused parameter, or with other results from run to run.
    """

    runs = 0

    def __init__(self, fault: str) -> None:
        super().__init__()
        self.fault = fault
        self.linear = nn.Linear(3, 5)
        self.unused = nn.Linear(3, 5) if fault == "unused" else None

    def forward(self, x: Tensor) -> Tensor:
        if self.fault == "drifts":
            Pooled.runs += 1
            x = x * Pooled.runs
        out: Tensor = self.linear(x.mean((2, 3)) if x.dim() == 4 else x[:, :3])
        return out


class Doubles(nn.Module):
    """Changes what it was given."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mul_(2)


@pytest.mark.parametrize(
    ("fault", "words"),
    [("unused", "has no gradient"), ("drifts", "linear.weight"), ("in_place", "works in place")],
)
def test_a_fault_is_found(monkeypatch: pytest.MonkeyPatch, fault: str, words: str) -> None:
    def layers(model: ModelConfig, data: DataConfig) -> tuple[Layer, ...]:
        pooled = Layer("pooled", "toy", f"{__name__}:Pooled", (("fault", fault),))
        doubles = Layer("doubles", "toy", f"{__name__}:Doubles", ())
        return (pooled, doubles) if fault == "in_place" else (pooled, pooled)

    monkeypatch.setitem(MODELS.entries, "faulty", ModelFamily(layers, lambda _: 1))
    monkeypatch.setattr(Pooled, "runs", 0)
    with pytest.raises(AssertionError, match=words):
        assert_cut_equals_whole(ModelConfig(name="faulty"), DataConfig(num_classes=5), parts=2)
