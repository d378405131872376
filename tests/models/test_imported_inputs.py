"""Networks of users that call einops or numpy between blocks, need other inputs, or count their batches."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from gems.config.compose import compose
from gems.errors import ConfigError
from gems.models import layers_of
from gems.models.build import build_layers
from gems.models.imported.user_code import construct
from tests.helpers.owned import DATA, own
from tests.helpers.zoo import run_all

NETS = "tests.helpers.own_inputs"
pytestmark = pytest.mark.cases


@pytest.mark.parametrize("name", ["Rearranges", "ReadsSizes", "TakesOptional"])
def test_layers_compute_what_the_network_does(name: str) -> None:
    model = own(f"{NETS}.{name}")
    layers = layers_of(model, DATA)
    parts = build_layers(layers, 0, len(layers), 3, torch.float64)
    assert len(layers) > 1
    whole = construct(f"{NETS}.{name}", {}, None).double()
    state = {key: value for part in parts for key, value in part.state_dict().items()}
    whole.load_state_dict(state)
    for num in (1, 2, 3) if name != "ReadsSizes" else (2, 4):
        images = torch.rand(num, 3, 9, 10, dtype=torch.float64)
        logits = run_all(parts, images)[0]
        torch.testing.assert_close(logits, whole(images), rtol=1e-12, atol=0)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        (
            "ReadsBatch",
            r"cannot be cut into layers at .*own_inputs.py:.*# the number`: the number of images",
        ),
        (
            "ReadsValues",
            (
                r"cannot be cut into layers at .*`.*# the values`: .*values of a tensor as an array"
                r" of numpy"
            ),
        ),
        (
            "TakesTwo",
            (
                r"its forward at .*own_inputs\.py:\d+ needs x, meta, and gets one batch of images;"
                r" give"
            ),
        ),
        (
            "TakesTwoByName",
            r"its forward at .*own_inputs\.py:\d+ needs x, meta, and gets one batch of images",
        ),
        (
            "TakesDict",
            r"at .*`.*# the key`: .*\['image'\] of its input, which is one tensor of images",
        ),
        (
            "AveragesAll",
            (
                r"layer body\.1 has momentum=None, an average over all batches.*; give it a"
                r" momentum such as"
            ),
        ),
    ],
)
def test_what_a_forward_cannot_have_is_named(name: str, says: str) -> None:
    with pytest.raises(ConfigError, match=rf"^model\.target={NETS}\.{name}: .*{says}"):
        layers_of(own(f"{NETS}.{name}"), DATA)


def test_an_average_over_all_batches_is_kept_if_it_is_frozen() -> None:
    words = [
        f"model.target={NETS}.AveragesAll",
        "model.norm=frozen_batch",
        f"model.path={Path.cwd()}",
    ]
    spec = compose(["data=synthetic", "data.height_px=9", "data.width_px=10", *words])
    assert [layer.name for layer in layers_of(spec.model, spec.data)] == [
        "stem",
        "body.0",
        "body.1",
        "head",
    ]
