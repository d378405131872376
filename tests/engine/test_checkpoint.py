"""Checkpoints by layer: saved with one cut, restored with another, and what is refused."""

from __future__ import annotations

import pickle
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from gems.engine.checkpoint import weights
from gems.engine.checkpoint.state_dict import restore
from gems.engine.rank_stages import Stages
from gems.engine.stage_modules import StageModules
from gems.errors import ConfigError
from gems.models import layers_of
from gems.models.build import build_layers
from gems.models.steps import whole_layers
from gems.runs.folder import RunFolder
from tests.helpers.small_disk import small_disk
from tests.helpers.toys import make_spec


def share(
    boundaries: list[int], num_directions: int = 1, replica: int = 0, seed: int = 0, **changes
):
    """What the checkpoint reads of a rank, with all stages of a cut on one rank."""
    spec = make_spec(
        "1f1b", len(boundaries) - 1, seed=seed, parallel__boundaries=boundaries, **changes
    )
    layers = layers_of(spec.model, spec.data)
    modules = {
        (direction, stage): nn.ModuleList(build_layers(layers, first, end, seed))
        for direction in range(num_directions)
        for stage, (first, end) in enumerate(pairwise(boundaries))
    }
    stages = SimpleNamespace(
        of_model=StageModules(layers, whole_layers(layers), boundaries), modules=modules
    )
    stages.named_layers = lambda held: Stages.named_layers(stages, held)
    return SimpleNamespace(plan=SimpleNamespace(spec=spec), replica=replica, stages=stages)


def values_of(rank, direction: int = 0) -> list[torch.Tensor]:
    return [
        value
        for (way, _), modules in sorted(rank.stages.modules.items())
        if way == direction
        for module in modules
        for value in module.state_dict().values()
    ]


def scramble(rank) -> None:
    for value in (
        value for modules in rank.stages.modules.values() for value in modules.state_dict().values()
    ):
        value.copy_(torch.rand(value.shape) * 5)


def test_another_cut_and_both_directions_read_it(tmp_path):
    saved = share([0, 2, 5])
    scramble(saved)
    weights.save(saved, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["stage0000.pt", "stage0001.pt"]
    other = share([0, 1, 3, 4, 5], num_directions=2, seed=7)
    restore(other, tmp_path)
    for direction in (0, 1):
        restored = values_of(other, direction)
        assert len(restored) == len(values_of(saved)) > 20
        assert all(torch.equal(a, b) for a, b in zip(restored, values_of(saved), strict=True))


def test_one_copy_of_the_model_is_written(tmp_path):
    weights.save(share([0, 2, 5], replica=1), tmp_path / "replica")
    assert not (tmp_path / "replica").exists()
    both = share([0, 5], num_directions=2)
    scramble(both)
    assert not torch.equal(values_of(both, 0)[0], values_of(both, 1)[0])
    weights.save(both, tmp_path)
    other = share([0, 5])
    restore(other, tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(values_of(other), values_of(both, 0), strict=True))


def test_a_run_folder_serves_as_well(tmp_path):
    saved = share([0, 5])
    weights.save(saved, RunFolder(tmp_path).checkpoint)
    assert weights.load(tmp_path).keys() == weights.load(RunFolder(tmp_path).checkpoint).keys()


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"model__depth": 14}, r"lacks stage1\.block2\."),
        ({"model__width": 8}, r"has stem\.conv\.weight of shape 4x3x3x3, and the model 8x3x3x3"),
        ({"data__num_classes": 4}, r"has head\.linear\.weight of shape 3x16, and the model 4x16"),
    ],
)
def test_another_model_is_refused_in_one_line(tmp_path, changes, says):
    weights.save(share([0, 5]), tmp_path)
    num_layers = 8 if "model__depth" in changes else 5
    other = share([0, num_layers], train__initial_checkpoint=str(tmp_path), **changes)
    with pytest.raises(ConfigError, match=says) as caught:
        restore(other, tmp_path)
    assert "\n" not in str(caught.value) and str(tmp_path) in str(caught.value)


def test_a_deeper_model_is_refused_although_all_layers_would_fit(tmp_path):
    weights.save(share([0, 8], model__depth=14), tmp_path)
    with pytest.raises(ConfigError, match=r"has more than this model: stage1\.block2\."):
        restore(share([0, 5]), tmp_path)


def test_a_stage_that_is_missing_is_noticed(tmp_path):
    weights.save(share([0, 2, 5]), tmp_path)
    (tmp_path / "stage0000.pt").unlink()
    with pytest.raises(ConfigError, match=r"lacks stem\."):
        restore(share([0, 5]), tmp_path)


def test_nothing_but_tensors_is_unpickled(tmp_path):
    class Evil:
        def __reduce__(self):
            return (pytest.fail, ("code of a checkpoint was run",))

    torch.save({"stem": {"weight": Evil()}}, tmp_path / "stage0000.pt")
    with pytest.raises(ConfigError, match="cannot be read"):
        weights.load(tmp_path)
    (tmp_path / "stage0000.pt").write_bytes(pickle.dumps({"stem": Evil()}, protocol=2))
    with pytest.raises(ConfigError, match="cannot be read"):
        weights.load(tmp_path)


def test_a_folder_without_a_checkpoint_and_a_truncated_file_are_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"train\.initial_checkpoint=.*holds no checkpoint"):
        weights.load(tmp_path)
    with pytest.raises(ConfigError, match="holds no checkpoint"):
        weights.load(tmp_path / "missing")
    weights.save(share([0, 5]), tmp_path)
    path = tmp_path / "stage0000.pt"
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(ConfigError, match="cannot be read") as caught:
        weights.load(tmp_path)
    assert "\n" not in str(caught.value)


def test_a_full_disk_is_named_and_leaves_no_part(tmp_path):
    """torch hides the system's error under its own."""
    layers = [("linear", torch.nn.Linear(500, 500))]
    stages = SimpleNamespace(modules={(0, 0): None}, named_layers=lambda key: layers)
    rank = SimpleNamespace(replica=0, stages=stages)
    with small_disk(tmp_path / "disk", 256) as disk:
        with pytest.raises(OSError, match="No space left on device"):
            weights.save(rank, disk.path)
        assert not list(disk.path.iterdir())
