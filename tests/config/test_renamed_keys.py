"""Renamed keys: an old key is taken under its new name, and an old run.yaml is still read."""

from __future__ import annotations

from pathlib import Path

import pytest

from gems.config.compose import compose
from gems.config.fields import INVERTED, RENAMED
from gems.config.overrides import hydra_word, valid_keys
from gems.config.schema import RunSpec
from gems.errors import ConfigError


def test_new_names_are_keys_and_old_ones_are_not() -> None:
    keys = set(valid_keys())
    assert set(RENAMED.values()) <= keys
    assert not set(RENAMED) & keys


@pytest.mark.parametrize("key", RENAMED)
def test_an_old_key_is_taken_with_one_line_that_says_its_new_name(
    key: str, caplog: pytest.LogCaptureFixture
) -> None:
    old_value, value = ("true", "false") if key in INVERTED else ("1", "1")
    assert hydra_word(f"{key}={old_value}") == f"{RENAMED[key]}={value}"
    (line,) = caplog.messages
    assert line == f"{key} is now called {RENAMED[key]}: took {RENAMED[key]}={value}"


def test_a_run_with_old_keys_is_that_with_the_new_ones() -> None:
    old = compose(
        [
            "data=synthetic",
            "train.optimizer=adam",
            "train.learning_rate=0.01",
            "train.dtype=bfloat16",
        ]
    )
    new = compose(
        ["data=synthetic", "optimizer.name=adam", "optimizer.lr=0.01", "train.precision=bf16_pure"]
    )
    assert old == new
    assert (old.optimizer.name, old.optimizer.lr, old.train.dtype) == ("adam", 0.01, "bfloat16")


def test_an_old_value_is_taken_under_its_new_name() -> None:
    assert compose(["data=synthetic", "memory.recompute=cheap"]).memory.recompute == "selective"
    assert RunSpec.from_dict({"memory": {"recompute": "cheap"}}).memory.recompute == "selective"


def test_an_old_key_in_a_file_answers_with_its_new_name(tmp_path: Path) -> None:
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text(
        "# @package _global_\ntrain:\n  stall_limit_s: 5\n"
    )
    with pytest.raises(
        ConfigError, match=r"^train\.stall_limit_s=.*: is now called train\.hang_timeout_s$"
    ):
        compose([f"hydra.searchpath=[file://{tmp_path}]", "experiment=mine"])


def test_old_keys_of_a_run_yaml_are_read() -> None:
    spec = RunSpec.from_dict(
        {
            "cluster": {"no_mem": True, "stop_before_s": 60, "nodes": 2},
            "data": {"train_images": 7},
            "schedule": {"allow": ["offload"]},
            "cost": {"input": 0.5},
            "train": {"optimizer": "adam", "warmup_steps": 3, "dtype": "float64"},
        }
    )
    assert (spec.optimizer.name, spec.benchmark.skip_steps, spec.train.precision) == (
        "adam",
        3,
        "float64",
    )
    assert (
        spec.cluster.supports_mem_option,
        spec.cluster.signal_before_end_s,
        spec.cluster.nodes,
    ) == (False, 60, 2)
    assert (spec.data.train_samples, spec.schedule.memory_actions, spec.cost.input_load) == (
        7,
        ["offload"],
        0.5,
    )
