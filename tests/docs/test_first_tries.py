"""What somebody with own data, an own loss or an own recipe tries first.

Each a command, and what it leaves behind.
"""

from __future__ import annotations

import csv
import importlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import tifffile
import torch
from PIL import Image
from safetensors.torch import load_file

from gems.utils.targets import import_module
from tests.docs.test_blocks import ROOT

pytestmark = [pytest.mark.docs, pytest.mark.timeout(300)]
# $SMALL of the commands: steps that take no time, over two ranks.
SMALL = (
    "cluster=local schedule=1f1b parallel.partitions=2 parallel.micro_batches=2"
    " parallel.micro_batch_size=2 model.depth=8 model.width=4 data.height_px=16 data.width_px=16"
    " benchmark.skip_steps=0 train.steps=4"
)
MINE = '''
import torch
from torch import nn
from torch.nn import functional


class Discs(torch.utils.data.Dataset):
    """Images with a bright disc or none: `rare` of them have one."""

    num_classes = 2

    def __init__(self, split, number=24, rare=12):
        self.first, self.number, self.rare = (0 if split == "train" else 1000), number, rare

    def __len__(self):
        return self.number

    def label(self, index):
        return int(index < self.rare)

    def __getitem__(self, index):
        image = torch.randn(3, 16, 16, generator=torch.Generator().manual_seed(self.first + index))
        image[:, 4:12, 4:12] += 0.3 * self.label(index)
        return image, self.label(index)


class WeightedFocal(nn.Module):
    def __init__(self, weights):
        super().__init__()
        self.register_buffer("weights", torch.tensor(weights))

    def weight(self, labels):
        return self.weights[labels].sum()

    def forward(self, logits, labels):
        each = functional.cross_entropy(logits, labels, reduction="none")
        return (self.weights[labels] * (1 - torch.exp(-each)) ** 2 * each).sum() / self.weight(labels)


class SignDescent(torch.optim.Optimizer):
    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter -= group["lr"] * parameter.grad.sign()


class Net(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(128, 2))
'''

Shell = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Shell:
    """Runs a command line in a folder that holds mine.py; it must end with a code."""
    (tmp_path / "mine.py").write_text(MINE)
    monkeypatch.chdir(tmp_path)
    programs = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = {
        **os.environ,
        "PATH": programs,
        "PYTHONPATH": str(ROOT),
        "SMALL": SMALL,
        "WANDB_MODE": "offline",
    }

    def run(command: str, code: int = 0) -> subprocess.CompletedProcess[str]:
        ended = subprocess.run(
            ["bash", "-c", command],
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=200,
        )
        assert ended.returncode == code, (
            f"{command}\nended with {ended.returncode}\n{ended.stdout}\n{ended.stderr}"
        )
        return ended

    return run


def folder_of(name: str) -> Path:
    (run,) = Path("runs").glob(f"{name}-*")
    return run


def result_of(name: str) -> dict[str, Any]:
    return dict(json.loads((folder_of(name) / "result.json").read_text()))


def metrics_of(name: str, column: str) -> list[float]:
    with (folder_of(name) / "metrics.csv").open(newline="") as file:
        return [float(row[column]) for row in csv.DictReader(file) if row[column]]


