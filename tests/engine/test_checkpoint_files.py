"""Shards, manifests and the folders of checkpoints: what is written, what is found, what is damage."""

from __future__ import annotations

import errno
import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from mpi4py import MPI
from safetensors.torch import load_file

from gems.config.checkpoint_schema import MANIFEST_JSON
from gems.config.compose import compose
from gems.config.schema import ModelConfig
from gems.engine.checkpoint.manifest import (
    Manifest,
    ShardFile,
    changed_code,
    checkpoint_folder,
    checkpoint_folders,
    difference,
    find_damage,
    prune,
    run_identity,
    write_shard,
)
from gems.engine.checkpoint.resume import find_start
from gems.engine.checkpoint.state import HostCopy
from gems.engine.checkpoint.state_dict import read_state_dict
from gems.errors import ConfigError
from gems.runs.prepare import prepare
from tests.helpers.toys import make_spec

TENSORS = {
    "a/b": torch.arange(6, dtype=torch.float32).reshape(2, 3),
    "half": torch.tensor([1.5, -2.0], dtype=torch.bfloat16),
    "turned": torch.arange(6.0, dtype=torch.float64).reshape(2, 3).t(),
    "count": torch.tensor(7),
    "flags": torch.tensor([True, False, True]),
    "nothing": torch.zeros(0, 3),
    "bytes": torch.tensor([1, 2, 255], dtype=torch.uint8),
}


def pieces_of(tensors: dict[str, torch.Tensor]):
    copy = HostCopy(torch.device("cpu"), torch.optim.SGD([torch.zeros(1)], 0.1))
    copy.begin({}, tensors)
    return copy.host_tensors()


def test_the_library_reads_what_was_written_and_the_copy_is_of_its_moment(tmp_path: Path) -> None:
    live = {name: tensor.clone() for name, tensor in TENSORS.items()}
    host_tensors = pieces_of(live)
    for tensor in live.values():
        tensor.zero_()
    written = write_shard(tmp_path / "rank0000.safetensors", host_tensors)
    found = load_file(tmp_path / written.name)
    assert found.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name
    assert written.num_bytes == (tmp_path / written.name).stat().st_size
    assert find_damage(tmp_path, written) is None
    assert [path.name for path in tmp_path.iterdir()] == [written.name]


def test_damage_is_told(tmp_path: Path) -> None:
    written = write_shard(tmp_path / "rank0000.safetensors", pieces_of(TENSORS))
    path = tmp_path / written.name
    whole = path.read_bytes()
    for place in (9, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 4]) + whole[place + 1 :])
        assert "another checksum" in (find_damage(tmp_path, written) or "")
    path.write_bytes(whole[:-1])
    assert f"{len(whole) - 1} bytes instead of {len(whole)}" in (
        find_damage(tmp_path, written) or ""
    )
    path.unlink()
    assert "cannot be read" in (find_damage(tmp_path, written) or "")


def test_a_shard_that_cannot_be_written_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_shard(tmp_path / "rank0000.safetensors", pieces_of(TENSORS))
    assert not list(tmp_path.iterdir())


def manifest(step: int) -> Manifest:
    return Manifest(step, 1, step * 8, "", run_identity(make_spec()), {}, {"conv": 0})


def test_a_manifest_comes_back_and_what_is_none_is_refused(tmp_path: Path) -> None:
    mine = replace(manifest(3), files=(ShardFile("rank0000.safetensors", 5, 7),))
    mine.write(tmp_path / "step00000003")
    assert Manifest.read(tmp_path / "step00000003") == mine
    for text in (
        "[]",
        "{",
        '{"schema": "gems.checkpoint/9"}',
        '{"schema": "gems.checkpoint/1", "step": 1}',
    ):
        (tmp_path / "step00000003" / MANIFEST_JSON).write_text(text)
        with pytest.raises(ValueError):
            Manifest.read(tmp_path / "step00000003")


