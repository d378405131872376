"""Plain state dicts: files of the user's weights into a cut network, and a run's weights out of it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from torch import Tensor

from gems.cli.export import export
from gems.cli.framework import Options
from gems.config.schema import ModelConfig
from gems.engine.checkpoint import weights
from gems.engine.checkpoint.manifest import Manifest, ShardFile, checkpoint_folder, shard_name
from gems.engine.checkpoint.state_dict import (
    match_names,
    read_state_dict,
    restore,
    trained_model,
    whole_model,
)
from gems.errors import ConfigError
from gems.runs.folder import RunFolder
from tests.engine.test_checkpoint import scramble, share
from tests.helpers.own_nets import Wrapped
from tests.helpers.toys import make_spec

OWN = ModelConfig(name="Wrapped", target="tests.helpers.own_nets.Wrapped")
SHAPES = {
    "stem.weight": (4, 3),
    "stem.num_batches_tracked": (),
    "fc.weight": (2, 4),
    "fc.bias": (2,),
}


def own_share(boundaries: list[int], **changes):
    """The stages of an own network on one rank, with other weights than those of seed 0."""
    own = {"model__name": "Wrapped", "model__target": OWN.target, "data__num_classes": 2}
    return share(boundaries, seed=5, **own, **changes)


def local_values(rank) -> dict[str, Tensor]:
    """Tensors by the names of the user's class."""
    return {
        name: value
        for modules in rank.stages.modules.values()
        for module in modules
        for name, value in module.state_dict().items()
    }


def random_weights() -> dict[str, Tensor]:
    torch.manual_seed(3)
    return {
        name: torch.rand(value.shape).to(value.dtype)
        for name, value in Wrapped().state_dict().items()
    }


@pytest.mark.parametrize("suffix", [".pt", ".pth", ".safetensors"])
@pytest.mark.parametrize("prefix", ["", "module.", "model.encoder."])
def test_a_file_of_the_whole_class_fills_every_stage(
    tmp_path: Path, suffix: str, prefix: str
) -> None:
    expected = random_weights()
    saved = {prefix + name: value for name, value in expected.items()}
    path = tmp_path / f"weights{suffix}"
    if suffix == ".safetensors":
        save_file(saved, path)
    else:
        torch.save({"epoch": 3, "state_dict": saved} if suffix == ".pth" else saved, path)
    rank = own_share([0, 3, 7])
    match = restore(rank, path)
    values = local_values(rank)
    assert values.keys() == {name for name in expected if not name.startswith("unused.")}
    assert all(torch.equal(value, expected[name]) for name, value in values.items())
    assert (match.removed_prefix, match.drawn_anew, match.unused) == (prefix, (), ())
    assert f"{len(expected)} of {len(expected)} tensors" in match.describe(path)


def test_a_new_head_is_drawn_anew_and_said(tmp_path: Path) -> None:
    expected = random_weights()
    folder = "head"
    head = ["head.weight", "head.bias"]
    torch.save(
        {
            name: torch.rand(7, *value.shape[1:]) if name in head else value
            for name, value in expected.items()
        },
        tmp_path / "pretrained.pt",
    )
    with pytest.raises(ConfigError, match=rf"draw it anew by train\.initial_new=\[{folder}\.\*\]"):
        restore(own_share([0, 3, 7]), tmp_path / "pretrained.pt")
    rank = own_share([0, 3, 7], train__initial_new=[f"{folder}.*"])
    before = {name: value.clone() for name, value in local_values(rank).items()}
    match = restore(rank, tmp_path / "pretrained.pt")
    values = local_values(rank)
    assert set(match.drawn_anew) == set(head)
    for name, value in values.items():
        assert torch.equal(value, before[name] if name in head else expected[name])
    assert f"drawn anew: {', '.join(head)}" in match.describe("pretrained.pt")


class TestMatch:
    def test_weights_of_a_submodule(self) -> None:
        ours = {f"backbone.{name}": shape for name, shape in SHAPES.items()} | {
            "head.weight": (2, 2)
        }
        match = match_names(ours, SHAPES, "x.pt", new=["head.*"])
        assert match.names == {f"backbone.{name}": name for name in SHAPES}
        assert (match.added_prefix, match.drawn_anew) == ("backbone.", ("head.weight",))
        assert "into backbone" in match.describe("x.pt")

    def test_a_given_prefix_takes_only_those_names(self) -> None:
        file = {f"ema.{name}": shape for name, shape in SHAPES.items()} | SHAPES
        match = match_names(SHAPES, file, "x.pt", prefix="ema.", is_strict=False)
        assert set(match.names.values()) == {f"ema.{name}" for name in SHAPES}

    def test_an_old_file_without_counters_is_whole(self) -> None:
        file = {name: shape for name, shape in SHAPES.items() if "num_batches" not in name}
        assert match_names(SHAPES, file, "x.pt").drawn_anew == ()

    def test_what_is_missing_or_too_much_is_refused_unless_not_strict(self) -> None:
        less = {name: shape for name, shape in SHAPES.items() if name != "fc.bias"}
        more = SHAPES | {"extra.weight": (3,)}
        with pytest.raises(ConfigError, match=r"x\.pt: lacks fc\.bias; .*train\.initial_new"):
            match_names(SHAPES, less, "x.pt")
        with pytest.raises(ConfigError, match=r"has more than this model: extra\.weight"):
            match_names(SHAPES, more, "x.pt")
        assert match_names(SHAPES, less, "x.pt", is_strict=False).drawn_anew == ("fc.bias",)
        assert match_names(SHAPES, more, "x.pt", is_strict=False).unused == ("extra.weight",)

    def test_another_network_is_refused(self) -> None:
        with pytest.raises(
            ConfigError,
            match=r"has no tensor of this model \(it has a\.b, the model has stem\.weight",
        ):
            match_names(SHAPES, {"a.b": (1,)}, "x.pt", is_strict=False)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"not a checkpoint", "cannot be read"),
        ({"epoch": 3, "weights": 5}, "holds no state dict, but keys epoch, weights"),
        ([1, 2], "holds no state dict, but list"),
        ({}, "holds no state dict"),
    ],
)
def test_what_is_no_state_dict_is_one_line(tmp_path: Path, content: object, says: str) -> None:
    path = tmp_path / "x.pt"
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        torch.save(content, path)
    with pytest.raises(ConfigError, match=says) as caught:
        read_state_dict(path, OWN)
    assert "\n" not in str(caught.value)


