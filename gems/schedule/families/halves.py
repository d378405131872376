"""Two directions share a step's micro-batches half and half."""

from __future__ import annotations

from gems.errors import ConfigError


def refuse_odd(name: str, num_micro_batches: int, why: str) -> None:
    """Check that the micro-batches of family `name` can be halved.

    Raises:
        ConfigError: an odd number of them; `why` says what the two directions do.
    """
    if num_micro_batches % 2:
        raise ConfigError(
            "parallel.micro_batches",
            num_micro_batches,
            f"must be even for {name}: {why}",
            f"use {num_micro_batches + 1}",
        )
