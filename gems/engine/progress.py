"""Progress of a run: a bar or log lines on rank 0, and progress.json for everyone else."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import sys
import time
from pathlib import Path
from typing import Any, Never

from tqdm import tqdm

from gems.utils.atomic_io import write_json

LOG_INTERVAL_S = 5.0
FILE_INTERVAL_S = 2.0
_log = logging.getLogger(__name__)


class Progress:
    """Shows steps, loss, learning rate, images/s (all directions and replicas) and the time left.

    On a terminal it is a bar; the launcher sets GEMS_PROGRESS, since the rank itself sees only a
    pipe. Otherwise it is a log line every few seconds. The file is written every FILE_INTERVAL_S,
    at the end and with an error; a file system that is full or gone does not end the run.
    """

    def __init__(
        self, name: str, num_steps: int, images_per_step: int, path: Path, first_step: int = 0
    ) -> None:
        self._name = name
        self._path = path
        self._num_steps = num_steps
        self._first_step = first_step
        self._images_per_step = images_per_step
        self._begin = self._last = time.perf_counter()
        self._written = -math.inf
        self._document: dict[str, Any] = {}
        self._error: str | None = None
        self._bar: tqdm[Never] | None = None
        if os.environ.get("GEMS_PROGRESS") == "bar" or sys.stderr.isatty():
            self._bar = tqdm(
                total=num_steps,
                initial=first_step,
                desc=name,
                unit="step",
                file=sys.stderr,
                dynamic_ncols=False,
                ncols=100,
            )

    def show(self, num_done: int, loss: float, learning_rate: float = math.nan) -> None:
        """Show that `num_done` steps are done; a loss or rate of NaN means that there is none."""
        now = time.perf_counter()
        known = {"loss": f"{loss:.4f}", "lr": f"{learning_rate:.3g}"}
        rate = (num_done - self._first_step) / (
            now - self._begin
        )  # the mean since this attempt's first step
        images_per_s = rate * self._images_per_step
        self._document = {
            "step": num_done,
            "steps": self._num_steps,
            "images_per_s": images_per_s,
            "loss": None if math.isnan(loss) else loss,
            "learning_rate": None if math.isnan(learning_rate) else learning_rate,
        }
        if now - self._written > FILE_INTERVAL_S or num_done == self._num_steps:
            self._written = now
            self._write()
        shown = [f"{name} {value}" for name, value in known.items() if value != "nan"]
        text = "  ".join(
            [*shown, f"{images_per_s:.1f} images/s", *([self._error] if self._error else [])]
        )
        if self._bar is not None:
            self._bar.set_postfix_str(text, refresh=False)
            self._bar.update(num_done - self._bar.n)
        elif now - self._last > LOG_INTERVAL_S or num_done == self._num_steps:
            self._last = now
            left_s = (self._num_steps - num_done) / rate
            _log.info(
                "%s: step %d/%d  %s  %.0f s left",
                self._name,
                num_done,
                self._num_steps,
                text,
                left_s,
            )

    def show_error(self, text: str | None) -> None:
        """Show what is wrong although the run goes on, from now on and in the file at once.

        None if nothing is.
        """
        self._error = text
        self._write()
        if self._bar is not None:
            self._bar.set_postfix_str(text or "")

    def _write(self) -> None:
        with contextlib.suppress(OSError):
            write_json(
                self._path,
                self._document | {"error": self._error, "time_ns": time.time_ns()},
                indent=None,
            )

    def close(self) -> None:
        """Close the bar."""
        if self._bar is not None:
            self._bar.close()
