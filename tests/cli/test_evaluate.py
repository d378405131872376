"""`gems evaluate`, `gems predict` and `gems export` on a run of two ranks that was trained here."""

from __future__ import annotations

import csv
import json
import os
from pathlib import Path

import numpy as np
import pytest
import tifffile
import torch
from PIL import Image

import gems
from gems.cli.evaluate import metric_tables, run_for_inference, weights_folder
from gems.cli.framework import Options
from gems.cli.predict import predict
from gems.config.compose import compose
from gems.data import open_dataset
from gems.errors import ConfigError
from gems.runs.folder import RunFolder
from gems.runs.prepare import prepare
from tests.helpers.commands import Gems, runner
from tests.helpers.processes import python

ROOT = Path(__file__).parents[2]
WORDS = (
    "data=synthetic",
    "data.height_px=16",
    "data.width_px=16",
    "data.validation_samples=10",
    "model.depth=8",
    "schedule=1f1b",
    "parallel.partitions=2",
    "parallel.micro_batch_size=4",
    "train.steps=6",
    "train.validate_steps=3",
    "train.monitor=loss",
    "optimizer.lr=0.2",
    "cluster=local",
)

pytestmark = pytest.mark.usefixtures("warm")


@pytest.fixture(scope="module")
def trained(warm: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that validated after three steps and at its end."""
    folder = tmp_path_factory.mktemp("trained")
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    ended = python("-m", "jobs", "submit", *WORDS, cwd=folder, env=environment)
    assert ended.returncode == 0, ended.stderr
    (run,) = (folder / "runs").iterdir()
    return run


@pytest.fixture
def command(
    trained: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Gems:
    """Run commands beside the run, in this process: another would load torch and profiles anew."""
    return runner(capfd, trained.parents[1], monkeypatch)


def test_strips_measure_what_whole_images_did(trained: Path, command: Gems) -> None:
    """A network with batch norm, which could not train in strips."""
    said = command("evaluate", "run", "parallel.strips=4", "--json")
    assert said.code == 0, said.err
    found = json.loads(said.out)
    result = json.loads(RunFolder(trained).result_json.read_text())
    assert (
        found["num_validation"] == 10
        and found["validation_accuracy"] == result["validation_accuracy"]
    )
    assert found["validation_loss"] == pytest.approx(result["validation_loss"], rel=1e-5)


def test_one_rank_measures_what_two_ranks_did(trained: Path, command: Gems) -> None:
    said = command("evaluate", "run", "parallel.partitions=1", "schedule=gpipe", "--json")
    assert said.code == 0, said.err
    found = json.loads(said.out)
    result = json.loads(RunFolder(trained).result_json.read_text())
    assert found["num_validation"] == result["num_validation"] == 10
    assert found["validation_accuracy"] == result["validation_accuracy"]
    assert found["validation_loss"] == pytest.approx(result["validation_loss"], rel=1e-5)


def test_the_model_in_one_piece_gives_the_same_loss(trained: Path) -> None:
    spec = RunFolder(trained).read_spec()
    data = open_dataset(spec.data, spec.seed)
    images = torch.stack([torch.from_numpy(data.image("validation", index)) for index in range(10)])
    labels = torch.tensor([data.label("validation", index) for index in range(10)])
    with torch.no_grad():
        loss = torch.nn.functional.cross_entropy(gems.load_model(trained)(images), labels)
    result = json.loads(RunFolder(trained).result_json.read_text())
    assert float(loss) == pytest.approx(result["validation_loss"], rel=1e-5)


def test_best_weights_are_those_of_the_best_validation(trained: Path) -> None:
    best = json.loads(RunFolder(trained).best_json.read_text())
    assert best["step"] in (3, 6) and best["metric"] == "validation_loss"
    folder = weights_folder(trained, "best")
    assert sorted(path.name for path in folder.iterdir()) == ["stage0000.pt", "stage0001.pt"]
    spec, path = run_for_inference([str(trained)], "best", "evaluate")
    assert (spec.train.initial_checkpoint, path) == (str(folder), trained)


def test_overrides_change_ranks_data_and_micro_batches(trained: Path) -> None:
    words = [
        str(trained),
        "parallel.partitions=3",
        "parallel.micro_batches=6",
        "data=tissue",
        "data.height_px=32",
    ]
    spec, _ = run_for_inference(words, "last", "evaluate")
    assert (spec.world_size, spec.parallel.micro_batches, spec.cluster.ranks_per_node) == (3, 6, 3)
    assert (spec.data.name, spec.data.height_px, spec.data.width_px) == ("tissue", 32, 16)


@pytest.mark.cases
def test_metrics_by_class_are_tables() -> None:
    values = {
        "validation_loss": 0.5,
        "validation_r2": None,
        "validation_dice_by_class": [0.25, None],
        "validation_confusion_matrix": [[4, 1], [0, 12]],
        "validation_own": [1.0, 2.0, 3.0],
        "num_validation": 17,
    }
    assert metric_tables(values, ["benign", "tumour"], title="run on data=folder").splitlines() == [
        "run on data=folder",
        "  validation loss  0.5",
        "  validation r2    -",
        "  validation own   [1.0, 2.0, 3.0]",
        "  num validation   17",
        "  class   validation dice by class",
        "  benign                      0.25",
        "  tumour                         -",
        "  validation confusion matrix: a row for each true class, a column for each predicted one",
        "  class   benign  tumour",
        "  benign       4       1",
        "  tumour       0      12",
    ]
    assert "class (1)" in metric_tables({"a": [[1, 2], [3, 4]]}, ["x", "class"], title="")


def probabilities(run: Path, images: torch.Tensor) -> list[list[float]]:
    """The probabilities of each class by the network in one piece."""
    with torch.no_grad():
        return gems.load_model(run)(images).softmax(1).tolist()


def predicted(command: Gems, *words: str) -> list[dict[str, str]]:
    out = Path(f"out{len(list(Path().glob('out*')))}")
    said = command("predict", "run", "--out", out.name, *words)
    assert said.code == 0, said.err
    return list(csv.DictReader((out / "predictions.csv").read_text().splitlines()))


def test_three_ranks_predict_what_the_model_in_one_piece_says(trained: Path, command: Gems) -> None:
    """Of the run's own validation split, whose accuracy they have."""
    rows = predicted(command, "parallel.partitions=3", "schedule=gems_master")
    spec = RunFolder(trained).read_spec()
    data = open_dataset(spec.data, spec.seed)
    images = torch.stack([torch.from_numpy(data.image("validation", index)) for index in range(10)])
    found = [[float(row["probability_0"]), float(row["probability_1"])] for row in rows]
    assert np.array(found) == pytest.approx(np.array(probabilities(trained, images)), rel=1e-4)
    right = sum(
        int(row["class"]) == data.label("validation", index) for index, row in enumerate(rows)
    )
    assert (
        right / 10 == json.loads(RunFolder(trained).result_json.read_text())["validation_accuracy"]
    )
    assert [row["sample"] for row in rows] == [
        f"sample {index} of validation" for index in range(10)
    ]


def test_images_of_files_are_predicted(trained: Path, command: Gems, tmp_path: Path) -> None:
    """A pattern and a folder, without labels; files of two folders may have one name."""
    pixels = np.random.default_rng(3).integers(256, size=(3, 16, 16, 3), dtype=np.uint8)
    paths = [tmp_path / name for name in ("more/a.png", "more/deep/b.png", "a.png")]
    for path, image in zip(paths, pixels, strict=True):
        path.parent.mkdir(exist_ok=True, parents=True)
        Image.fromarray(image).save(path)
    rows = predicted(
        command, "--input", str(tmp_path / "more"), str(tmp_path / "*.png"), "parallel.partitions=1"
    )
    assert [row["sample"] for row in rows] == [str(path) for path in paths]
    images = (torch.from_numpy(pixels).permute(0, 3, 1, 2).float() - 127.5) / 64
    expected = probabilities(trained, images)
    found = [[float(row["probability_0"]), float(row["probability_1"])] for row in rows]
    assert np.array(found) == pytest.approx(np.array(expected), rel=1e-4)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--input", "no/such.png"], r"^--input=no/such\.png: no such file"),
        (["--input", "empty"], r"^--input=empty: holds no file that ends with \.png"),
        (["--input", "tables"], r"^--input=tables: holds no file that ends with \.png"),
        (
            ["--input", "full/five.tiff"],
            r"^data\.channels=3: .*/five\.tiff has 5; set data\.channels=5$",
        ),
        (["--input", "full/no.csv"], r"^data\.path=.*/no\.csv: not a readable image"),
        (["--out", "full"], r"^--out=.*/full: is not empty; choose another"),
        (["--out", "full/predictions.csv/deeper"], r"^--out=.*: cannot be made"),
        (["data=tisue"], r"^data=tisue: allowed: "),
    ],
)
def test_refusals_of_predict(
    trained: Path, words: list[str], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(trained.parents[1])
    Path("empty").mkdir(exist_ok=True)
    Path("full").mkdir(exist_ok=True)
    Path("tables", ".hidden").mkdir(exist_ok=True, parents=True)
    for name in (
        "full/predictions.csv",
        "full/no.csv",
        "tables/labels.csv",
        "tables/.hidden/a.png",
    ):
        Path(name).touch()
    tifffile.imwrite(
        "full/five.tiff",
        np.zeros((5, 8, 8), np.uint8),
        photometric="minisblack",
        planarconfig="separate",
    )
    chosen = dict(zip(words[::2], words[1::2], strict=False)) if words[0].startswith("--") else {}
    rest = [] if chosen else words
    with pytest.raises(ConfigError, match=says):
        predict([str(trained), *rest], Options(chosen=chosen))


def test_a_file_that_is_no_image_ends_with_its_name(command: Gems, tmp_path: Path) -> None:
    (tmp_path / "a.png").write_text("no image")
    words = ["parallel.partitions=1", "--input", str(tmp_path), "--out", "none"]
    said = command("predict", "run", *words)
    assert not Path("none").exists()
    assert said.code == 2 and f"{tmp_path}/a.png: not a readable image" in said.err


def test_what_has_no_labels_is_not_trained_on(tmp_path: Path) -> None:
    (tmp_path / "files.txt").write_text(f"{tmp_path}/a.png\n")
    with pytest.raises(
        ConfigError, match=r"^data=unlabelled: has no labels; predict it: gems predict RUN"
    ):
        prepare(
            compose(["data=unlabelled", f"data.path={tmp_path}/files.txt", "data.num_classes=2"])
        )


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["parallel.partitions=1"], r"^run=none: must be one run; gems evaluate RUN"),
        (["a", "b"], r"^run=a b: must be one run"),
        (
            ["{run}", "parallel.partition=1"],
            r"^parallel\.partition=1: unknown key; nearest: parallel\.partitions",
        ),
        (["{run}", "data=tisue"], r"^data=tisue: allowed: .*nearest: tissue"),
    ],
)
def test_refusals(trained: Path, words: list[str], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        run_for_inference([word.format(run=trained) for word in words], "last", "evaluate")


def test_a_run_without_best_weights(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"^--weights=best: .* has none; train with train\.monitor=METRIC$"
    ):
        weights_folder(tmp_path, "best")
    with pytest.raises(
        ConfigError, match=r"^--weights=average: .* has none; train with train\.ema_decay"
    ):
        weights_folder(tmp_path, "average")
    (tmp_path / "checkpoint" / "average").mkdir(parents=True)
    assert weights_folder(tmp_path, "average") == tmp_path / "checkpoint" / "average"
