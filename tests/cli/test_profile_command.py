"""`gems profile`: its table, its JSON, and that the JSON can be given back."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gems.__main__ import VERBS
from gems.cli.framework import main
from gems.profile import ModelProfile
from gems.profile.spans import Spans

NETWORK = ["model=resnet20_v2", "model.depth=11"]
WORDS = ["data=synthetic", *NETWORK, "machine=cpu", "data.height_px=16", "data.width_px=16"]


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GEMS_CACHE_DIR", str(tmp_path_factory.getbasetemp() / "profiles"))


def test_the_json_is_a_profile_that_can_be_given_back(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main("gems", VERBS, ["profile", *WORDS, "--json"]) == 0
    text = capsys.readouterr().out
    document = json.loads(text)
    path = tmp_path / "profile.json"
    path.write_text(text)
    profile = ModelProfile.from_json(document)
    spans = Spans(profile)
    end = profile.num_layers
    assert document["schema"] == "gems.profile/1" and profile.source == "fake"
    assert document["stash_bytes"] == spans.stash[0, end]
    assert document["peak_bytes"] > 0.8 * document["composed_peak_bytes"] > 0
    assert document["forward_s"] == pytest.approx(sum(layer.forward_s for layer in profile.layers))
    assert main("gems", VERBS, ["profile", *WORDS, f"profile.path={path}", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == document
    assert (
        main("gems", VERBS, ["profile", *WORDS, "data.height_px=20", f"profile.path={path}"]) == 2
    )
    assert "data.height_px=16 instead of 20" in capsys.readouterr().err


def test_the_table_has_a_row_a_layer_and_both_peaks(capsys: pytest.CaptureFixture[str]) -> None:
    assert main("gems", VERBS, ["profile", *WORDS]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith(": 1 x 16 x 16 px, float32, fake on cpu")
    assert [line.split()[0] for line in lines[2:5]] == ["stem", "stage1.block1", "stage2.block1"]
    assert lines[-3].startswith("all ") and all("peak of the whole" in line for line in lines[-2:])


def test_a_profile_at_another_resolution_from_three(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    paths = []
    for side_px in (16, 32, 48):
        size = [f"data.height_px={side_px}", f"data.width_px={side_px}"]
        assert main("gems", VERBS, ["profile", *WORDS, *size, "--json"]) == 0
        paths.append(tmp_path / f"{side_px}.json")
        paths[-1].write_text(capsys.readouterr().out)
    size = ["data.height_px=64", "data.width_px=64"]
    points = ",".join(map(str, paths))
    assert main("gems", VERBS, ["profile", *WORDS, *size, "--from", points, "--json"]) == 0
    said = capsys.readouterr()
    found = ModelProfile.from_json(json.loads(said.out))
    assert said.err.startswith("gems: extrapolated from 3 profiles; error at most ")
    assert main("gems", VERBS, ["profile", *WORDS, *size, "--json"]) == 0
    taken = ModelProfile.from_json(json.loads(capsys.readouterr().out))
    ours, theirs = (Spans(each).stash[0, each.num_layers] for each in (found, taken))
    assert ours == pytest.approx(theirs, rel=0.01)
    (tmp_path / "64.json").write_text(said.out)
    back = ["profile", *WORDS, *size, f"profile.path={tmp_path / '64.json'}", "--json"]
    assert main("gems", VERBS, back) == 0
    assert main("gems", VERBS, ["profile", *WORDS, "--from", str(paths[0])]) == 2
    assert "must be profiles of two sizes or more" in capsys.readouterr().err


def test_hdf5_there_and_back(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "profile.h5"
    assert main("gems", VERBS, ["profile", *WORDS, "--hdf5", str(path), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert main("gems", VERBS, ["profile", *WORDS, f"profile.path={path}", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == document
    assert main("gems", VERBS, ["profile", *WORDS, "--hdf5", str(tmp_path / "no" / "a.h5")]) == 2
    assert "--hdf5=" in capsys.readouterr().err
    path.write_bytes(b"no HDF5")
    assert main("gems", VERBS, ["profile", *WORDS, f"profile.path={path}"]) == 2
    assert "holds no profile" in capsys.readouterr().err
