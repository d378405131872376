"""Questions to SLURM's commands: bounded in time, without a shell, and without what an enclosing job left behind."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass

from gems.launch.local_launcher import without_leftovers

ASK_LIMIT_S, HEAR_LIMIT_S = 30.0, 10.0
OF_THE_USER = ("SINFO_", "SACCTMGR_", "SQUEUE_", "SACCT_")  # own formats would hide from us what we ask for
# What SLURM says where it is not the question that is wrong.
NOT_THERE = (
    "Unable to contact slurm controller", "Could not establish a configuration source", "Unable to process configuration",
    "Socket timed out", "Zero Bytes were transmitted", "connect failure", "Connection refused", "slurmdbd",
    "Slurm accounting storage is disabled", "not running a supported accounting_storage plugin",
    "Resource temporarily unavailable",
)  # fmt: skip


class UnansweredError(Exception):
    """A question that got no answer here: the command is missing, too slow, or reaches nobody."""


class RefusedError(Exception):
    """What a command said when it refused."""


def ask(argv: Sequence[str], text: str = "", limit_s: float = ASK_LIMIT_S) -> str:
    """Return what a command says on stdout, then on stderr; `text` is what it reads.

    Raises:
        UnansweredError: it is not there, does not answer in time, or reaches nobody.
        RefusedError: it ended with another exit code than 0.
    """
    asked = _run(argv, text, limit_s)
    if asked.returncode == 0:
        return asked.stdout + asked.stderr
    words = " ".join((asked.stderr or asked.stdout).split()) or f"exit code {asked.returncode}"
    if any(sign in words for sign in NOT_THERE):
        raise UnansweredError(f"{argv[0]} said: {words}")
    raise RefusedError(words)


@dataclass(frozen=True, slots=True)
class Said:
    """The lines that a command printed; `trouble` says why they are no answer."""

    lines: tuple[str, ...] = ()
    trouble: str | None = None


def hear(argv: Sequence[str], limit_s: float | None = None) -> Said:
    """Return what a command prints, for those who can do without; HEAR_LIMIT_S unless told."""
    try:
        asked = _run(argv, "", HEAR_LIMIT_S if limit_s is None else limit_s)
    except UnansweredError as error:
        return Said(trouble=str(error))
    lines = tuple(asked.stdout.splitlines())
    if asked.returncode:
        words = " ".join(asked.stderr.split()) or f"exit code {asked.returncode}"
        return Said(lines, f"{argv[0]} said: {words}")
    return Said(lines)


def _run(argv: Sequence[str], text: str, limit_s: float) -> subprocess.CompletedProcess[str]:
    kept = without_leftovers(os.environ)
    environment = {name: value for name, value in kept.items() if not name.startswith(OF_THE_USER)}
    try:
        return subprocess.run(
            list(argv), env=environment | {"LC_ALL": "C"}, input=text, capture_output=True, text=True, errors="replace",
            timeout=limit_s,
        )  # fmt: skip
    except FileNotFoundError as error:
        raise UnansweredError(f"{argv[0]} is not on PATH") from error
    except subprocess.TimeoutExpired as error:
        raise UnansweredError(f"{argv[0]} did not answer within {limit_s:g} s") from error
    except OSError as error:
        raise UnansweredError(f"{argv[0]} cannot be run ({error.strerror})") from error
