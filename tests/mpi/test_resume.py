"""Resumed training on four ranks.

The same to the bit after a kill, and the same numbers on another cut.
"""

from __future__ import annotations

import errno
import random
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gems.config.schema import DataConfig, ModelConfig
from gems.engine.checkpoint import saver, weights
from gems.engine.checkpoint.manifest import (
    Manifest,
    checkpoint_folder,
    checkpoint_folders,
    shard_name,
    write_shard,
)
from gems.engine.emulation.run import emulate
from gems.engine.train import train
from gems.engine.transport.mpi import broadcast, meet
from gems.errors import ConfigError, RankFailedError
from gems.models import MODELS, Layer, ModelFamily
from gems.models.families.shared import Backbone, chain_family, pooled_head
from gems.models.steps import Fork, conv, max_pool
from gems.plan.evaluate import Plan, evaluate
from gems.plan.rank_plan import RankPlan
from gems.runs.folder import RunFolder
from gems.runs.heartbeat import Heartbeat
from gems.runs.prepare import prepare
from gems.trace import part_path, read_part
from gems.utils.atomic_io import read_json
from tests.helpers.device import DEVICE
from tests.helpers.toys import make_spec
from tests.mpi.conftest import sub_world

STEPS = 7
_plans: dict[str, Plan] = {}  # a plan serves all attempts of a case


def _drop_layers(model, data):
    """Batch norm, whose statistics and counter move, and dropout, which draws random numbers."""
    flat = 4 * data.height_px * data.width_px
    return (
        Layer(
            "conv",
            "toy",
            "torch.nn:Conv2d",
            (("in_channels", 3), ("out_channels", 4), ("kernel_size", 3), ("padding", 1)),
        ),
        Layer("norm", "toy", "torch.nn:BatchNorm2d", (("num_features", 4), ("momentum", None))),
        Layer("drop", "toy", "torch.nn:Dropout", (("p", 0.3),)),
        Layer("flatten", "toy", "torch.nn:Flatten", ()),
        Layer(
            "linear",
            "toy",
            "torch.nn:Linear",
            (("in_features", flat), ("out_features", data.num_classes)),
        ),
    )


if "toy_drop" not in MODELS:
    MODELS.register("toy_drop", ModelFamily(_drop_layers, lambda model: 1))


def _branches(model: ModelConfig) -> Backbone:
    fork = Fork(((conv(4),), (conv(4), conv(8, 3)), (max_pool(3, 1, 1), conv(4))))
    return Backbone(16, {"conv": (conv(8, 3, 2),), "first": (fork,), "second": (fork,)})


if "toy_branches" not in MODELS:
    head = partial(pooled_head, in_channels=16)
    MODELS.register(
        "toy_branches", chain_family(_branches, lambda model, data, body: (head(model, data),))
    )


class KilledError(Exception):
    """Ends all ranks of an attempt at once, as SIGKILL does."""


class Fatal(Heartbeat):
    """A heartbeat that ends the rank where an action of a step begins."""

    def __init__(self, path: Path, step: int = -9, action: str = "") -> None:
        self._fatal = (step, action)
        super().__init__(path)

    def beat(self, step: int, action: str) -> None:
        super().beat(step, action)
        if step == self._fatal[0] and self._fatal[1] in action:
            raise KilledError


class Asked:
    """Wants the run to stop, on one rank, once asked as often as it said."""

    def __init__(self, calls: int) -> None:
        self._left = calls

    def reason(self) -> str | None:
        self._left -= 1
        return "the test wants it" if self._left < 0 else None


def attempt(
    comm, spec, folder: RunFolder, kill: tuple[int, str] = (-9, ""), stop=None, seed: int = 0
) -> None:
    """Run one attempt in a folder, as a process of its own would.

    Random states are those of a fresh one.
    """
    meet(comm)  # all have looked at the files that are moved away now
    if comm.rank == 0:
        folder.path.mkdir(parents=True, exist_ok=True)
        folder.archive()
        if (case := repr(spec)) not in _plans:
            _plans[case] = evaluate(spec)
        made = _plans[case]
        folder.write_schedule(made.schedule)
        folder.write_boundaries(made.boundaries)
    meet(comm)
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)
    heartbeat = Fatal(folder.heartbeat(comm.rank), *kill)
    try:
        plan = RankPlan(spec, folder.read_schedule(), folder.read_boundaries())
        train(plan, folder, comm, DEVICE, heartbeat, stop)
        assert kill[0] < 0, "nothing was killed"
    except KilledError:
        pass
    meet(comm)


def last_manifest(folder: RunFolder, step: int = STEPS) -> Manifest:
    return Manifest.read(checkpoint_folder(folder.checkpoints, step))


