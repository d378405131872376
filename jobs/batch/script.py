"""The parts of batch scripts that all systems share: template, modules, variables, options."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from importlib import resources
from typing import Any, NamedTuple

from gems.config.schema import ClusterConfig
from gems.errors import ConfigError
from gems.runs.folder import RunFolder
from jobs.batch.output import report
from jobs.batch.resources import JobSpec


def render(system: str, *, command: str, directives: Sequence[str], **blocks: Sequence[str]) -> str:
    """Fill in the template templates/SYSTEM.sh; remove the lines of empty blocks."""
    text = resources.files("jobs.batch").joinpath(f"templates/{system}.sh").read_text()
    lines = {"command": [command], "directives": directives, **blocks}
    return re.sub(
        r"^@([A-Z]+)@\n",
        lambda mark: "".join(f"{line}\n" for line in lines[mark[1].lower()]),
        text,
        flags=re.MULTILINE,
    )


def report_short_job(job: JobSpec) -> None:
    """Warn if a job is too short for the signal before its end, which makes its run save."""
    if job.cluster.signal_before_end_s and not job.has_early_signal:
        early = f"cluster.signal_before_end_s={job.cluster.signal_before_end_s} s before the end"
        short = f"cluster.minutes={job.minutes} is too short to save {early}"
        report(f"{short}: the run is killed at its time limit")


class FreeOptions(NamedTuple):
    """The rules of the free map of options at `key`.

    `own` maps options that are set by other keys to these keys. `lists` has the options that may be
    repeated. `separator` joins the words of an option's name.
    """

    key: str
    own: Mapping[str, str]
    form: str
    what: str
    example: str
    lists: Sequence[str] = ()
    separator: str = "-"

    def checked(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Check options: true is a bare flag, and false and null omit the option.

        Raises:
            ConfigError: An option is set by its own key, has an invalid name, or contains text that
                would break out of its line.
        """
        checked: dict[str, Any] = {}
        for name, value in options.items():
            option = str(name).removeprefix("--").replace("_", self.separator)
            full = f"{self.key}.{shown(str(name))}"
            if option in self.own:
                raise ConfigError(full, value, "must not be given here", f"set {self.own[option]}")
            if not re.fullmatch(self.form, option):
                raise ConfigError(
                    full, value, f"is not {self.what}", f"as in +{self.key}.{self.example}"
                )
            is_list = isinstance(value, list) and option in self.lists
            if isinstance(value, dict | list) and not is_list:
                raise ConfigError(
                    full, value, "must be one value", f"as in +{self.key}.{self.example}"
                )
            if not all(str(item).isprintable() for item in (value if is_list else [value])):
                raise ConfigError(full, repr(value), "must be printable text")
            if value is not None and value is not False:
                checked[option] = value
        return checked


def module_lines(cluster: ClusterConfig) -> list[str]:
    """Return the line that loads the site's modules, or ends the job with a clear error."""
    if not cluster.modules:
        return []
    return [f"module load {shlex.join(cluster.modules)} || exit {ConfigError.exit_code}"]


def export_lines(values: Mapping[str, object]) -> list[str]:
    """Return the lines that set variables.

    Raises:
        ConfigError: A name or value is invalid.
    """
    for name, value in values.items():
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            raise ConfigError(
                f"cluster.environment.{shown(name)}", value, "is not the name of a variable"
            )
        if "\0" in str(value):
            raise ConfigError(
                f"cluster.environment.{name}", repr(value), "must have no NUL character"
            )
    return [f"export {name}={shlex.quote(str(value))}" for name, value in values.items()]


def check_path(job: JobSpec, folder: RunFolder, system: str, forbidden: Mapping[str, str]) -> None:
    """Raise ConfigError for a run folder that a batch system or Python would misread.

    `forbidden` maps the texts that the system interprets to the words for them in the message.
    """
    path = str(folder.path)
    if not path.isprintable() or any(text in path for text in forbidden):
        is_name = any(text in job.name for text in forbidden)
        key, value = ("name", job.name) if is_name else ("runs_dir", job.runs_dir)
        words = ", ".join(dict.fromkeys(forbidden.values()))
        raise ConfigError(
            key,
            shown(value),
            f"must have no {words} or line break, which {system} interprets in paths",
        )
    if job.snapshot and ":" in path:
        key, value = ("name", job.name) if ":" in job.name else ("runs_dir", job.runs_dir)
        text = "must have no ':', which separates the folders that Python imports from"
        raise ConfigError(key, value, text, "change it, or set cluster.archive_code=false")


def shown(name: str) -> str:
    """Return a name in a form that can be printed on one line."""
    return name if name.isprintable() else repr(name)
