"""Options that every command answers without a verb: its version, and shell completion."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence

from gems import __version__
from gems.errors import ConfigError, one_of

VERSION = "--version"
COMPLETION = "--completion"
SHELLS = ("bash", "zsh", "fish")
_BASH = """{function}() {{
  local line="${{COMP_LINE:0:COMP_POINT}}" choices=""
  local word="${{line##* }}"
  if [ "$COMP_CWORD" -eq 1 ]; then choices={verbs}; else case "${{COMP_WORDS[1]}}" in
{cases}
  esac; fi
  mapfile -t COMPREPLY < <(compgen -W "$choices" -- "$word")
  if [[ "$word" == *=* ]]; then COMPREPLY=("${{COMPREPLY[@]#"${{word%"${{word##*=}}"}}"}}"); fi
}}
complete -o nospace -o default -F {function} {command}
"""
_ZSH = """#compdef {command}
{function}() {{
  local choices=""
  if (( CURRENT == 2 )); then choices={verbs}; else case "$words[2]" in
{cases}
  esac; fi
  compadd -S '' -- ${{=choices}} || _files
}}
compdef {function} {command}
"""


def completion(command: str, verbs: Mapping[str, Sequence[str]], shell: str) -> str:
    """Return a shell script that completes the verbs of a command and the words of each verb."""
    if shell == "fish":
        lines = [
            f"complete -c {command} -f -n __fish_use_subcommand -a {shlex.quote(' '.join(verbs))}"
        ]
        for verb, words in verbs.items():
            condition = shlex.quote(f"__fish_seen_subcommand_from {verb}")
            lines.append(f"complete -c {command} -n {condition} -a {shlex.quote(' '.join(words))}")
        return "\n".join(lines)
    cases = "\n".join(
        f"    {verb}) choices={shlex.quote(' '.join(words))} ;;" for verb, words in verbs.items()
    )
    return (_BASH if shell == "bash" else _ZSH).format(
        command=command,
        function=f"_{command.replace('-', '_')}",
        verbs=shlex.quote(" ".join(verbs)),
        cases=cases,
    )


def answer(
    command: str, argv: Sequence[str], words: Callable[[], Mapping[str, Sequence[str]]]
) -> str | None:
    """Return a command's output for --version or --completion SHELL, or None for other options.

    `words` returns the words of each verb.

    Raises:
        ConfigError: The shell is unknown.
    """
    option, _, shell = argv[0].partition("=") if argv else ("", "", "")
    if option == VERSION:
        return f"{command} {__version__}"
    if option != COMPLETION:
        return None
    shell = shell or "".join(argv[1:2])
    if shell not in SHELLS:
        raise ConfigError(COMPLETION, shell, one_of(SHELLS))
    return completion(command, words(), shell)
