"""Overrides: the words key=value of a command, checked against groups and keys, with errors of one line."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import get_origin

import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep, Override
from hydra.errors import HydraException
from omegaconf.errors import (
    ConfigAttributeError,
    ConfigKeyError,
    OmegaConfBaseException,
    ValidationError,
)

from gems.config.cluster_presets import AUTO, choose_preset
from gems.config.cluster_presets import GROUP as CLUSTER
from gems.config.fields import KINDS, RENAMED, keys, renamed_error, renamed_word
from gems.config.recipe import AUTO as AUTO_LOSS
from gems.config.recipe import LOSSES, LR_SCHEDULERS, METRICS, OPTIMIZERS
from gems.config.registries import COSTS, DATASETS, METHODS, MODELS, POLICIES
from gems.config.schema import PROFILES, RunSpec
from gems.config.target_files import SCHEME
from gems.errors import ConfigError, nearest, one_of
from gems.schedule import FAMILIES, FROM_FILE, PLACED
from gems.utils.registry import load_plugins, plugin_folder

CONF = Path(__file__).resolve().parents[2] / "conf"
IN_CONF = "(in conf/)"
FILE = "file://"
PACKAGE = "pkg://"
# Mappings whose keys are the user's own.
FREE = re.compile(r"(cluster\.(environment|sbatch)|metrics|\w+\.(\w+_)?kwargs|data\.class_map)\.")
KWARGS = re.compile(r"metrics\.|(\w+\.(\w+_)?kwargs|data\.class_map)[.=]")
# Sizes and times with a unit, as in machine.device_bytes=16GB or cluster.minutes=1h30min.
SIZES = ("_bytes", "_bytes_per_s")
MINUTES = "minutes"
_UNITS = {
    "k": 10**3,
    "M": 10**6,
    "G": 10**9,
    "T": 10**12,
    "Ki": 2**10,
    "Mi": 2**20,
    "Gi": 2**30,
    "Ti": 2**40,
}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)([kMGT]|[KMGT]i)B(?:/s)?")
_SECONDS = {"d": 86400, "h": 3600, "min": 60, "m": 60, "s": 1}
_TIME = re.compile(r"(?:\d+(?:\.\d+)?(?:d|h|min|m|s))+")
_PART = re.compile(r"(\d+(?:\.\d+)?)(d|h|min|m|s)")
_CLOCK = re.compile(r"(?:(\d+)-)?(\d+):(\d\d):(\d\d)")  # as SLURM prints a time limit
_SIZE_FORM = "with a unit: 16GB is 16 * 10^9 bytes, 16GiB 16 * 2^30"
_TIME_FORM = "with units: 90min, 1h30min, 1-02:00:00"
_log = logging.getLogger(__name__)


def rewritten(words: Sequence[str]) -> list[str]:
    """Return overrides as Hydra takes them.

    Sizes in bytes, keys that may be added, this machine's preset.
    """
    words = [hydra_word(word) for word in words]
    auto = f"{CLUSTER}={AUTO}"
    chosen = [word for word in words if word.startswith(f"{CLUSTER}=")]
    if not chosen or chosen[-1] != auto:
        return [word for word in words if word != auto]
    preset = choose_preset(config_folders(words))
    return [word if word != auto else f"{CLUSTER}={preset}" for word in words]


def hydra_word(override: str) -> str:
    """Return an override as Hydra takes it.

    The key of a keyword argument of the user's own may be new and gets a ++. A size or a time
    becomes a plain number: machine.device_bytes=16GB is 16000000000, cluster.minutes=1h is 60.
    Hydra's `_target_` is our `target`. An old key is taken under its new name, with one line of
    warning.
    """
    name, equals, value = override.partition("=")
    key, value = renamed_word(name.replace("._target_", ".target"), value)
    if equals and name in RENAMED:
        _log.warning("%s is now called %s: took %s=%s", name, key, key, value)
    if is_size(key) or not FREE.match(key):
        value = plain_number(key, value)
    override = f"{key}{equals}{value}"
    return f"++{override}" if KWARGS.match(override) else override


def config_folders(words: Sequence[str]) -> list[Path]:
    """Return the folders of options: ours, and those of the user in hydra.searchpath."""
    return [
        CONF,
        *search_path(parsed([word for word in words if word.startswith("hydra.searchpath=")])),
    ]


def with_target_files(words: Sequence[str]) -> list[str]:
    """Return overrides for Hydra, which then takes `_target_` in the files of the user's folders."""
    schemes = FILE, f"{SCHEME}://"
    return [
        word.replace(*schemes) if word.startswith("hydra.searchpath=") else word for word in words
    ]


