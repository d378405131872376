"""Get profiles from a file or the cache, or take them.

A child process takes them if torch is not loaded here.
"""

from __future__ import annotations

import json
import math
import platform
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import cache
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import gems
from gems.config.schema import MachineConfig, ProfileConfig
from gems.data import reads_bytes, reads_mask_rows, reads_rows, sample_shape
from gems.errors import ConfigError
from gems.models import layers_of, stride_of
from gems.profile.model_profile import LIBRARY_BYTES, TIMES, ModelProfile
from gems.profile.pace import RunPace
from gems.profile.strip_profile import (
    SCHEMA,
    STRIP_SHARES,
    STRIPS_OVER_WHOLE,
    StripProfile,
    StripWork,
)
from gems.profile.subject import Subject
from gems.profile.work import ModelWork
from gems.utils.cache import cached, keep_cached, read_cached
from gems.utils.gpus import may_have_gpu
from gems.utils.run_module import RUN_MODULE
from gems.utils.targets import source_of
from gems.utils.units import SIDES, with_sides

PROFILER = 16  # increase it if profilers give other figures
DISTRIBUTIONS = ("torch", "numpy")
REFUSED = "refused"
PACE = "pace"
ERROR = re.compile(r"[\w.]+(Error|Exception|Interrupt)\b")
TAKER, OPERATORS_TAKER, STRIPS_TAKER, STRIP_WORK_TAKER, EXACTNESS_TAKER, WORK_TAKER = (
    f"gems.profile.profilers.{name}"
    for name in ("layers", "operators", "strips", "strip_work", "exactness", "work")
)
# keys of the configuration that a profile depends on besides its subject
_ON_FAKE = (
    "machine.name",
    "machine.device",
    "machine.float64_flops_per_s",
    "machine.flops_per_s",
    "machine.bfloat16_flops_per_s",
    "machine.memory_bytes_per_s",
    "machine.efficiency",
    *(f"machine.{name}" for name in ("launch_s", "bfloat16_launch_s", "operator_s")),
    *(f"machine.{name}half_rate_channels" for name in ("", "bfloat16_")),
    "machine.operator_efficiency",
    "machine.memory_efficiency",
    "machine.multiprocessors",
    "machine.winograd",
    "replays_graphs",
    "profile.whole_model_peak",
)
_ON_STRIPS = (
    "parallel.strips",
    "parallel.strips_until",
    "parallel.min_strip_positions",
    "parallel.boundaries",
    "machine.device",
    "optimizer.frozen",
)
_ON_DEVICE = (
    "machine.device",
    "machine.threads_per_rank",
    "machine.deterministic",
    "machine.cudnn_benchmark",
    "machine.tf32",
    "profile.repetitions",
)
_INCREMENTAL = ("profile.on", "machine.device_bytes", "optimizer.num_states", "parallel.partitions")


def versions() -> dict[str, str]:
    """Return the versions that a profile depends on, without importing the packages."""
    return {"gems": gems.__version__, **{name: _version(name) for name in DISTRIBUTIONS}}


@cache
def _version(distribution: str) -> str:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return "none"


def is_fake(profile: ProfileConfig) -> bool:
    """Return whether a profile is taken on fake tensors."""
    return profile.name == "fake" or (profile.name == "incremental" and profile.on == "fake")


def key_of(subject: Subject) -> dict[str, Any]:
    """Return everything that the profile of a resolved run depends on.

    This is the subject, the profiler, the machine and the versions.
    """
    name = subject.profile.name
    where = (
        _on_fake(subject, _ON_FAKE)
        if is_fake(subject.profile)
        else {"node": platform.node(), **subject.values(_ON_DEVICE)}
    )
    more = subject.values(_INCREMENTAL) if name == "incremental" else {}
    return {**subject.layers, **where, **more, "profile": name, "profiler": PROFILER, **versions()}


def _on_fake(subject: Subject, keys: Sequence[str]) -> dict[str, Any]:
    """Return the values of keys, and whether machine.device=auto stands for a GPU.

    The latter is part of the key because nodes with and without GPUs may share a cache.
    """
    more = {"has_gpu": may_have_gpu()} if subject.machine.device == "auto" else {}
    return {**subject.values(keys), **more}