def finished(folder: Path, rank) -> Path:
    """A finished run's folder with the weights of a rank."""
    run = RunFolder(folder / "mine-00000000")
    run.path.mkdir(parents=True)
    run.run_yaml.write_text(yaml.safe_dump(rank.plan.spec.to_dict()))
    weights.save(rank, run.checkpoint)
    return run.path


@pytest.mark.parametrize("name", ["model.safetensors", "model.pt"])
def test_an_exported_run_loads_into_the_users_class_with_equal_logits(
    tmp_path: Path, name: str
) -> None:
    rank = own_share([0, 3, 7])
    scramble(rank)
    out = tmp_path / name
    assert export([str(finished(tmp_path, rank))], Options(chosen={"--out": str(out)})) == 0
    state = load_file(out) if out.suffix == ".safetensors" else torch.load(out, weights_only=True)
    module = Wrapped().eval()
    module.load_state_dict(state, strict=True)
    data = rank.plan.spec.data
    images = torch.rand(2, data.channels, data.height_px, data.width_px)
    values: tuple[Tensor, ...] = (images,)
    with torch.no_grad():
        for modules in rank.stages.modules.values():
            for part in modules.eval():
                made = part(*values)
                values = (made,) if isinstance(made, Tensor) else made
        assert torch.equal(module(images), values[0])


def test_a_network_of_the_toolkit_goes_out_and_in(tmp_path: Path) -> None:
    rank = share([0, 2, 5])
    scramble(rank)
    run = finished(tmp_path, rank)
    export([str(run)], Options(chosen={"--out": str(tmp_path / "resnet.pt")}))
    other = share([0, 1, 5], seed=8)
    assert restore(other, tmp_path / "resnet.pt").drawn_anew == ()
    model = trained_model(run, rank.plan.spec.model, rank.plan.spec.data)
    images = torch.rand(2, 3, 12, 8)
    values: tuple[Tensor, ...] = (images,)
    with torch.no_grad():
        for modules in other.stages.modules.values():
            for layer in modules.eval():
                values = (layer(*values),)
        assert torch.equal(model(images), values[0])


def test_weights_of_another_class_are_refused(tmp_path: Path) -> None:
    run = finished(tmp_path, share([0, 2, 5]))
    with pytest.raises(ConfigError, match="has weights of another model"):
        trained_model(run, OWN, make_spec().data)
    assert isinstance(whole_model(OWN, make_spec().data), Wrapped)


@pytest.mark.parametrize(
    ("words", "out", "says"),
    [
        ([], "x.pt", r"^run=none: must be one run"),
        (["no-such-run"], "x.pt", r"^run=no-such-run: is no run"),
        (["a"], "x.onnx", r"^--out=.*x\.onnx: must end with \.safetensors, \.pt, \.pth"),
        (["a"], "missing/x.pt", r"^--out=.*: its folder does not exist"),
    ],
)
def test_refusals_of_export(tmp_path: Path, words: list[str], out: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        export(words, Options(chosen={"--out": str(tmp_path / out)}))


def test_the_newest_checkpoint_stands_for_a_run_that_has_not_finished(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    with pytest.raises(ConfigError, match="holds no checkpoint"):
        read_state_dict(run.path, ModelConfig())
    for step in (2, 4):
        folder = checkpoint_folder(run.checkpoints, step)
        folder.mkdir(parents=True)
        tensors = {
            "parameters/stem/conv.weight": torch.full((2,), float(step)),
            "buffers/stem/mean": torch.ones(1),
        }
        save_file(
            tensors | {"optimizer/momentum/stem/conv.weight": torch.zeros(2)},
            folder / shard_name(0),
        )
        Manifest(step, 1, 0, "", {}, {}, {}, (ShardFile(shard_name(0), 0, 0),)).write(folder)
    found = read_state_dict(run.path, ModelConfig())
    assert found.keys() == {"stem.conv.weight", "stem.mean"}
    assert found["stem.conv.weight"].tolist() == [4.0, 4.0]
    older = read_state_dict(checkpoint_folder(run.checkpoints, 2), ModelConfig())
    assert older["stem.conv.weight"].tolist() == [2.0, 2.0]
