"""Wrappers of stages are chosen by name, as plugins register them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from gems.config.compose import compose
from gems.engine.stages.whole import WholeStage
from gems.engine.stages.wrappers import wrap_stage
from gems.errors import ConfigError
from tests.helpers import counting_stages

PLUGIN = "plugins=[tests.helpers.counting_stages]"


def test_the_first_wrapper_is_the_innermost_and_passes_everything_on() -> None:
    stage = WholeStage(nn.ModuleList([nn.Linear(2, 2)]), True, lambda: None)
    once = wrap_stage(stage, (0, 0, None), ["counting"])
    twice = wrap_stage(stage, (0, 0, 1), ["counting", "counting"])
    counting_stages.calls.clear()
    twice.forward(3, (torch.ones(1, 2),))
    once.forward(4, (torch.ones(1, 2),))
    assert counting_stages.calls == {(0, 0, 1, "forward"): 2, (0, 0, None, "forward"): 1}
    assert once.num_in_flight == 2
    assert once.modules is stage.modules
    assert wrap_stage(stage, (0, 0, None), []) is stage


def test_a_name_of_no_wrapper_is_refused_in_one_line() -> None:
    assert compose([PLUGIN, "train.stage_wrappers=[counting]"]).train.stage_wrappers == ["counting"]
    with pytest.raises(ConfigError, match=r"train\.stage_wrappers\[0\]=countin: allowed: counting"):
        compose([PLUGIN, "train.stage_wrappers=[countin]"])
