"""gems.config.compose.key_help.

--help shows every key with its limits, and an error shows the help of its key.
"""

from __future__ import annotations

import math
from functools import reduce
from typing import Any

import pytest
import yaml

from gems.config.cluster import QueueLimit
from gems.config.compose import key_help
from gems.config.fields import MAX_INT, MAX_REAL, Key, check_fields, keys
from gems.config.schema import RunSpec
from gems.errors import ConfigError, one_line

KEYS = list(keys(RunSpec))
NUMBERS = [key for key in KEYS if key.entry in (int, float)]
SHOWN = key_help(RunSpec(), 120).partition("== Keys ==\n")[2]


def name_of(key: Key) -> str:
    return key.name


def wrong_values(key: Key) -> list[Any]:
    """Values that the rule of a key forbids, of the key's type."""
    rule = key.rule
    is_list = isinstance(key.default, list) or "list" in str(key.kind)
    if key.entry in (int, float):
        kind = key.entry
        most = min(rule.max, MAX_INT if kind is int else MAX_REAL)
        least = rule.min if rule.above is None else rule.above
        found: list[Any] = [kind(least) - 1, most * 2 + 1 if kind is int else most * 2]
        found += [] if rule.above is None else [kind(rule.above)]
        found += [] if kind is int else [math.nan, math.inf]
    elif rule.choices is not None or rule.accepts is not None:
        found = ["\x01no such\n" + "x" * 4000]
    else:
        found = []
    return [[value] if is_list else value for value in found]


@pytest.mark.parametrize("key", KEYS + list(keys(QueueLimit, "cluster.limits[].")), ids=name_of)
def test_every_key_has_a_help_text(key: Key) -> None:
    assert len(key.rule.help) > 5 and not key.rule.help.endswith(".")
    assert key.rule.help == one_line(key.rule.help)


@pytest.mark.parametrize("key", KEYS, ids=name_of)
def test_help_shows_every_key_with_its_default_and_help(key: Key) -> None:
    value, _, rest = f"\n{SHOWN}\n".partition(f"\n{key.name}=")[2].partition("\n")
    assert yaml.safe_load(value) in (key.default, str(key.default))
    assert " ".join(rest.split()).startswith(key.rule.help)


@pytest.mark.parametrize("key", NUMBERS, ids=name_of)
def test_help_shows_the_limits_of_every_number(key: Key) -> None:
    allowed = key.rule.allowed(key.entry)
    assert any(word in allowed for word in ("above", "or more", " to "))
    assert " ".join(f"{key.rule.help} [{allowed}]".split()) in " ".join(SHOWN.split())


@pytest.mark.parametrize("key", [key for key in KEYS if wrong_values(key)], ids=name_of)
def test_a_value_out_of_range_is_refused_with_its_help_text(key: Key) -> None:
    for value in wrong_values(key):
        spec = RunSpec()
        section, _, name = key.name.rpartition(".")
        setattr(reduce(getattr, section.split("."), spec) if section else spec, name, value)
        with pytest.raises(ConfigError) as caught:
            check_fields(spec)
        assert caught.value.key.partition("[")[0] in (key.name, key.name.removesuffix(".name"))
        assert key.rule.help in str(caught.value)


def test_a_choice_is_refused_with_the_nearest() -> None:
    spec = RunSpec()
    spec.memory.name = "vdnn_al"
    with pytest.raises(
        ConfigError, match=r"^memory=vdnn_al: allowed: keep, .*; did you mean vdnn_all\?$"
    ):
        check_fields(spec)
