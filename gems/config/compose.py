"""Composition: from `conf/` and overrides to a resolved run, with errors in one line; and the text of --help."""

from __future__ import annotations

import functools
import json
import os
import pickle
import sys
import textwrap
from collections.abc import Callable, Hashable, Iterator, Sequence
from pathlib import Path
from typing import Any

import hydra
import yaml
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from gems.config import target_files
from gems.config.cluster_presets import AUTO, choose_preset
from gems.config.fields import keys
from gems.config.overrides import (
    CONF,
    FREE,
    PACKAGE,
    REGISTERED,
    check_overrides,
    config_folders,
    hydra_word,
    import_plugins,
    options_of,
    parsed,
    registered_options,
    rewritten,
    translate,
    with_target_files,
)
from gems.config.resolve import resolve
from gems.config.schema import RunSpec
from gems.errors import ConfigError, GemsError

LOCAL = "local"
WIDTH = 120  # of a line of help


def compose(overrides: Sequence[str], cluster: str = LOCAL) -> RunSpec:
    """Compose `conf/config.yaml` with overrides and resolve it.

    Raises:
        ConfigError: as `composed`, or a value that cannot run.
    """
    return resolve(composed(overrides, cluster))


def composed(overrides: Sequence[str], cluster: str = LOCAL) -> RunSpec:
    """Compose `conf/config.yaml` with overrides, without checking or deriving values.

    `cluster` is the preset if neither an override nor an experiment chooses one: a name, or auto for this machine's.

    Raises:
        ConfigError: an unknown key or option (with the nearest valid ones), a value of another type, or no preset for
            this machine.
    """
    overrides = rewritten(overrides)
    check_overrides(overrides)
    given, folders = parsed(overrides), config_folders(overrides)
    values = [override for override in given if _is_value(override, folders)]
    choices = tuple(str(override.input_line) for override in given if override not in values)
    try:
        if cluster == AUTO or any(PACKAGE in word for word in choices):  # which depend on more than files
            config = _with_options(choices, cluster)
        else:
            config = pickle.loads(_kept_options(choices, cluster, _option_files(folders), _registered_names()))
        ConfigLoaderImpl._apply_overrides_to_config(values, config)  # as Hydra itself does last
        spec = _to_spec(config)
    except GemsError:
        raise
    except Exception as error:  # Hydra has errors of its own, OmegaConf's, YAML's, the system's and plain ValueErrors
        raise translate(error, overrides) from error
    return spec


def _is_value(override: Override, folders: Sequence[Path]) -> bool:
    """Return whether an override sets one value, and chooses no options."""
    key = str(override.key_or_group)
    return not (options_of(key, folders) or key.startswith("hydra") or override.is_sweep_override())


def _with_options(choices: Sequence[str], cluster: str) -> DictConfig:
    """Return what Hydra composes of the chosen options."""
    default = _DefaultCluster(cluster, choices)
    _register(default)
    GlobalHydra.instance().clear()
    with hydra.initialize_config_dir(version_base="1.3", config_dir=str(CONF)):
        config = hydra.compose(config_name="config", overrides=with_target_files(choices))
    default.check()
    return config


@functools.lru_cache(maxsize=256)
def _kept_options(choices: Sequence[str], cluster: str, *_: Hashable) -> bytes:
    """Return the options' configuration for `pickle`: Hydra takes 0.1 s to compose it, and a study has many runs."""
    return pickle.dumps(_with_options(choices, cluster))


def _option_files(folders: Sequence[Path]) -> Hashable:
    """Return the files of options, as they are now."""
    files = (path for folder in folders for path in folder.absolute().rglob("*.yaml"))
    return tuple((str(path), (stat := path.stat()).st_mtime_ns, stat.st_size) for path in files if path.exists())


def _registered_names() -> Hashable:
    return tuple(tuple(registered_options(group)) for group in REGISTERED)


def changed(spec: RunSpec, overrides: Sequence[str], takes_options: bool = False) -> RunSpec:
    """Return a resolved run with some keys changed and resolved again.

    If it `takes_options`, an option of a group sets the keys that it names and leaves the others of the group.

    Raises:
        ConfigError: as `compose`, or a word that is no plain key=value.
    """
    overrides = [hydra_word(word) for word in overrides]
    check_overrides(overrides)
    given = parsed(overrides)
    try:
        config = OmegaConf.structured(spec)
        for override in given:
            key = str(override.key_or_group)
            option = override.value()
            if takes_options and options_of(key) and isinstance(option, str):
                for name, value in _option_values(key, option).items():
                    OmegaConf.update(config, f"{key}.{name}", value)
                continue
            if "." not in key or override.is_sweep_override():
                raise ConfigError(
                    key, override.input_line or "", "is not one value of one key", "as in cluster.minutes=90"
                )
            OmegaConf.update(config, key, override.value(), force_add=FREE.match(key) is not None)
        made = OmegaConf.to_object(config)
    except OmegaConfBaseException as error:
        raise translate(error, overrides) from error
    assert isinstance(made, RunSpec)
    return resolve(made)