def pixels(number: int, *shape: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.random.default_rng(number).integers(256, size=shape, dtype=np.uint8)


def write_images(folder: Path, number: int) -> list[str]:
    folder.mkdir(parents=True)
    names = [f"{index:02d}.png" for index in range(number)]
    for index, name in enumerate(names):
        Image.fromarray(pixels(index, 16, 16, 3)).save(folder / name)
    return names


def write_start() -> dict[str, torch.Tensor]:
    """Write plain weights of `mine.Net` to start.pth, by its own names."""
    shapes = {"0.weight": (8, 3, 3, 3), "0.bias": (8,), "4.weight": (2, 128), "4.bias": (2,)}
    made = {name: 0.1 * torch.randn(shape) for name, shape in shapes.items()}
    torch.save(made, "start.pth")
    return made


def distance(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    assert one.keys() == other.keys()
    return float(
        torch.stack([(one[name].double() - other[name].double()).norm() for name in one]).norm()
    )


def test_own_dataset(shell: Shell) -> None:
    shell(
        "gems-jobs submit $SMALL name=own data.target=mine.Discs data.kwargs.number=28"
        " train.epochs=3"
    )
    found = result_of("own")
    assert found["num_validation"] == 28 and len(metrics_of("own", "train_loss")) == 3 * 28 // 4


def test_hdf5(shell: Shell) -> None:
    with h5py.File("scans.h5", "w") as file:
        file["images"], file["labels"] = pixels(0, 20, 16, 16, 3), np.arange(20) % 3
    shell(
        "gems-jobs submit $SMALL name=h5 data=hdf5 data.path=scans.h5 data.num_classes=3"
        " data.validation_samples=256"
    )
    assert 0 < result_of("h5")["num_validation"] < 20


def test_masks(shell: Shell) -> None:
    Path("cells/masks").mkdir(parents=True)
    for index, name in enumerate(write_images(Path("cells/images"), 12)):
        Image.fromarray(255 * (pixels(index, 16, 16) > 99).astype(np.uint8)).save(
            f"cells/masks/{name}"
        )
    shell(
        "gems-jobs submit $SMALL name=masks data=masks data.path=cells 'data.class_map={0: 0, 255:"
        " 1}' model=unet model.depth=2"
    )
    assert 0 < result_of("masks")["validation_dice"] < 1


def write_table(columns: str, *values: str) -> None:
    names = write_images(Path("images"), 16)
    rows = [f"images/{name},{values[index % len(values)]}\n" for index, name in enumerate(names)]
    Path("cohort.csv").write_text(f"file,{columns}\n" + "".join(rows))


def test_csv_of_several_labels(shell: Shell) -> None:
    write_table("mitosis,necrosis,tumour", "0,1,1", "1,0,1", "0,0,0")
    shell(
        "gems-jobs submit $SMALL name=several data=table data.path=cohort.csv data.task=multi_label"
        " 'data.label_columns=[mitosis,necrosis,tumour]' data.num_classes=3"
    )
    assert 0 <= result_of("several")["validation_accuracy"] <= 1


def test_regression(shell: Shell) -> None:
    write_table("age", "0.31", "0.62", "0.45")
    shell(
        "gems-jobs submit $SMALL name=age data=table data.path=cohort.csv data.task=regression "
        "'data.label_columns=[age]' data.num_classes=1"
    )
    assert 0 < result_of("age")["validation_mean_absolute_error"] < 10


def test_tiff_of_16_bits_and_of_5_pages(shell: Shell) -> None:
    for index in range(8):
        for folder in ("deep", "pages"):
            Path(folder, "ab"[index % 2]).mkdir(parents=True, exist_ok=True)
        tifffile.imwrite(
            f"deep/{'ab'[index % 2]}/{index}.tiff", pixels(index, 16, 16, 3).astype(np.uint16) * 257
        )
        with tifffile.TiffWriter(f"pages/{'ab'[index % 2]}/{index}.tiff") as file:
            for page in range(5):
                file.write(pixels(page, 16, 16, 3), contiguous=False)
    said = shell("gems-jobs submit $SMALL name=deep data=folder data.path=deep", code=2).stderr
    assert "data.bits" in said
    shell("gems-jobs submit $SMALL name=deep data=folder data.path=deep data.bits=16")
    said = shell("gems-jobs submit $SMALL name=pages data=folder data.path=pages", code=2).stderr
    assert "data.page" in said
    shell("gems-jobs submit $SMALL name=pages data=folder data.path=pages data.page=3")
    assert result_of("deep")["num_validation"] + result_of("pages")["num_validation"] > 1


def test_slide(shell: Shell) -> None:
    shell("gems-jobs submit $SMALL name=slide data=slide data.path=tissue data.level=1")
    assert 0 <= result_of("slide")["validation_accuracy"] <= 1


def test_own_loss_with_class_weights(shell: Shell) -> None:
    ended = shell(
        "gems verify $SMALL loss.target=mine.WeightedFocal 'loss.kwargs.weights=[1.0,9.0]' --json"
    )
    assert json.loads(ended.stdout)["max_rel_error"] <= 1e-12


def test_lamb_and_own_optimizer(shell: Shell) -> None:
    """The own one is refused nowhere, and moves each weight by its rate or not at all."""
    before = write_start()
    own = (
        "data.target=mine.Discs model.target=mine.Net train.initial_checkpoint=start.pth"
        " train.steps=1"
    )
    shell(
        f"gems-jobs submit $SMALL name=lamb {own} optimizer=lamb && gems export lamb --out lamb.pt"
    )
    assert distance(before, torch.load("lamb.pt")) > 0
    shell(
        f"gems-jobs submit $SMALL name=sign {own} optimizer.target=mine.SignDescent"
        " optimizer.lr=0.25"
    )
    shell("gems export sign --out sign.pt")
    after = torch.load("sign.pt")
    moved = torch.cat([(after[name] - before[name]).abs().flatten() for name in before])
    assert set(moved.mul(1e4).round().tolist()) <= {0.0, 2500.0} and moved.max() > 0


def test_one_cycle(shell: Shell) -> None:
    shell(
        "gems-jobs submit $SMALL name=cycle lr_scheduler=one_cycle optimizer.lr=0.2 train.steps=8"
    )
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.2, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.2, total_steps=8)
    expected = []
    for _ in range(8):
        expected.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    assert metrics_of("cycle", "learning_rate") == pytest.approx(expected, rel=1e-6)


def test_clipping(shell: Shell) -> None:
    """One step of plain descent by a gradient of norm 0.01."""
    before = write_start()
    shell(
        "gems-jobs submit $SMALL name=clip data.target=mine.Discs model.target=mine.Net"
        " optimizer.momentum=0 optimizer.weight_decay=0 optimizer.lr=1"
        " train.initial_checkpoint=start.pth train.steps=1 train.max_grad_norm=0.01"
    )
    shell("gems export clip --out clip.pt")
    assert distance(before, torch.load("clip.pt")) == pytest.approx(0.01, rel=1e-3)
    assert metrics_of("clip", "grad_norm")[0] > 0.01


def test_average_of_weights(shell: Shell) -> None:
    before = write_start()
    shell(
        "gems-jobs submit $SMALL name=ema data.target=mine.Discs model.target=mine.Net"
        " train.steps=1 train.initial_checkpoint=start.pth train.ema_decay=0.75"
    )
    shell("gems export ema --out last.pt && gems export ema --weights average --out average.pt")
    last = torch.load("last.pt")
    average = torch.load("average.pt")
    assert distance(before, last) > 0
    assert (
        distance({name: 0.75 * before[name] + 0.25 * last[name] for name in last}, average) < 1e-6
    )


def test_early_stopping_keeps_the_best(shell: Shell) -> None:
    """The weights get worse with every step, so the first validation stays the best."""
    shell(
        "gems-jobs submit $SMALL name=early data.target=mine.Discs optimizer.lr=30 train.steps=50 "
        "train.validate_steps=1 train.monitor=loss train.min_improvement=1e9 train.patience=3"
    )
    best = json.loads((folder_of("early") / "best.json").read_text())
    assert best["step"] == 1 and len(metrics_of("early", "train_loss")) == 4
    found = json.loads(shell("gems evaluate early --weights best --json").stdout)
    assert found["validation_loss"] == pytest.approx(best["value"], rel=1e-6)


def test_area_under_the_curve_of_100_to_5(shell: Shell) -> None:
    """Equal to the share of pairs that the predicted probabilities put in order."""
    shell(
        "gems-jobs submit $SMALL name=rare data.target=mine.Discs data.kwargs.number=105"
        " data.kwargs.rare=5 'metrics=[auc,balanced_accuracy]' train.monitor=auc"
    )
    shell("gems predict rare --out predicted")
    rows = list(csv.DictReader(Path("predicted/predictions.csv").read_text().splitlines()))
    scores = np.array([float(row["probability_1"]) for row in rows])
    pairs = scores[:5, None] - scores[None, 5:]
    assert result_of("rare")["validation_auc"] == pytest.approx(
        ((pairs > 0) + 0.5 * (pairs == 0)).mean(), rel=1e-6
    )


def test_trackers(shell: Shell) -> None:
    shell("gems-jobs submit $SMALL name=tracked 'train.loggers=[tensorboard,wandb]'")
    accumulator = importlib.import_module("tensorboard.backend.event_processing.event_accumulator")
    events = accumulator.EventAccumulator(str(folder_of("tracked") / "tensorboard"))
    events.Reload()
    seen = [event.value for event in events.Scalars("train_loss")]
    assert seen == pytest.approx(metrics_of("tracked", "train_loss"), rel=1e-6)
    (run,) = (folder_of("tracked") / "wandb").glob("offline-run-*/run-*.wandb")
    assert b"train_loss" in run.read_bytes()


def test_nan_at_step_6(shell: Shell) -> None:
    """The rate of step 5 throws the weights so far that step 6 computes no number."""
    command = (
        "gems-jobs submit $SMALL name=nan optimizer.lr=0.1 lr_scheduler=multi_step"
        " lr_scheduler.interval=step 'lr_scheduler.kwargs.milestones=[5]'"
        " lr_scheduler.kwargs.gamma=1e30 train.steps=9 train.checkpoint_steps=2"
    )
    assert "step 6 is not finite" in shell(command, code=4).stderr
    saved = [load_file(path) for path in folder_of("nan").glob("checkpoints/*/*.safetensors")]
    assert saved and all(
        bool(tensor.isfinite().all()) for shard in saved for tensor in shard.values()
    )


def test_export_into_the_class_of_torchvision(shell: Shell) -> None:
    shell(
        "gems-jobs submit $SMALL name=vision data.target=mine.Discs"
        " model.target=torchvision.models.resnet18 model.kwargs.num_classes=2"
    )
    shell("gems export vision --out weights.safetensors && gems predict vision --out predicted")
    model = import_module("torchvision.models").resnet18(num_classes=2).eval()
    model.load_state_dict(load_file("weights.safetensors"), strict=True)
    discs: dict[str, Any] = {}
    exec(MINE, discs)
    images = torch.stack(
        [image for image, _ in map(discs["Discs"]("validation").__getitem__, range(24))]
    )
    rows = csv.DictReader(Path("predicted/predictions.csv").read_text().splitlines())
    found = [[float(row["probability_0"]), float(row["probability_1"])] for row in rows]
    with torch.no_grad():
        assert np.array(found) == pytest.approx(model(images).softmax(1).numpy(), rel=1e-4)


def test_prediction_on_other_ranks(shell: Shell) -> None:
    shell("gems-jobs submit $SMALL name=two data.target=mine.Discs data.kwargs.number=30")
    shell("gems predict two parallel.partitions=3 schedule=gems_master --out predicted")
    found = json.loads(
        shell("gems evaluate two parallel.partitions=1 schedule=gpipe --json").stdout
    )
    rows = list(csv.DictReader(Path("predicted/predictions.csv").read_text().splitlines()))
    right = sum(int(row["class"]) == int(index < 12) for index, row in enumerate(rows))
    assert right / 30 == found["validation_accuracy"] == result_of("two")["validation_accuracy"]


def test_plain_weights(shell: Shell) -> None:
    before = write_start()
    shell(
        "gems-jobs submit $SMALL name=plain data.target=mine.Discs model.target=mine.Net "
        "train.initial_checkpoint=start.pth optimizer.lr=1e-20 && gems export plain --out plain.pt"
    )
    assert distance(before, torch.load("plain.pt")) == 0


def test_changed_code_is_not_resumed(shell: Shell) -> None:
    command = "gems-jobs submit $SMALL name=changed data.target=mine.Discs model.target=mine.Net"
    shell(f"{command} train.checkpoint_steps=2")
    Path("mine.py").write_text(MINE.replace("nn.ReLU()", "nn.Tanh()"))
    more = f"{command} train.steps=6 train.resume={folder_of('changed')}"
    assert "train.resume=force" in shell(more, code=2).stderr