def base(schedule: str, partitions: int, replicas: int, **changes):
    changes = {"train__steps": STEPS, "train__checkpoint_steps": 2, "optimizer__lr": 0.01} | changes
    return make_spec(schedule, partitions, replicas, **changes)


BRANCHES = {
    "model": ModelConfig(name="toy_branches", width=16, norm="batch"),
    "data": DataConfig(
        name="synthetic", height_px=32, width_px=32, num_classes=3, train_samples=64
    ),
}
RECIPE = {
    "optimizer__layer_decay": 0.9,
    "train__ema_decay": 0.9,
    "train__max_grad_norm": 1.0,
    "lr_scheduler__name": "one_cycle",
    "lr_scheduler__warmup_steps": 3,
}
CASES = {
    "odd_gems": base("gems_master", 3, 1, parallel__parts=2),
    "replicas": base("gems_mast", 2, 2, optimizer__name="adam"),
    "split": base("zb_h1", 4, 1),
    "dropout": base("1f1b", 2, 2, model__name="toy_drop", optimizer__name="adam"),
    "gems_dropout": base("gems_master", 2, 2, model__name="toy_drop", parallel__micro_batches=4),
    "recipe": base("gems_master", 2, 2, optimizer__name="lamb", **RECIPE),
    "placed": base("placed", 2, 1, parallel__micro_batches=2, partition__budget_s=0.3, **BRANCHES),
}


def result_of(folder: RunFolder) -> dict[str, Any]:
    """Return a run's result without its energy, which differs from run to run."""
    return {key: value for key, value in read_json(folder.result_json).items() if key != "energy_j"}


@pytest.mark.parametrize(
    ("case", "action"), [(case, "load" if case == "dropout" else "REDUCE_GRAD") for case in CASES]
)
def test_a_killed_run_goes_on_to_the_same_bits(comm, tmp_path, case, action):
    """All shards' checksums are compared.

    Weights, optimizer, statistics, counters, random states and losses.
    """
    spec = CASES[case]
    part = sub_world(comm, spec.world_size)
    if part is None:
        return
    path = broadcast(part, tmp_path)
    whole = RunFolder(path / "whole")
    broken = RunFolder(path / "broken")
    attempt(part, spec, whole)
    attempt(part, spec, broken, stop=Asked(1))
    step = random.Random(f"{case} {action}").randrange(2, STEPS)
    attempt(part, spec, broken, kill=(step, action), seed=part.rank + 33)
    assert not broken.result_json.exists()
    attempt(part, spec, broken, seed=part.rank + 77)
    first_step = read_part(part_path(broken.path, part.rank)).attributes["first_step"]
    assert (
        2 <= first_step <= step
        and read_part(part_path(whole.path, part.rank)).attributes["first_step"] == 0
    )
    assert last_manifest(broken).files == last_manifest(whole).files
    assert len(last_manifest(whole).files) == part.size
    results = [result_of(folder) for folder in (whole, broken)]
    assert results[0] == results[1] and results[0]["num_steps"] == STEPS
    states = [weights.load(folder.path) for folder in (whole, broken)]
    assert [*states[0]] == [*states[1]]
    for name, layer in states[0].items():
        assert all(torch.equal(value, states[1][name][key]) for key, value in layer.items())


