"""Extrapolate profiles to another resolution and micro-batch size."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from gems.errors import ConfigError
from gems.profile import LayerProfile, ModelProfile
from gems.profile.model_profile import (
    PAIRS,
    SIZES,
    STORAGES,
    TIMES,
    Saved,
    product_bytes_of,
    stash_of,
)
from gems.utils.units import SIDES


def extrapolate(
    points: Sequence[ModelProfile], sides: Mapping[str, int], micro_batch_size: int
) -> ModelProfile:
    """Return the profile of samples with other sides, with every figure as a + b x pixels.

    The line is the least-squares fit over the micro-batches of `points`; `sides` are by name.

    For a convolutional network this is exact, except for rounding if a side is not a multiple of
    the network's stride. `facts["error"]` has the largest relative error of the total time and
    stash in leave-one-out cross-validation; None with fewer than three points.

    Raises:
        ConfigError: there are fewer than two sizes, or points of different models.
    """
    _check(points)
    error = None
    if len({_pixels(point) for point in points}) > 2:
        error = {"time_s": 0.0, "stash_bytes": 0.0}
        for point in points:
            rest = [other for other in points if _pixels(other) != _pixels(point)]
            guess = _fit(rest, point.sides, point.micro_batch_size)
            for name in error:
                error[name] = max(error[name], abs(_whole(guess, name) / _whole(point, name) - 1))
    profile = _fit(points, sides, micro_batch_size)
    shapes = [[point.micro_batch_size, *point.sides.values()] for point in points]
    profile = replace(profile, facts={"extrapolated_from": shapes, "error": error})
    return profile.captured(points[0].is_captured)


def _fit(
    points: Sequence[ModelProfile], sides: Mapping[str, int], micro_batch_size: int
) -> ModelProfile:
    """Return the profile on the line nearest to the points; no value is below 0."""
    pixels = [_pixels(point) for point in points]
    mean = sum(pixels) / len(pixels)
    spread = sum((count - mean) ** 2 for count in pixels)
    beyond = micro_batch_size * math.prod(sides.values()) - mean
    weights = [1 / len(pixels) + beyond * (count - mean) / spread for count in pixels]

    def at(values: Iterable[float]) -> float:
        return max(0.0, sum(weight * value for weight, value in zip(weights, values, strict=True)))

    def fitted_layer(layers: Sequence[LayerProfile]) -> LayerProfile:
        def rows(name: str) -> Iterator[tuple[Any, ...]]:
            return zip(*(getattr(layer, name) for layer in layers), strict=True)

        fitted: dict[str, Any] = {
            name: at(getattr(layer, name) for layer in layers) for name in TIMES
        }
        fitted |= {name: round(at(getattr(layer, name) for layer in layers)) for name in SIZES}
        fitted |= {
            name: tuple(
                (row[0][0], round(at(num_bytes for _, num_bytes in row))) for row in rows(name)
            )
            for name in PAIRS
        }
        if any(_structure(layer) != _structure(layers[0]) for layer in layers):
            return replace(layers[0], **fitted, saved=(), passing=())
        storages = {
            name: tuple(
                replace(row[0], num_bytes=round(at(storage.num_bytes for storage in row)))
                for row in rows(name)
            )
            for name in STORAGES
        }
        stash, later = stash_of(storages["saved"])
        cheap = product_bytes_of((*storages["saved"], *storages["passing"]))
        return replace(
            layers[0],
            **(
                fitted
                | storages
                | {"stash_bytes": stash, "saved_later": later, "cheap_bytes": cheap}
            ),
        )

    return replace(
        points[0],
        **{name: sides.get(name) for name in SIDES},  # type: ignore[arg-type]
        micro_batch_size=micro_batch_size,
        layers=tuple(
            fitted_layer(layers) for layers in zip(*(point.layers for point in points), strict=True)
        ),
        input_bytes=round(at(point.input_bytes for point in points)),
    )


def _check(points: Sequence[ModelProfile]) -> None:
    if len({_pixels(point) for point in points}) < 2:
        advice = "take one at another resolution"
        raise ConfigError("points", len(points), "must be profiles of two sizes or more", advice)
    first = points[0]
    for point in points[1:]:
        for name in ("model", "dtype", "device", "source"):
            if getattr(point, name) != getattr(first, name):
                text = f"must all be of one {name}, and one is of {getattr(first, name)}"
                raise ConfigError("points", getattr(point, name), text)
        if _aheads(point) != _aheads(first):
            raise ConfigError(
                "points", point.model, "must all have the same layers, sharing the same tensors"
            )


def _aheads(profile: ModelProfile) -> list[tuple[object, ...]]:
    return [
        (layer.name, *([ahead for ahead, _ in getattr(layer, name)] for name in PAIRS))
        for layer in profile.layers
    ]


def _structure(layer: LayerProfile) -> list[list[Saved]]:
    """Return the storages without their bytes, which are the same at all resolutions."""
    return [
        [replace(storage, num_bytes=0) for storage in getattr(layer, name)] for name in STORAGES
    ]


def _pixels(profile: ModelProfile) -> int:
    return profile.micro_batch_size * math.prod(profile.sides.values())


def _whole(profile: ModelProfile, name: str) -> float:
    return float(
        sum(layer.time_s if name == "time_s" else layer.kept_bytes for layer in profile.layers)
    )