def _option_values(group: str, option: str) -> dict[str, Any]:
    """Return the keys of a group that an option sets; a target of the user's own gives way to it."""
    path = CONF / group / f"{option}.yaml"
    values = {"name": option, **(yaml.safe_load(path.read_text()) if path.exists() else {})}
    has_target = any(key.name == f"{group}.target" for key in keys(RunSpec))
    return {**({"target": None} if has_target else {}), **values}


def hydra_app(argv: Sequence[str], program: str, act: Callable[[RunSpec], None], cluster: str = LOCAL) -> None:
    """Run `act` under `hydra.main`, for Hydra's own options (--cfg, --info, --multirun, ...).

    In `argv` overrides come before options, for Hydra's parser takes them in one piece. `cluster` is that of `compose`.
    The first job of a sweep that fails ends the sweep.

    Raises:
        ConfigError: as `compose`; and whatever `act` raises.
    """
    argv = rewritten(argv)
    words = [word for word in argv if not word.startswith("-")]
    import_plugins(parsed([word for word in words if word.startswith("plugins")]))
    default = _DefaultCluster(cluster, words)
    _register(default)
    failed: list[BaseException] = []

    @hydra.main(version_base="1.3", config_path=str(CONF), config_name="config")
    def app(config: DictConfig) -> None:
        if failed:
            return
        try:
            default.check()
            act(resolve(_to_spec(config)))
        except BaseException as error:  # Hydra would print it as a traceback and exit with 1
            failed.append(error)

    before = sys.argv, os.environ.get("HYDRA_FULL_ERROR")
    sys.argv = [program, *with_target_files(argv)]
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra's own errors come out, instead of as text and SystemExit
    try:
        app()
    except Exception as error:  # as in `compose`; what `act` raised is in `failed`
        raise translate(error, argv) from error
    except SystemExit as error:  # --info and its like end so
        if error.code:
            raise
    finally:
        sys.argv = before[0]
        os.environ.pop("HYDRA_FULL_ERROR")
        if before[1] is not None:
            os.environ["HYDRA_FULL_ERROR"] = before[1]
    if failed and isinstance(failed[0], OmegaConfBaseException):
        raise translate(failed[0], argv) from failed[0]
    if failed:
        raise failed[0]
    default.check()


class _DefaultCluster:
    """The preset for Hydra's list of defaults, which Hydra asks for only if nothing else chooses one.

    Hydra would wrap an error that is raised here, so `check` raises it later.
    """

    def __init__(self, name: str, overrides: Sequence[str]) -> None:
        self._name = name
        self.overrides = overrides
        self._error: ConfigError | None = None

    def __call__(self) -> str:
        if self._name != AUTO:
            return self._name
        try:
            return choose_preset(config_folders(self.overrides))
        except ConfigError as error:
            self._error = error
            return LOCAL

    def check(self) -> None:
        """Raise the ConfigError of a preset that was not found."""
        if self._error is not None:
            raise self._error


@functools.cache
def _store_schema() -> None:
    ConfigStore.instance().store(name="run_schema", node=RunSpec)


def _register(default: _DefaultCluster) -> None:
    """Give Hydra what is no file: the schema, the default cluster, and the registered options without a file."""
    _store_schema()
    target_files.register()
    store, folders = ConfigStore.instance(), config_folders(default.overrides)
    for group in REGISTERED:
        files = {path.name for folder in folders for path in (folder / group).glob("*.yaml")}
        for name in registered_options(group):
            # Hydra would take an entry beside a file of its name for the file's schema.
            if f"{name}.yaml" in files:
                store.repo.get(group, {}).pop(f"{name}.yaml", None)
            else:
                of_several = group == "metrics"  # of which a run has any number
                store.store(group=group, name=name, node={name: {"name": name}} if of_several else {"name": name})
    OmegaConf.register_new_resolver("gems.cluster", default, replace=True)


def _to_spec(config: DictConfig) -> RunSpec:
    try:
        spec = OmegaConf.to_object(config)
    except MissingMandatoryValue as error:
        missing = min(OmegaConf.missing_keys(config))
        raise ConfigError(missing, "???", "must be given", f"add {missing}=...") from error
    assert isinstance(spec, RunSpec)
    return spec


def key_help(spec: RunSpec) -> str:
    """Return the groups with their options, and every key with its value in `spec`, what it may hold and its use."""
    groups = sorted({folder.name for folder in CONF.iterdir() if folder.is_dir()} | set(REGISTERED))

    def wrapped(text: str, indent: int = 0) -> str:
        return textwrap.fill(text, WIDTH, initial_indent=" " * indent, subsequent_indent=" " * (indent + 2))

    def lines() -> Iterator[str]:
        yield "Choose an option of a group: group=option. Set a key: key=value; null derives the value."
        yield from ("", "== Groups ==")
        yield from (wrapped(f"{group}: {', '.join(options_of(group))}") for group in groups if options_of(group))
        yield from ("", "== Keys ==")
        for key in keys(RunSpec):
            value: Any = functools.reduce(getattr, key.name.split("."), spec)
            yield f"{key.name}={json.dumps(value) if isinstance(value, bool | None) else value}"
            allowed = key.rule.allowed(key.entry)
            yield wrapped(f"{key.rule.help} [{allowed}]" if allowed else key.rule.help, 4)

    return "\n".join(lines())
