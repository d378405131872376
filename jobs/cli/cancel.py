"""Cancel runs and studies: `gems-jobs cancel`."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from gems.cli.framework import Options
from gems.errors import ConfigError
from jobs.batch.output import report
from jobs.preflight.cost import YES, ask_yes
from jobs.status.cancellation import cancel_all
from jobs.status.lookup import Overview, find_named, overview


def cancel(words: Sequence[str], options: Options) -> int:
    """Run `gems-jobs cancel RUN_OR_STUDY ...`.

    Return 1 if something was refused or has not ended yet.

    Raises:
        ConfigError: Nothing is named, a run or study does not exist, or nobody can confirm.
    """
    catalogue = find_named(words, "cancel")
    seen = overview(catalogue)
    needs_yes = seen.is_active or any(
        study.record.is_running_here() is None for study in seen.studies
    )
    if needs_yes and YES not in options.flags and not _is_confirmed(seen):
        report("nothing is cancelled")
        return 1
    return cancel_all(catalogue, as_json=options.json)


def _is_confirmed(seen: Overview) -> bool:
    """Show the runs and studies that would end, and ask for confirmation."""
    active = [run for run in seen.all_runs() if run.is_active]
    if not sys.stdin.isatty():
        raise ConfigError(
            "cancel", len(active), "must be confirmed, and stdin is no terminal", f"add {YES}"
        )
    for run in active:
        report(
            f"{run.folder.path.name} is {run.state}" + (f", job {run.job_id}" if run.job_id else "")
        )
    for study in seen.studies:
        report(f"study {study.record.name} starts no more points")
    return ask_yes("cancel?")