def options_of(group: str, folders: Sequence[Path] = (CONF,)) -> list[str]:
    """Return the options of a configuration group: files in `folders`, and what is registered."""
    files = {path.stem for folder in folders for path in (folder / group).glob("*.yaml")}
    return sorted(files | set(registered_options(group)))


def registered_options(group: str) -> Iterable[str]:
    """Return the names that a group takes without a file.

    Those of its registry, or the choices of its field `name`.
    """
    return REGISTERED[group]() if group in REGISTERED else ()


REGISTERED: dict[str, Callable[[], Iterable[str]]] = {
    "schedule": lambda: (*FAMILIES, FROM_FILE, PLACED),
    "memory": lambda: POLICIES,
    "partition": lambda: METHODS,
    "data": lambda: DATASETS,
    "model": lambda: MODELS,
    "profile": lambda: PROFILES,
    "cost": lambda: COSTS,
    "loss": lambda: (AUTO_LOSS, *LOSSES),
    "optimizer": lambda: OPTIMIZERS,
    "lr_scheduler": lambda: LR_SCHEDULERS,
    "metrics": lambda: METRICS,
}


def import_plugins(overrides: Sequence[Override]) -> None:
    """Import the modules that `plugins=` names, so that the names that they register can be given.

    Raises:
        ConfigError: one cannot be imported.
    """
    values = {str(override.key_or_group): override.value() for override in overrides}
    named = values.get("plugins") or []
    if not isinstance(named, list):
        raise ConfigError(
            "plugins", named, "must be a list of modules, as in plugins=[my_schedules]"
        )
    names = [str(name) for name in named]
    folder = values.get("plugins_dir")
    load_plugins(names, str(folder) if folder else plugin_folder(names))


def valid_keys(folders: Sequence[Path] = (CONF,)) -> Iterator[str]:
    """Yield every key that an override may name.

    Groups in `folders`, and fields of the schema with their dots.
    """
    files = (path for folder in folders for path in folder.glob("*/*.yaml"))
    yield from sorted({*REGISTERED, *(path.parent.name for path in files)})
    yield from (key.name for key in keys(RunSpec))


def check_overrides(overrides: Sequence[str]) -> None:
    """Check that the keys and options of overrides exist.

    Raises:
        ConfigError: one does not; with the nearest valid keys or options.
    """
    words = parsed(overrides)
    import_plugins(words)
    folders = [CONF, *search_path(words)]
    valid = list(valid_keys(folders))
    for override in words:
        _check_override(override, valid, folders)


def parsed(overrides: Sequence[str]) -> list[Override]:
    """Parse overrides by Hydra's grammar.

    Raises:
        ConfigError: one is not of the form key=value.
    """
    words: list[Override] = []
    for text in overrides:
        # the bytes of the command line are not UTF-8
        if any("\ud800" <= char <= "\udfff" for char in text):
            raise ConfigError("override", ascii(text), "is no text in UTF-8")
        try:
            words += _parsed(text)
        except HydraException as error:
            raise ConfigError(
                "override",
                text,
                "not of the form key=value",
                "quote special characters: 'key=\"a b\"'",
            ) from error
    return words


@functools.lru_cache(maxsize=4096)
def _parsed(text: str) -> tuple[Override, ...]:
    """Parse one word: Hydra's parser takes 1 ms for it, and the points of a study share most of their words."""
    return tuple(OverridesParser.create().parse_overrides([text]))


def search_path(overrides: Sequence[Override]) -> Iterator[Path]:
    """Yield the user's own configuration folders, from hydra.searchpath."""
    for override in overrides:
        values = override.value() if override.key_or_group == "hydra.searchpath" else None
        for entry in values if isinstance(values, list) else ():
            path = Path(str(entry).removeprefix(FILE))
            if str(entry).startswith(PACKAGE):
                package = None
                with contextlib.suppress(ImportError, ValueError, AttributeError):
                    package = importlib.util.find_spec(
                        str(entry).removeprefix(PACKAGE).replace("/", ".")
                    )
                if package is None:
                    raise ConfigError("hydra.searchpath", entry, "is no package of Python's")
            elif path.is_dir():
                yield path
            else:
                key = "--config-dir" if str(entry).startswith(FILE) else "hydra.searchpath"
                raise ConfigError(key, path, "is not a folder")


