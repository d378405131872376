"""Composition: from `conf/` and overrides to a resolved run, with errors in one line.

And the text of --help.
"""

from __future__ import annotations

import functools
import json
import os
import pickle
import sys
import warnings
from collections.abc import Callable, Hashable, Iterator, Sequence
from pathlib import Path
from typing import Any

import hydra
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.types import Override
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from gems.config import target_files
from gems.config.cluster_presets import AUTO, GROUP, choose_preset
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
from gems.utils.atomic_io import read_yaml
from gems.utils.tables import wrapped

LOCAL = "local"
MICRO_BATCHES = "parallel.micro_batches"
COUNTS = (MICRO_BATCHES, "parallel.replications", "parallel.parts")
COMMON = frozenset(  # keys that most runs set: --help shows these
    f"{section}.{key}" if section else key
    for section, names in (
        ("", "name seed runs_dir"),
        ("model", "name depth target kwargs"),
        ("data", "name path height_px width_px num_classes"),
        ("parallel", "gpus partitions replicas micro_batches micro_batch_size strips"),
        ("schedule", "name"),
        ("memory", "name"),
        ("loss", "name"),
        ("optimizer", "name lr"),
        ("machine", "name"),
        ("cluster", "name minutes account"),
        ("train", "steps epochs precision checkpoint_s"),
    )
    for key in names.split()
)
# Hydra 1.3 asks for version_base
warnings.filterwarnings("ignore", message="The version_base parameter is deprecated")


def compose(overrides: Sequence[str], cluster: str = LOCAL) -> RunSpec:
    """Compose `conf/config.yaml` with overrides and resolve it.

    Raises:
        ConfigError: as `composed`, or a value that cannot run.
    """
    spec = composed(overrides, cluster)
    try:
        return resolve(spec)
    except ConfigError as error:
        raise _with_experiment(error, rewritten(overrides)) from error


def composed(overrides: Sequence[str], cluster: str = LOCAL) -> RunSpec:
    """Compose `conf/config.yaml` with overrides, without checking or deriving values.

    `cluster` is the preset if neither an override nor an experiment chooses one: a name, or auto
    for this machine's.

    Raises:
        ConfigError: an unknown key or option (with the nearest valid ones), a value of another
            type, or no preset for this machine.
    """
    overrides = rewritten(overrides)
    check_overrides(overrides)
    words = parsed(overrides)
    folders = config_folders(overrides)
    values = [override for override in words if _is_value(override, folders)]
    choices = tuple(str(override.input_line) for override in words if override not in values)
    try:
        # these choices depend on more than files
        if cluster == AUTO or any(PACKAGE in word for word in choices):
            config = _with_options(choices, cluster)
        else:
            config = pickle.loads(
                _kept_options(choices, cluster, _option_files(folders), _registered_names())
            )
        ConfigLoaderImpl._apply_overrides_to_config(values, config)  # as Hydra itself does last
        _give_way(config, words)
        spec = _to_spec(config)
    except GemsError:
        raise
    except Exception as error:  # Hydra has errors of its own, OmegaConf's, YAML's, the system's and plain ValueErrors
        raise translate(error, overrides) from error
    return spec


def _give_way(config: DictConfig, words: Sequence[Override]) -> None:
    """Take away an experiment's replications and parts if they contradict the user's own micro-batches."""
    names = {str(override.key_or_group) for override in words}
    parallel = config.parallel
    runs = parallel.replications
    parts = parallel.parts
    total = parallel.micro_batches
    if (
        "experiment" in names
        and MICRO_BATCHES in names
        and None not in (runs, parts, total)
        and runs * parts != total
    ):
        for name in {"replications", "parts"} - {key.removeprefix("parallel.") for key in names}:
            parallel[name] = None


def _with_experiment(error: ConfigError, overrides: Sequence[str]) -> ConfigError:
    """Return the error, with the experiment that sets its key, if it is a count that no override sets."""
    words = {str(override.key_or_group): override for override in parsed(overrides)}
    if "experiment" not in words or error.key not in COUNTS or error.key in words:
        return error
    line = words["experiment"].input_line
    return ConfigError(
        error.key, error.value, f"is set by {line}, and {error.allowed}", error.advice
    )


def _is_value(override: Override, folders: Sequence[Path]) -> bool:
    """Return whether an override sets one value, and chooses no options."""
    key = str(override.key_or_group)
    return not (options_of(key, folders) or key.startswith("hydra") or override.is_sweep_override())


