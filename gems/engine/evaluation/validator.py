"""Validation during training: when it is due, the best weights so far, and early stopping."""

from __future__ import annotations

import logging
import math
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol

from gems.config.schema import TrainConfig
from gems.engine.transport.mpi import Comm, allgather, broadcast
from gems.errors import ConfigError, one_of
from gems.runs.folder import RunFolder
from gems.trace import TracePart
from gems.utils.atomic_io import read_json, write_json

PREFIX = "validation_"
FALLING = ("loss", "error")  # metrics with these endings are better when they are lower
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Best:
    """The best value of the monitored metric, its step, and the number of worse values since."""

    metric: str
    step: int
    value: float
    num_worse: int = 0

    @property
    def weights(self) -> str:
        """Return the name of the folder of its weights, below the run's folder of best weights."""
        return f"step{self.step:08d}"


class Validated(Protocol):
    """The weights that are validated."""

    def measure(self) -> Mapping[str, float]:
        """Return the validation metrics, the same on all ranks; collective."""

    def save(self, path: Path) -> None:
        """Write this rank's weights to a folder; collective."""


class Validator:
    """Validates at regular steps, keeps the best weights, and decides when to stop.

    All calls are collective. A run that continues reads its best value from best.json.
    """

    def __init__(
        self,
        train: TrainConfig,
        folder: RunFolder,
        comm: Comm,
        part: TracePart,
        steps_per_epoch: int,
        first_step: int,
        weights: Validated,
    ) -> None:
        self._train = train
        self._folder = folder
        self._comm = comm
        self._part = part
        self._every = train.validate_steps
        if train.validate_epochs is not None:
            self._every = train.validate_epochs * steps_per_epoch
        self._weights = weights
        self._num_steps = first_step
        self._last: tuple[int, Mapping[str, float]] | None = None
        known = broadcast(comm, read_json(folder.best_json) if comm.rank == 0 else None)
        self.best = Best(**known) if known and known["step"] <= first_step else None

    def after(self, num_steps: int) -> Mapping[str, float]:
        """Return the metrics after `num_steps`, empty if no validation is due; collective."""
        self._num_steps = num_steps
        is_due = self._every is not None and num_steps % self._every == 0
        is_last = self._train.evaluate and num_steps == self._train.steps
        return self.validate() if is_due or is_last else {}

    def validate(self) -> Mapping[str, float]:
        """Return the metrics after the steps done, and keep the best weights; collective.

        The metrics of a step are measured only once.

        Raises:
            ConfigError: `train.monitor` is none of the metrics.
        """
        if self._last is None or self._last[0] != self._num_steps:
            metrics = self._weights.measure()
            self._last = self._num_steps, metrics
            if self._comm.rank == 0:
                self._part.set_attributes({"metrics": list(metrics)})
                for index, value in enumerate(metrics.values()):
                    self._part.add("validations", (self._num_steps, index, value))
            if self._train.monitor is not None:
                self._judge(self._num_steps, metrics)
        return self._last[1]

    @property
    def is_over(self) -> bool:
        """Return whether the last train.patience validations were not better than the best."""
        patience = self._train.patience
        return patience is not None and self.best is not None and self.best.num_worse >= patience

    def _judge(self, num_steps: int, metrics: Mapping[str, float]) -> None:
        monitor = str(self._train.monitor)
        name = next((name for name in (monitor, PREFIX + monitor) if name in metrics), None)
        if name is None:
            raise ConfigError(
                "train.monitor", monitor, one_of(metric.removeprefix(PREFIX) for metric in metrics)
            )
        value = metrics[name]
        best = self.best
        sign = -1 if name.endswith(FALLING) else 1
        is_better = best is None or sign * (value - best.value) > self._train.min_improvement
        if math.isnan(value) or not is_better:
            if best is not None:
                self.best = Best(best.metric, best.step, best.value, best.num_worse + 1)
        else:
            self.best = Best(name, num_steps, value)
            if (fault := self._keep_weights(self._folder.best / self.best.weights)) is not None:
                self.best = (
                    best  # whose weights stay; a later validation that is better may find room
                )
                if self._comm.rank == 0:
                    _log.warning("the weights of the best validation could not be saved: %s", fault)
        if self._comm.rank == 0 and self.best is not None:
            try:
                write_json(self._folder.best_json, asdict(self.best))
            except OSError as error:
                _log.warning("%s could not be written: %s", self._folder.best_json, error.strerror)
                return
            for old in self._folder.best.glob("step*"):
                if old.name != self.best.weights:
                    shutil.rmtree(old, ignore_errors=True)
            if self.is_over and num_steps < self._train.steps:
                _log.info(
                    "stops early after step %d: %s was best after step %d (%.6g)",
                    num_steps,
                    name,
                    self.best.step,
                    self.best.value,
                )

    def _keep_weights(self, folder: Path) -> str | None:
        """Save the weights; if a rank fails, remove them and return its error; collective."""
        local_fault = None
        try:
            self._weights.save(folder)
        except OSError as error:
            local_fault = f"rank {self._comm.rank}: {error.strerror}"
        fault = next(
            (
                fault_of_rank
                for fault_of_rank in allgather(self._comm, local_fault)
                if fault_of_rank is not None
            ),
            None,
        )
        if fault is not None and self._comm.rank == 0:
            shutil.rmtree(folder, ignore_errors=True)
        return fault
