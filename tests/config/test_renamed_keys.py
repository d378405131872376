"""Renamed keys: an old key answers with its new name, and an old run.yaml is still read."""

from __future__ import annotations

from pathlib import Path

import pytest

from gems.config.compose import compose
from gems.config.fields import INVERTED, RENAMED
from gems.config.overrides import valid_keys
from gems.config.schema import RunSpec
from gems.errors import ConfigError


def test_new_names_are_keys_and_old_ones_are_not() -> None:
    keys = set(valid_keys())
    assert set(RENAMED.values()) <= keys
    assert not set(RENAMED) & keys


@pytest.mark.parametrize("key", RENAMED)
def test_an_old_key_answers_with_its_new_name(key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        compose(["data=synthetic", f"{key}=1"])
    assert str(caught.value).startswith(f"{key}=1: is now called {RENAMED[key]}")
    assert ("swapped" in str(caught.value)) == (key in INVERTED)


def test_an_old_value_answers_with_its_new_name() -> None:
    with pytest.raises(ConfigError, match=r"^memory\.recompute=cheap: is now called selective$"):
        compose(["data=synthetic", "memory.recompute=cheap"])
    assert RunSpec.from_dict({"memory": {"recompute": "cheap"}}).memory.recompute == "selective"


def test_an_old_key_in_a_file_answers_with_its_new_name(tmp_path: Path) -> None:
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text("# @package _global_\ntrain:\n  stall_limit_s: 5\n")
    with pytest.raises(ConfigError, match=r"^train\.stall_limit_s=.*: is now called train\.hang_timeout_s$"):
        compose([f"hydra.searchpath=[file://{tmp_path}]", "experiment=mine"])


def test_old_keys_of_a_run_yaml_are_read() -> None:
    spec = RunSpec.from_dict(
        {
            "cluster": {"no_mem": True, "stop_before_s": 60, "nodes": 2},
            "data": {"train_images": 7},
            "schedule": {"allow": ["offload"]},
            "cost": {"input": 0.5},
        }
    )
    assert (spec.cluster.supports_mem_option, spec.cluster.signal_before_end_s, spec.cluster.nodes) == (False, 60, 2)
    assert (spec.data.train_samples, spec.schedule.memory_actions, spec.cost.input_load) == (7, ["offload"], 0.5)