def test_another_cut_and_number_of_replicas_go_on_with_the_same_numbers(comm, tmp_path):
    """Float32, the same global batch.

    Group norm, for batch norm's statistics are those of a micro-batch.
    """
    same = {"model__norm": "group", "train__evaluate": True, "optimizer__name": "adam", **RECIPE}
    path = broadcast(comm, tmp_path)
    whole = RunFolder(path / "whole")
    first = RunFolder(path / "first")
    spec = base("gems_master", 4, 1, parallel__parts=2, **same)
    attempt(comm, spec, whole)
    attempt(comm, spec, first, stop=Asked(3))
    for number, other in enumerate(
        (
            base("1f1b", 2, 2, parallel__micro_batches=spec.parallel.micro_batches // 2, **same),
            base("gpipe", 1, 4, parallel__micro_batches=spec.parallel.micro_batches // 4, **same),
            base("zb_h1", 2, 1, parallel__micro_batches=spec.parallel.micro_batches, **same),
        )
    ):
        part = sub_world(comm, other.world_size)
        if part is None:
            continue
        folder = RunFolder(path / f"other{number}")
        attempt(
            part, replace(other, train=replace(other.train, resume=str(first.path))), folder, seed=9
        )
        assert read_part(part_path(folder.path, part.rank)).attributes["first_step"] == 4
        results = [read_json(run.result_json) for run in (whole, folder)]
        for key in ("first_loss", "last_loss", "validation_loss"):
            assert results[1][key] == pytest.approx(results[0][key], rel=1e-6), key
        assert results[1]["num_steps"] == STEPS
        states = [weights.load(run.path) for run in (whole, folder)]
        averages = [weights.load(run.checkpoint / "average") for run in (whole, folder)]
        for state, average in zip(states, averages, strict=True):
            state |= {f"{name} (average)": layer for name, layer in average.items()}
        for name, layer in states[0].items():
            for key, value in layer.items():
                size = value.abs().max().item() if value.numel() else 0.0
                torch.testing.assert_close(states[1][name][key], value, rtol=1e-6, atol=1e-6 * size)
        fresh = RunFolder(path / f"fresh{number}")
        attempt(part, replace(other, seed=1), fresh)
        assert read_json(fresh.result_json)["last_loss"] != pytest.approx(
            results[0]["last_loss"], rel=1e-3
        )
    meet(comm)


def test_one_rank_that_is_asked_stops_all_behind_the_same_step(comm, tmp_path):
    spec = base("gems_master", 4, 1, train__checkpoint_steps=None)
    path = broadcast(comm, tmp_path)
    whole = RunFolder(path / "whole")
    stopped = RunFolder(path / "stopped")
    attempt(comm, spec, whole)
    assert not whole.checkpoints.exists(), "nobody asked for checkpoints"
    attempt(comm, spec, stopped, stop=Asked(3 if comm.rank == 2 else 99))
    note = read_json(stopped.stopped_json)
    assert (note["step"], note["reason"]) == (4, "the test wants it")
    assert not stopped.result_json.exists() and not (stopped.path / "checkpoint").exists()
    assert read_part(part_path(stopped.path, comm.rank)).rank_steps["step"].tolist() == [0, 1, 2, 3]
    meet(comm)
    attempt(comm, spec, stopped, stop=Asked(99))
    assert read_part(part_path(stopped.path, comm.rank)).rank_steps["step"].tolist() == [4, 5, 6]
    assert result_of(stopped) == result_of(whole)
    states = [weights.load(folder.path) for folder in (whole, stopped)]
    assert all(
        torch.equal(v, states[1][name][key])
        for name, layer in states[0].items()
        for key, v in layer.items()
    )


def test_a_damaged_checkpoint_is_named_and_the_one_before_it_is_used(comm, tmp_path, capfd):
    part = sub_world(comm, 2)
    if part is None:
        return
    spec = base("1f1b", 1, 2)
    path = broadcast(part, tmp_path)
    whole = RunFolder(path / "whole")
    broken = RunFolder(path / "broken")
    attempt(part, spec, whole)
    attempt(part, spec, broken, stop=Asked(3))
    newest = checkpoint_folder(broken.checkpoints, 4)
    assert [folder.name for folder in checkpoint_folders(broken.checkpoints)] == [
        "step00000004",
        "step00000002",
    ]
    if part.rank == 0:
        shard = newest / shard_name(1)
        content = bytearray(shard.read_bytes())
        content[-5] ^= 1
        shard.write_bytes(content)
    meet(part)
    capfd.readouterr()
    attempt(part, spec, broken)
    said = capfd.readouterr().err
    if part.rank == 0:
        assert f"checkpoint {newest} is damaged: {shard_name(1)} has another checksum" in said
    assert read_part(part_path(broken.path, part.rank)).attributes["first_step"] == 2
    assert last_manifest(broken).files == last_manifest(whole).files


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("model__width", 8, "another model.width"),
        ("seed", 3, "another seed"),
        ("optimizer__name", "adam", "another optimizer.name"),
        ("parallel__micro_batch_size", 4, "another global batch"),
        ("train__steps", 2, "train.steps=2"),
    ],
)
def test_what_does_not_suit_is_refused_in_one_line(comm, tmp_path, key, value, said):
    path = broadcast(comm, tmp_path)
    first = RunFolder(path / "first")
    part = sub_world(comm, 2)
    if part is None:
        return
    attempt(part, base("1f1b", 2, 1, train__steps=2), first)
    other = base("1f1b", 2, 1, train__resume=str(first.path), **{key: value})
    with pytest.raises(ConfigError, match=said) as refused:
        attempt(part, other, RunFolder(path / "second"))
    assert "\n" not in str(refused.value)


def test_a_finished_run_can_be_made_longer(comm, tmp_path):
    part = sub_world(comm, 2)
    if part is None:
        return
    spec = base("1f1b", 2, 1, train__steps=4)
    path = broadcast(part, tmp_path)
    whole, first, longer = (RunFolder(path / name) for name in ("whole", "first", "longer"))
    attempt(part, base("1f1b", 2, 1), whole)
    attempt(part, spec, first)
    attempt(part, base("1f1b", 2, 1, train__resume=str(first.path)), longer)
    assert read_part(part_path(longer.path, part.rank)).rank_steps["step"].tolist() == [4, 5, 6]
    assert last_manifest(longer).files == last_manifest(whole).files


