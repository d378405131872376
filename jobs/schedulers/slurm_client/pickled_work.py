"""Write the file that submitit's program runs in a job.

This is the only module that imports submitit, and it is imported only on demand.
"""

from __future__ import annotations

from pathlib import Path

import submitit
from submitit.core.utils import DelayedSubmission

from gems.errors import ConfigError
from jobs.batch.resources import Work

MAX_TIMEOUTS = 3  # submitit's default: how often it may requeue a job itself


def pickle_work(work: Work, minutes: int, path: Path) -> None:
    """Pickle a work for submitit's program; submitit has no public API for it."""
    if not hasattr(DelayedSubmission, "set_timeout") or not hasattr(DelayedSubmission, "dump"):
        text = "cannot pickle a submission as submitit 1.5 does"
        raise ConfigError("submitit", submitit.__version__, text, "install submitit>=1.5.2,<2")
    delayed = DelayedSubmission(work)
    delayed.set_timeout(minutes, MAX_TIMEOUTS)
    delayed.dump(path)
