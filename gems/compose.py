"""Composition: from `conf/` and overrides to a resolved run, with errors in one line. The only user of Hydra."""

from __future__ import annotations

import dataclasses
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import hydra
import yaml
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep, Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from gems.config import RunSpec
from gems.errors import ConfigError, GemsError, nearest, one_of
from gems.resolve import resolve

CONF = Path(__file__).resolve().parent.parent / "conf"
IN_CONF = "(in conf/)"
FILE = "file://"
UNITS = {"k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}
SIZE = re.compile(
    r"(?P<key>[\w.+]+_bytes(?:_per_s)?)=(?P<number>\d+(?:\.\d+)?)(?P<unit>[kMGT]|[KMGT]i)B(?:/s)?"
)
FREE = re.compile(
    r"(cluster\.(environment|sbatch)|model\.kwargs)\."
)  # mappings whose keys are the user's own
KWARGS = re.compile(r"model\.kwargs[.=]")


def compose(overrides: Sequence[str]) -> RunSpec:
    """Composes `conf/config.yaml` with overrides and resolves it.

    Raises:
        ConfigError: an unknown key or option (with the nearest valid ones), or a value that cannot run.
    """
    _register()
    overrides = [_opened(in_bytes(word)) for word in overrides]
    check_overrides(overrides)
    GlobalHydra.instance().clear()
    try:
        with hydra.initialize_config_dir(version_base="1.3", config_dir=str(CONF)):
            spec = _to_spec(hydra.compose(config_name="config", overrides=list(overrides)))
    except GemsError:
        raise
    except (
        Exception
    ) as error:  # Hydra has errors of its own, OmegaConf's, YAML's, the system's and plain ValueErrors
        raise _translate(error, overrides) from error
    return resolve(spec)


def hydra_app(argv: Sequence[str], program: str, act: Callable[[RunSpec], None]) -> None:
    """Runs `act` under `hydra.main`, for Hydra's own options (--cfg, --help, --info, --multirun, ...).

    In `argv` overrides come before options, as Hydra's parser takes them in one piece.
    The first job of a sweep that fails ends the sweep.

    Raises:
        ConfigError: as `compose`; and whatever `act` raises.
    """
    _register()
    argv = [_opened(in_bytes(word)) for word in argv]
    failed: list[BaseException] = []

    @hydra.main(version_base="1.3", config_path=str(CONF), config_name="config")
    def app(config: DictConfig) -> None:
        if failed:
            return
        try:
            act(resolve(_to_spec(config)))
        except BaseException as error:  # Hydra would print it as a traceback and exit with 1
            failed.append(error)

    before = sys.argv, os.environ.get("HYDRA_FULL_ERROR")
    sys.argv = [program, *argv]
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra's own errors come out, instead of as text and SystemExit
    try:
        app()
    except Exception as error:  # as in `compose`; what `act` raised is in `failed`
        raise _translate(error, argv) from error
    except SystemExit as error:  # --help and its like end so
        if error.code:
            raise
    finally:
        sys.argv = before[0]
        os.environ.pop("HYDRA_FULL_ERROR")
        if before[1] is not None:
            os.environ["HYDRA_FULL_ERROR"] = before[1]
    if failed and isinstance(failed[0], OmegaConfBaseException):
        raise _translate(failed[0], argv) from failed[0]
    if failed:
        raise failed[0]


def _register() -> None:
    ConfigStore.instance().store(name="run_schema", node=RunSpec)


def _to_spec(config: DictConfig) -> RunSpec:
    missing = sorted(OmegaConf.missing_keys(config))
    if missing:
        raise ConfigError(missing[0], "???", "must be given", f"add {missing[0]}=...")
    spec = OmegaConf.to_object(config)
    assert isinstance(spec, RunSpec)
    return spec


def _opened(override: str) -> str:
    """Gives an override that may add keys, where they are keyword arguments of the user's own network."""
    return f"++{override}" if KWARGS.match(override) else override


def in_bytes(override: str) -> str:
    """Gives an override of a key in bytes with a plain number: machine.device_bytes=16GB is 16000000000, GiB 2^30."""
    found = SIZE.fullmatch(override)
    if found is None:
        return override
    return f"{found['key']}={round(float(found['number']) * UNITS[found['unit']])}"


def options_of(group: str, folders: Sequence[Path] = (CONF,)) -> list[str]:
    """Gives the options of a configuration group in `folders`, or nothing where there is no such group."""
    return sorted({path.stem for folder in folders for path in (folder / group).glob("*.yaml")})


def valid_keys(folders: Sequence[Path] = (CONF,)) -> Iterator[str]:
    """Gives every key that an override may name: groups in `folders`, and fields of the schema with their dots."""
    for folder in folders:
        groups = (path.name for path in folder.iterdir() if path.is_dir())
        yield from (group for group in groups if options_of(group, [folder]))
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
    parser = OverridesParser.create()
    parsed: list[Override] = []
    for text in overrides:
        try:
            parsed += parser.parse_overrides([text])
        except HydraException as error:
            raise ConfigError(
                "override", text, "not of the form key=value", "quote special characters: 'key=\"a b\"'"
            ) from error
    folders = [CONF, *_search_path(parsed)]
    keys = list(valid_keys(folders))
    for override in parsed:
        _check_override(override, keys, folders)


def _search_path(parsed: Sequence[Override]) -> Iterator[Path]:
    """Gives the user's own configuration folders, that hydra.searchpath names."""
    for override in parsed:
        values = override.value() if override.key_or_group == "hydra.searchpath" else None
        for entry in values if isinstance(values, list) else ():
            path = Path(str(entry).removeprefix(FILE))
            if str(entry).startswith(FILE) and not path.is_dir():
                raise ConfigError("--config-dir", path, "is not a folder")
            if path.is_dir():
                yield path


def _check_override(override: Override, keys: Sequence[str], folders: Sequence[Path]) -> None:
    key = str(override.key_or_group)
    if key.startswith("hydra"):
        return
    if key == "study":
        value = override.get_value_element_as_str()
        raise ConfigError(
            key, value, "names many runs, and this is one", f"python -m jobs study study={value}"
        )
    if override.is_delete():
        raise ConfigError(f"~{key}", "", "a key cannot be taken away", f"set it instead: {key}=...")
    if key not in keys and not FREE.match(key):
        raise ConfigError(
            key, override.get_value_element_as_str(), "unknown key; nearest: " + ", ".join(nearest(key, keys))
        )
    options = options_of(key, folders)
    for option in _options_in(override) if options else ():
        if option not in options:
            shown = "null" if option is None else str(option)
            raise ConfigError(key, shown, one_of(options), f"nearest: {nearest(shown, options, 1)[0]}")


def _options_in(override: Override) -> list[object]:
    """Gives the options of a group that an override names: one, a list, or the choices of a sweep."""
    value = override.value()
    if isinstance(value, ChoiceSweep):
        return [getattr(choice, "text", choice) for choice in value.list]
    if override.is_sweep_override() or isinstance(value, dict):
        return []  # a pattern of options, or keys of the group
    return list(value) if isinstance(value, list) else [value]


def _translate(error: Exception, words: Sequence[str]) -> ConfigError:
    """Makes one line of what Hydra, OmegaConf or YAML says in several."""
    if isinstance(error, OSError) and not isinstance(error, HydraException):
        return ConfigError("file", error.filename, f"cannot be read or written ({error.strerror})")
    if isinstance(error, (yaml.YAMLError, UnicodeDecodeError)):
        return ConfigError("file", "a file of the configuration", f"is no YAML ({error})")
    cause = error.__cause__ if isinstance(error.__cause__, OmegaConfBaseException) else error
    text = str(cause).strip() or type(cause).__name__
    first = text.splitlines()[0]
    named = re.search(r"full_key: (\S+)", text) or re.search(r"'\+{0,2}([\w./]+)=", first)
    key = named[1] if named else "configuration"
    given = [word.partition("=")[2] for word in words if word.partition("=")[0].lstrip("+") == key]
    wrong = re.search(r"Value '(.*?)' of type", first)
    value = wrong[1] if wrong else given[-1] if given else IN_CONF
    if "is not in struct" in text or "not in '" in first:
        if FREE.match(key):
            return ConfigError(key, value, "is not there yet", f"add it with a plus: +{key}=...")
        return ConfigError(key, value, "unknown key; nearest: " + ", ".join(nearest(key, valid_keys())))
    return ConfigError(key, value, first)
