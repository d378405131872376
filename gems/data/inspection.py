"""Check the data once before a run is queued.

The checks cover the first image of each class, every file and every label. If torch is not loaded
in this process, the user's code runs in a child process.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from gems.config.schema import DataConfig
from gems.data import find_source, open_dataset, task_of
from gems.data.dataset import Dataset, Split
from gems.data.images import ImageDataset, ordered, stamps, threads
from gems.errors import ConfigError
from gems.utils.cache import keep_cached, read_cached
from gems.utils.targets import answer, ask_child, target_error

_PAUSES_S = (1.0, 30.0)  # between lines of progress, on a terminal and elsewhere
SPLITS: tuple[Split, Split] = ("train", "validation")


def inspect_data(data: DataConfig, seed: int) -> None:
    """Check the data of a run, and compute what all its ranks need of it.

    Files that were read once are not read again until one of them changes.

    Raises:
        ConfigError: A file cannot be read or would be misread, a label is out of range, or a split
            is empty.
    """
    if data.target is not None:
        find_source(data).check(data)
        return
    if not find_source(data).counts_itself:  # samples that need no files
        return
    if data.transform is None or "torch" in sys.modules:
        _inspect(data, seed)
        return
    ask_child("data.transform", data.transform, __name__, json.dumps(asdict(data)), str(seed))


def _inspect(data: DataConfig, seed: int) -> None:
    dataset = open_dataset(data, seed)
    if isinstance(dataset, ImageDataset):
        dataset.prepare()
    files = dataset.files()
    key = repr((asdict(data), seed, _stamps(files)))
    if files and read_cached(None, "examination", key) is not None:
        return
    for split in (split for split in SPLITS if dataset.num_images(split)):
        for index in _first_of_each_class(dataset, split, task_of(data)):
            if dataset.is_large and dataset.reads_rows(split):
                for band in dataset.bands():
                    rows = band[0].start, band[0].stop
                    dataset.rows(split, index, 0, *rows)
                    if dataset.reads_mask_rows(split):
                        dataset.mask_rows(split, index, 0, *rows)
                if not dataset.reads_mask_rows(split):
                    dataset.label(split, index)
                continue
            image, _ = dataset.sample(split, index)
            if image.shape != dataset.shape:
                text = (
                    f"{dataset.name_of(split, index)} has shape {image.shape}, and the keys say"
                    f" {dataset.shape}"
                )
                raise ConfigError(
                    "data.height_px",
                    data.height_px,
                    text,
                    f"set data.channels, {' and '.join(data.sides)}",
                )
    if files:
        _examine(dataset)
        keep_cached(None, "examination", key, {"num_files": len(files)})


def _examine(dataset: Any) -> None:
    """Read every sample completely, several at a time, and report progress if it takes long."""
    places = [(split, index) for split in SPLITS for index in range(dataset.num_images(split))]
    is_terminal = sys.stderr.isatty()
    pause_s, end = (_PAUSES_S[0], "\r") if is_terminal else (_PAUSES_S[1], "\n")
    told_at = time.monotonic()
    line = ""
    with threads() as pool:
        for count, _ in enumerate(
            ordered(pool, lambda number: dataset.examine(*places[number]), len(places)), 1
        ):
            if time.monotonic() > told_at + pause_s:
                told_at = time.monotonic()
                line = f"gems: checked {count} of {len(places)} samples before training"
                print(line, end=end, file=sys.stderr, flush=True)
    if line and is_terminal:
        print(" " * len(line), end=end, file=sys.stderr, flush=True)


def _first_of_each_class(dataset: Dataset, split: Split, task: str) -> list[int]:
    """Return the first sample of each class, after reading every label.

    For masks and values, return the first sample only.
    """
    if task == "segmentation":
        return [0]
    first: dict[int, int] = {}
    for index in range(dataset.num_images(split)):
        label = dataset.label(split, index)
        first.setdefault(label if isinstance(label, int) else 0, index)
    return sorted(first.values())


def _stamps(files: list[Path]) -> str:
    try:
        return stamps(files)
    except OSError as error:
        raise ConfigError(
            "data.path", error.filename, f"cannot be read ({error.strerror})"
        ) from error


def main(argv: Sequence[str]) -> None:
    """Print the answer to a process without torch that asks about data with a transform."""
    import torch  # transforms take torch tensors

    data = DataConfig(**json.loads(argv[0]))

    def inspect() -> dict[str, str]:
        _inspect(data, int(argv[1]))
        return {"torch": torch.__version__}

    answer(
        inspect,
        lambda error: target_error(
            "data.transform", str(data.transform), "cannot be applied", error
        ),
    )


if __name__ == "__main__":
    main(sys.argv[1:])
