"""A whole run whose rank is killed by SIGKILL goes on where it was, and ends as if nothing had happened."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from gems.utils.atomic_io import read_json
from scripts.bench.resume import OVERRIDES, bits, run, run_and_kill

STEPS = 40
SMALL = [
    *OVERRIDES,
    "model=resnet20_v1",
    "model.depth=8",
    "data.height_px=16",
    "data.width_px=16",
    f"train.steps={STEPS}",
]


@pytest.mark.timeout(280)
def test_a_run_killed_in_any_step_ends_with_the_bits_of_one_that_was_not(tmp_path: Path) -> None:
    whole = run(tmp_path, [*SMALL, "name=whole"])
    assert run_and_kill(tmp_path, [*SMALL, "name=killed"], random.Random(5)) is not None
    (killed,) = tmp_path.glob("killed-*")
    assert (
        read_json(killed / "status.json")["state"] == "failed"
        and not (killed / "result.json").exists()
    )
    assert run(tmp_path, [*SMALL, "name=killed"]) == killed
    found = bits(whole, killed, STEPS)
    assert found["equal_losses"] and found["equal_weights"]
    assert read_json(killed / "result.json")["num_steps"] == STEPS
