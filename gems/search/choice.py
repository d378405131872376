"""Choices: configurations with their predictions, and the reasons why they lose to the best."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from gems.search.best_first import is_as_fast
from gems.search.candidate import Candidate

REASONS = {
    "compute": "computes {} more",
    "recompute": "recomputes {}",
    "messages": "exposed messages {} more",
    "all_reduce": "all-reduce {} more",
    "waiting": "bubble {} more",
}
PARTS = tuple(REASONS)
COPIES = "bubble and copies {} more"
MIN_SHARE = 0.001  # of the best step; smaller differences are not reported
MAX_REASONS = 3


@dataclass(frozen=True)
class Choice:
    """A configuration with one simulated step.

    `peak_bytes` and `host_bytes` have one entry per rank of a pipeline. `split` computes `parts_s`,
    and `noisy` the same choice by the median step under machine.noise; both are slow. Choices are
    ranked by `score_s`: the step, or, if the `epochs` to the target are known, the seconds to it.
    `changes` are further settings of the plan, as command-line words.
    """

    candidate: Candidate
    boundaries: tuple[int, ...]
    step_s: float
    score_s: float
    efficiency: float
    peak_bytes: tuple[int, ...]
    host_bytes: tuple[int, ...]
    split: Callable[[], Mapping[str, float]] = field(repr=False, compare=False)
    noisy: Callable[[], Choice] | None = field(default=None, repr=False, compare=False)
    epochs: float | None = None
    changes: tuple[str, ...] = ()

    @cached_property
    def parts_s(self) -> Mapping[str, float]:
        """The seconds of a step by activity, as means over the ranks; they add up to `step_s`."""
        return self.split()

    @property
    def most_bytes(self) -> int:
        """The peak of the fullest rank."""
        return max(self.peak_bytes)

    @property
    def overrides(self) -> tuple[str, ...]:
        """The configuration as command-line words, to be added to those of the plan."""
        return *self.candidate.overrides(self.boundaries), *self.changes

    @property
    def images_per_s(self) -> float:
        """Images per second over all replicas."""
        return self.candidate.global_batch / self.step_s

    def to_json(self, first: Choice) -> dict[str, Any]:
        """Return the choice as plain data, compared with the first one."""
        candidate = self.candidate
        return {
            "step_s": self.step_s,
            "images_per_s": self.images_per_s,
            "peak_bytes": list(self.peak_bytes),
            "host_bytes": list(self.host_bytes),
            "efficiency": self.efficiency,
            "partitions": candidate.partitions,
            "replicas": candidate.replicas,
            "schedule": candidate.schedule,
            "activation_cap": candidate.cap,
            "parts": candidate.parts,
            "chunks": candidate.chunks,
            "strips": candidate.strips,
            "micro_batch_size": candidate.micro_batch_size,
            "micro_batches": candidate.micro_batches,
            "global_batch": candidate.global_batch,
            "memory": candidate.policy,
            "boundaries": list(self.boundaries),
            "parts_s": dict(self.parts_s),
            "epochs": self.epochs,
            "to_target_s": None if self.epochs is None else self.score_s,
            "loses_by": reasons(first, self),
            "overrides": list(self.overrides),
        }


def reasons(first: Choice, other: Choice) -> list[str]:
    """List the reasons why a choice costs more than the first, largest first.

    Each is in milliseconds of a step and in percent of the first one's step. Parts are scaled to
    the same number of images, so choices with different global batches can be compared.
    """
    if other is first or first.step_s <= 0:
        return []
    scale = first.candidate.global_batch / other.candidate.global_batch
    more = {part: scale * other.parts_s[part] - first.parts_s[part] for part in PARTS}
    causes = sorted(
        (part for part in PARTS if more[part] > MIN_SHARE * first.step_s),
        key=lambda part: -more[part],
    )
    costs = []
    for part in causes[:MAX_REASONS]:
        text = COPIES if part == "waiting" and any(other.host_bytes) else REASONS[part]
        costs.append(
            text.format(f"{1e3 * more[part]:.3g} ms ({100 * more[part] / first.step_s:.1f} %)")
        )
    if first.epochs and other.epochs and other.epochs > first.epochs:
        costs.append(f"needs {100 * (other.epochs / first.epochs - 1):.1f} % more epochs")
    if costs:
        return costs
    if not is_as_fast(first, other):
        return [f"as fast to {100 * (other.score_s / first.score_s - 1):.2g} %"]
    peak_bytes = other.most_bytes
    first_peak_bytes = first.most_bytes
    return [
        f"as fast, holds {100 * (peak_bytes / first_peak_bytes - 1):.2g} % more"
        if peak_bytes > first_peak_bytes > 0
        else "as fast"
    ]
