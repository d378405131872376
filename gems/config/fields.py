"""Fields of the configuration.

Declarations of what each may hold and what it is for, and checks by them.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Any, TypeVar, cast, get_args, get_origin, get_type_hints

from gems.errors import ConfigError, nearest, one_of

T = TypeVar("T")
AUTO = "auto"
MAX_INT = 2**63 - 1
# Products and quotients of a few numbers between these two stay finite.
MIN_REAL = 1e-30
MAX_REAL = 1e30
KINDS = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "text",
    list: "a list",
    dict: "a mapping",
    bool | str: "auto, true or false",
}
COUNTS = int | list[int]  # a whole number, or one for each axis
# Keys and values with new names. Old ones are read from a run.yaml, and taken as overrides with one
# line of warning.
RENAMED = {
    "cluster.ask_above_gpu_hours": "cluster.confirm_above_gpu_hours",
    "cluster.no_mem": "cluster.supports_mem_option",
    "cluster.points_per_job": "cluster.runs_per_job",
    "cluster.snapshot": "cluster.archive_code",
    "cluster.stop_before_s": "cluster.signal_before_end_s",
    "cost.input": "cost.input_load",
    "data.field_px": "data.field_of_view_px",
    "data.train_images": "data.train_samples",
    "data.validation_images": "data.validation_samples",
    "memory.least_bytes": "memory.min_offload_bytes",
    "memory.saving": "memory.target_reduction",
    "profile.whole": "profile.whole_model_peak",
    "schedule.allow": "schedule.memory_actions",
    "train.dtype": "train.precision",
    "train.learning_rate": "optimizer.lr",
    "train.momentum": "optimizer.momentum",
    "train.optimizer": "optimizer.name",
    "train.stall_limit_s": "train.hang_timeout_s",
    "train.warmup_steps": "benchmark.skip_steps",
    "train.weight_decay": "optimizer.weight_decay",
}
VALUES = {("memory.recompute", "cheap"): "selective", ("train.dtype", "bfloat16"): "bf16_pure"}
INVERTED = ("cluster.no_mem",)  # true of the old key is false of the new one


@dataclass(frozen=True, slots=True)
class Rule:
    """What a field may hold, or each entry of a list.

    `choices` may be a function, so that a registry is asked when a value is checked. `accepts`
    judges a text, and `form` describes the texts that it accepts. A field with `in_run_id=False`
    changes no result of a run.
    """

    help: str = ""
    min: float = 0
    max: float = math.inf
    above: float | None = None
    choices: Callable[[], Iterable[str]] | None = None
    accepts: Callable[[str], object] | None = None
    form: str = ""
    needs_entries: bool = False
    in_run_id: bool = True

    def allowed(self, kind: Any) -> str:
        """Describe the allowed values of a field of type `kind`, or return "" if its type says all."""
        if self.choices is not None:
            return one_of(self.choices())
        if kind not in (int, float, COUNTS):
            return self.form
        return (
            self._lower
            if self.max == math.inf
            else f"{self._lower.removesuffix(' or more')} to {_plain(self.max)}"
        )

    @property
    def _lower(self) -> str:
        return f"above {self.above:g}" if self.above is not None else f"{_plain(self.min)} or more"

    def check(self, key: str, value: Any) -> None:
        """Check one value that has the right type.

        Raises:
            ConfigError: with what is allowed and the help text.
        """
        if self.choices is not None:
            valid = list(self.choices())
            if value not in valid:
                shown = key if key == "data.name" else key.removesuffix(".name")
                hint = "".join(f"; did you mean {name}?" for name in nearest(value, valid, 1))
                raise ConfigError(shown, value, one_of(valid), f"{self.help}{hint}")
        elif isinstance(value, str):
            try:
                data = value.encode()
            except UnicodeEncodeError as error:
                raise ConfigError(key, ascii(value), "is no text in UTF-8") from error
            if b"\0" in data:
                raise ConfigError(key, repr(value), "must not hold the character 0")
            if self.accepts is not None and not self.accepts(value):
                raise ConfigError(key, repr(value), self.form, self.help)
        elif isinstance(value, int | float) and not isinstance(value, bool):
            is_real = isinstance(value, float)
            # isfinite fails for whole numbers that no float can hold
            is_finite = not is_real or math.isfinite(value)
            if (
                not is_finite
                or value < self.min
                or (self.above is not None and value <= self.above)
            ):
                raise ConfigError(
                    key,
                    value,
                    f"must be {self._lower}{' and finite' if is_real else ''}",
                    self.help,
                )
            if value > (most := min(self.max, MAX_REAL if is_real else MAX_INT)):
                raise ConfigError(key, value, f"must be at most {_plain(most)}", self.help)
            if is_real and 0 < value < MIN_REAL:
                raise ConfigError(
                    key, value, f"must be 0 or from {MIN_REAL:g} to {MAX_REAL:g}", self.help
                )


def _plain(number: float) -> str:
    return str(number) if isinstance(number, int) else f"{number:g}"


def _field(default: Any, rule: Rule) -> Any:
    if isinstance(default, list | dict):
        return dataclasses.field(default_factory=default.copy, metadata={"rule": rule})
    return dataclasses.field(default=default, metadata={"rule": rule})


def number(
    default: T,
    help: str,
    *,
    min: float = 0,
    max: float = math.inf,
    above: float | None = None,
    needs_entries: bool = False,
    in_run_id: bool = True,
) -> T:
    """Declare a number or a list of numbers from `min` (or above `above`) to `max`."""
    rule = Rule(help, min, max, above, needs_entries=needs_entries, in_run_id=in_run_id)
    return cast(T, _field(default, rule))


def choice(
    default: T,
    choices: Callable[[], Iterable[str]] | Iterable[str],
    help: str,
    *,
    in_run_id: bool = True,
) -> T:
    """Declare a text, or a list of texts, that is one of `choices`.

    A function is asked at each check.
    """
    valid = choices if callable(choices) else lambda: choices
    return cast(T, _field(default, Rule(help, choices=valid, in_run_id=in_run_id)))


def text(
    default: T,
    help: str,
    *,
    accepts: Callable[[str], object] | None = None,
    form: str = "",
    in_run_id: bool = True,
) -> T:
    """Declare a text, list or mapping whose texts `accepts` takes.

    `form` describes them ("must be ...").
    """
    return cast(T, _field(default, Rule(help, accepts=accepts, form=form, in_run_id=in_run_id)))


def flag(default: T, help: str, *, in_run_id: bool = True) -> T:
    """Declare a key that is true or false."""
    return cast(T, _field(default, Rule(help, in_run_id=in_run_id)))


def switch(default: T, help: str) -> T:
    """Declare a key that is true, false, or auto for what suits the machine."""
    return text(default, help, accepts=AUTO.__eq__, form=f"must be {KINDS[bool | str]}")


def counts(default: int, help: str, *, max: int) -> Any:
    """Declare a whole number up to `max`, or a list of them, one for each axis.

    OmegaConf knows no such type: annotate the field as Any.
    """
    rule = Rule(help, 0, max)
    return dataclasses.field(default=default, metadata={"rule": rule, "kind": COUNTS})


@dataclass(frozen=True, slots=True)
class Key:
    """One key of the configuration.

    Its dotted name, the type of its values without None, its default and its rule.
    """

    name: str
    kind: Any
    is_optional: bool
    default: Any
    rule: Rule

    @property
    def entry(self) -> Any:
        """The type of one value: of an entry if the key holds a list."""
        return get_args(self.kind)[0] if get_origin(self.kind) is list else self.kind


@cache
def keys(schema: type, prefix: str = "") -> tuple[Key, ...]:
    """Return every key of a dataclass and of those in it."""
    hints = type_hints(schema)
    entries: list[Key] = []
    for field in fields(schema):
        kind = hints[field.name]
        if is_dataclass(kind):
            entries += keys(cast(type, kind), f"{prefix}{field.name}.")
            continue
        default = field.default_factory() if field.default_factory is not MISSING else field.default
        bare = _without_none(kind)
        entries.append(
            Key(f"{prefix}{field.name}", bare, bare is not kind, default, field.metadata["rule"])
        )
    return tuple(entries)


@cache
def type_hints(schema: Any) -> dict[str, Any]:
    """Return the types of a dataclass's fields."""
    explicit = {
        field.name: field.metadata["kind"] for field in fields(schema) if "kind" in field.metadata
    }
    return get_type_hints(schema) | explicit


