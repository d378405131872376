"""The recipe of a run: what its ranks would refuse is refused before a job is queued."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from gems.config.compose import compose
from gems.config.schema import RunSpec
from gems.errors import ConfigError
from gems.launch import recipe
from gems.utils.run_module import RUN_MODULE
from tests.helpers.processes import python

ROOT = Path(__file__).parents[2]
OWN = "tests.helpers.own_losses"
WORDS = (
    "data=synthetic",
    "data.height_px=16",
    "data.width_px=16",
    "model.depth=8",
    "model.width=4",
    "schedule=gpipe",
    "parallel.partitions=1",
)
OPTIMIZERS = """
import torch


class ReadsValues(torch.optim.SGD):
    def __init__(self, params, lr):
        super().__init__(params, lr=lr)
        assert all(float(each.detach().norm()) >= 0 for group in self.param_groups for each in group["params"])


class AsksForGpu(torch.optim.SGD):
    def __init__(self, params, lr):
        raise RuntimeError("No CUDA GPUs are available")
"""
pytestmark = pytest.mark.cases


def spec_of(*words: str) -> RunSpec:
    return compose([*WORDS, *words])


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (
            "loss.target=tests.helpers.own_losses.Nope",
            r"^loss\.target=.*nothing named Nope in tests\.helpers",
        ),
        (
            "loss.target=mine.Nope",
            r"^loss\.target=mine\.Nope: no module named mine.*; set loss\.path",
        ),
        ("loss.kwargs.gamma=1", r"^loss\.kwargs=.*CrossEntropyLoss does not take them"),
        (f"loss.target={OWN}.by_outputs", r"^loss\.target=.*cannot be summed over micro-batches"),
        (
            f"loss.target={OWN}.broken",
            r"^loss\.target=.*cannot take outputs of shape \(4, 2\).*own_losses\.py",
        ),
        (
            "optimizer.target=torch.optim.Nope",
            r"^optimizer\.target=torch\.optim\.Nope: nothing named Nope in torch",
        ),
        (
            "optimizer.target=torch.optim.LBFGS",
            r"^optimizer\.target=torch\.optim\.LBFGS: .*\(closure\)",
        ),
        ("optimizer.kwargs.beta=1", r"^optimizer\.kwargs=.*SGD does not take them"),
        (
            "optimizer.frozen=[layer9.*]",
            r"^optimizer\.frozen=layer9\.\*: is the name of no layer or parameter",
        ),
        (
            "lr_scheduler=step lr_scheduler.kwargs.nope=1",
            r"^lr_scheduler\.kwargs=.*StepLR does not take them",
        ),
        (
            "lr_scheduler.target=torch.optim.lr_scheduler.ReduceLROnPlateau",
            r"^lr_scheduler\.target=.*needs metrics at",
        ),
        (
            "metrics.f1.target=torchmetrics.Nope",
            r"^metrics\.f1\.target=torchmetrics\.Nope: nothing named Nope",
        ),
    ],
)
def test_what_ranks_would_refuse(words: str, says: str) -> None:
    spec = spec_of(*words.split())
    assert recipe.needs_check(spec)
    with pytest.raises(ConfigError, match=says) as caught:
        recipe.check_recipe(spec)
    assert "\n" not in str(caught.value)


def test_a_missing_transform(tmp_path: Path) -> None:
    spec = spec_of()
    spec.data.transform = "torchvision.transforms.v2.Nope"
    with pytest.raises(ConfigError, match=r"^data\.transform=torchvision"):
        recipe.check_recipe(spec)


def test_recipes_that_ranks_take(tmp_path: Path) -> None:
    (tmp_path / "my_optimizers.py").write_text(OPTIMIZERS)
    at = f"optimizer.path={tmp_path}"
    for words in (
        ["loss.kwargs.label_smoothing=0.1", "optimizer=adamw", "lr_scheduler=cosine"],
        [f"loss.target={OWN}.Focal", "lr_scheduler=one_cycle", "lr_scheduler.interval=epoch"],
        ["optimizer.target=my_optimizers.ReadsValues", at],
        ["optimizer.target=my_optimizers.AsksForGpu", at, "machine.device=cuda"],
    ):
        spec = spec_of(*words)
        assert recipe.needs_check(spec)
        recipe.check_recipe(spec)
    with pytest.raises(ConfigError, match="No CUDA GPUs are available"):
        recipe.check_recipe(
            spec_of("optimizer.target=my_optimizers.AsksForGpu", at, "machine.device=cpu")
        )


def test_names_alone_need_no_process_and_an_answer_is_kept_until_the_code_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not recipe.needs_check(spec_of())
    assert not recipe.needs_check(spec_of("optimizer=adamw", "metrics=[auc]", "train.monitor=auc"))
    assert not recipe.needs_check(spec_of("machine=simulated", "loss.target=a.B"))
    code = tmp_path / "my_loss.py"
    code.write_text("class Loss: pass")
    spec = spec_of("loss.target=my_loss.Loss", f"loss.path={tmp_path}")
    asked = []

    def ask(*words: Any) -> dict[str, Any]:
        asked.append(words)
        if len(asked) == 1:
            raise ConfigError("loss.target", "my_loss.Loss", "is refused")
        return {}

    monkeypatch.setattr(recipe, "ask_child", ask)
    monkeypatch.setenv("GEMS_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delitem(sys.modules, torch.__name__)  # as on a login node
    with pytest.raises(ConfigError, match="is refused"):
        recipe.check_recipe(spec)
    for words in ("seed=1", "optimizer.lr=0.3", "train.steps=7", "parallel.micro_batches=4"):
        recipe.check_recipe(spec_of("loss.target=my_loss.Loss", f"loss.path={tmp_path}", words))
    assert len(asked) == 2  # a refusal is not kept
    code.write_text("class Loss: changed = True")
    recipe.source_of.cache_clear()
    recipe.check_recipe(spec)
    recipe.check_recipe(
        spec_of("loss.target=my_loss.Loss", f"loss.path={tmp_path}", "train.precision=float64")
    )
    assert len(asked) == 4


@pytest.mark.usefixtures("warm")
def test_a_job_is_refused_by_the_child_process_and_not_by_its_ranks(tmp_path: Path) -> None:
    words = [
        *WORDS,
        "cluster=slurm",
        "cluster.partition=gpu",
        "optimizer.target=torch.optim.LBFGS",
        "--dry-run",
    ]
    ended = python(
        *RUN_MODULE,
        "jobs",
        "submit",
        *words,
        cwd=tmp_path,
        env=os.environ | {"GEMS_CACHE_DIR": str(tmp_path / "cache")},
    )
    assert (ended.returncode, ended.stdout) == (2, ""), ended.stderr
    assert (
        "optimizer.target=torch.optim.LBFGS: computes the loss of the whole model again"
        in ended.stderr
    )
    assert not (tmp_path / "runs").exists()