def test_the_newest_stay_and_what_is_being_written_too(tmp_path: Path) -> None:
    for step in (100, 20, 3):
        manifest(step).write(checkpoint_folder(tmp_path, step))
    for step in (50, 120):
        checkpoint_folder(tmp_path, step).mkdir()
    (tmp_path / "step00000007.damaged").mkdir()
    assert [folder.name[-3:] for folder in checkpoint_folders(tmp_path)] == ["100", "020", "003"]
    prune(tmp_path, 2)
    names = ["step00000007.damaged", "step00000020", "step00000100", "step00000120"]
    assert sorted(folder.name for folder in tmp_path.iterdir()) == names


def test_the_first_difference_is_named() -> None:
    mine = run_identity(make_spec())
    assert (
        difference(mine, run_identity(make_spec("1f1b", 2, optimizer__lr=0.5, train__steps=9)))
        is None
    )
    assert difference(mine, run_identity(make_spec(data__height_px=16))) == (
        "data.height_px",
        12,
        16,
    )
    assert (
        difference(mine, run_identity(make_spec(parallel__micro_batch_size=1)))[0] == "global batch"
    )
    assert difference({}, {"seed": 1}) == ("seed", None, 1)


def test_other_code_of_the_users_is_noticed() -> None:
    mine = {"code": {"net.Net": "new", "data.Tiles": "same"}}
    assert changed_code({"code": {"net.Net": "old", "data.Tiles": "same"}}, mine) == "net.Net"
    assert changed_code({"code": {"data.Tiles": "same"}}, mine) is None
    assert changed_code({}, mine) is None  # of a version that did not note it
    assert difference({"code": {"net.Net": "old"}}, mine) is None


@pytest.mark.cases
@pytest.mark.parametrize("inner", ["", "step00000004", "checkpoints/step00000004"])
def test_a_checkpoint_of_another_schema_is_refused_when_the_run_is_composed(tmp_path, inner):
    for step in ("step00000002", inner) if inner == "step00000004" else (inner,):
        (tmp_path / step).mkdir(parents=True, exist_ok=True)
        schema = "gems.checkpoint/1" if step == "step00000002" else "gems.checkpoint/9"
        (tmp_path / step / MANIFEST_JSON).write_text(json.dumps({"schema": schema}))
    with pytest.raises(ConfigError) as caught:
        compose(["data=synthetic", f"train.resume={tmp_path}"])
    assert str(caught.value).startswith(f"train.resume={tmp_path}: ") and "damaged" not in str(
        caught.value
    )
    assert (
        "is a checkpoint of schema gems.checkpoint/9, and this version of gems-train reads"
        " gems.checkpoint/1" in str(caught.value)
    )
    if inner != "step00000004":  # a folder of checkpoints is no source of weights
        with pytest.raises(
            ConfigError, match=r"^train\.initial_checkpoint=.*of schema gems\.checkpoint/9"
        ):
            read_state_dict(tmp_path, ModelConfig())


@pytest.mark.cases
def test_the_runs_own_checkpoint_of_another_schema_is_refused_before_the_queue_and_by_its_ranks(
    tmp_path,
):
    words = [
        "data=synthetic",
        "schedule=gpipe",
        "data.height_px=16",
        "data.width_px=16",
        f"runs_dir={tmp_path}",
    ]
    spec = compose(words)
    folder = prepare(spec)
    checkpoint_folder(folder.checkpoints, 3).mkdir(parents=True)
    (checkpoint_folder(folder.checkpoints, 3) / MANIFEST_JSON).write_text(
        '{"schema": "gems.checkpoint/9"}'
    )
    for refuse in (lambda: prepare(spec), lambda: find_start(spec, folder, MPI.COMM_SELF)):
        with pytest.raises(
            ConfigError,
            match=r"^train\.resume=auto: .*step00000003 is a checkpoint of schema gems\.",
        ):
            refuse()
    prepare(compose([*words, "train.resume=never"]))
