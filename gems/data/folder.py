"""Images in folders by class or with a table of their classes, and lists of unlabelled images."""

from __future__ import annotations

from pathlib import Path

from gems.config.recipe import TASKS
from gems.config.schema import DataConfig
from gems.data.dataset import Split
from gems.data.files.paths import data_folder, files_below, folders_in, split_folders
from gems.data.images import KEYS, FileDataset, image_source
from gems.data.table import Records, class_numbers, read_records, split_records
from gems.errors import ConfigError

_LAYOUTS = "PATH/train/CLASS/* and PATH/validation/CLASS/* (or val), or PATH/CLASS/*"


@image_source("folder", keys=(*KEYS, "labels_path", "image_column", "class_map"))
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
        is_table = data.labels_path is not None
        records = _records(data)
        names = [record["label"] for record in records]
        where = "the table" if is_table else "the folder"
        self.class_numbers = class_numbers(data, names, where, is_table)
        split = split_records(data, "data.labels_path", records, names, seed)
        super().__init__(
            data,
            {name: [Path(record["file"]) for record in chosen] for name, chosen in split.items()},
            seed,
        )
        self._labels = {
            name: [self.class_numbers[record["label"]] for record in chosen]
            for name, chosen in split.items()
        }

    def _label(self, split: Split, index: int) -> int:
        return self._labels[split][index]


@image_source("unlabelled", tasks=TASKS, keys=KEYS, labelled=False)
class UnlabelledDataset(FileDataset):
    """The images listed in the text file data.path, one per line.

    They are the validation split of a data set without labels.
    """

    needs_training = False

    def __init__(self, data: DataConfig, seed: int) -> None:
        if data.path is None or not Path(data.path).is_file():
            text = "must be a text file that names an image a line"
            raise ConfigError("data.path", data.path, text, "give its path")
        paths = [Path(line) for line in Path(data.path).read_text().splitlines() if line]
        super().__init__(data, {"train": [], "validation": paths}, seed)

    def files(self) -> list[Path]:
        """Return no files, because the command that lists them has checked them."""
        return []

    def _label(self, split: Split, index: int) -> int:
        return 0


def _records(data: DataConfig) -> Records:
    """Return the file and label of each image, and its split if there are folders of splits.

    Raises:
        ConfigError: A folder is missing, or a class has no image for training.
    """
    root = data_folder(data, _LAYOUTS)
    if data.labels_path is not None:
        records = read_records("data.labels_path", data.labels_path, [data.image_column, "label"])
        return [record | {"file": str(root / record[data.image_column])} for record in records]
    folders = split_folders(root, layouts=_LAYOUTS)
    training = root if folders is None else folders["train"]
    names = folders_in(training)
    if not names:
        advice = f"lay files out as {_LAYOUTS}"
        raise ConfigError("data.num_classes", data.num_classes, "the folder has no classes", advice)
    if folders is not None:
        strays = sorted(set(folders_in(folders["validation"])) - set(names))
        if strays:
            text = f"train/ lacks classes of {folders['validation'].name}/: {', '.join(strays)}"
            raise ConfigError("data.path", data.path, text)
    for name in names:
        if not files_below(training / name):
            text = f"the class {name} has no image for training: {training / name} is empty"
            raise ConfigError("data.path", data.path, text, "add images, or remove the folder")
    if folders is None:
        return [
            {"file": str(path), "label": name}
            for name in names
            for path in files_below(root / name)
        ]
    return [
        {"file": str(path), "label": name, "split": split}
        for split, folder in folders.items()
        for name in names
        for path in files_below(folder / name)
    ]
