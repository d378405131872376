"""Layers of a user's network are held against themselves before a run in strips or with a split backward."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from gems.autograd.split_backward import layers as split_layers
from gems.config.schema import DataConfig, ModelConfig, RunSpec
from gems.errors import ConfigError
from gems.profile import exactness
from gems.profile.exactness import check_exact
from gems.profile.subject import Subject
from gems.streaming import buffers
from tests.helpers.own_gates import Gate
from tests.helpers.toys import make_spec

pytestmark = pytest.mark.cases
DATA = {"name": "synthetic", "num_classes": 2, "height_px": 512, "width_px": 512}


@pytest.fixture
def spec(tmp_path: Path) -> RunSpec:
    model = ModelConfig(target="tests.helpers.own_gates.Gated")
    made = make_spec("1f1b", 2, model=model, data=DataConfig(**DATA), parallel__strips=3)
    return replace(made, cache_dir=str(tmp_path))


def in_strips(spec: RunSpec, strips: int | list[int]) -> RunSpec:
    return replace(spec, parallel=replace(spec.parallel, strips=strips))


def test_layers_that_equal_themselves_are_asked_once(
    spec: RunSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_exact(Subject.of(spec), "1f1b")
    (kept,) = Path(str(spec.cache_dir)).glob("exactness-*.json")
    assert '"image": [32, 32], "left_out": ""' in kept.read_text()
    check_exact(Subject.of(in_strips(spec, [2, 2])), None)  # in blocks, which are another matter
    assert len([*Path(str(spec.cache_dir)).glob("exactness-*.json")]) == 2
    monkeypatch.setattr(exactness, "take_profile", lambda *_: pytest.fail("asked again"))
    check_exact(Subject.of(spec), "1f1b")
    check_exact(Subject.of(in_strips(spec, [2, 3])), "1f1b")
    check_exact(Subject.of(in_strips(spec, 1)), None)
    own = replace(spec, model=ModelConfig(name="resnet", depth=20, norm="none"))
    check_exact(Subject.of(own), "1f1b")


def test_a_wrong_rule_of_strips_is_found(spec: RunSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    forward, _ = buffers._FROM_OUTPUT["sigmoid"]
    monkeypatch.setitem(
        buffers._FROM_OUTPUT, "sigmoid", (forward, lambda gradient, made: gradient * made)
    )
    with pytest.raises(
        ConfigError, match=r"parallel\.strips=3: layer gate in strips differs from itself"
    ):
        check_exact(Subject.of(spec), None)


def test_a_wrong_split_backward_is_found(spec: RunSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    def linear(deferred: Any, name: str, module: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(x, module.weight.detach(), module.bias)

    monkeypatch.setitem(split_layers._SPLIT_FORWARDS, torch.nn.Linear, linear)
    with pytest.raises(
        ConfigError, match="schedule=1f1b: layer head with a split backward differs from itself"
    ):
        check_exact(Subject.of(in_strips(spec, 1)), "1f1b")


def test_a_hook_of_the_graph_that_a_split_backward_loses_is_found(
    spec: RunSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forward(self: Gate, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.conv(x)
        if made.grad_fn is not None:
            made.grad_fn.register_hook(
                lambda gradients, _: tuple(each if each is None else 2 * each for each in gradients)
            )
        return made

    monkeypatch.setattr(Gate, "forward", forward)
    with pytest.raises(
        ConfigError, match="schedule=1f1b: layer gate with a split backward differs from itself"
    ):
        check_exact(Subject.of(in_strips(spec, 1)), "1f1b")
