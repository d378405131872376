"""The cluster preset of this machine: found by the patterns of login host names that presets carry."""

from __future__ import annotations

import functools
import socket
import sys
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path

import yaml

from gems.errors import ConfigError
from gems.utils.atomic_io import read_yaml

GROUP = "cluster"
AUTO = "auto"


def choose_preset(folders: Sequence[Path]) -> str:
    """Return the preset of `folders` whose host patterns match this machine, and report it on stderr once a process.

    Raises:
        ConfigError: none matches, or several do.
    """
    return _choose(tuple(folders), host_names())


def host_names() -> tuple[str, ...]:
    """Return the names of this machine: its host name, and with the domain if that is known."""
    names = dict.fromkeys(name.lower() for name in (socket.gethostname(), socket.getfqdn()) if name)
    return tuple(name for name in names if not name.startswith("localhost")) or tuple(names)


def matching(folders: Sequence[Path], names: Sequence[str]) -> dict[str, str]:
    """Return the presets of `folders` that match one of `names`, each with that name.

    Raises:
        ConfigError: a preset's file is not YAML.
    """
    presets: dict[str, str] = {}
    for path in (path for folder in folders for path in sorted((folder / GROUP).glob("*.yaml"))):
        try:
            values = read_yaml(path.read_text())
        except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
            raise ConfigError(
                GROUP, path, f"cannot be read ({' '.join(str(error).split())})"
            ) from error
        hosts = values.get("hosts") if isinstance(values, dict) else None
        for pattern in hosts if isinstance(hosts, list) else ():
            fitting = [name for name in names if fnmatchcase(name, str(pattern).lower())]
            if fitting:
                presets[path.stem] = fitting[0]
    return presets


@functools.cache
def _choose(folders: tuple[Path, ...], names: tuple[str, ...]) -> str:
    presets = matching(folders, names)
    here = " or ".join(names)
    if not presets:
        raise ConfigError(
            GROUP,
            AUTO,
            f"no preset knows the host {here}",
            "give cluster=local to run here, cluster=NAME for a known machine, or draft a preset of"
            " this one: gems-jobs discover",
        )
    if len(presets) > 1:
        raise ConfigError(
            GROUP,
            AUTO,
            f"the host {here} fits several presets: {', '.join(sorted(presets))}",
            "give cluster=NAME",
        )
    ((preset, name),) = presets.items()
    print(
        f"gems: cluster={preset}, by the host name {name}; cluster=NAME overrides it",
        file=sys.stderr,
        flush=True,
    )
    return preset
