"""The text of --help: every group with its options, every key with its value, what it may hold and what it is for."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from functools import reduce

from gems.config.fields import Key, keys
from gems.config.overrides import CONF, REGISTERED, options_of
from gems.config.schema import RunSpec

WIDTH = 120


def key_help(spec: RunSpec) -> str:
    """Return the groups and keys of the configuration, with the values of `spec`."""
    groups = sorted({folder.name for folder in CONF.iterdir() if folder.is_dir()} | set(REGISTERED))
    return "\n".join(
        [
            "Choose an option of a group: group=option. Set a key: key=value; null derives the value.",
            *("", "== Groups =="),
            *(_wrapped(f"{group}: {', '.join(options_of(group))}", 0) for group in groups if options_of(group)),
            *("", "== Keys =="),
            *(line for key in keys(RunSpec) for line in _lines(key, reduce(getattr, key.name.split("."), spec))),
        ]
    )


def _lines(key: Key, value: object) -> Iterator[str]:
    shown = {None: "null", True: "true", False: "false"}.get(value, value) if isinstance(value, bool | None) else value
    yield f"{key.name}={shown}"
    allowed = key.rule.allowed(key.entry)
    yield _wrapped(f"{key.rule.help} [{allowed}]" if allowed else key.rule.help, 4)


def _wrapped(text: str, indent: int) -> str:
    return textwrap.fill(text, WIDTH, initial_indent=" " * indent, subsequent_indent=" " * (indent + 2))
