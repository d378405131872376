"""Turn a study's file into points: the configuration of each run."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from gems.config.compose import compose
from gems.config.fields import build
from gems.config.overrides import CONF, options_of
from gems.config.schema import RunSpec, StudyConfig
from gems.errors import ConfigError, nearest, one_of
from gems.plan.draft import Draft
from gems.plan.evaluate import with_strips_chosen
from gems.runs.folder import RunFolder
from gems.utils.atomic_io import read_yaml

GROUP = "study"


@dataclass(frozen=True)
class Point:
    """One run of a study: the overrides that distinguish it, and its complete configuration."""

    words: tuple[str, ...]
    spec: RunSpec

    @property
    def label(self) -> str:
        """The overrides that distinguish this point from the others."""
        return " ".join(self.words) or "the only point"

    @functools.cached_property
    def folder(self) -> RunFolder:
        """The run folder, whether or not it exists."""
        return RunFolder.of(self.spec)


def study_name(study: str) -> str:
    """Return the name of a study that is given by name or by file."""
    return Path(study).stem if _is_file(study) else study


def read_study(study: str) -> StudyConfig:
    """Read a study by its name in `conf/study/` or from its .yaml file.

    Raises:
        ConfigError: There is no such study, or it is invalid.
    """
    options = options_of(GROUP)
    if not _is_file(study) and study not in options:
        advice = "".join(f"nearest: {option}, " for option in nearest(study, options, 1))
        raise ConfigError(GROUP, study, one_of(options), f"{advice}or give a .yaml file")
    path = Path(study) if _is_file(study) else CONF / GROUP / f"{study}.yaml"
    try:
        values = read_yaml(path.read_text())
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise ConfigError(GROUP, path, f"cannot be read ({error})") from error
    if not isinstance(values, dict):
        raise ConfigError(GROUP, path, "must be a mapping of keys to values")
    return _checked(values)


def compose_points(study: StudyConfig, name: str, overrides: Sequence[str] = ()) -> list[Point]:
    """Compose every point of a study, each followed by `overrides`.

    Points with the same run folder count once. The result is in running order: each repetition is a
    round of all points, so a machine that slows down over hours slows all points alike, and not
    only the last ones (Hoefler and Belli, SC 2015, rule 10). The first round is in the file's
    order. The others are in a random order that is the same for every call. Each repetition has its
    own seed, and therefore its own folder.

    Raises:
        ConfigError: A point cannot run; its number and words precede the key.
    """
    once: dict[Path, Point] = {}
    axes = [[_words(key, choice) for choice in choices] for key, choices in study.axes.items()]
    for number, chosen in enumerate(itertools.product(*axes, study.points or [[]]), 1):
        words = tuple(itertools.chain(*chosen))
        try:
            spec = with_strips_chosen(compose([f"name='{name}'", *study.base, *words, *overrides]))
            _ = Draft(spec).costs  # fail before any point runs if a point cannot be partitioned
        except ConfigError as error:
            key = f"point {number} of study {name} ({' '.join(words)}): {error.key}"
            raise ConfigError(key, error.value, error.allowed, error.advice) from error
        point = Point(words, spec)
        once.setdefault(point.folder.path, point)
    order = list(once.values())
    points = list(order)
    for repetition in range(1, study.repetitions):
        last = order[-1]
        random.Random(repetition).shuffle(order)
        if len(order) > 1 and order[0] is last:
            order.append(order.pop(0))
        for point in order:
            seed = point.spec.seed + repetition
            points.append(
                Point((*point.words, f"seed={seed}"), dataclasses.replace(point.spec, seed=seed))
            )
    return list({point.folder.path: point for point in points}.values())


def _words(key: str, choice: Any) -> list[str]:
    """Return the overrides of one choice on an axis."""
    if isinstance(choice, list):
        return [*map(str, choice)]
    text = str(choice).lower() if isinstance(choice, bool) else choice
    return [f"{key}={'null' if choice is None else text}"]


def _checked(values: dict[str, Any]) -> StudyConfig:
    overrides = {key: value for key, value in values.items() if value is not None}
    study = build(StudyConfig, overrides, GROUP)
    for key, choices in study.axes.items():
        if not choices:
            text = "must be a list of values, or of lists of overrides"
            raise ConfigError(f"{GROUP}.axes.{key}", choices, text, f"as in {key}: [1, 2, 4]")
    if study.repetitions < 1:
        raise ConfigError(f"{GROUP}.repetitions", study.repetitions, "must be 1 or more")
    return study


def _is_file(study: str) -> bool:
    return study.endswith((".yaml", ".yml"))
