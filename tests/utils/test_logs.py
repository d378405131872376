"""Lines of the log on stderr, of ranks and of commands."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from gems.config.training import LOG_LEVELS
from gems.utils.logs import (
    LEVELS,
    PACKAGES,
    set_log_level,
    set_up_command_logging,
    set_up_rank_logging,
)


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    loggers = [logging.getLogger(name) for name in PACKAGES]
    before = [(list(logger.handlers), logger.level, logger.propagate) for logger in loggers]
    yield
    for logger, (handlers, level, propagate) in zip(loggers, before, strict=True):
        logger.handlers[:], logger.level, logger.propagate = handlers, level, propagate


def log_all() -> None:
    for number, level in enumerate(LEVELS):
        logging.getLogger("gems.engine.some.module").log(
            getattr(logging, level.upper()), "text %d", number
        )


def test_a_rank_logs_its_number_and_the_level(capsys: pytest.CaptureFixture[str]) -> None:
    set_up_rank_logging(3)
    log_all()
    assert capsys.readouterr().err.splitlines() == [
        "[rank 3] INFO text 1",
        "[rank 3] WARNING text 2",
        "[rank 3] ERROR text 3",
    ]


def test_a_command_logs_its_name(capsys: pytest.CaptureFixture[str]) -> None:
    set_up_command_logging("gems", "warning")
    log_all()
    assert capsys.readouterr().err == "gems: text 2\ngems: text 3\n"


@pytest.mark.parametrize(("level", "num_lines"), zip(LEVELS, (4, 3, 2, 1), strict=True))
def test_the_level_is_the_lowest_shown(
    level: str, num_lines: int, capsys: pytest.CaptureFixture[str]
) -> None:
    set_up_rank_logging(0)
    set_log_level(level)  # once the configuration is known
    log_all()
    assert len(capsys.readouterr().err.splitlines()) == num_lines


def test_levels_are_those_of_the_configuration() -> None:
    assert LOG_LEVELS == LEVELS
