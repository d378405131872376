"""The command line of `gems`, `gems-jobs` and `gems-analysis`: verbs, overrides, exit codes."""

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
from typing import Any, TypeVar, cast

from gems.config.schema import RunSpec
from gems.errors import ConfigError, GemsError, nearest, of_the_system, one_of
from gems.utils.completion import SHELLS, answer
from gems.utils.tables import terminal_width, wrapped

# use the preset of this machine if neither an override nor an experiment chooses one
AUTO_CLUSTER = "--auto-cluster"
HYDRA_DIRECTORY = ("--config-dir", "-cd")
HELP = ("-h", "--help")
ALL = "--all"  # beside --help: every key
COLUMNS = 80  # of help that is not printed on a terminal
_CFG = ("job", "hydra", "all")
_INFO = ("all", "config", "defaults", "defaults-tree", "plugins", "searchpath")
# Values of Hydra's options: none (None), one of these, or any word (). Hydra's shell completion is
# missing: it needs a program of one word, and ours have three.
HYDRA_FLAGS: dict[str, tuple[str, ...] | None] = {
    "--cfg": _CFG,
    "-c": _CFG,
    "--info": _INFO,
    "-i": _INFO,
    "--package": (),
    "-p": (),
    **dict.fromkeys(
        (*HELP, "--hydra-help", "--multirun", "-m", "--resolve", "--version", "--run", "-r")
    ),
}


Whole = TypeVar("Whole", int, None)


@dataclass(frozen=True, slots=True)
class Options:
    """The options of a command line other than overrides."""

    json: bool = False
    flags: frozenset[str] = frozenset()
    chosen: Mapping[str, str] = field(default_factory=dict)

    def path(self, name: str) -> Path | None:
        """Return the value of an option as a path, or None."""
        return Path(self.chosen[name]) if name in self.chosen else None

    def whole(self, name: str, default: Whole, least: int = 1, most: int = 10**9) -> int | Whole:
        """Return the value of an option as a whole number, or the default.

        Raises:
            ConfigError: The value is not a whole number, or is out of range.
        """
        if name not in self.chosen:
            return default
        return whole_number(name, self.chosen[name], least, most)


@dataclass(frozen=True, slots=True)
class Verb:
    """A command: `module:function`, called with (RunSpec, Options).

    If it `takes_words`, it is called with (words, Options) instead. `help` is one sentence; `notes`
    explain the options in `VERB --help`. `flags` take no value; `choices` take one of some values,
    or any value if none is listed. `completes` is the function that makes the choices which a
    configuration leaves to its plan. The function returns an exit code, or None for 0.
    """

    target: str
    help: str
    flags: tuple[str, ...] = field(default=())
    choices: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    takes_words: bool = False
    completes: str | None = "gems.plan.evaluate:with_strips_chosen"
    operands: str = "[key=value ...]"
    notes: Mapping[str, str] = field(default_factory=dict)

    def load(self) -> Callable[..., int | None]:
        """Import the function; the modules of other verbs are not loaded."""
        return cast(Callable[..., int | None], _imported(self.target))

    def act(self, spec: RunSpec, options: Options) -> int:
        """Run the command for a resolved run, after the choices that its plan makes."""
        if not spec.parallel.num_strips and self.completes is not None:
            spec = _imported(self.completes)(spec)
        return self.load()(spec, options) or 0


def _imported(target: str) -> Any:
    module, function = target.split(":")
    return getattr(importlib.import_module(module), function)


