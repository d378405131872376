"""Images in folders by class or with a table of their classes, and lists of unlabelled images."""

from __future__ import annotations

from pathlib import Path

from gems.config.recipe import TASKS
from gems.config.schema import DataConfig
from gems.data.dataset import DATASETS, Source, Split, generator
from gems.data.files.paths import expanded, files_below, folders_in, split_folders
from gems.data.images import KEYS, FileDataset, check_images, stamps
from gems.data.splits import num_held_out
from gems.data.table import Records, class_numbers, read_records, split_records
from gems.errors import ConfigError

_LAYOUTS = "PATH/train/CLASS/* and PATH/validation/CLASS/* (or val), or PATH/CLASS/*"

Files = list[tuple[Path, int]]


class FolderDataset(FileDataset):
    """Images in folders of classes, with or without folders of splits.

    The files are PATH/train/CLASS/* and PATH/validation/CLASS/* (or val), or PATH/CLASS/* split by
    the seed. A class consists of all files in its folder and its subfolders. Without folders of
    splits, a share data.validation_samples / (data.train_samples + data.validation_samples) of the
    images of each class is used for validation; all images are used, whatever these two counts are.
    Classes are numbered by sorted name, or by data.class_map. With data.labels_path, a table names
    the files and their classes.
    """

    def __init__(self, data: DataConfig, seed: int) -> None:
        check(data)
        self._files = _split(data, seed)
        super().__init__(data, len(self._files["train"]), len(self._files["validation"]), seed)

    def path(self, split: Split, index: int) -> Path:
        """Return the file of an image."""
        return self._files[split][index][0]

    def files(self) -> list[Path]:
        """Return all files that the dataset reads."""
        return [path for files in self._files.values() for path, _ in files]

    def identity(self, split: Split) -> str:
        """Return the names, sizes and times of a split's files."""
        return stamps([path for path, _ in self._files[split]])

    def _label(self, split: Split, index: int) -> int:
        return self._files[split][index][1]


class UnlabelledDataset(FileDataset):
    """The images listed in the text file data.path, one per line.

    They are the validation split of a data set without labels.
    """

    needs_training = False

    def __init__(self, data: DataConfig, seed: int) -> None:
        check_unlabelled(data)
        self._files = [Path(line) for line in Path(str(data.path)).read_text().splitlines() if line]
        super().__init__(data, 0, len(self._files), seed)

    def path(self, split: Split, index: int) -> Path:
        """Return the file of an image."""
        return self._files[index]

    def identity(self, split: Split) -> str:
        """Return the names, sizes and times of the files."""
        return stamps(self._files)

    def _label(self, split: Split, index: int) -> int:
        return 0


def check_unlabelled(data: DataConfig) -> None:
    """Raise ConfigError if the list of images is missing; no image is opened."""
    check_images(data)
    if data.path is None or not Path(data.path).is_file():
        raise ConfigError(
            "data.path",
            data.path,
            "must be a text file that names an image a line",
            "give its path",
        )


def numbers_of_classes(data: DataConfig) -> dict[str, int]:
    """Return the number of each class, by its folder or its name in the table."""
    root = _root(data)
    if data.labels_path is not None:
        return _classes_of(data, [record["label"] for record in _records(data)])
    return _classes_of(data, folders_in(_training_folder(root)))


def check(data: DataConfig) -> None:
    """Raise ConfigError for a missing folder, an empty class or a wrong number of classes.

    No image is opened.
    """
    check_images(data)
    root = _root(data)
    if data.labels_path is not None:
        numbers_of_classes(data)
        return
    split = split_folders(root, layouts=_LAYOUTS)
    if split is not None:
        strays = set(folders_in(split["validation"])) - set(folders_in(split["train"]))
        if strays:
            text = f"train/ lacks classes of {split['validation'].name}/: {_listed(strays)}"
            raise ConfigError("data.path", data.path, text)
    numbers_of_classes(data)
    folder = _training_folder(root)
    for name in folders_in(folder):
        if not files_below(folder / name):
            text = f"the class {name} has no image for training: {folder / name} is empty"
            raise ConfigError("data.path", data.path, text, "add images, or remove the folder")


def _classes_of(data: DataConfig, names: list[str]) -> dict[str, int]:
    """Return the number of each class; there must be data.num_classes of them."""
    if data.labels_path is not None:
        return class_numbers(data, names, "the table", is_table=True)
    if not names:
        advice = f"lay files out as {_LAYOUTS}"
        raise ConfigError("data.num_classes", data.num_classes, "the folder has no classes", advice)
    return class_numbers(data, names, "the folder", is_table=False)


def _root(data: DataConfig) -> Path:
    if data.path is None:
        raise ConfigError(
            "data.path",
            None,
            "data=folder needs a directory of images",
            f"lay it out as {_LAYOUTS}",
        )
    root = expanded("data.path", data.path)
    if not root.is_dir():
        raise ConfigError("data.path", data.path, "no such directory", f"lay it out as {_LAYOUTS}")
    return root


def _records(data: DataConfig) -> Records:
    return read_records("data.labels_path", str(data.labels_path), [data.image_column, "label"])


def _training_folder(root: Path) -> Path:
    """Return the folder of the classes: the training split's folder, or the only one."""
    split = split_folders(root, layouts=_LAYOUTS)
    return root if split is None else split["train"]


def _split(data: DataConfig, seed: int) -> dict[Split, Files]:
    root = _root(data)
    files: dict[Split, Files] = {"train": [], "validation": []}
    if data.labels_path is not None:
        records = _records(data)
        numbers = _classes_of(data, [record["label"] for record in records])
        for split, chosen in split_records(
            data, "data.labels_path", records, [record["label"] for record in records], seed
        ).items():
            files[split] += [
                (root / record[data.image_column], numbers[record["label"]]) for record in chosen
            ]
        return files
    folders = split_folders(root, layouts=_LAYOUTS)
    names = folders_in(_training_folder(root))
    numbers = _classes_of(data, names)
    if folders is not None:
        for split, folder in folders.items():
            files[split] += [
                (path, numbers[name]) for name in names for path in files_below(folder / name)
            ]
        return files
    for order, name in enumerate(names):
        paths = files_below(root / name)
        num_validation = num_held_out(data, len(paths))
        held_out = set(
            generator(seed, "split", order).permutation(len(paths))[:num_validation].tolist()
        )
        for number, path in enumerate(paths):
            files["validation" if number in held_out else "train"].append((path, numbers[name]))
    return files


def _listed(names: list[str] | set[str]) -> str:
    shown = sorted(names)
    return ", ".join(shown[:5]) + (", ..." if len(shown) > 5 else "")


DATASETS.register(
    "folder",
    Source(
        FolderDataset,
        check,
        counts_itself=True,
        keys=(*KEYS, "labels_path", "image_column", "class_map"),
        class_numbers=numbers_of_classes,
    ),
)
DATASETS.register(
    "unlabelled",
    Source(
        UnlabelledDataset,
        check_unlabelled,
        tasks=TASKS,
        counts_itself=True,
        keys=KEYS,
        labelled=False,
    ),
)
