"""What the ranks of `gems evaluate` and `gems predict` do with a run's weights.

Predictions are a table with a row for each sample, and maps of the classes of pixels as TIFF files.
"""

from __future__ import annotations

import csv
import os
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gems.config.schema import DataConfig
from gems.data import Dataset, Split, task_of
from gems.data.dataset import Image, Tokens
from gems.data.slide import SlideDataset
from gems.engine.batch_loader import BatchLoader
from gems.engine.checkpoint.state_dict import restore
from gems.engine.evaluation.heat_map import write_heat_maps
from gems.engine.evaluation.map_file import MapFile
from gems.engine.evaluation.measure import evaluate, measure
from gems.engine.evaluation.metrics import Metric, Scores, Values
from gems.engine.rank import Rank
from gems.engine.transport.mpi import Comm, broadcast
from gems.launch.scratch_run import REQUEST_JSON
from gems.losses.summed import Outputs
from gems.runs.folder import RunFolder
from gems.streaming.block_plan import Box
from gems.utils.atomic_io import atomic_write, distinct, read_json

CSV = "predictions.csv"
MAPS = "maps"
HEAT_MAPS = "heat_maps"


class Numbered(Dataset):
    """The samples of a dataset, each with its number as its label."""

    def __init__(self, dataset: Dataset) -> None:
        super().__init__(
            dataset.shape,
            dataset.num_classes,
            dataset.num_train,
            dataset.num_validation,
            dataset.seed,
            augment=False,
        )
        self.samples = dataset
        self.seeds_process = dataset.seeds_process

    def name_of(self, split: Split, index: int) -> str:
        """Return the name of a sample in the dataset."""
        return self.samples.name_of(split, index)

    def reads_rows(self, split: Split) -> bool:
        """Return whether the dataset does."""
        return self.samples.reads_rows(split)

    def reads_bytes(self, split: Split) -> bool:
        """Return whether the dataset does."""
        return self.samples.reads_bytes(split)

    def byte_scale(self) -> tuple[Image, Image]:
        """Return that of the dataset."""
        return self.samples.byte_scale()

    def byte_rows(
        self, split: Split, index: int, draw: int, first: int, end: int, *inner: tuple[int, int]
    ) -> NDArray[np.uint8]:
        """Return bytes of a sample as the dataset gives them, upright."""
        return self.samples.byte_rows(split, index, 0, first, end, *inner)

    def rows(
        self, split: Split, index: int, draw: int, first: int, end: int, *inner: tuple[int, int]
    ) -> Image:
        """Return rows of a sample as the dataset gives them, upright."""
        return self.samples.rows(split, index, 0, first, end, *inner)

    def _pixels(self, split: Split, index: int) -> Image | Tokens:
        return self.samples.image(split, index)

    def _label(self, split: Split, index: int) -> int:
        return index


class PredictionRows(Metric):
    """What a model says of samples whose labels are their numbers.

    Rows hold the number, then the probability of each class or label, the values of a regression,
    or the pixels of each class, whose map is a file of `folder` by then.
    """

    def __init__(self, data: DataConfig, scores: Scores, folder: Path, maps: Sequence[str]) -> None:
        super().__init__(data.num_classes, scores)
        self._task = task_of(data)
        self._sides = data.sides_px
        self._folder = folder
        self._maps = maps
        self._files: dict[int, MapFile] = {}  # by sample, of maps that are not complete
        self.takes_parts = self._task == "segmentation"

    def update_part(self, outputs: Outputs, labels: Tensor, part: Box) -> None:
        """Add a part of the maps of some samples to their files."""
        self._add(self._scores(outputs).detach(), labels, part, self._sides)

    def update(self, outputs: Outputs, labels: Tensor) -> None:
        """Keep the predictions of some samples, or write their maps."""
        scores = self._scores(outputs).detach()
        if self._task == "segmentation":
            self._add(scores, labels, (), tuple(scores.shape[2:]))
            return
        scores = scores.double().reshape(len(labels), -1)
        if self._task == "classification":
            scores = scores[:, : self._num_classes].softmax(1)
        elif self._task == "multi_label":
            scores = scores.sigmoid()
        self.by_sample.append(torch.cat([labels.double()[:, None], scores], dim=1).cpu())

    def compute(self) -> Values:
        """Return no figure."""
        return {}

    def _add(self, maps: Tensor, labels: Tensor, part: Box, sides: Sequence[int]) -> None:
        for number, scores in zip(labels.tolist(), maps, strict=True):
            if number not in self._files:
                path = self._folder / self._maps[number]
                self._files[number] = MapFile(path, sides, self._num_classes)
            file = self._files[number]
            file.add(scores[: self._num_classes].argmax(0).cpu().numpy(), part)
            if file.is_complete:
                del self._files[number]
                file.write()
                row = np.concatenate([[number], file.counts])
                self.by_sample.append(torch.from_numpy(row).double()[None])


