"""Where profiles come from: a file, the cache, or taken: by a child process if torch is not loaded here."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

from gems.config.schema import RunSpec
from gems.errors import ConfigError
from gems.models import layers_of
from gems.profile.identity import differences, key_of, subject_of, versions
from gems.profile.model_profile import ModelProfile
from gems.utils.cache import cached

REFUSED = "refused"
ERROR = re.compile(r"[\w.]+(Error|Exception|Interrupt)\b")
TAKER, OPERATORS_TAKER = "gems.profile.profilers.take", "gems.profile.profilers.operators"


def profile_of(spec: RunSpec) -> ModelProfile:
    """Return the profile of a resolved run: of its file `profile.path`, from the cache, or taken now.

    Raises:
        ConfigError: a file without a profile, or with one of another model, shape, dtype or version; or a profile that
            could not be taken.
    """
    if spec.profile.path is not None:
        return read_file(spec, Path(spec.profile.path))
    key = json.dumps(key_of(spec), sort_keys=True, default=str)
    return ModelProfile.from_json(cached(spec.cache_dir, "profile", key, lambda: take_profile(spec)))


def read_file(spec: RunSpec, path: Path) -> ModelProfile:
    """Read a profile from a file, when it is of this run's layers.

    Raises:
        ConfigError: it is not, or no such file.
    """
    profile = read_document(path)
    check(profile, spec, path)
    return profile


def read_document(path: Path) -> ModelProfile:
    """Read what `gems profile --json` printed, or (.h5) what `gems profile --hdf5` wrote.

    Raises:
        ConfigError: no such file, or no profile in it.
    """
    advice = "give a file of `gems profile --json` or --hdf5"
    try:
        if path.suffix == ".h5":
            return _read_hdf5(path)
        document = json.loads(path.read_text())
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigError("profile.path", path, f"holds no profile ({error})", advice) from error
    if not isinstance(document, dict):
        raise ConfigError("profile.path", path, "holds no profile", advice)
    return ModelProfile.from_json(document, path)


def _read_hdf5(path: Path) -> ModelProfile:
    import h5py

    from gems.profile.hdf5 import read_profile

    with h5py.File(path, "r") as file:
        return read_profile(file["profile"])


def check(profile: ModelProfile, spec: RunSpec, path: Path) -> None:
    """Check that a profile is of the run's layers at the run's shape and dtype, and of these versions.

    Raises:
        ConfigError: what differs, in one line.
    """
    found = {
        "data.height_px": profile.height_px,
        "data.width_px": profile.width_px,
        "parallel.micro_batch_size": profile.micro_batch_size,
        "train.dtype": profile.dtype,
        "layers": [layer.name for layer in profile.layers],
        **{f"version of {name}": text for name, text in profile.versions.items()},
        **dict(profile.facts.get("subject", {})),
    }
    wanted = {
        **subject_of(spec),
        "layers": [layer.name for layer in layers_of(spec.model, spec.data)],
        **{f"version of {name}": text for name, text in versions().items()},
    }
    several = list(differences(found, wanted))
    if several:
        named = [text for text in several if not text.startswith("layers=")] or ["other layers"]
        raise ConfigError(
            "profile.path", path, f"is of another run: {', '.join(named[:3])}",
            "make it again with `gems profile --json`, or leave profile.path out",
        )  # fmt: skip


def operators_taken(spec: RunSpec) -> dict[str, Any]:
    """Return the operators of a resolved run's model with their roofline times, from the cache or taken now.

    The document is of schema gems.operators/1.

    Raises:
        ConfigError: they could not be taken.
    """
    key = json.dumps({**key_of(spec), "train.optimizer": spec.train.optimizer, "train.momentum": spec.train.momentum},
                     sort_keys=True, default=str)  # fmt: skip
    return cached(spec.cache_dir, "operators", key, lambda: take_profile(spec, OPERATORS_TAKER, "ops"))


def take_profile(spec: RunSpec, taker: str | None = None, wanted: str = "layers") -> dict[str, Any]:
    """Take the profile and return its document.

    A measured one is always taken in a child process; one on fake tensors in this process if torch is loaded already.

    Raises:
        ConfigError: what the profiler refused, or how it failed.
    """
    print(f"gems: taking the profile ({spec.profile.name}) ...", file=sys.stderr, flush=True)
    if "torch" in sys.modules and spec.profile.name == "fake":
        try:
            document: dict[str, Any] = json.loads(json.dumps(import_module(taker or TAKER).take(spec).to_json()))
        except ConfigError:
            raise
        except Exception as error:
            notes = getattr(error, "__notes__", [])
            raise _failure(spec, "; ".join([f"{type(error).__name__}: {error}", *notes])) from error
        return document
    ended = subprocess.run(
        [sys.executable, "-m", taker or TAKER], input=json.dumps(spec.to_dict()), capture_output=True, text=True
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
        raise _failure(spec, "; ".join(lines[told:]))
    return answer


def _failure(spec: RunSpec, reason: str) -> ConfigError:
    return ConfigError("profile", spec.profile.name, f"could not be taken: {reason[-400:]}")
