"""Made-up points, whose law is known."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from analysis.scaling.points import Point, Setting

KNOWN = Setting(commits=("abc",), versions=("gems 0.1", "numpy 2"), num_warmup_steps=1)


def point(ranks: int = 4, step_s: Sequence[float] = (1.0,) * 8, **fields: Any) -> Point:
    """Return a measured point of weak scaling, 4 images a rank, documented as it should be."""
    values: dict[str, Any] = {
        "line": "1f1b",
        "source": "measured",
        "ranks": ranks,
        "partitions": min(ranks, 4),
        "replicas": max(1, ranks // 4),
        "micro_batches": 8,
        "images_per_step": 4 * ranks,
        "problem": ("resnet", 3, 1024),
        "work_s": None,
        "step_s": tuple(step_s),
        "signatures": ("s",),
        "setting": KNOWN,
    }
    return Point(**(values | fields))


def noisy(step_s: float, count: int = 20, noise: float = 0.01, seed: int = 0) -> tuple[float, ...]:
    """Return step times around a median, spread by `noise`."""
    rng = np.random.default_rng([seed, round(step_s * 1e6)])
    return tuple(step_s * np.exp(noise * rng.standard_normal(count)))
