"""Scaling: a profile at another resolution and micro-batch, from profiles at a few."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from gems.errors import ConfigError
from gems.profile.model_profile import PAIRS, SIZES, STORAGES, TIMES, LayerProfile, ModelProfile
from gems.profile.saved_storages import product_bytes_of, stash_of


def extrapolate(points: Sequence[ModelProfile], height_px: int, width_px: int, micro_batch_size: int) -> ModelProfile:
    """Return the profile at another shape: every time and size as a + b x pixels of the micro-batch, by least squares.

    Of a convolutional network that is what times and sizes are, except for rounding where a side is no multiple of the
    network's stride. `facts["error"]` has the largest relative error of the whole's time and stash when one point
    after the other is left out and predicted from the rest; None with fewer than three points.

    Raises:
        ConfigError: fewer than two sizes, or points of different models.
    """
    _check(points)
    error = None
    if len({_pixels(point) for point in points}) > 2:
        error = {"time_s": 0.0, "stash_bytes": 0.0}
        for point in points:
            rest = [other for other in points if _pixels(other) != _pixels(point)]
            guess = _fit(rest, point.height_px, point.width_px, point.micro_batch_size)
            for name in error:
                error[name] = max(error[name], abs(_whole(guess, name) / _whole(point, name) - 1))
    found = _fit(points, height_px, width_px, micro_batch_size)
    shapes = [[point.micro_batch_size, point.height_px, point.width_px] for point in points]
    return replace(found, facts={"extrapolated_from": shapes, "error": error})


def _fit(points: Sequence[ModelProfile], height_px: int, width_px: int, micro_batch_size: int) -> ModelProfile:
    first = points[0]
    weights = _line([_pixels(point) for point in points], float(micro_batch_size * height_px * width_px))

    def value(of: Callable[[LayerProfile], float], index: int) -> float:
        return _at(weights, [of(point.layers[index]) for point in points])

    def layer(index: int) -> LayerProfile:
        base = first.layers[index]
        fitted: dict[str, object] = {}
        for name in TIMES:
            fitted[name] = value(lambda one, name=name: float(getattr(one, name)), index)  # type: ignore[misc]
        for name in SIZES:
            fitted[name] = round(value(lambda one, name=name: float(getattr(one, name)), index))  # type: ignore[misc]
        for name in PAIRS:
            fitted[name] = tuple(
                (ahead, round(value(lambda one, n=name, k=ahead: float(dict(getattr(one, n))[k]), index)))  # type: ignore[misc]
                for ahead, _ in getattr(base, name)
            )
        return replace(base, **(fitted | storages(index, fitted)))  # type: ignore[arg-type]

    def storages(index: int, fitted: dict[str, object]) -> dict[str, object]:
        """Return the storages, and the sums that follow from them; only the sums where points do not agree on them."""
        if not all(_structure(point.layers[index]) == _structure(first.layers[index]) for point in points):
            return {"saved": (), "passing": ()}
        found = {
            name: tuple(
                replace(
                    one,
                    num_bytes=round(
                        value(lambda other, n=name, k=place: float(getattr(other, n)[k].num_bytes), index)  # type: ignore[misc]
                    ),
                )
                for place, one in enumerate(getattr(first.layers[index], name))
            )
            for name in STORAGES
        }
        stash, later = stash_of(found["saved"])
        cheap = product_bytes_of((*found["saved"], *found["passing"]))
        return {**found, "stash_bytes": stash, "saved_later": later, "cheap_bytes": cheap}

    return replace(
        first,
        height_px=height_px,
        width_px=width_px,
        micro_batch_size=micro_batch_size,
        layers=tuple(layer(index) for index in range(first.num_layers)),
        input_bytes=round(_at(weights, [point.input_bytes for point in points])),
    )


def _line(at: Sequence[int], wanted: float) -> tuple[float, ...]:
    """Return what each point counts for in the value at `wanted` of the line nearest to them."""
    mean = sum(at) / len(at)
    spread = sum((one - mean) ** 2 for one in at)
    return tuple(1 / len(at) + (wanted - mean) * (one - mean) / spread for one in at)


def _at(weights: Sequence[float], values: Sequence[float]) -> float:
    """Return the value on the line; never below 0."""
    return max(0.0, sum(weight * value for weight, value in zip(weights, values, strict=True)))


def _check(points: Sequence[ModelProfile]) -> None:
    if len({_pixels(point) for point in points}) < 2:
        raise ConfigError(
            "points", len(points), "must be profiles of two sizes or more", "take one at another resolution"
        )
    first = points[0]
    for point in points[1:]:
        for name in ("model", "dtype", "device", "source"):
            if getattr(point, name) != getattr(first, name):
                raise ConfigError(
                    "points", getattr(point, name), f"must all be of one {name}, and one is of {getattr(first, name)}"
                )
        if not _have_same_layers(point, first):
            raise ConfigError("points", point.model, "must all have the same layers, sharing the same tensors")


def _have_same_layers(one: ModelProfile, other: ModelProfile) -> bool:
    def shape(profile: ModelProfile) -> list[object]:
        return [
            (layer.name, *([ahead for ahead, _ in getattr(layer, name)] for name in PAIRS)) for layer in profile.layers
        ]

    return shape(one) == shape(other)


def _structure(layer: LayerProfile) -> list[list[tuple[object, ...]]]:
    return [[one.structure for one in getattr(layer, name)] for name in STORAGES]


def _pixels(profile: ModelProfile) -> int:
    return profile.micro_batch_size * profile.height_px * profile.width_px


def _whole(profile: ModelProfile, name: str) -> float:
    """Return the sum over layers of a time or of what they save."""
    if name == "time_s":
        return sum(layer.time_s for layer in profile.layers)
    return float(sum(layer.stash_bytes + sum(size for _, size in layer.saved_later) for layer in profile.layers))
