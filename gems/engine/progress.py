"""Progress: what rank 0 shows while a run goes on."""

from __future__ import annotations

import math
import os
import sys
import time

from tqdm import tqdm

LINES_S = 5.0


class Progress:
    """Shows steps, loss, images/s (all images of both directions and all replicas) and the time left, on stderr.

    A bar where a person looks on (the launcher says so in GEMS_PROGRESS, for the rank itself sees only a pipe);
    otherwise a line every few seconds.
    """

    def __init__(self, name: str, num_steps: int, images_per_step: int) -> None:
        self._num_steps = num_steps
        self._images_per_step = images_per_step
        self._begin = self._last = time.perf_counter()
        self._name = name
        is_bar = os.environ.get("GEMS_PROGRESS") == "bar" or sys.stderr.isatty()
        self._bar = (
            tqdm(total=num_steps, desc=name, unit="step", file=sys.stderr, dynamic_ncols=False, ncols=100)
            if is_bar
            else None
        )

    def show(self, num_done: int, loss: float) -> None:
        """Shows that `num_done` steps are done; a loss of NaN, where there is none, is left out."""
        now = time.perf_counter()
        rate = num_done / (now - self._begin)
        text = f"{rate * self._images_per_step:.1f} images/s"
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

    def close(self) -> None:
        """Ends the bar."""
        if self._bar is not None:
            self._bar.close()
