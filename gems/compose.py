"""Composition: from `conf/` and overrides to a resolved run, with errors in one line. The only user of Hydra."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import hydra
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from gems.config import RunSpec
from gems.errors import ConfigError, nearest, one_of
from gems.resolve import resolve

CONF = Path(__file__).resolve().parent.parent / "conf"


def compose(overrides: Sequence[str]) -> RunSpec:
    """Composes `conf/config.yaml` with overrides and resolves it.

    Raises:
        ConfigError: an unknown key or option (with the nearest valid ones), or a value that cannot run.
    """
    _register()
    check_overrides(overrides)
    GlobalHydra.instance().clear()
    try:
        with hydra.initialize_config_dir(version_base="1.3", config_dir=str(CONF)):
            config = hydra.compose(config_name="config", overrides=list(overrides))
            return resolve(_to_spec(config))
    except (HydraException, OmegaConfBaseException) as error:
        raise _translate(error) from error


def hydra_app(argv: Sequence[str], program: str, act: Callable[[RunSpec], None]) -> None:
    """Runs `act` under `hydra.main`, for Hydra's own options (--cfg, --help, --info, --multirun, ...)."""
    import sys

    _register()
    sys.argv = [program, *argv]

    @hydra.main(version_base="1.3", config_path=str(CONF), config_name="config")
    def app(config: DictConfig) -> None:
        act(resolve(_to_spec(config)))

    app()


def _register() -> None:
    ConfigStore.instance().store(name="run_schema", node=RunSpec)


def _to_spec(config: DictConfig) -> RunSpec:
    missing = sorted(OmegaConf.missing_keys(config))
    if missing:
        raise ConfigError(missing[0], "???", "must be given", f"add {missing[0]}=...")
    spec = OmegaConf.to_object(config)
    assert isinstance(spec, RunSpec)
    return spec


def options_of(group: str) -> list[str]:
    """Gives the options of a configuration group, or nothing where there is no such group."""
    return sorted(path.stem for path in (CONF / group).glob("*.yaml"))


def valid_keys() -> Iterator[str]:
    """Gives every key that an override may name: groups, and fields of the schema with their dots."""
    yield from (path.name for path in CONF.iterdir() if path.is_dir() and options_of(path.name))
    for field in dataclasses.fields(RunSpec):
        inner = field.default_factory
        if inner is dataclasses.MISSING:
            yield field.name
            continue
        for name in getattr(inner, "__dataclass_fields__", {}):
            yield f"{field.name}.{name}"


def check_overrides(overrides: Sequence[str]) -> None:
    """Refuses overrides whose key or option does not exist.

    Raises:
        ConfigError: with the nearest valid keys or options.
    """
    try:
        parsed = OverridesParser.create().parse_overrides(list(overrides))
    except HydraException as error:
        culprit = next((text for text in overrides if text in str(error)), " ".join(overrides))
        raise ConfigError(
            "override", culprit, "not of the form key=value", "quote special characters: 'key=\"a b\"'"
        ) from error
    keys = list(valid_keys())
    for override in parsed:
        _check_override(override, keys)


def _check_override(override: Override, keys: Sequence[str]) -> None:
    key = str(override.key_or_group)
    if key.startswith("hydra"):
        return
    if override.is_delete():
        raise ConfigError(f"~{key}", "", "a key cannot be taken away", f"set it instead: {key}=...")
    free = re.match(r"cluster\.(environment|sbatch)\.", key)
    if key not in keys and not free:
        raise ConfigError(
            key, override.get_value_element_as_str(), "unknown key; nearest: " + ", ".join(nearest(key, keys))
        )
    options = options_of(key)
    if (
        options
        and isinstance(override.value(), str)
        and not override.is_sweep_override()
        and override.value() not in options
    ):
        raise ConfigError(
            key,
            override.value(),
            one_of(options),
            f"nearest: {nearest(str(override.value()), options, 1)[0]}",
        )


def _translate(error: Exception) -> ConfigError:
    """Makes one line of what Hydra or OmegaConf says in several."""
    cause = error.__cause__ if isinstance(error.__cause__, OmegaConfBaseException) else error
    text = str(cause)
    match = re.search(r"full_key: (\S+)", text)
    key = match[1] if match else "configuration"
    first = text.strip().splitlines()[0]
    value = re.search(r"Value '(.*?)' of type", first)
    if "is not in struct" in text or "not in '" in first:
        return ConfigError(key, _absent(), "unknown key; nearest: " + ", ".join(nearest(key, valid_keys())))
    return ConfigError(key, value[1] if value else _absent(), first)


def _absent() -> Any:
    return "(in conf/)"
