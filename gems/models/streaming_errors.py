"""The errors of streaming, as errors of the run's configuration."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from gems.errors import ConfigError
from gems.streaming.errors import StreamingError

KEY = "parallel.strips"
_NORM = "set model.norm=frozen_batch|none|layer"
# the keys that change what a library can only ask for
_ADVICE = {
    "norm": _NORM,
    "batch_norm": f"{_NORM}|ghost_batch",
    "mixed": "set train.precision=float32|bf16_pure",
}


@contextmanager
def config_errors(strips: int | list[int]) -> Iterator[None]:
    """Raise a StreamingError in the context as a ConfigError of `parallel.strips`."""
    try:
        yield
    except StreamingError as error:
        advice = _ADVICE.get(error.cause, error.advice)
        instead = f"set {KEY}=1"
        raise ConfigError(
            KEY, strips, error.reason, f"{advice}, or {instead}" if advice else instead
        ) from error
