"""Progress: what rank 0 shows while a run goes on, and leaves in a file for those who are not there."""

from __future__ import annotations

import contextlib
import math
import os
import sys
import time
from pathlib import Path

from tqdm import tqdm

from gems.utils.atomic_io import write_json

LINES_S = 5.0
NOTES_S = 2.0


class Progress:
    """Shows steps, loss, images/s (all images of both directions and all replicas) and the time left, on stderr.

    A bar where a person looks on (the launcher says so in GEMS_PROGRESS, for the rank itself sees only a pipe);
    otherwise a line every few seconds. The same goes to the file `path` every NOTES_S, and at the end; a file system
    that is full or gone stops the notes and not the run.
    """

    def __init__(self, name: str, num_steps: int, images_per_step: int, path: Path, first_step: int = 0) -> None:
        self._path = path
        self._noted = -math.inf
        self._num_steps = num_steps
        self._first_step = first_step
        self._images_per_step = images_per_step
        self._begin = self._last = time.perf_counter()
        self._name = name
        is_bar = os.environ.get("GEMS_PROGRESS") == "bar" or sys.stderr.isatty()
        self._bar = (
            tqdm(
                total=num_steps,
                initial=first_step,
                desc=name,
                unit="step",
                file=sys.stderr,
                dynamic_ncols=False,
                ncols=100,
            )
            if is_bar
            else None
        )

    def show(self, num_done: int, loss: float) -> None:
        """Show that `num_done` steps are done; a loss of NaN, where there is none, is left out."""
        now = time.perf_counter()
        rate = (num_done - self._first_step) / (now - self._begin)
        text = f"{rate * self._images_per_step:.1f} images/s"
        if now - self._noted > NOTES_S or num_done == self._num_steps:
            self._noted = now
            self._note(num_done, rate * self._images_per_step, loss)
        if not math.isnan(loss):
            text = f"loss {loss:.4f}  {text}"
        if self._bar is not None:
            self._bar.set_postfix_str(text, refresh=False)
            self._bar.update(num_done - self._bar.n)
        elif now - self._last > LINES_S or num_done == self._num_steps:
            self._last = now
            left_s = (self._num_steps - num_done) / rate
            print(
                f"{self._name}: step {num_done}/{self._num_steps}  {text}  {left_s:.0f} s left",
                file=sys.stderr,
                flush=True,
            )

    def _note(self, num_done: int, images_per_s: float, loss: float) -> None:
        """Write the file: `images_per_s` is the mean since this attempt's first step, `loss` is null where there is none."""
        note = {
            "step": num_done, "steps": self._num_steps, "images_per_s": images_per_s,
            "loss": None if math.isnan(loss) else loss, "time_ns": time.time_ns(),
        }  # fmt: skip
        with contextlib.suppress(OSError):
            write_json(self._path, note, indent=None)

    def close(self) -> None:
        """End the bar."""
        if self._bar is not None:
            self._bar.close()
