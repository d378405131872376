"""Random generators that depend on the run's seed and on what they are for, and on nothing else."""

from __future__ import annotations

import zlib

import numpy as np


def generator(seed: int, purpose: str, *key: int) -> np.random.Generator:
    """Return a fresh generator for (seed, purpose, key); other purposes or keys are independent streams."""
    return np.random.default_rng((seed, zlib.crc32(purpose.encode()), *key))
