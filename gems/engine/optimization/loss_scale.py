"""The loss scale of float16, in which small gradients would be zero."""

from __future__ import annotations

import torch

INITIAL = 2.0**16
LEAST = 1.0
MOST = 2.0**24
GROWTH_STEPS = 2000


class LossScale:
    """The factor of the loss, a power of 2.

    Halved after a step that overflows, doubled after 2000 that do not.
    """

    def __init__(self) -> None:
        self.value = INITIAL
        self._good_steps = 0

    @classmethod
    def for_precision(cls, precision: str) -> LossScale | None:
        """Return the scale of a train.precision, None if it needs none."""
        return cls() if precision == "fp16_mixed" else None

    @property
    def can_shrink(self) -> bool:
        """Whether a smaller scale may help after an overflow."""
        return self.value > LEAST

    def update(self, is_finite: bool) -> None:
        """Count a step whose gradients were finite, or shrink after one whose were not."""
        if not is_finite:
            self.value = max(LEAST, self.value / 2)
            self._good_steps = 0
            return
        self._good_steps += 1
        if self._good_steps == GROWTH_STEPS:
            self.value = min(MOST, self.value * 2)
            self._good_steps = 0

    def state(self) -> torch.Tensor:
        """Return the state, for a checkpoint."""
        return torch.tensor([self.value, self._good_steps], dtype=torch.float64)

    def restore(self, state: torch.Tensor) -> None:
        """Continue from a state."""
        self.value, self._good_steps = float(state[0]), int(state[1])