def check_fields(config: Any, prefix: str = "", types_only: bool = False) -> None:
    """Check each value of a dataclass by the type and, unless `types_only`, by the rule of its field.

    Raises:
        ConfigError: the first wrong value, with its key, what is allowed and the help text.
    """
    schema: Any = type(config)
    hints = type_hints(schema)
    for field in fields(config):
        rule = field.metadata.get("rule", Rule())
        _check(
            f"{prefix}{field.name}",
            getattr(config, field.name),
            hints[field.name],
            None if types_only else rule,
        )


def _check(key: str, value: Any, kind: Any, rule: Rule | None) -> None:
    bare = _without_none(kind)
    if value is None and bare is not kind:
        return
    if bare == COUNTS:
        bare = list[int] if isinstance(value, list) else int
    if is_dataclass(bare) and is_dataclass(value):
        check_fields(value, f"{key}.", rule is None)
        return
    origin = bare if bare in KINDS else get_origin(bare) or bare
    if origin in KINDS:
        is_right = isinstance(value, int | float) if origin is float else isinstance(value, origin)
        if not is_right or (isinstance(value, bool) and origin in (int, float)):
            raise ConfigError(key, value, f"must be {KINDS[origin]}")
    if origin is list:
        if rule is not None and rule.needs_entries and not value:
            raise ConfigError(key, value, "must have one entry or more", rule.help)
        for number, entry in enumerate(value):
            _check(f"{key}[{number}]", entry, get_args(bare)[0], rule)
    elif origin is dict:
        of_keys, of_values = get_args(bare)
        for name, entry in value.items():
            _check(f"{key}.{name}", name, of_keys, None)
            _check(f"{key}.{name}", entry, of_values, rule if isinstance(entry, str) else None)
    elif rule is not None:
        rule.check(key, value)


