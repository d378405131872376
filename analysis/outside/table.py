"""A table of pipelines that others measured: a CSV with a row per experiment.

The columns are those of `scripts/data/pipelines_of_others.csv`; lines that begin with `#` are
notes. Cells may be empty where nothing was published.
"""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from gems.errors import ConfigError, nearest

COLUMNS = (
    *("id", "source", "address", "kind", "model", "image_px", "batch", "micro_batches", "gpus"),
    *("accelerator", "partitions", "replicas", "spatial_parts", "precision", "images_per_s"),
    *("step_s", "memory_gib", "relative", "certainty", "note"),
)
NEEDED = ("id", "model", "image_px", "partitions")
_MOST = 2**31
_CUTS = re.compile(r"children a partition (\d+(?:\s*\+\s*\d+)*)")


@dataclass(frozen=True, slots=True)
class Row:
    """A published experiment; what was not published is None.

    `cuts` are the children of torchgpipe's sequential network in each partition. `recompute` is
    torchgpipe's `checkpoint`: always, except_last or never. The flags say which optimisations its
    runtime had: the order of backward by explicit dependencies, copies on streams of their own, and
    skips that go straight to their reader (portals).
    """

    name: str
    source: str
    model: str
    accelerator: str
    image_px: int
    partitions: int
    batch: int | None
    micro_batches: int | None
    step_s: float | None
    memory_gib: float | None
    relative: float | None
    cuts: tuple[int, ...] | None
    recompute: str
    has_order: bool = True
    has_streams: bool = True
    has_portals: bool = True
    is_activations: bool = False

    @property
    def samples(self) -> int | None:
        """The samples of a micro-batch, rounded up."""
        if self.batch is None or self.micro_batches is None:
            return None
        return math.ceil(self.batch / self.micro_batches)


def read_rows(path: Path) -> list[Row]:
    """Return the rows of a table.

    Raises:
        ConfigError: The file cannot be read, has an unknown column or lacks one, or a cell is no
            number.
    """
    try:
        lines = path.read_text("utf-8-sig").splitlines()
        rows = [line for line in lines if line.strip() and line[0] != "#"]
        reader = csv.DictReader(rows, strict=True, skipinitialspace=True)
        names = [name.strip() for name in reader.fieldnames or ()]
        _check_columns(path, names)
        reader.fieldnames = names
        out = [_row(path, cells) for cells in reader]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(
            "--table", path, f"cannot be read ({why})", "give a CSV of pipelines"
        ) from error
    if not out:
        raise ConfigError("--table", path, "has no row")
    return out


def row_named(rows: list[Row], name: str) -> Row:
    """Return the row with an id.

    Raises:
        ConfigError: There is none, or it has no time of a step.
    """
    timed = [row.name for row in rows if row.step_s is not None and row.samples is not None]
    if name not in timed:
        known = any(row.name == name for row in rows)
        text = "has no step_s with batch and micro_batches" if known else "is no row of the table"
        raise ConfigError(
            "--calibrate", name, text, f"rows with them: {', '.join(timed) or 'none'}"
        )
    return next(row for row in rows if row.name == name)


def _check_columns(path: Path, names: list[str]) -> None:
    for name in names:
        if name not in COLUMNS:
            near = nearest(name, COLUMNS, 1)[0]
            text = f"has an unknown column {name!r}"
            raise ConfigError(
                "--table", path, text, f"nearest: {near}; allowed: {', '.join(COLUMNS)}"
            )
    missing = [name for name in NEEDED if name not in names]
    if missing:
        raise ConfigError(
            "--table", path, f"has no column {', '.join(missing)}", "separate columns by commas"
        )


def _row(path: Path, cells: Mapping[str | None, str]) -> Row:
    name = (cells.get("id") or "").strip()

    def number(column: str, is_whole: bool = False, default: float | None = None) -> float | None:
        text = (cells.get(column) or "").strip()
        if not text and column not in NEEDED:
            return default
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not 0 < value < _MOST or (is_whole and not value.is_integer()):
            kind = "whole number" if is_whole else "number"
            text = f"row {name or '?'}: {column} is {text[:40]!r}, and must be a {kind} above 0"
            raise ConfigError("--table", path, text)
        return value

    def count(column: str) -> int | None:
        value = number(column, is_whole=True)
        return None if value is None else int(value)

    batch, rate, step_s = count("batch"), number("images_per_s"), number("step_s")
    if step_s is None and batch is not None and rate is not None:
        step_s = batch / rate
    note = cells.get("note") or ""
    cuts = _CUTS.search(note)
    plain = "no optimisation" in note
    has_list = plain or "Dependency" in note
    return Row(
        name,
        cells.get("source") or "",
        cells.get("model") or "",
        cells.get("accelerator") or "",
        int(number("image_px", is_whole=True) or 0),
        int(number("partitions", is_whole=True) or 0),
        batch,
        count("micro_batches"),
        step_s,
        number("memory_gib"),
        number("relative"),
        tuple(map(int, cuts[1].split("+"))) if cuts else None,
        _recompute(note),
        "Dependency" in note if has_list else True,
        "Streams" in note if has_list else True,
        "Portals" in note if has_list else True,
        "peak activations" in note,
    )


def _recompute(note: str) -> str:
    if "no recompute" in note or "without a pipeline, no" in note:
        return "never"
    return "always" if "recompute always" in note else "except_last"
