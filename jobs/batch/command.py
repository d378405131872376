"""Run scheduler commands with a time limit, without a shell or an enclosing job's variables."""

from __future__ import annotations

import os
import pwd
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gems.launch.local_launcher import without_leftovers

QUERY_LIMIT_S = 10.0
SITE_LIMIT_S = 30.0
# a user's own formats would hide the requested columns
USER_FORMATS = ("SINFO_", "SACCTMGR_", "SQUEUE_", "SACCT_")
# Messages of commands that reach no scheduler, as opposed to a refusal.
UNREACHABLE = (
    "Unable to contact slurm controller",
    "Could not establish a configuration source",
    "slurmdbd",
    "connect failure",
    "Unable to process configuration",
    "Socket timed out",
    "Zero Bytes were transmitted",
    "Connection refused",
    "Slurm accounting storage is disabled",
    "not running a supported accounting_storage plugin",
    "Resource temporarily unavailable",
    "cannot connect to server",
    "Unable to connect to Flux",
)


class SchedulerError(Exception):
    """A command that failed, or is not available; `reason` leaves out the command's name."""

    def __init__(self, command: str, reason: str, *, is_own_message: bool = False) -> None:
        self.reason = reason.removeprefix(f"{command}: ")
        super().__init__(
            f"{command} failed: {self.reason}" if is_own_message else f"{command} {reason}"
        )


class SchedulerUnavailableError(SchedulerError):
    """The command is missing, too slow, or reaches no scheduler."""


class SchedulerRefusedError(SchedulerError):
    """The command ended with an exit code other than 0."""


@dataclass(frozen=True, slots=True)
class CommandResult:
    """The output of a command, and its error if it failed."""

    stdout: str = ""
    stderr: str = ""
    error: SchedulerError | None = None

    @property
    def failure(self) -> str | None:
        """The text of the error, or None."""
        return None if self.error is None else str(self.error)

    @property
    def lines(self) -> list[str]:
        """The lines of stdout."""
        return self.stdout.splitlines()

    def check(self) -> str:
        """Return stdout, or raise the SchedulerUnavailableError or SchedulerRefusedError."""
        if self.error is not None:
            raise self.error
        return self.stdout


def user_name(command: str) -> str:
    """Return this user's name for a command; raise SchedulerUnavailableError without a name."""
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        raise SchedulerUnavailableError(
            command, f"needs a name, and user {os.getuid()} has none here"
        ) from None


def run_command(
    argv: Sequence[str],
    stdin: str = "",
    limit_s: float | None = None,
    environment: Mapping[str, str] | None = None,
    pass_fds: Sequence[int] = (),
) -> CommandResult:
    """Run a scheduler command for at most `limit_s`, by default QUERY_LIMIT_S; never raise.

    By default, `environment` is the environment for queries, in which messages are English. The
    command inherits the open files in `pass_fds`, as in subprocess.
    """
    limit_s = QUERY_LIMIT_S if limit_s is None else limit_s
    if environment is None:
        variables = without_leftovers(os.environ).items()
        environment = {
            name: value for name, value in variables if not name.startswith(USER_FORMATS)
        } | {"LC_ALL": "C"}
    try:
        ended = subprocess.run(
            list(argv),
            env=environment,
            input=stdin,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=limit_s,
            pass_fds=pass_fds,
        )
    except FileNotFoundError:
        reason = "is not on PATH"
    except subprocess.TimeoutExpired:
        reason = f"did not answer within {limit_s:g} s"
    except OSError as error:
        reason = f"cannot be run ({error.strerror})"
    else:
        if ended.returncode >= 0:
            return _answer(argv[0], ended)
        reason = f"was ended by signal {-ended.returncode}"
    return CommandResult(error=SchedulerUnavailableError(argv[0], reason))


def _answer(command: str, ended: subprocess.CompletedProcess[str]) -> CommandResult:
    error: SchedulerError | None = None
    if ended.returncode:
        words = (ended.stderr or ended.stdout).split()
        reason = " ".join(words) or f"exit code {ended.returncode}"
        is_unreachable = any(text in reason for text in UNREACHABLE)
        kind = SchedulerUnavailableError if is_unreachable else SchedulerRefusedError
        error = kind(command, reason, is_own_message=True)
    return CommandResult(ended.stdout, ended.stderr, error)
