"""`gems predict`: apply a run's weights to images; write a table, and maps of pixels."""

from __future__ import annotations

import csv
import glob
import tempfile
from collections.abc import Collection, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from gems.cli.evaluate import EVALUATE, LAST, names_of_values, read_run
from gems.cli.framework import Options, print_json
from gems.config.compose import changed
from gems.config.schema import DataConfig
from gems.data import IMAGES, find_source, kind_of, open_dataset, task_of
from gems.data.files.paths import expanded, files_below
from gems.data.files.reader import check_header
from gems.data.images import KEYS, ImageDataset
from gems.data.slide import SUFFIXES
from gems.errors import ConfigError
from gems.launch.scratch_run import run_program

# Of the files that are taken of a folder.
IMAGE_SUFFIXES = (
    ".png",
    ".jpg",
    ".jpeg",
    ".tif",
    ".tiff",
    ".bmp",
    ".webp",
    ".gif",
    ".ppm",
    ".pgm",
    ".jp2",
)
UNLABELLED = "unlabelled"
UNLABELLED_SLIDE = "unlabelled_slide"
SLIDE = "slide"


def predict(words: Sequence[str], options: Options) -> int:
    """Predict the images of --input, or of the validation split, and write to the folder of --out.

    Raises:
        ConfigError: No run, no weights, no image, one that cannot be read, or a folder that holds
        files. RankFailedError: a rank ended before all was written.
    """
    pattern = options.chosen.get("--input")
    inputs = (
        []
        if pattern is None
        else [pattern, *(word for word in words[1:] if "=" not in word or Path(word).exists())]
    )
    out = Path(options.chosen.get("--out", "predictions")).absolute()
    weights = options.chosen.get("--weights", LAST)
    run_words = [word for word in words if word not in inputs[1:]]
    with tempfile.TemporaryDirectory(prefix="gems-predict-") as scratch:
        spec, overrides, path = read_run(run_words, weights, "predict")
        spec = replace(spec, train=replace(spec.train, epochs=None))
        classes = names_of_values(spec.data)
        files = input_files(inputs, SUFFIXES if spec.data.name == SLIDE else IMAGE_SUFFIXES)
        if files:
            listed = Path(scratch) / "files.txt"
            write_list(listed, files, spec.data)
            spec = replace(spec, data=unlabelled(spec.data, spec.seed, listed))
        spec = changed(spec, overrides, takes_options=True)
        if spec.data.name == UNLABELLED:
            check_files(files, spec.data)
        make_folder(out)
        request = {"out": str(out), "classes": classes}
        result = run_program(
            spec, EVALUATE, "predict", request, timeout_s=None, needs_labels=False, trains=False
        )
    if options.json:
        print_json({"run": str(path), **result})
    else:
        print("\n".join(f"{key.replace('_', ' '):12}  {value}" for key, value in result.items()))
    return 0


def input_files(inputs: Sequence[str], suffixes: Collection[str]) -> list[Path]:
    """Return the files that are named, those of named folders with one of the suffixes, and those that patterns match.

    Raises:
        ConfigError: No such file, or a folder or pattern without any.
    """
    images: list[Path] = []
    for text in inputs:
        path = expanded("--input", text)
        if path.is_dir():
            files = [file for file in files_below(path) if file.suffix.lower() in suffixes]
        elif path.exists():
            files = [path]
        else:
            files = sorted(
                Path(file) for file in glob.glob(str(path), recursive=True) if Path(file).is_file()
            )
        if not files:
            what = (
                f"holds no file that ends with {', '.join(suffixes)}"
                if path.is_dir()
                else "no such file"
            )
            raise ConfigError(
                "--input", text, what, "name images, folders of images, or a pattern as '*.png'"
            )
        images += [file.absolute() for file in files]
    return list(dict.fromkeys(images))


def check_files(files: Sequence[Path], data: DataConfig) -> None:
    """Check the headers of the files, without reading pixels.

    Raises:
        ConfigError: One that cannot be read, or would be misread.
    """
    for path in files:
        check_header(path, data)


def write_list(path: Path, files: Sequence[Path], data: DataConfig) -> None:
    """Write a line for each image; of slides a table in which all have one label."""
    with path.open("w", newline="") as file:
        if data.name != SLIDE:
            file.writelines(f"{image}\n" for image in files)
            return
        table = csv.writer(file)
        table.writerow([data.image_column, "label", "split"])
        table.writerows([image, next(iter(data.class_map), "0"), "validation"] for image in files)


def unlabelled(data: DataConfig, seed: int, listed: Path) -> DataConfig:
    """Return the data of a run with other images, which are read and normalised alike.

    Raises:
        ConfigError: The run's samples are not images, or are read by the user's own code.
    """
    if data.target is not None or kind_of(data) != IMAGES:
        what = (
            "the samples of this run are no image files but come from"
            f" {data.target or f'data={data.name}'}"
        )
        advice = (
            "leave --input out, and say by data.kwargs or data.path what its validation split holds"
        )
        raise ConfigError("--input", "given", what, advice)
    changes: dict[str, Any] = {"task": task_of(data), "transform": None, "transform_kwargs": {}}
    if data.name == SLIDE:
        unread: set[str] = set()
        changes |= {
            "name": UNLABELLED_SLIDE,
            "path": str(listed.parent),
            "labels_path": str(listed),
            "region": None,
        }
    else:
        unread = set(find_source(data).keys) - set(KEYS)
        changes |= {"name": UNLABELLED, "path": str(listed)}
    options = {
        field.name: getattr(data, field.name) for field in fields(data) if field.name not in unread
    }
    config = DataConfig(**options | changes)
    dataset = (
        open_dataset(data, seed) if data.normalization == "computed" and data.mean is None else None
    )
    if not isinstance(dataset, ImageDataset):
        return config
    mean, deviation = (part.ravel().tolist() for part in dataset.statistics())
    return replace(config, normalization="none", mean=mean, std=deviation)


def make_folder(out: Path) -> None:
    """Create the folder of predictions.

    Raises:
        ConfigError: It cannot be made, or holds files already.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            "--out", out, f"cannot be made ({error.strerror})", "choose another folder"
        ) from error
    if any(out.iterdir()):
        raise ConfigError(
            "--out", out, "is not empty", "choose another folder, for maps of two calls would mix"
        )
