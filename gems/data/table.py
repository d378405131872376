"""A table (CSV) of image files and their labels: a class, several 0/1 columns, or values."""

from __future__ import annotations

import csv
import math
from collections import defaultdict
from pathlib import Path

import numpy as np

from gems.config.schema import DataConfig
from gems.data.dataset import Label, Split, as_label, generator
from gems.data.files.paths import expanded
from gems.data.images import KEYS, FileDataset, image_source
from gems.data.splits import NAMES, num_held_out
from gems.errors import ConfigError, one_of

Record = dict[str, str]
Records = list[Record]
TASKS = ("classification", "multi_label", "regression")


@image_source("table", tasks=TASKS, keys=(*KEYS, "label_columns", "image_column", "class_map"))
class TableDataset(FileDataset):
    """Images listed in a CSV file, relative to its folder, with labels in data.label_columns.

    A column `split` divides them (train, validation; test is left out); without it, the seed does.
    """

    def __init__(self, data: DataConfig, seed: int) -> None:
        self._task = data.task or TASKS[0]
        records = _checked_records(data, self._task)
        kinds = [""] * len(records)
        if self._task == TASKS[0]:
            (column,) = data.label_columns
            kinds = [record[column] for record in records]
            self.class_numbers = class_numbers(data, kinds, f"column {column}", is_table=True)
        self._records = split_records(data, "data.path", records, kinds, seed)
        folder = expanded("data.path", str(data.path)).parent
        paths = {
            split: [folder / record[data.image_column] for record in chosen]
            for split, chosen in self._records.items()
        }
        super().__init__(data, paths, seed)
        self._check_classes()

    def _check_classes(self) -> None:
        """Raise ConfigError for a class that occurs in validation but not in training."""
        if self._task != TASKS[0]:
            return
        column = self.config.label_columns[0]
        trained, validated = (
            {self.class_numbers[record[column]]: record[column] for record in records}
            for records in self._records.values()
        )
        if trained and (
            untrained := [validated[name] for name in validated if name not in trained]
        ):
            text = f"the class {untrained[0]} has no image for training"
            raise ConfigError("data.path", self.config.path, text, "add rows of it to train")

    def _label(self, split: Split, index: int) -> Label:
        cells = [self._records[split][index][column] for column in self.config.label_columns]
        if self._task == TASKS[0]:
            return self.class_numbers[cells[0]]
        return as_label(
            np.array([float(cell) for cell in cells]),
            self.config,
            self._task,
            self.name_of(split, index),
        )


def _checked_records(data: DataConfig, task: str) -> Records:
    columns = data.label_columns
    if not columns:
        raise ConfigError(
            "data.label_columns", columns, "must name the columns of the labels", "as in [grade]"
        )
    if data.path is None:
        raise ConfigError(
            "data.path", None, "data=table needs a CSV file", "its rows name image files and labels"
        )
    records = read_records("data.path", data.path, [data.image_column, *columns])
    if task == TASKS[0]:
        if len(columns) != 1:
            raise ConfigError(
                "data.label_columns",
                columns,
                "is one column for classes",
                "set data.task=multi_label or regression",
            )
        return records
    if len(columns) != data.num_classes:
        text = f"must be {len(columns)}, the columns of data.label_columns"
        raise ConfigError(
            "data.num_classes", data.num_classes, text, f"set data.num_classes={len(columns)}"
        )
    for line, record in enumerate(records, start=2):
        for column in columns:
            try:
                is_finite = math.isfinite(float(record[column]))
            except ValueError:
                is_finite = False
            if not is_finite:
                text = f"line {line} has {record[column]!r} in column {column}"
                raise ConfigError("data.path", data.path, text, "must be a number")
    return records


