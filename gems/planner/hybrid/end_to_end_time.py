"""Data parallelism against workers of several devices.

End-to-end time C = T x S x E (Pal et al., IEEE Micro 39(5), 2019).

T is the time of a step, S the steps of an epoch, E the epochs to the target. N workers of M devices each take, over one
worker on one device, C_1 / C = SU^M SE_N N E_1 / E_N: SU^M is the speed-up of a worker's step by M-way model
parallelism, SE_N the scaling efficiency of N workers. Workers of M devices beat M N workers of one exactly where SU^M >
M (SE_MN / SE_N) (E_N / E_MN).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from gems.planner.hybrid.efficiency import Efficiency, IdealEfficiency
from gems.planner.hybrid.epochs import Epochs
from gems.planner.hybrid.quantity import Quantity


@dataclass(frozen=True, slots=True)
class HybridCase:
    """What the planner weighs.

    Attributes:
        worker_batch: samples of one step of one worker, whatever its devices.
        epochs: epochs by samples of a global batch.
        speedups: SU^M by M; that of 1 is 1 and need not be there.
        efficiency: SE_N by workers and ways.
        step_s: T_1, a step of one worker on one device; None where only ratios are known.
        num_samples: samples of an epoch; None where only ratios are known.
        misfits: ways that do not fit the devices, each with the reason.
    """

    worker_batch: float
    epochs: Epochs
    speedups: Mapping[int, Quantity]
    efficiency: Efficiency = field(default_factory=IdealEfficiency)
    step_s: Quantity | None = None
    num_samples: int | None = None
    misfits: Mapping[int, str] | None = None

    @property
    def ways(self) -> tuple[int, ...]:
        """The ways to weigh: 1, which is data parallelism, and those with a speed-up."""
        return tuple(sorted({1, *self.speedups}))

    @property
    def is_exact(self) -> bool:
        """Whether no input has an interval."""
        parts = (*self.speedups.values(), *([self.step_s] if self.step_s else []))
        return self.epochs.is_exact and self.efficiency.is_exact and all(part.is_exact for part in parts)

    def speedup(self, ways: int) -> float:
        """Return SU^M."""
        return 1.0 if ways == 1 else self.speedups[ways].value

    def cost(self, workers: int, ways: int) -> float:
        """Return C in units of T_1 S_1, the epochs that one worker on one device would do in that time.

        Raises:
            ConfigError: epochs or efficiency that are not known there.
        """
        return self.step(workers, ways) * self.epochs.epochs(workers * self.worker_batch) / workers

    def step(self, workers: int, ways: int) -> float:
        """Return T in units of T_1.

        Raises:
            ConfigError: an efficiency that is not known there.
        """
        return 1.0 / (self.speedup(ways) * self.efficiency.of(workers, ways))

    def threshold(self, workers: int, ways: int) -> float:
        """Return the right side of the criterion: what SU^M must exceed for N workers of M ways to win.

        Raises:
            ConfigError: epochs or efficiency that are not known there.
        """
        many = workers * ways
        efficiencies = self.efficiency.of(many, 1) / self.efficiency.of(workers, ways)
        epochs = self.epochs.epochs(workers * self.worker_batch) / self.epochs.epochs(many * self.worker_batch)
        return ways * efficiencies * epochs

    def gain(self, workers: int, ways: int) -> float:
        """Return the time of data parallelism on the same devices over that of N workers of M ways.

        Above 1 hybrid wins.
        """
        return self.speedup(ways) / self.threshold(workers, ways)

    def seconds(self, cost: float) -> float | None:
        """Return a cost in seconds, None where the time of a step or the samples of an epoch are not known."""
        if self.step_s is None or self.num_samples is None:
            return None
        return cost * self.step_s.value * self.num_samples / self.worker_batch

    def drawn(self, rng: np.random.Generator) -> HybridCase:
        """Return the case with every uncertain input drawn once."""
        return replace(
            self,
            epochs=self.epochs.drawn(rng),
            speedups={ways: each.drawn(rng) for ways, each in self.speedups.items()},
            efficiency=self.efficiency.drawn(rng),
            step_s=None if self.step_s is None else self.step_s.drawn(rng),
        )
