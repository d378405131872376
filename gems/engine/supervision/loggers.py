"""Loggers: what rank 0 writes of each step for people and their trackers.

The CSV is always there; TensorBoard, Weights & Biases (offline) and MLflow (its file store) are
extras.
"""

from __future__ import annotations

import contextlib
import csv
import importlib
import io
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from gems.errors import ConfigError
from gems.runs.folder import RunFolder
from gems.utils.atomic_io import atomic_write

MAX_PARAM_CHARS = 500  # of a value, as MLflow limits them
_log = logging.getLogger(__name__)


class Logger(Protocol):
    """A place that values by name go to."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Write the values of a step, counted from 1: those that are known."""

    def close(self) -> None:
        """Write what is left."""


class LoggedRun(NamedTuple):
    """A run as trackers show it; `first_step` counts from 0."""

    name: str
    run_id: str
    path: Path
    settings: Mapping[str, Any]
    first_step: int


class Loggers:
    """All loggers of a run, on rank 0.

    A disk that is full or gone is reported once and does not end the run.
    """

    def __init__(self, loggers: Iterable[Logger]) -> None:
        self._loggers = tuple(loggers)
        self._failed: set[Logger] = set()

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Write the values of a step, counted from 1, to each logger."""
        for logger in self._loggers:
            with self._warning_once(logger):
                logger.log(step, values)

    def close(self) -> None:
        """Close each logger."""
        for logger in self._loggers:
            with self._warning_once(logger):
                logger.close()

    @contextlib.contextmanager
    def _warning_once(self, logger: Logger) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if logger not in self._failed:
                _log.warning("%s cannot write (%s)", type(logger).__name__, error.strerror or error)
            self._failed.add(logger)


def open_loggers(loggers: Sequence[str], run: LoggedRun, names: Sequence[str]) -> Loggers:
    """Open the CSV with a column for each of `names`, and the loggers of train.loggers.

    A run that continues goes on in the same files; what they have from `run.first_step` on is of steps
    that are lost.

    Raises:
        ConfigError: a logger's package is not installed.
    """
    with contextlib.ExitStack() as opened:
        trackers: list[Logger] = []
        for name in loggers:
            trackers.append(opened.enter_context(contextlib.closing(_MAKERS[name](run))))
        csv_logger = CsvLogger(RunFolder(run.path).metrics_csv, names, run.first_step)
        opened.pop_all()
    return Loggers((*trackers, csv_logger))


class CsvLogger:
    """One row a step, with empty cells for what was not measured then; each row is flushed.

    Rows that find no room on the disk are written with the next one that does.
    """

    def __init__(self, path: Path, names: Sequence[str], first_step: int) -> None:
        self._columns = ("step", *names)
        rows: list[dict[str, str]] = []
        if path.exists():
            with path.open(newline="") as file:
                rows = [
                    row
                    for row in csv.DictReader(file)
                    if row["step"].isdecimal() and int(row["step"]) <= first_step
                ]
        with atomic_write(path) as partial, partial.open("w", newline="") as file:
            writer = self._writer(file)
            writer.writeheader()
            writer.writerows(rows)
        self._file = path.open("ab", buffering=0)
        self._unwritten = b""

    def _writer(self, file: Any) -> csv.DictWriter[str]:
        return csv.DictWriter(
            file, self._columns, restval="", extrasaction="ignore", lineterminator="\n"
        )

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Append the row of a step."""
        row = io.StringIO()
        self._writer(row).writerow(
            {"step": step, **{name: repr(value) for name, value in values.items()}}
        )
        self._unwritten += row.getvalue().encode()
        self._write()

    def close(self) -> None:
        """Write the rows that are left, and close the file."""
        with self._file:
            self._write()

    def _write(self) -> None:
        while self._unwritten:
            self._unwritten = self._unwritten[self._file.write(self._unwritten) :]


class TensorBoardLogger:
    """Event files in the run's folder, for `tensorboard --logdir runs`."""

    def __init__(self, run: LoggedRun) -> None:
        writer = _package("tensorboard", "torch.utils.tensorboard").SummaryWriter
        self._writer = writer(
            str(run.path / "tensorboard"), purge_step=run.first_step + 1 if run.first_step else None
        )
        self._writer.add_text(
            "run.yaml", "\n".join(f"    {key}: {value}" for key, value in run.settings.items())
        )

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Add a scalar for each value."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Flush and close the event file."""
        self._writer.close()


class WandbLogger:
    """A run of Weights & Biases, offline unless WANDB_MODE says another.

    `wandb sync` sends it later.
    """

    def __init__(self, run: LoggedRun) -> None:
        os.environ.setdefault("WANDB_SILENT", "true")  # read when it is imported
        wandb = _package("wandb")
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "gems"),
            name=run.path.name,
            id=run.run_id,
            resume="allow",
            dir=str(run.path),
            config=run.settings,
            mode=os.environ.get("WANDB_MODE", "offline"),
        )

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Log the values."""
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        """End the run."""
        self._run.finish()


class MlflowLogger:
    """A run of MLflow, in `mlruns` beside the run folders, or at MLFLOW_TRACKING_URI if set."""

    def __init__(self, run: LoggedRun) -> None:
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # which MLflow 3 refuses otherwise
        _package("mlflow")
        client = importlib.import_module("mlflow.tracking").MlflowClient
        store = os.environ.get("MLFLOW_TRACKING_URI") or (run.path.parent / "mlruns").as_uri()
        self._client = client(tracking_uri=store)
        experiment = self._client.get_experiment_by_name(run.name)
        number = (
            self._client.create_experiment(run.name)
            if experiment is None
            else experiment.experiment_id
        )
        runs = self._client.search_runs(
            [number], f"tags.mlflow.runName = '{run.path.name}'", max_results=1
        )
        if runs:
            self._id = runs[0].info.run_id
            self._client.update_run(self._id, "RUNNING")
            return
        self._id = self._client.create_run(number, run_name=run.path.name).info.run_id
        for key, value in run.settings.items():
            self._client.log_param(self._id, key, str(value)[:MAX_PARAM_CHARS])

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Log the values."""
        for name, value in values.items():
            self._client.log_metric(self._id, name, value, step=step)

    def close(self) -> None:
        """End the run."""
        self._client.set_terminated(self._id)


_MAKERS: dict[str, Callable[[LoggedRun], Logger]] = {
    "tensorboard": TensorBoardLogger,
    "wandb": WandbLogger,
    "mlflow": MlflowLogger,
}


def _package(name: str, module: str | None = None) -> Any:
    """Import the package of a logger.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        return importlib.import_module(module or name)
    except ModuleNotFoundError as error:
        raise ConfigError(
            "train.loggers",
            name,
            f"needs {error.name}, which is not installed",
            f"pip install 'gems-train[{name}]'",
        ) from error
