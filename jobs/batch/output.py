"""Messages of `gems-jobs` and its jobs on stderr."""

from __future__ import annotations

from gems.utils import stdio


def report(text: str) -> None:
    """Print a line on stderr immediately, as in `jobs: text`."""
    stdio.report("jobs", text)
