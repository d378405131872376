"""The command line that `python -m gems` and `python -m jobs` share: verbs, Hydra overrides, --json, exit codes."""

from __future__ import annotations

import importlib
import io
import json
import os
import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gems.config.schema import RunSpec
from gems.errors import ConfigError, GemsError, nearest, of_the_system, one_of

# Take the preset of this machine if neither an override nor an experiment chooses one.
AUTO_CLUSTER = "--auto-cluster"
HYDRA_DIRECTORY = ("--config-dir", "-cd")
HELP = ("-h", "--help")
_CFG = ("job", "hydra", "all")
_INFO = ("all", "config", "defaults", "defaults-tree", "plugins", "searchpath")
# Values of Hydra's options: none (None), one of these, or any word (). Shell completion is left out: it knows a program
# by one word, and ours have three.
HYDRA_FLAGS: dict[str, tuple[str, ...] | None] = {
    "--cfg": _CFG, "-c": _CFG, "--info": _INFO, "-i": _INFO, "--package": (), "-p": (),
    **dict.fromkeys((*HELP, "--hydra-help", "--multirun", "-m", "--resolve", "--version", "--run", "-r")),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Options:
    """Options of the command line, beside overrides."""

    json: bool = False
    flags: frozenset[str] = frozenset()
    chosen: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Verb:
    """A command: `module:function`, called with (RunSpec, Options), or with (words, Options) if `takes_words`.

    `flags` take no value; `choices` take one of some values, or any value if none is listed. The function returns an
    exit code, or None for 0.
    """

    target: str
    help: str
    flags: tuple[str, ...] = field(default=())
    choices: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    takes_words: bool = False

    def load(self) -> Callable[..., int | None]:
        """Import the function, so that what other verbs need is never loaded."""
        module, function = self.target.split(":")
        loaded: Callable[..., int | None] = getattr(importlib.import_module(module), function)
        return loaded


def main(program: str, verbs: Mapping[str, Verb], argv: Sequence[str]) -> int:
    """Run one command and return its exit code; a GemsError is one line on stderr."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # file names may have characters that a terminal's encoding lacks
            stream.reconfigure(errors="backslashreplace")
    try:
        return _dispatch(program, verbs, list(argv))
    except GemsError as error:
        print(f"{program}: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader of our output has closed it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (OSError, RecursionError) as error:
        print(f"{program}: {of_the_system(error)}", file=sys.stderr)
        return ConfigError.exit_code


def _dispatch(program: str, verbs: Mapping[str, Verb], argv: list[str]) -> int:
    if not argv or argv[0] in HELP:
        print(_usage(program, verbs))
        return 0 if argv else 2
    name, words = argv[0], argv[1:]
    if name not in verbs:
        raise ConfigError("command", name, "allowed: " + ", ".join(verbs), f"nearest: {nearest(name, verbs, 1)[0]}")
    verb = verbs[name]
    flags = frozenset(word for word in words if word in verb.flags)
    words, chosen = _take_choices(words, verb)
    options = Options(json="--json" in words, flags=flags, chosen=chosen)
    words = [word for word in words if word != "--json" and word not in flags]
    if verb.takes_words:
        if any(word in HELP for word in words):
            print(f"python -m {program} {name}: {verb.help}")
            return 0
        _refuse_flags(words, verb)
        return verb.load()(words, options) or 0
    words = _search_path(words)
    _refuse_flags(words, verb)
    if any(word in HELP for word in words):
        print(_help(program, name, verb, words))
        return 0
    if any(word.split("=")[0] in HYDRA_FLAGS for word in words):
        return _through_hydra(program, name, verb, words, options)
    from gems.config.compose import compose

    return verb.load()(compose(words, _default_cluster(flags)), options) or 0


def _default_cluster(flags: frozenset[str]) -> str:
    from gems.config.cluster_presets import AUTO
    from gems.config.compose import LOCAL

    return AUTO if AUTO_CLUSTER in flags else LOCAL


def _help(program: str, name: str, verb: Verb, words: list[str]) -> str:
    from gems.config.compose import composed, key_help

    choices = [f"{option} {'|'.join(allowed) or 'VALUE'}" for option, allowed in verb.choices.items()]
    own = " ".join(f"[{option}]" for option in ("--json", *verb.flags, *choices))
    overrides, _ = _sort([word for word in words if word not in HELP])
    head = [f"usage: python -m {program} {name} [key=value ...] {own}", "", verb.help, ""]
    return "\n".join([*head, key_help(composed(overrides))])


def _through_hydra(program: str, name: str, verb: Verb, words: list[str], options: Options) -> int:
    from gems.config.compose import hydra_app
    from gems.config.overrides import check_overrides

    overrides, hydra_options = _sort(words)
    check_overrides(overrides)
    codes: list[int] = []

    def act(spec: RunSpec) -> None:
        codes.append(verb.load()(spec, options) or 0)

    hydra_app([*overrides, *hydra_options], f"{program} {name}", act, _default_cluster(options.flags))
    return max(codes, default=0)


def _search_path(words: list[str]) -> list[str]:
    """Replace Hydra's --config-dir DIR with the override that does the same."""
    kept: list[str] = []
    rest = iter(words)
    for word in rest:
        flag, _, value = word.partition("=")
        if flag not in HYDRA_DIRECTORY:
            kept.append(word)
            continue
        folder = value or next(rest, "")
        if not Path(folder).is_dir() or not folder:
            raise ConfigError(flag, folder, "is not a folder")
        path = str(Path(folder).absolute()).replace("'", r"\'")
        kept.append(f"hydra.searchpath=['file://{path}']")
    return kept


def _take_choices(words: list[str], verb: Verb) -> tuple[list[str], dict[str, str]]:
    """Return the words without the verb's own options, and the values of these."""
    kept: list[str] = []
    chosen: dict[str, str] = {}
    rest = iter(words)
    for word in rest:
        name, equals, value = word.partition("=")
        if name not in verb.choices:
            kept.append(word)
            continue
        chosen[name] = value if equals else next(rest, "")
        allowed = verb.choices[name]
        if not chosen[name] or chosen[name].startswith("-") or (allowed and chosen[name] not in allowed):
            raise ConfigError(name, chosen[name] or "none", one_of(allowed) if allowed else "must have a value")
    return kept, chosen


def _refuse_flags(words: Sequence[str], verb: Verb) -> None:
    of_hydra = () if verb.takes_words else (*HYDRA_FLAGS, *HYDRA_DIRECTORY)
    known = ("--json", *verb.flags, *verb.choices, *of_hydra)
    for word in words:
        if word.startswith("-") and word.partition("=")[0] not in of_hydra:
            raise ConfigError("option", word, "unknown; nearest: " + ", ".join(nearest(word, known)))


def _sort(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Separate overrides from Hydra's options.

    Raises:
        ConfigError: an option that Hydra's parser would answer with its usage.
    """
    overrides: list[str] = []
    options: list[str] = []
    rest = deque(words)
    while rest:
        word = rest.popleft()
        flag, equals, value = word.partition("=")
        if not word.startswith("-"):
            overrides.append(word)
            continue
        options.append(flag)
        choices = HYDRA_FLAGS[flag]
        if choices is None:
            if equals:
                raise ConfigError(flag, value, "takes no value")
            continue
        is_optional = choices is _INFO
        if not equals and rest and (not is_optional or rest[0] in choices):
            value = rest.popleft()
        if value or not is_optional:
            options.append(value)
            if not value or value.startswith("-") or (choices and value not in choices):
                allowed = one_of(choices) if choices else "must name a part of the configuration"
                raise ConfigError(flag, value, allowed)
    return overrides, options


def _usage(program: str, verbs: Mapping[str, Verb]) -> str:
    width = max(map(len, verbs))
    lines = [f"usage: python -m {program} VERB [key=value ...] [--json]", ""]
    lines += [f"  {name:<{width}}  {verb.help}" for name, verb in verbs.items()]
    lines += [
        "",
        f"`python -m {program} VERB --help` lists every key with its limits; --cfg job prints the configuration.",
    ]
    return "\n".join(lines)


def print_json(document: Mapping[str, Any]) -> None:
    """Print the one machine-readable object of a command on stdout."""
    json.dump(document, sys.stdout)
    sys.stdout.write("\n")