def main(program: str, verbs: Mapping[str, Verb], argv: Sequence[str]) -> int:
    """Run one command and return its exit code; print a GemsError as one line on stderr."""
    for stream in (sys.stdout, sys.stderr):
        # file names may have characters that a terminal's encoding lacks
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        return _dispatch(program, verbs, list(argv))
    except GemsError as error:
        print(f"{program}: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader of the output has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (OSError, RecursionError) as error:
        print(f"{program}: {of_the_system(error)}", file=sys.stderr)
        return ConfigError.exit_code


def _dispatch(program: str, verbs: Mapping[str, Verb], argv: list[str]) -> int:
    command = command_name(program)
    text = answer(command, argv, lambda: {name: _words_of(verb) for name, verb in verbs.items()})
    if text is not None:
        print(text)
        return 0
    if not argv or argv[0] in HELP:
        print(_usage(program, verbs))
        return 0 if argv else 2
    name = argv[0]
    words = argv[1:]
    if name not in verbs:
        raise ConfigError(
            "command",
            name,
            "allowed: " + ", ".join(verbs),
            f"nearest: {nearest(name, verbs, 1)[0]}",
        )
    verb = verbs[name]
    if verb.takes_words and any(word in HELP for word in words):
        print(_help(f"{command} {name}", verb))
        return 0
    is_all = ALL in words and any(word in HELP for word in words)
    words, hydra_options, options = _parse(
        [word for word in words if not (is_all and word == ALL)], verb
    )
    if verb.takes_words:
        return verb.load()(words, options) or 0
    from gems.config.cluster_presets import AUTO
    from gems.config.compose import LOCAL, compose, composed, hydra_app, key_help
    from gems.config.overrides import check_overrides

    default_cluster = AUTO if AUTO_CLUSTER in options.flags else LOCAL
    if any(word in HELP for word in hydra_options):
        keys = key_help(composed(words), _columns(), is_all)
        print(f"{_help(f'{command} {name}', verb)}\n\n{keys}")
        return 0
    if not hydra_options:
        return verb.act(compose(words, default_cluster), options)
    check_overrides(words)
    codes: list[int] = []

    def act(spec: RunSpec, label: str) -> None:
        if label and not options.json:
            print(f"== {label} ==", flush=True)
        codes.append(verb.act(spec, options))

    hydra_app([*words, *hydra_options], f"{program} {name}", act, default_cluster)
    return max(codes, default=0)


def _words_of(verb: Verb) -> list[str]:
    """Return the words that may follow a verb: its options, groups with their options, and keys."""
    words = ["--json", *verb.flags, *verb.choices]
    if verb.takes_words:
        return words
    from gems.config.overrides import options_of, valid_keys

    for key in valid_keys():
        options = options_of(key)
        words += [f"{key}={option}" for option in options] or [f"{key}="]
    return [*words, *HYDRA_FLAGS, *HYDRA_DIRECTORY]


def _parse(argv: Sequence[str], verb: Verb) -> tuple[list[str], list[str], Options]:
    """Separate words or overrides, Hydra's options, and those of the verb.

    --config-dir becomes an override.

    Raises:
        ConfigError: An option is unknown, or does not allow its value.
    """
    words: list[str] = []
    hydra_options: list[str] = []
    chosen: dict[str, str] = {}
    hydra_flags = {} if verb.takes_words else HYDRA_FLAGS
    directory = () if verb.takes_words else HYDRA_DIRECTORY
    rest = deque(argv)
    while rest:
        word = rest.popleft()
        name, equals, value = word.partition("=")
        if word == "--json" or word in verb.flags:
            continue
        if name in verb.choices:
            chosen[name] = value if equals or not rest else rest.popleft()
            allowed = verb.choices[name]
            if (
                not chosen[name]
                or chosen[name].startswith("-")
                or (allowed and chosen[name] not in allowed)
            ):
                raise ConfigError(
                    name,
                    chosen[name] or "none",
                    one_of(allowed) if allowed else "must have a value",
                )
        elif name in directory:
            folder = value or (rest.popleft() if rest else "")
            if not Path(folder).is_dir() or not folder:
                raise ConfigError(name, folder, "is not a folder")
            path = str(Path(folder).absolute()).replace("'", r"\'")
            words.append(f"hydra.searchpath=['file://{path}']")
        elif name in hydra_flags:
            hydra_options += [name, *_hydra_value(word, hydra_flags[name], rest)]
        elif word.startswith("-"):
            known = ("--json", *verb.flags, *verb.choices, *hydra_flags, *directory)
            raise ConfigError(
                "option", word, "unknown; nearest: " + ", ".join(nearest(word, known))
            )
        else:
            words.append(word)
    flags = frozenset(word for word in argv if word in verb.flags)
    return words, hydra_options, Options("--json" in argv, flags, chosen)


def _hydra_value(word: str, choices: tuple[str, ...] | None, rest: deque[str]) -> list[str]:
    """Return the value of one of Hydra's options, which may be the next of the `rest`.

    Raises:
        ConfigError: The value is one to which Hydra's parser would answer with its usage.
    """
    flag, equals, value = word.partition("=")
    if choices is None:
        if equals:
            raise ConfigError(flag, value, "takes no value")
        return []
    is_optional = choices is _INFO
    if not equals and rest and (not is_optional or rest[0] in choices):
        value = rest.popleft()
    if not value and is_optional:
        return []
    if not value or value.startswith("-") or (choices and value not in choices):
        raise ConfigError(
            flag, value, one_of(choices) if choices else "must name a part of the configuration"
        )
    return [value]


def whole_number(name: str, text: str, least: int = 1, most: int = 10**9) -> int:
    """Parse a word of the command line as a whole number.

    Raises:
        ConfigError: It is not a whole number, or is out of range.
    """
    is_whole = text.isascii() and text.isdigit() and len(text) <= len(str(most))
    if not is_whole or not least <= int(text) <= most:
        raise ConfigError(name, text, f"must be a whole number from {least} to {most}")
    return int(text)


def command_name(program: str) -> str:
    """Return the name of a program as it is installed."""
    return program if program == "gems" else f"gems-{program}"


def _columns() -> int:
    return terminal_width() or COLUMNS


def _usage(program: str, verbs: Mapping[str, Verb]) -> str:
    width = max(map(len, verbs))
    command = command_name(program)
    takes_keys = not all(verb.takes_words for verb in verbs.values())
    lines = [f"usage: {command} VERB {'[key=value ...]' if takes_keys else 'WORD ...'} [--json]"]
    lines += [f"       {command} --version | --completion {'|'.join(SHELLS)}", ""]
    columns = _columns()
    lines += [wrapped(verb.help, f"  {name:<{width}}  ", columns) for name, verb in verbs.items()]
    if takes_keys:
        hint = (
            f"`{command} VERB --help` explains a verb and the common keys, --help --all every key;"
            " --cfg job prints the configuration."
        )
        lines += ["", wrapped(hint, "", columns)]
    return "\n".join(lines)


def _help(command: str, verb: Verb) -> str:
    choices = [
        f"{option} {'|'.join(allowed) or 'VALUE'}" for option, allowed in verb.choices.items()
    ]
    options = " ".join(f"[{option}]" for option in ("--json", *verb.flags, *choices))
    columns = _columns()
    width = max(map(len, verb.notes), default=0)
    notes = [
        wrapped(note, f"  {option:<{width}}  ", columns) for option, note in verb.notes.items()
    ]
    return "\n".join(
        [
            wrapped(f"{verb.operands} {options}", f"usage: {command} ", columns),
            "",
            wrapped(verb.help, "", columns),
            *notes,
        ]
    )


def print_json(document: Mapping[str, Any]) -> None:
    """Print the JSON object of a command on stdout."""
    json.dump(document, sys.stdout)
    sys.stdout.write("\n")