def test_a_run_that_may_not_resume_starts_anew_and_keeps_what_was_saved(comm, tmp_path):
    folder = RunFolder(broadcast(comm, tmp_path) / "run")
    attempt(comm, base("1f1b", 4, 1), folder, stop=Asked(1))
    attempt(comm, base("1f1b", 4, 1, train__resume="never"), folder)
    assert read_part(part_path(folder.path, comm.rank)).rank_steps["step"].tolist() == list(
        range(STEPS)
    )
    assert checkpoint_folders(folder.path / "attempts" / "001" / "checkpoints")


def test_an_emulated_run_goes_on_at_its_step(comm, tmp_path):
    path = broadcast(comm, tmp_path)
    spec = make_spec(
        "1f1b",
        4,
        machine__kind="emulated",
        cost__unit_s=0.0005,
        parallel__micro_batches=8,
        train__steps=STEPS,
        runs_dir=str(path),
    )
    folder = RunFolder.of(spec)
    for wanted, stop in (([0, 1], Asked(1)), ([2, 3, 4, 5, 6], None)):
        meet(comm)  # all have looked at the files that preparing clears
        if comm.rank == 0:
            prepare(spec)
        meet(comm)
        emulate(folder, comm, Heartbeat(folder.heartbeat(comm.rank)), stop)
        meet(comm)
        if comm.rank == 0:
            folder.write_status(
                "finished" if stop is None else "stopped"
            )  # else the heartbeats keep the folder
        part = read_part(part_path(folder.path, comm.rank))
        assert part.rank_steps["step"].tolist() == wanted and part.attributes["continues"] == (
            wanted[0] > 0
        )
        assert folder.result_json.exists() == (stop is None) != folder.stopped_json.exists()


def test_a_rank_without_room_makes_all_save_again_before_the_next_step(
    comm, tmp_path, monkeypatch, capfd
):
    """Rank 2 fails twice; those with room write their shards, which go too, and nobody waits for nobody."""
    spec = base("1f1b", 4, 1)
    path = broadcast(comm, tmp_path)
    whole = RunFolder(path / "whole")
    full = RunFolder(path / "full")
    attempt(comm, spec, whole)
    monkeypatch.setattr(saver, "RETRY_S", 0.01)
    tries = []

    def write(target: Path, tensors: dict) -> object:
        tries.append(target.parent)
        if comm.rank == 2 and len(tries) in (2, 3):
            raise OSError(errno.ENOSPC, "No space left on device", target.name)
        return write_shard(target, tensors)

    monkeypatch.setattr(saver, "write_shard", write)
    capfd.readouterr()
    attempt(comm, spec, full)
    said = capfd.readouterr().err
    if comm.rank == 0:
        assert f"save 1 of 5 failed: rank 2: No space left on device: {shard_name(2)}" in said
        assert "the checkpoint of step 2 remains" in said
    assert len({*tries}) < len(tries) and last_manifest(full).files == last_manifest(whole).files
    meet(comm)
    limited = replace(spec, train=replace(spec.train, max_failed_saves=1))
    if comm.rank == 2:
        tries[:] = [full.path]
    with pytest.raises(
        RankFailedError, match=r"rank 2: No space left on device: .*there is no checkpoint"
    ):
        attempt(comm, limited, RunFolder(path / "ends"))
    meet(comm)
    assert not [*(path / "ends" / "checkpoints").iterdir()]


def test_a_run_whose_checkpoints_are_all_damaged_does_not_start_anew(comm, tmp_path):
    part = sub_world(comm, 2)
    if part is None:
        return
    spec = base("1f1b", 2, 1)
    path = broadcast(part, tmp_path)
    folder = RunFolder(path / "run")
    attempt(part, spec, folder, stop=Asked(3))
    if part.rank == 0:
        for checkpoint in checkpoint_folders(folder.checkpoints):
            (checkpoint / shard_name(1)).write_bytes(b"")
    text = (
        r"^train\.resume=auto: all 2 checkpoints in .* are damaged \(step00000004: .*0 bytes"
        r" instead.*resume=never$"
    )
    for _ in range(2):  # nor at the second try
        with pytest.raises(ConfigError, match=text):
            attempt(part, spec, folder)
        assert len(checkpoint_folders(folder.checkpoints)) == 2
    meet(part)
    if part.rank == 0:
        for checkpoint in checkpoint_folders(folder.checkpoints):
            checkpoint.rename(f"{checkpoint}.damaged")
    with pytest.raises(ConfigError, match=r"all 2 checkpoints .*it was found so before"):
        attempt(part, spec, folder)
    attempt(part, replace(spec, train=replace(spec.train, resume="never")), folder)
    assert read_part(part_path(folder.path, part.rank)).rank_steps["step"].tolist() == list(
        range(STEPS)
    )