def profile_of(subject: Subject) -> ModelProfile:
    """Return the profile of a resolved run, with layer times at the pace of a run if it is known.

    The bytes that libraries hold are `machine.library_bytes` if set, else as the profile measured
    them. With strips, the times are those of the strips one after the other: thin strips read
    weights more often.

    Raises:
        ConfigError: As `profile_alone`.
    """
    profile = profile_alone(subject)
    pace = known_pace(subject)
    if subject.parallel.num_strips > 1 and subject.profile.path is None:
        profile = _with_times_of_strips(subject, profile)
    if pace is not None and profile.source == "measured":
        profile = pace.of(profile)
    known = subject.machine.library_bytes
    if known is not None:
        profile = replace(profile, facts={**profile.facts, LIBRARY_BYTES: known})
    return profile.captured(subject.is_captured)


def _with_times_of_strips(subject: Subject, profile: ModelProfile) -> ModelProfile:
    """Return a profile with layer times for strips, and each strip's share of the layers.

    A layer's time is the time for an image with the rows (and columns) of the strips that it takes
    at once, multiplied by the number of such groups. Strips thinner than what the model shrinks to
    one row or column count as that thick. If the model does not take such a small image, or has no
    streaming form, times stay unchanged.
    """
    try:
        work = strip_work(subject)
    except ConfigError:
        return profile
    whole = math.prod(subject.data.sides_px)
    by_sides: dict[tuple[int, ...], ModelProfile] = {}
    layers = []
    for number, (layer, of_layer) in enumerate(zip(profile.layers, work.layers, strict=True)):
        of_strips = _sides_of_strips(subject, of_layer.at_once)
        if of_strips not in by_sides:
            by_sides[of_strips] = _smaller(subject, profile, of_strips)
        small = by_sides[of_strips]
        share = whole / math.prod(small.sides.values())
        layers.append(
            replace(layer, **{name: getattr(small.layers[number], name) * share for name in TIMES})
        )
    shares = [list(of_layer.shares) for of_layer in work.layers]
    in_strips = replace(
        profile, layers=tuple(layers), facts={**profile.facts, STRIP_SHARES: shares}
    )
    whole_s = sum(layer.time_s for layer in profile.layers)
    slower = sum(layer.time_s for layer in layers) / whole_s if whole_s else 1.0
    return replace(in_strips, facts={**in_strips.facts, STRIPS_OVER_WHOLE: slower})


