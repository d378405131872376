"""What is between the blocks of a user's network beside operations.

Grad mode, custom functions and hooks.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from gems.autograd.outputs import as_tuple
from gems.errors import ConfigError
from gems.models.imported.parts import describe, whole_with_parts

pytestmark = pytest.mark.cases


def text(**kwargs: Any) -> str:
    target = "tests.helpers.own_surroundings.FrozenStem"
    return json.dumps(
        {"target": target, "kwargs": kwargs, "path": None, "norm": "batch", "image": [3, 8, 8]}
    )


def test_a_block_without_gradients_is_one_in_layers_too() -> None:
    whole, parts = whole_with_parts(text(), 0, torch.float64, torch.device("cpu"))
    output: Any = torch.randn(2, 3, 8, 8, dtype=torch.float64)
    for part in parts:
        output = part(*as_tuple(output))
    output.sum().backward()
    frozen = {
        name.partition(".")[0]
        for name, parameter in whole.named_parameters()
        if parameter.grad is None
    }
    assert frozen == {"stem"}
    with torch.no_grad():
        parts[0](torch.randn(2, 3, 8, 8, dtype=torch.float64))
        assert not torch.is_grad_enabled()


@pytest.mark.parametrize(
    ("kwargs", "told"),
    [
        ({"is_reversed": True}, "a custom autograd function (Reversed) between its blocks"),
        ({"is_hooked": True}, "the network (FrozenStem) has hooks (forward_hooks)"),
    ],
)
def test_what_layers_would_lose_is_refused(kwargs: dict[str, bool], told: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        describe(text(**kwargs), 2)
    assert told in str(refusal.value)