def _without_none(kind: Any) -> Any:
    if isinstance(kind, UnionType) and kind not in (*KINDS, COUNTS):
        (kind,) = (option for option in get_args(kind) if option is not NoneType)
    return kind


def build(schema: type[T], values: Any, key: str = "") -> T:
    """Make a dataclass of a mapping as a file holds it, with the dataclasses in it.

    Raises:
        ConfigError: no mapping, an unknown key, or a value of another type.
    """
    instance = _build(schema, values, key)
    check_fields(instance, f"{key}." if key else "", types_only=True)
    return instance


def _build(schema: type[T], values: Any, key: str) -> T:
    if not isinstance(values, Mapping):
        raise ConfigError(key, values, "must be a mapping of keys to values")
    hints = type_hints(cast(Any, schema))
    prefix = f"{key}." if key else ""
    arguments = {}
    for name, value in values.items():
        if name not in hints:
            raise ConfigError(f"{prefix}{name}", value, one_of(nearest(str(name), hints)))
        entry = get_args(hints[name])
        if is_dataclass(hints[name]):
            value = _build(cast(Any, hints[name]), value, f"{prefix}{name}")
        elif isinstance(value, list) and entry and is_dataclass(entry[0]):
            value = [
                _build(cast(Any, entry[0]), row, f"{prefix}{name}[{index}]")
                for index, row in enumerate(value)
            ]
        arguments[name] = value
    return schema(**arguments)


def renamed_error(key: str, value: object) -> ConfigError | None:
    """Return the error for a key or a value that has a new name, or None."""
    if isinstance(value, str) and (key, value) in VALUES:
        return ConfigError(key, value, f"is now called {VALUES[key, value]}")
    if key not in RENAMED:
        return None
    return ConfigError(
        key,
        value,
        f"is now called {RENAMED[key]}",
        "true and false are swapped" if key in INVERTED else "",
    )


def with_new_names(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return a run.yaml as a mapping of sections, with old keys and values under their new names."""
    sections = {
        name: dict(value) if isinstance(value, Mapping) else value
        for name, value in document.items()
    }
    for (key, old_value), value in VALUES.items():
        section, _, name = key.partition(".")
        if isinstance(sections.get(section), dict) and sections[section].get(name) == old_value:
            sections[section][name] = value
    for key, new_key in RENAMED.items():
        section, _, name = key.partition(".")
        if isinstance(sections.get(section), dict) and name in sections[section]:
            value = sections[section].pop(name)
            new_section, _, new_name = new_key.partition(".")
            sections.setdefault(new_section, {})[new_name] = not value if key in INVERTED else value
    return sections


def renamed_word(key: str, value: str) -> tuple[str, str]:
    """Return an override's key and value under their new names."""
    value = VALUES.get((key, value), value)
    if key in INVERTED:
        value = {"true": "false", "false": "true"}.get(value.lower(), value)
    return RENAMED.get(key, key), value