def _sides_of_strips(subject: Subject, at_once: int) -> tuple[int, ...]:
    """Return the sides of the strips that a layer takes at once, in whole strides."""
    stride = stride_of(subject.model)
    sides = subject.data.sides_px
    first, *inner = subject.parallel.full_grid(len(sides))
    shares = [(at_once, first), *((1, parts) for parts in inner)]
    return tuple(
        min(side, max(stride, -(-side * together // parts // stride) * stride))
        for side, (together, parts) in zip(sides, shares, strict=True)
    )


def _smaller(subject: Subject, profile: ModelProfile, sides: tuple[int, ...]) -> ModelProfile:
    """Return the profile of an image with such sides.

    Return the given profile if its image is no larger, or if the model refuses such an image.
    """
    if sides == tuple(profile.sides.values()):
        return profile
    try:
        small = profile_alone(replace(subject, data=with_sides(subject.data, sides)))
    except ConfigError:
        return profile
    return (
        small
        if [layer.name for layer in small.layers] == [layer.name for layer in profile.layers]
        else profile
    )


def known_pace(subject: Subject) -> RunPace | None:
    """Return how much longer measured layers take in a resolved run.

    The pace is that of the machine's configuration, or as calibrated on this node; None if neither
    is known. A profile in a file may be of another machine, so the calibration of this node does
    not apply to it.
    """
    machine = subject.machine
    if not machine.is_real or (subject.profile.path is None and is_fake(subject.profile)):
        return None
    if machine.pace_factor is not None:
        return RunPace(machine.pace_factor, machine.pace_pass_s)
    document = (
        None
        if subject.profile.path is not None
        else read_cached(subject.cache_dir, PACE, _pace_key(machine))
    )
    try:
        return None if document is None else RunPace(**document)
    except TypeError:  # written by another version
        return None


def keep_pace(pace: RunPace, cache_dir: str | None, machine: MachineConfig) -> None:
    """Cache the pace of this node's devices for later runs."""
    keep_cached(cache_dir, PACE, _pace_key(machine), asdict(pace))


def _pace_key(machine: MachineConfig) -> str:
    return json.dumps([platform.node(), machine.device, machine.threads_per_rank, versions()])


def profile_alone(subject: Subject) -> ModelProfile:
    """Return the profile of a resolved run, from `profile.path` or the cache, or taken now.

    A measured profile has the times of layers that run alone.

    Raises:
        ConfigError: The file has no profile, or one of another model, shape, dtype or version; or
            the profile could not be taken.
    """
    if subject.profile.path is not None:
        profile = read_document(Path(subject.profile.path))
        check(profile, subject, Path(subject.profile.path))
        return profile
    key = json.dumps(key_of(subject), sort_keys=True, default=str)
    return ModelProfile.from_json(
        cached(subject.cache_dir, "profile", key, lambda: take_profile(subject))
    )


def read_document(path: Path) -> ModelProfile:
    """Read a profile that `gems profile --json` printed or (.h5) `--hdf5` wrote.

    Raises:
        ConfigError: The file contains no profile.
    """
    advice = "give a file of `gems profile --json` or --hdf5"
    try:
        if path.suffix == ".h5":
            import h5py

            from gems.profile.hdf5 import read_profile

            with h5py.File(path, "r") as file:
                return read_profile(file["profile"])
        document = json.loads(path.read_text())
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigError("profile.path", path, f"holds no profile ({error})", advice) from error
    if not isinstance(document, dict):
        raise ConfigError("profile.path", path, "holds no profile", advice)
    return ModelProfile.from_json(document, path)


def check(profile: ModelProfile, subject: Subject, path: Path) -> None:
    """Raise ConfigError if a profile differs from the run in layers, shape, dtype or versions."""
    actual = {
        **{f"data.{name}": getattr(profile, name) for name in SIDES},
        "parallel.micro_batch_size": profile.micro_batch_size,
        "train.dtype": profile.dtype,
        "layers": [layer.name for layer in profile.layers],
        **{f"version of {name}": text for name, text in profile.versions.items()},
        **{
            key: value
            for key, value in dict(profile.facts.get("subject", {})).items()
            if value is not None
        },
    }
    expected = {
        "data.depth_px": None,
        **subject.layers,
        "layers": [layer.name for layer in layers_of(subject.model, subject.data)],
        **{f"version of {name}": text for name, text in versions().items()},
    }
    several = [
        f"{key}={actual[key]} instead of {expected[key]}"
        for key in expected
        if key in actual and actual[key] != expected[key]
    ]
    if several:
        named = [text for text in several if not text.startswith("layers=")] or ["other layers"]
        advice = "make it again with `gems profile --json`, or leave profile.path out"
        raise ConfigError(
            "profile.path", path, f"is of another run: {', '.join(named[:3])}", advice
        )


def operators_taken(subject: Subject) -> dict[str, Any]:
    """Return the operators of a run's model with roofline times, from the cache or taken now.

    The run is resolved; the document has schema gems.operators/1.

    Raises:
        ConfigError: As `take_profile`.
    """
    known = key_of(subject) | subject.values(("optimizer.num_states",))
    key = json.dumps(known, sort_keys=True, default=str)
    return cached(
        subject.cache_dir, "operators", key, lambda: take_profile(subject, OPERATORS_TAKER, "ops")
    )


def work_of(subject: Subject) -> ModelWork:
    """Return the work of a resolved run's layers on fake tensors, from the cache or taken now.

    Raises:
        ConfigError: As `take_profile`.
    """
    key = json.dumps(key_of(subject), sort_keys=True, default=str)
    return ModelWork.from_json(
        cached(subject.cache_dir, "work", key, lambda: take_profile(subject, WORK_TAKER, "kinds"))
    )


def strips_of(subject: Subject, boundaries: Sequence[int]) -> StripProfile:
    """Return the strip profile of a resolved run's stages, from the cache or taken now.

    It is taken on fake tensors.

    Raises:
        ConfigError: A layer needs the whole image, or as `take_profile`.
    """
    cut = replace(subject, parallel=replace(subject.parallel, boundaries=list(boundaries)))
    strips = StripProfile.from_json(_strips_taken(cut, STRIPS_TAKER, "stages"))
    data = subject.data
    are_bytes = not reads_rows(data) and reads_bytes(data)
    return replace(
        strips,
        reads_rows=reads_rows(data),
        byte_images=subject.parallel.micro_batch_size * math.prod(sample_shape(data)) * are_bytes,
        reads_masks=len(strips.masks) > 1 and reads_mask_rows(data),
    )


def strip_work(subject: Subject) -> StripWork:
    """Return each strip's share of the layers of a resolved run, from the cache or taken now.

    Raises:
        ConfigError: As `strips_of`.
    """
    parallel = replace(subject.parallel, boundaries=None)  # boundaries do not matter here
    return StripWork.from_json(
        _strips_taken(replace(subject, parallel=parallel), STRIP_WORK_TAKER, "layers")
    )


def _strips_taken(subject: Subject, taker: str, wanted: str) -> dict[str, Any]:
    known = {**subject.layers, **_on_fake(subject, _ON_STRIPS), "profiler": PROFILER, **versions()}
    loss = subject.loss
    known["schema"] = SCHEMA
    # the loss decides whether strips keep their outputs for it
    known["loss"] = asdict(loss), loss.target and source_of(loss.target, loss.path)
    key = json.dumps([taker, known], sort_keys=True, default=str)
    return cached(subject.cache_dir, "strips", key, lambda: take_profile(subject, taker, wanted))


def take_in_this_process() -> None:
    """Load torch, so that many profiles on fake tensors are taken in this process.

    A process for each would take longer.
    """
    import_module(STRIPS_TAKER)


def take_profile(
    subject: Subject, taker: str | None = None, wanted: str = "layers"
) -> dict[str, Any]:
    """Take the profile and return its document.

    A measured profile is always taken in a child process. One on fake tensors is taken in this
    process if torch is loaded already.

    Raises:
        ConfigError: The profiler refused the run or failed; the error says why.
    """
    is_strips = taker in (STRIPS_TAKER, STRIP_WORK_TAKER, EXACTNESS_TAKER)
    what = "profile of strips" if is_strips else f"profile ({subject.profile.name})"
    doing = "comparing layers with themselves" if taker == EXACTNESS_TAKER else f"taking the {what}"
    print(f"gems: {doing} ...", file=sys.stderr, flush=True)
    if "torch" in sys.modules and (is_strips or subject.profile.name == "fake"):
        try:
            document: dict[str, Any] = json.loads(
                json.dumps(import_module(taker or TAKER).take(subject).to_json())
            )
        except ConfigError:
            raise
        except Exception as error:
            notes = getattr(error, "__notes__", [])
            raise _failure(
                subject, "; ".join([f"{type(error).__name__}: {error}", *notes])
            ) from error
        return document
    ended = subprocess.run(
        [sys.executable, *RUN_MODULE, taker or TAKER],
        input=json.dumps(asdict(subject)),
        capture_output=True,
        text=True,
    )
    try:
        answer = json.loads(ended.stdout.splitlines()[-1]) if ended.stdout.strip() else {}
    except ValueError:
        answer = {}
    if REFUSED in answer:
        raise ConfigError(*answer[REFUSED])
    if ended.returncode or not isinstance(answer, dict) or wanted not in answer:
        lines = ended.stderr.strip().splitlines() or [f"the process ended with {ended.returncode}"]
        # Python prints an error before its notes, such as the layer at fault
        told = max((n for n, line in enumerate(lines) if ERROR.match(line)), default=len(lines) - 1)
        raise _failure(subject, "; ".join(lines[told:]))
    return answer


def _failure(subject: Subject, reason: str) -> ConfigError:
    return ConfigError("profile", subject.profile.name, f"could not be taken: {reason[-400:]}")
