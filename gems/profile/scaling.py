"""Scaling: a profile at another resolution and micro-batch, from profiles at a few."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
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


def extrapolate(
    points: Sequence[ModelProfile], height_px: int, width_px: int, micro_batch_size: int
) -> ModelProfile:
    """Return the profile at another shape.

    Every time and size as a + b x pixels of the micro-batch, by least squares.
    Of a convolutional network that is what times and sizes are, except for rounding where a side is
    no multiple of the network's stride. `facts["error"]` has the largest relative error of the
    whole's time and stash when one point after the other is left out and predicted from the rest;
    None with fewer than three points.

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
    found = replace(found, facts={"extrapolated_from": shapes, "error": error})
    return found.captured(points[0].is_captured)


def _fit(
    points: Sequence[ModelProfile], height_px: int, width_px: int, micro_batch_size: int
) -> ModelProfile:
    """Return the profile on the line nearest to the points; no value is below 0."""
    pixels = [_pixels(point) for point in points]
    mean = sum(pixels) / len(pixels)
    spread = sum((one - mean) ** 2 for one in pixels)
    beyond = micro_batch_size * height_px * width_px - mean
    weights = [1 / len(pixels) + beyond * (one - mean) / spread for one in pixels]

    def at(values: Iterable[float]) -> float:
        return max(0.0, sum(weight * value for weight, value in zip(weights, values, strict=True)))

    def layer(several: Sequence[LayerProfile]) -> LayerProfile:
        def rows(name: str) -> Iterator[tuple[Any, ...]]:
            return zip(*(getattr(one, name) for one in several), strict=True)

        fitted: dict[str, Any] = {name: at(getattr(one, name) for one in several) for name in TIMES}
        fitted |= {name: round(at(getattr(one, name) for one in several)) for name in SIZES}
        fitted |= {
            name: tuple(
                (row[0][0], round(at(num_bytes for _, num_bytes in row))) for row in rows(name)
            )
            for name in PAIRS
        }
        if any(_structure(one) != _structure(several[0]) for one in several):
            return replace(several[0], **fitted, saved=(), passing=())
        found = {
            name: tuple(
                replace(row[0], num_bytes=round(at(one.num_bytes for one in row)))
                for row in rows(name)
            )
            for name in STORAGES
        }
        stash, later = stash_of(found["saved"])
        cheap = product_bytes_of((*found["saved"], *found["passing"]))
        return replace(
            several[0],
            **(fitted | found | {"stash_bytes": stash, "saved_later": later, "cheap_bytes": cheap}),
        )

    return replace(
        points[0],
        height_px=height_px,
        width_px=width_px,
        micro_batch_size=micro_batch_size,
        layers=tuple(
            layer(several) for several in zip(*(point.layers for point in points), strict=True)
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
    """Return what is alike at other resolutions: all of the storages but their bytes."""
    return [[replace(one, num_bytes=0) for one in getattr(layer, name)] for name in STORAGES]


def _pixels(profile: ModelProfile) -> int:
    return profile.micro_batch_size * profile.height_px * profile.width_px


def _whole(profile: ModelProfile, name: str) -> float:
    return float(
        sum(layer.time_s if name == "time_s" else layer.kept_bytes for layer in profile.layers)
    )
