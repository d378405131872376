"""The points of a study: from its file to the configuration of each run."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from gems.compose import CONF, compose, options_of
from gems.config import RunSpec, StudyConfig
from gems.costed import costed
from gems.errors import ConfigError, nearest, one_of
from gems.runfolder import RunFolder

GROUP = "study"
KEYS = tuple(field.name for field in dataclasses.fields(StudyConfig))


@dataclass(frozen=True, slots=True)
class Point:
    """One run of a study: the overrides that tell it from the others, and all of its configuration."""

    words: tuple[str, ...]
    spec: RunSpec

    @property
    def label(self) -> str:
        """The overrides that tell this point from the others."""
        return " ".join(self.words) or "the only point"

    @property
    def folder(self) -> RunFolder:
        """The run folder, whether or not it is there."""
        return RunFolder.of(self.spec)


def study_name(study: str) -> str:
    """Gives the name of a study that is given by name or by its file."""
    return Path(study).stem if _is_file(study) else study


def read_study(study: str) -> StudyConfig:
    """Reads a study: a name of `conf/study/`, or the path of a .yaml file.

    Raises:
        ConfigError: there is none, or it is not of the form of `StudyConfig`.
    """
    options = options_of(GROUP)
    if not _is_file(study) and study not in options:
        advice = "".join(f"nearest: {option}, " for option in nearest(study, options, 1))
        raise ConfigError(GROUP, study, one_of(options), f"{advice}or give a .yaml file")
    path = Path(study) if _is_file(study) else CONF / GROUP / f"{study}.yaml"
    try:
        values = yaml.safe_load(path.read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(GROUP, path, f"cannot be read ({error})") from error
    if not isinstance(values, dict):
        raise ConfigError(GROUP, path, "must be a mapping of " + ", ".join(KEYS))
    return _checked(values)


def points_of(study: StudyConfig, name: str, overrides: Sequence[str] = ()) -> list[Point]:
    """Composes every point of a study, each followed by `overrides`; points of one run folder count once.

    Raises:
        ConfigError: a point that cannot run, with its number and words before the key.
    """
    points: dict[Path, Point] = {}
    for number, words in enumerate(_products(study), 1):
        try:
            spec = costed(compose([f"name='{name}'", *study.base, *words, *overrides]))
        except ConfigError as error:
            key = f"point {number} of study {name} ({' '.join(words)}): {error.key}"
            raise ConfigError(key, error.value, error.allowed, error.advice) from error
        point = Point(words, spec)
        points.setdefault(point.folder.path, point)
    return list(points.values())


def _products(study: StudyConfig) -> Iterator[tuple[str, ...]]:
    axes = [[_words(key, choice) for choice in choices] for key, choices in study.axes.items()]
    for chosen in itertools.product(*axes, study.points or [[]]):
        yield tuple(itertools.chain(*chosen))


def _words(key: str, choice: Any) -> list[str]:
    """Gives the overrides of one choice of an axis."""
    if isinstance(choice, list):
        return choice
    return [
        f"{key}={'null' if choice is None else str(choice).lower() if isinstance(choice, bool) else choice}"
    ]


def _checked(values: dict[str, Any]) -> StudyConfig:
    for key in values:
        if key not in KEYS:
            raise ConfigError(f"{GROUP}.{key}", values[key], one_of(KEYS))
    study = StudyConfig(**{key: value for key, value in values.items() if value is not None})
    if not _is_words(study.base):
        raise ConfigError(f"{GROUP}.base", study.base, "must be a list of overrides", "as in [schedule=1f1b]")
    if not isinstance(study.points, list) or not all(map(_is_words, study.points)):
        raise ConfigError(
            f"{GROUP}.points",
            study.points,
            "must be a list of lists of overrides",
            "as in [[parallel.replicas=2]]",
        )
    if not isinstance(study.axes, dict):
        raise ConfigError(f"{GROUP}.axes", study.axes, "must be a mapping of keys to lists of choices")
    for key, choices in study.axes.items():
        if not isinstance(choices, list) or not choices or not all(map(_is_choice, choices)):
            raise ConfigError(
                f"{GROUP}.axes.{key}", choices, "must be a list of values, or of lists of overrides",
                "as in parallel.replicas: [1, 2, 4]",
            )  # fmt: skip
    return study


def _is_words(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(word, str) for word in value)


def _is_choice(value: object) -> bool:
    return _is_words(value) or value is None or isinstance(value, str | int | float)


def _is_file(study: str) -> bool:
    return study.endswith((".yaml", ".yml"))