def _with_options(choices: Sequence[str], cluster: str) -> DictConfig:
    """Return what Hydra composes of the chosen options."""
    _register(choices)
    return _hydra_compose("config", _with_cluster(choices, cluster))


@functools.lru_cache(maxsize=256)
def _kept_options(choices: Sequence[str], cluster: str, *_: Hashable) -> bytes:
    """Return the options' configuration for `pickle`.

    Hydra takes 0.1 s to compose it, and a study has many runs.
    """
    return pickle.dumps(_with_options(choices, cluster))


def _option_files(folders: Sequence[Path]) -> Hashable:
    """Return the files of options, as they are now."""
    files = (path for folder in folders for path in folder.absolute().rglob("*.yaml"))
    return tuple(
        (str(path), (stat := path.stat()).st_mtime_ns, stat.st_size)
        for path in files
        if path.exists()
    )


def _registered_names() -> Hashable:
    return tuple(tuple(registered_options(group)) for group in REGISTERED)


def changed(spec: RunSpec, overrides: Sequence[str], takes_options: bool = False) -> RunSpec:
    """Return a resolved run with some keys changed and resolved again.

    If it `takes_options`, an option of a group sets the keys that it names and leaves the others of
    the group.

    Raises:
        ConfigError: as `compose`, or a word that is no plain key=value.
    """
    overrides = [hydra_word(word) for word in overrides]
    check_overrides(overrides)
    words = parsed(overrides)
    try:
        config = OmegaConf.structured(spec)
        for override in words:
            key = str(override.key_or_group)
            option = override.value()
            if takes_options and options_of(key) and isinstance(option, str):
                for name, value in _option_values(key, option).items():
                    OmegaConf.update(config, f"{key}.{name}", value)
                continue
            if "." not in key or override.is_sweep_override():
                raise ConfigError(
                    key,
                    override.input_line or "",
                    "is not one value of one key",
                    "as in cluster.minutes=90",
                )
            OmegaConf.update(config, key, override.value(), force_add=FREE.match(key) is not None)
        spec_object = OmegaConf.to_object(config)
    except OmegaConfBaseException as error:
        raise translate(error, overrides) from error
    assert isinstance(spec_object, RunSpec)
    return resolve(spec_object)


def _option_values(group: str, option: str) -> dict[str, Any]:
    """Return the keys of a group that an option sets; a target of the user's own gives way to it."""
    path = CONF / group / f"{option}.yaml"
    values = {"name": option, **(read_yaml(path.read_text()) if path.exists() else {})}
    has_target = any(key.name == f"{group}.target" for key in keys(RunSpec))
    return {**({"target": None} if has_target else {}), **values}


def hydra_app(
    argv: Sequence[str], program: str, act: Callable[[RunSpec, str], None], cluster: str = LOCAL
) -> None:
    """Run `act` under `hydra.main`, for Hydra's own options (--cfg, --info, --multirun, ...).

    In `argv` overrides come before options, for Hydra's parser takes them in one piece. `cluster`
    is that of `compose`. `act` takes a run, and in a sweep its overrides. The first job of a sweep
    that fails ends the sweep.

    Raises:
        ConfigError: as `compose`; and whatever `act` raises.
    """
    argv = rewritten(argv)
    count = next((index for index, word in enumerate(argv) if word.startswith("-")), len(argv))
    words = argv[:count]
    options = argv[count:]
    import_plugins(parsed([word for word in words if word.startswith("plugins")]))
    _register(words)
    failed: list[BaseException] = []

    @hydra.main(version_base="1.3", config_path=str(CONF), config_name="config")
    def app(config: DictConfig) -> None:
        if failed:
            return
        try:
            job = HydraConfig.get()
            _give_way(config, parsed(job.overrides.task))
            spec = resolve(_to_spec(config))
            act(spec, " ".join(job.overrides.task) if job.mode == RunMode.MULTIRUN else "")
        except BaseException as error:  # Hydra would print it as a traceback and exit with 1
            failed.append(error)

    before = sys.argv, os.environ.get("HYDRA_FULL_ERROR")
    os.environ["HYDRA_FULL_ERROR"] = (
        "1"  # Hydra's own errors come out, instead of as text and SystemExit
    )
    try:
        words = with_target_files(_with_cluster(words, cluster))
        sys.argv = [program, *words, *options]
        app()
    except GemsError:
        raise
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


