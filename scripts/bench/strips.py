"""Strips on this machine: bytes and times of images in strips beside whole ones, trained in turn.

Parts: `device`, one rank with whole images, segment recompute, strips, and strips that are run
again, by height; `ranks`, one image a step through two ranks, in strips and whole; `time`, one rank
by number of strips and height; `bytes`, what strips save for backward over the whole image, on fake
tensors; `largest`, the bytes of one device by height, on fake tensors. Ratios are medians of those
of one round. `--width 0` is square images; `time` takes `--models` and `--strips`. Takes Hydra
overrides for every run, such as machine=cuda. Prints tables on stderr and JSON on stdout; what does
not run is named with the reason.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from gems.models import layers_of
from gems.plan.evaluate import evaluate
from gems.profile.profilers.fake import fake_profile
from gems.profile.store import strips_of
from gems.profile.subject import Subject
from scripts.bench.rig import Table, answered, composed, machine, options, square, trained_in_turns

RESNET50 = "resnet50"
VGG16 = "vgg16"
CONVNEXT_TINY = "convnext_tiny"
RESNET = "model=resnet50 model.norm=frozen_batch"
VGG = "model=vgg16 model.norm=none"
CONVNEXT = "model=convnext_tiny"
MODELS = {
    RESNET50: ("ResNet-50", RESNET),
    VGG16: ("VGG-16", VGG),
    CONVNEXT_TINY: ("ConvNeXt-tiny", CONVNEXT),
}
ONE = (
    "data=synthetic schedule=layer_parallel parallel.partitions=1 parallel.micro_batches=1"
    " parallel.micro_batch_size=1 data.validation_samples=1 data.train_samples=8 optimizer.lr=1e-9"
    " train.steps=4 benchmark.skip_steps=1"
)
WHOLE = "whole"
AGAIN = "memory=recompute memory.recompute=strip"
STRIP_ROWS = 256
MIN_ROWS = 64


def main(argv: list[str] | None = None) -> int:
    """Measure the chosen part and print it."""
    chosen = options(
        __doc__,
        argv,
        part=tuple(_PARTS),
        heights=[512, 1024, 2048],
        width=256,
        rounds=3,
        models=[RESNET50, VGG16],
        strips=[2, 4, 8, 16, 32],
        overrides={"nargs": "*"},
    )
    if unknown := [model for model in chosen.models if model not in MODELS]:
        raise SystemExit(f"--models={unknown[0]}: allowed are {', '.join(MODELS)}")
    machine()
    return answered(_PARTS[chosen.part](chosen), False)


def _size(height: int, width: int) -> str:
    return f"data.height_px={height} data.width_px={width or height}"


Ways = dict[str, str]


def _raced(
    chosen: argparse.Namespace, models: Ways, words: Callable[[int], tuple[str, Ways]]
) -> list[dict[str, Any]]:
    """Train each model at each height; `words` are those of all ways at a height, and by way."""
    table = Table("model:<14", "height=height_px:<8", *_COLUMNS)
    rows = []
    for name, model in models.items():
        for height in chosen.heights:
            of_all, ways = words(height)
            specs = {
                way: composed(model, ONE, of_all, own, chosen.overrides)
                for way, own in ways.items()
            }
            runs = trained_in_turns(specs, chosen.rounds)
            rows += table.rows(
                ({"model": name, "height_px": height, **row} for row in runs), _why_not
            )
    return rows


def _device(chosen: argparse.Namespace) -> list[dict[str, Any]]:
    def words(height: int) -> tuple[str, Ways]:
        strips = f"parallel.strips={height // STRIP_ROWS}"
        return _size(height, chosen.width), {
            WHOLE: "",
            "segment recompute": "memory=recompute",
            f"strips of {STRIP_ROWS} rows": strips,
            "strips, run again": f"{strips} {AGAIN}",
        }

    return _raced(chosen, dict([MODELS[RESNET50]]), words)


def _ranks(chosen: argparse.Namespace) -> list[dict[str, Any]]:
    def words(height: int) -> tuple[str, Ways]:
        strips = [k for k in (2, 4, 8) if height // k >= MIN_ROWS]
        ways = {f"{k} strips": f"schedule=1f1b parallel.strips={k}" for k in strips}
        two = "parallel.partitions=2 profile=measured"
        return f"{square(height)} {two}", {WHOLE: "schedule=layer_parallel"} | ways

    return _raced(chosen, dict([MODELS[RESNET50]]), words)


def _time(chosen: argparse.Namespace) -> list[dict[str, Any]]:
    ways = {WHOLE: ""} | {f"{k} strips": f"parallel.strips={k}" for k in chosen.strips}
    models = dict(MODELS[key] for key in chosen.models)
    return _raced(chosen, models, lambda height: (_size(height, chosen.width), ways))


def _why_not(row: dict[str, Any]) -> str:
    return str(row.get("failed", ""))


_COLUMNS = (
    "way:<20",
    "activations MiB=activation_bytes:>16.1f",
    "predicted MiB=predicted_bytes:>14.1f",
    "device MiB=device_bytes:>12.0f",
    "resident MiB=rss_bytes:>14.0f",
    "step ms=step_s:>9.0f",
    "over whole=ratio:>11.2f",
)


def _bytes(chosen: argparse.Namespace) -> list[dict[str, Any]]:
    numbers = (1, 2, 4, 8, 16, 32)
    table = Table("model:<14", "height=height_px:>7", *(f"{k}:>8.3f" for k in numbers))
    rows = []
    for name, model in MODELS.values():
        for height in chosen.heights:
            whole = composed(model, ONE, _size(height, chosen.width), chosen.overrides)
            parts = (whole.model, whole.data, 1, whole.train.layer_dtype, whole.machine)
            saved = sum(layer.kept_bytes for layer in fake_profile(*parts).layers)
            cut = (0, len(layers_of(whole.model, whole.data)))
            row: dict[str, Any] = {"model": name, "height_px": height}
            for k in numbers:
                spec = replace(whole, parallel=replace(whole.parallel, strips=k))
                row[str(k)] = (
                    sum(strip.kept for strip in strips_of(Subject.of(spec), cut).stages[0]) / saved
                )
            rows.append(table.row(row))
    return rows


def _largest(chosen: argparse.Namespace) -> list[dict[str, Any]]:
    table = Table("height=height_px:<8", "way:<34", "strips:>7", "device GiB=device_bytes:>11.2f")
    rows = []
    for height in chosen.heights:
        ways = {WHOLE: (1, "cost=profile"), "segment recompute": (1, "memory=recompute")}
        ways |= {
            f"strips of {height // k} rows, run again": (k, AGAIN)
            for k in (height // 64, height // 256)
        }
        for way, (k, words) in ways.items():
            spec = composed(
                RESNET, ONE, square(height), f"parallel.strips={k}", words, chosen.overrides
            )
            peak = evaluate(spec).peak
            rows.append(
                table.row(
                    {
                        "height_px": height,
                        "way": way,
                        "strips": k,
                        "device_bytes": peak and peak.device_bytes,
                    }
                )
            )
    return rows


_PARTS: dict[str, Callable[[argparse.Namespace], list[dict[str, Any]]]] = {
    "device": _device,
    "ranks": _ranks,
    "time": _time,
    "bytes": _bytes,
    "largest": _largest,
}


if __name__ == "__main__":
    sys.exit(main())
