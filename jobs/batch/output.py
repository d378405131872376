"""Print what `gems-jobs` and its jobs say on stderr."""

from __future__ import annotations

from gems.utils import stdio


def report(text: str) -> None:
    """Print a line on stderr immediately, as in `jobs: text`."""
    stdio.report("jobs", text)
