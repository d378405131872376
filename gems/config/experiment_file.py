"""Experiment files: a run that was chosen, as its differences from the defaults, with comments that say why."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from gems.config.overrides import options_of
from gems.config.schema import RunSpec
from gems.errors import ConfigError

# Keys of the site or of one call, rather than of the run.
LEFT_OUT = ("runs_dir", "cache_dir", "cluster", "name")


def experiment_text(spec: RunSpec, base: RunSpec, name: str, comments: Sequence[str]) -> str:
    """Return the text of an experiment that composes to a resolved run.

    `base` is what composes without it.
    """
    values = {"name": name, **_differing(spec.to_dict(), base.to_dict(), LEFT_OUT)}
    cluster = spec.cluster.name
    if cluster != base.cluster.name and cluster in options_of("cluster"):
        values = {"defaults": [{"override /cluster": cluster}], **values}
    head = ["# @package _global_", *(f"# {line}" for line in comments)]
    body = yaml.safe_dump(values, sort_keys=False, default_flow_style=None, width=110)
    return "\n".join(head) + "\n" + body


def check_experiment(path: Path) -> None:
    """Check the file that an experiment is to be written to.

    Raises:
        ConfigError: it does not end with .yaml, or its folder does not exist.
    """
    if path.suffix != ".yaml" or not path.parent.is_dir():
        raise ConfigError(
            "--write",
            path,
            "must be a file NAME.yaml in an existing folder",
            "conf/experiment/NAME.yaml for make submit CONF=NAME",
        )


def write_experiment(path: Path, text: str) -> None:
    """Write an experiment, and replace an earlier one.

    Raises:
        ConfigError: it cannot be written.
    """
    try:
        path.write_text(text)
    except OSError as error:
        raise ConfigError("--write", path, f"cannot be written ({error.strerror})") from error


def _differing(
    values: Mapping[str, Any], base: Mapping[str, Any], left_out: Sequence[str] = ()
) -> dict[str, Any]:
    differing = {}
    for key, value in values.items():
        if key in left_out or value == base[key]:
            continue
        # a mapping with keys of the user's own is written whole
        is_section = (
            isinstance(value, Mapping) and isinstance(base[key], Mapping) and key != "kwargs"
        )
        differing[key] = _differing(value, base[key]) if is_section else value
    return differing