def read_records(key: str, path: str, columns: list[str]) -> Records:
    """Return the records of a CSV file by column, without spaces around the cells.

    Raises:
        ConfigError: The file cannot be read, or lacks a column, a cell or any row.
    """
    try:
        with expanded(key, path).open(newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file, skipinitialspace=True)
            names = list(reader.fieldnames or ())
            records = [(reader.line_num, record) for record in reader]
    except OSError as error:
        raise ConfigError(
            key, path, f"cannot be read ({error.strerror})", "give a CSV file"
        ) from error
    except (csv.Error, UnicodeDecodeError) as error:
        raise ConfigError(key, path, f"is no CSV file ({error})") from error
    for column in columns:
        if column not in names:
            raise ConfigError(
                key,
                path,
                f"has no column {column}",
                f"its columns: {one_of(names)}" if names else "",
            )
    for line, record in records:
        if any(record[column] is None for column in columns):
            raise ConfigError(key, path, f"line {line} has too few cells")
        empty = next((column for column in columns if not record[column].strip()), None)
        if empty is not None:
            advice = f"fill it, or remove the line ({Path(path).name}:{line})"
            raise ConfigError(key, path, f"line {line} has no {empty}", advice)
    if not records:
        raise ConfigError(key, path, "has no rows")
    return [
        {name: (cell or "").strip() for name, cell in record.items() if isinstance(name, str)}
        for _, record in records
    ]


def class_numbers(data: DataConfig, names: list[str], where: str, is_table: bool) -> dict[str, int]:
    """Return the number of each class: by data.class_map, or its rank among the sorted names.

    If all names in a table are class numbers, they represent themselves.

    Raises:
        ConfigError: The number of classes is not data.num_classes, or data.class_map lacks a class.
    """
    classes = sorted(set(names))
    if data.class_map:
        missing = [name for name in classes if name not in data.class_map]
        if missing:
            raise ConfigError(
                "data.class_map",
                data.class_map,
                f"lacks the class {missing[0]}",
                "name every class",
            )
        wrong = [number for number in data.class_map.values() if number >= data.num_classes]
        if wrong:
            text = f"numbers a class {wrong[0]}"
            raise ConfigError(
                "data.class_map", data.class_map, text, f"data.num_classes is {data.num_classes}"
            )
        return {name: data.class_map[name] for name in classes}
    if is_table and all(name.isdecimal() and int(name) < data.num_classes for name in classes):
        return {name: int(name) for name in classes}
    if len(classes) != data.num_classes:
        shown = ", ".join(classes[:5]) + (", ..." if len(classes) > 5 else "")
        text = (
            f"{where} has {len(classes)} classes ({shown})"
            if classes
            else f"{where} has no classes"
        )
        advice = (
            f"set data.num_classes={len(classes)}"
            if len(classes) > 1
            else "add one, or choose another data.path"
        )
        raise ConfigError("data.num_classes", data.num_classes, text, advice)
    return {name: number for number, name in enumerate(classes)}


def split_records(
    data: DataConfig, key: str, records: Records, kinds: list[str], seed: int
) -> dict[Split, Records]:
    """Return the records of each split.

    They are divided by their column `split`, or else by the seed, with the same share of validation
    for each kind.

    Raises:
        ConfigError: The column contains another word.
    """
    splits: dict[Split, Records] = {"train": [], "validation": []}
    if "split" in records[0]:
        for line, record in enumerate(records, start=2):
            if record["split"] not in NAMES:
                text = f"line {line} names a split {record['split']!r}"
                raise ConfigError(
                    key, data.labels_path or data.path, text, f"use {', '.join(NAMES)}"
                )
            split = NAMES[record["split"]]
            if split is not None:
                splits[split].append(record)
        return splits
    by_kind = defaultdict(list)
    for record, kind in zip(records, kinds, strict=True):
        by_kind[kind].append(record)
    for order, kind in enumerate(sorted(by_kind)):
        group = by_kind[kind]
        held_out = set(
            generator(seed, "split", order)
            .permutation(len(group))[: num_held_out(data, len(group))]
            .tolist()
        )
        for number, record in enumerate(group):
            splits["validation" if number in held_out else "train"].append(record)
    return splits