def evaluate_run(folder: RunFolder, comm: Comm, device: torch.device) -> dict[str, Any]:
    """Evaluate a prepared run, whose train.initial_checkpoint are the weights; collective.

    If the folder holds a request, predictions are written as it says, and labels are not read.
    """
    plan = folder.read_plan()
    rank = Rank.open(plan, comm, device, trains=False)
    restore(rank, Path(str(plan.spec.train.initial_checkpoint)))
    request = read_json(folder.path / REQUEST_JSON)
    view = Numbered if request else None
    with closing(BatchLoader.open(plan, comm, device, plan.spec.train.steps, view=view)) as loader:
        if request:
            return write_predictions(rank, loader, request)
        return evaluate(rank, loader)


def write_predictions(
    rank: Rank, loader: BatchLoader, request: Mapping[str, Any]
) -> dict[str, Any]:
    """Write the predictions of all samples to the folder of a request.

    Collective, with a whole result on rank 0.
    The request holds `out`, a folder, and `classes`, a name for each class or value.

    Returns:
        The number of samples, the table and the folder of maps, if there are any.
    """
    spec = rank.plan.spec
    out = Path(request["out"])
    task = task_of(spec.data)
    samples = loader.dataset
    num_samples = loader.num_validation
    own = [samples.name_of("validation", index) for index in range(num_samples)] if samples else []
    names = broadcast(rank.comm, own)  # of rank 0, which reads samples
    maps = [f"{MAPS}/{stem}.tif" for stem in stems_of(names)] if task == "segmentation" else []
    predictions = PredictionRows(spec.data, rank.training.loss.scores, out, maps)
    measure(rank, loader, [predictions])
    summary = {"num_samples": num_samples, "table": str(out / CSV)}
    if task == "segmentation":
        summary["maps"] = str(out / MAPS)
    if rank.comm.rank == 0:
        rows = np.concatenate([part.numpy() for part in predictions.by_sample])
        rows = rows[np.argsort(rows[:, 0])]
        write_table(out / CSV, rows, names, maps, request["classes"], task)
        if isinstance(samples, Numbered) and isinstance(samples.samples, SlideDataset):
            write_heat_maps(out / HEAT_MAPS, samples.samples, rows[:, 1:], request["classes"])
            summary["heat_maps"] = str(out / HEAT_MAPS)
    return summary


def write_table(
    path: Path,
    rows: NDArray[np.float64],
    names: Sequence[str],
    maps: Sequence[str],
    classes: Sequence[str],
    task: str,
) -> None:
    """Write rows of `PredictionRows`, sorted by their numbers, as a CSV file.

    Of a segmentation with its `maps`.
    """
    kind = {"regression": "", "segmentation": "pixels_"}.get(task, "probability_")
    header = [
        "sample",
        *(["map"] if task == "segmentation" else []),
        *(["class"] if task == "classification" else []),
    ]
    with atomic_write(path) as partial, partial.open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow([*header, *(f"{kind}{name}" for name in classes)])
        for number, *values in rows.tolist():
            index = int(number)
            cells: list[Any] = [names[index]]
            if task == "segmentation":
                cells.append(maps[index])
            elif task == "classification":
                cells.append(classes[int(np.argmax(values))])
            table.writerow(
                [
                    *cells,
                    *(int(value) if task == "segmentation" else f"{value:.9g}" for value in values),
                ]
            )


def stems_of(names: Sequence[str]) -> list[str]:
    """Return each sample's path below the common folder, without suffix, numbered if it recurs."""
    paths = [Path(name) for name in names]
    parents = {str(path.parent) for path in paths}
    common = (
        Path(os.path.commonpath(parents)) if all(path.is_absolute() for path in paths) else Path()
    )
    below = (path.relative_to(common) if path.is_relative_to(common) else path for path in paths)
    return distinct(str(path.with_suffix("")) for path in below)