def _check_override(override: Override, valid: Sequence[str], folders: Sequence[Path]) -> None:
    key = str(override.key_or_group)
    if key.startswith("hydra"):
        return
    if key == "study":
        value = override.get_value_element_as_str()
        raise ConfigError(
            key, value, "names many runs, and this is one", f"gems-jobs study study={value}"
        )
    if override.is_delete():
        raise ConfigError(f"~{key}", "", "a key cannot be taken away", f"set it instead: {key}=...")
    if (error := renamed_error(key, str(override.input_line).partition("=")[2])) is not None:
        raise error
    if key not in valid and not FREE.match(key):
        raise ConfigError(
            key,
            override.get_value_element_as_str(),
            "unknown key; nearest: " + ", ".join(nearest(key, valid)),
        )
    options = options_of(key, folders) + ([AUTO] if key == CLUSTER else [])
    if options and override.value() == []:
        raise ConfigError(key, "[]", one_of(options), "name at least one")
    for option in _options_in(override) if options else ():
        if option not in options:
            shown = "null" if option is None else str(option)
            raise ConfigError(
                key, shown, one_of(options), f"nearest: {nearest(shown, options, 1)[0]}"
            )


def _options_in(override: Override) -> list[object]:
    """Return the options of a group that an override names: one, a list, or the choices of a sweep."""
    value = override.value()
    if isinstance(value, ChoiceSweep):
        return [getattr(choice, "text", choice) for choice in value.list]
    if override.is_sweep_override() or isinstance(value, dict):
        return []  # a pattern of options, or keys of the group
    return list(value) if isinstance(value, list) else [value]


def translate(error: Exception, words: Sequence[str]) -> ConfigError:
    """Convert an error of Hydra, OmegaConf or YAML to a ConfigError of one line."""
    if isinstance(error, OSError) and not isinstance(error, HydraException):
        return ConfigError("file", error.filename, f"cannot be read or written ({error.strerror})")
    if isinstance(error, (yaml.YAMLError, UnicodeDecodeError)):
        return ConfigError("file", "a file of the configuration", f"is no YAML ({error})")
    chain = (error, error.__cause__, error.__context__)
    cause = next((one for one in chain if isinstance(one, OmegaConfBaseException)), error)
    first = (str(cause).strip() or type(cause).__name__).splitlines()[0]
    values_by_key = {
        name.lstrip("+"): value for name, _, value in (word.partition("=") for word in words)
    }
    quoted = first.replace("+", "")
    # errors of Python's own, as OverflowError, have the key in their text alone
    named = re.search(r"full_key: (\S+)", str(cause))
    key = named[1] if named else next((name for name in values_by_key if f"'{name}" in quoted), "")
    if not key and "interpolation" in first:
        # OmegaConf cannot name the key of a recursion that reaches Python's limit before its own
        key = next((name for name in reversed(values_by_key) if "${" in values_by_key[name]), "")
    value = getattr(cause, "value", None)
    if value is None or isinstance(value, list):
        value = values_by_key.get(key, IN_CONF)
    if isinstance(cause, ConfigKeyError | ConfigAttributeError):
        if (renamed := renamed_error(key, value)) is not None:
            return renamed
        if FREE.match(key):
            return ConfigError(key, value, "is not there yet", f"add it with a plus: +{key}=...")
        return ConfigError(
            key, value, "unknown key; nearest: " + ", ".join(nearest(key, valid_keys()))
        )
    name, is_entry, _ = key.partition("[")
    if isinstance(cause, ValidationError):
        for known in keys(RunSpec):
            if known.name == name:
                kind = known.entry if is_entry else known.kind
                kind = kind if kind in KINDS else get_origin(kind)
                return ConfigError(
                    key, value, f"must be {KINDS.get(kind, KINDS[dict])}{forms(key)}"
                )
    return ConfigError(key or "configuration", value, first)


def is_size(key: str) -> bool:
    """Return whether a key holds bytes or bytes per second."""
    return key.endswith(SIZES)


def is_time(key: str) -> bool:
    """Return whether a key holds minutes or seconds."""
    return key.split(".")[-1] == MINUTES or (key.endswith("_s") and not key.endswith("_per_s"))


def plain_number(key: str, text: str) -> str:
    """Return a size in bytes, or a time in the key's unit, without its unit.

    Any other text as it is.
    """
    if is_size(key) and (size := _SIZE.fullmatch(text)) is not None:
        return str(round(float(size[1]) * _UNITS[size[2]]))
    seconds = _seconds(text) if is_time(key) else None
    if seconds is None:
        return text
    value = seconds / (60 if key.endswith(MINUTES) else 1)
    return str(int(value)) if value.is_integer() else repr(value)


def forms(key: str) -> str:
    """Return what a key takes on the command line besides a plain number, or nothing."""
    form = _SIZE_FORM if is_size(key) else _TIME_FORM if is_time(key) else ""
    return f", or on the command line {form}" if form else ""


def _seconds(text: str) -> float | None:
    if (clock := _CLOCK.fullmatch(text)) is not None:
        days, hours, minutes, seconds = (int(part or 0) for part in clock.groups())
        return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)
    if _TIME.fullmatch(text) is None:
        return None
    return sum(float(number) * _SECONDS[unit] for number, unit in _PART.findall(text))
