"""The example of fine-tuning.

Weights with another head, batch norm that stays as it was, in bfloat16.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.helpers.processes import python

ROOT = Path(__file__).parents[2]
PROGRAM = """
from pathlib import Path
import gems, torch
from safetensors.torch import load_file
from examples import finetune

finetune.STEPS = 2
finetune.main(Path("runs/pretrained.safetensors"))
given = load_file("runs/pretrained.safetensors")
words = ["parallel.partitions=1", "schedule=gpipe", "train.steps=3", "benchmark.skip_steps=0"]
result = gems.train(gems.compose(["experiment=finetune", "lr_scheduler.warmup_steps=1", *words]))
found = gems.load_model(result.folder).state_dict()
assert found["fc.weight"].shape == (2, 64) and given["fc.weight"].shape == (4, 64)
norms = [name for name in found if ".bn" in name and not name.endswith("num_batches_tracked")]
assert len(norms) == 24 and all(torch.equal(found[name], given[name]) for name in norms)
assert not torch.equal(found["stem.weight"], given["stem.weight"])
assert (found["stem.weight"] - given["stem.weight"]).abs().max() < 0.01
"""


@pytest.mark.usefixtures("warm")
def test_it_starts_from_weights_and_keeps_its_batch_norm(tmp_path: Path) -> None:
    ended = python("-c", PROGRAM, cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT)})
    assert ended.returncode == 0, ended.stderr