def _with_cluster(words: Sequence[str], cluster: str) -> list[str]:
    """Return overrides, with a preset of the cluster unless one of them or an experiment chooses it.

    Raises:
        ConfigError: no preset for this machine, or several experiments, of which each may choose
        one.
    """
    parsed_words = parsed(words)
    if cluster == LOCAL or any(override.key_or_group == GROUP for override in parsed_words):
        return list(words)
    if any(
        override.key_or_group == "experiment" and override.is_sweep_override()
        for override in parsed_words
    ):
        raise ConfigError(
            GROUP, cluster, "is not chosen for several experiments at once", f"add {GROUP}=NAME"
        )
    document = read_yaml((CONF / "config.yaml").read_text())
    for entry in document["defaults"]:
        if isinstance(entry, dict) and GROUP in entry:
            entry[GROUP] = AUTO
    _store(None, "config_auto", document)
    _store(GROUP, AUTO, {"name": AUTO})
    if _hydra_compose("config_auto", words)[GROUP].name != AUTO:
        return list(words)
    return [
        *words,
        f"{GROUP}={choose_preset(config_folders(words)) if cluster == AUTO else cluster}",
    ]


def _hydra_compose(name: str, words: Sequence[str]) -> DictConfig:
    GlobalHydra.instance().clear()
    with hydra.initialize_config_dir(version_base="1.3", config_dir=str(CONF)):
        return hydra.compose(config_name=name, overrides=with_target_files(words))


@functools.cache
def _store_schema() -> None:
    ConfigStore.instance().store(name="run_schema", node=RunSpec)


def _register(words: Sequence[str]) -> None:
    """Give Hydra what is no file: the schema, and the registered options without a file."""
    _store_schema()
    target_files.register()
    folders = config_folders(words)
    for group in REGISTERED:
        files = {path.name for folder in folders for path in (folder / group).glob("*.yaml")}
        for name in registered_options(group):
            # Hydra would take an entry beside a file of its name for the file's schema.
            if f"{name}.yaml" in files:
                ConfigStore.instance().repo.get(group, {}).pop(f"{name}.yaml", None)
            else:
                of_several = group == "metrics"  # of which a run has any number
                _store(group, name, {name: {"name": name}} if of_several else {"name": name})


def _store(group: str | None, name: str, node: dict[str, Any]) -> None:
    """Register a configuration in place of an earlier one, of which Hydra 1.4 would warn."""
    store = ConfigStore.instance()
    (store.repo if group is None else store.repo.get(group, {})).pop(f"{name}.yaml", None)
    store.store(group=group, name=name, node=node)


def _to_spec(config: DictConfig) -> RunSpec:
    try:
        spec = OmegaConf.to_object(config)
    except MissingMandatoryValue as error:
        missing = min(OmegaConf.missing_keys(config))
        raise ConfigError(missing, "???", "must be given", f"add {missing}=...") from error
    assert isinstance(spec, RunSpec)
    return spec


def key_help(spec: RunSpec, columns: int, is_all: bool = True) -> str:
    """Return the groups with their options, and keys with their value in `spec`, limits and use.

    The keys are all, or those that most runs set. Lines are wrapped to `columns`.
    """
    groups = sorted({folder.name for folder in CONF.iterdir() if folder.is_dir()} | set(REGISTERED))
    shown = [key for key in keys(RunSpec) if is_all or key.name in COMMON]

    def lines() -> Iterator[str]:
        advice = "Choose an option of a group: group=option. Set a key: key=value; null derives it."
        yield wrapped(advice, "", columns)
        yield from ("", "== Groups ==")
        for group in groups:
            if options := options_of(group):
                yield wrapped(f"{group}: {', '.join(options)}", "", columns, hanging=2)
        yield from ("", "== Keys ==" if is_all else "== Common keys (--all shows every key) ==")
        for key in shown:
            value: Any = functools.reduce(getattr, key.name.split("."), spec)
            yield f"{key.name}={json.dumps(value) if isinstance(value, bool | None) else value}"
            allowed = key.rule.allowed(key.entry)
            text = f"{key.rule.help} [{allowed}]" if allowed else key.rule.help
            yield wrapped(text, "    ", columns, hanging=2)

    return "\n".join(lines())
