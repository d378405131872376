"""The errors of streaming, as errors of the run's configuration."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from gems.errors import ConfigError
from gems.streaming.errors import StreamingError

KEY = "parallel.strips"
_UNTIL = f"{KEY}_until=<a layer before it>"
_NORM = "set model.norm=frozen_batch|none|layer"
# the keys that change what a library can only ask for
_ADVICE = {
    "norm": f"{_NORM}, or {_UNTIL}",
    "batch_norm": f"{_NORM}|ghost_batch, or {_UNTIL}",
    "whole": f"set {_UNTIL}",
    "mixed": "set train.precision=float32|bf16_pure",
}


def until_in(layers: Sequence[str], names: Sequence[str], until: str | None) -> str | None:
    """Return the layer after which some layers, of those with `names`, take whole maps.

    Return None if they all stand before it, and "" if they all stand after it.

    Raises:
        ConfigError: There is no such layer.
    """
    if until is None:
        return None
    place = next(
        (place for place, name in enumerate(names) if f"{until}.".startswith(f"{name}.")), None
    )
    if place is None:
        raise ConfigError(f"{KEY}_until", until, "is no layer", f"give one of {', '.join(names)}")
    if names[place] in layers:
        return until
    return "" if layers and names.index(layers[0]) > place else None


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
