"""Logging to stderr, in one format for ranks and one for commands."""

from __future__ import annotations

import logging
import sys
from typing import TextIO

LEVELS = ("debug", "info", "warning", "error")
PACKAGES = ("gems", "jobs", "analysis")


class _StderrHandler(logging.StreamHandler[TextIO]):
    """A handler that writes to the current `sys.stderr` of each record."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> TextIO:  # type: ignore[override]
        return sys.stderr


def set_up_rank_logging(rank: int, level: str = "info") -> None:
    """Log the messages of this rank from `level` on, as in `[rank 3] WARNING text`."""
    _set_up(f"[rank {rank}] %(levelname)s %(message)s", level)


def set_up_command_logging(program: str, level: str = "info") -> None:
    """Log the messages of a command from `level` on, as in `gems: text`."""
    _set_up(f"{program}: %(message)s", level)


def set_log_level(level: str) -> None:
    """Log messages from `level` on."""
    for name in PACKAGES:
        logging.getLogger(name).setLevel(level.upper())


def _set_up(text_format: str, level: str) -> None:
    handler = _StderrHandler()
    handler.setFormatter(logging.Formatter(text_format))
    for name in PACKAGES:
        logger = logging.getLogger(name)
        logger.handlers[:] = [handler]
        logger.propagate = False
    set_log_level(level)
