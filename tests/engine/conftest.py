"""Fixtures of the engine's tests in one process: MPI starts as a world of one rank."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
import torch

from gems.engine.transport.mpi import Comm, world
from gems.utils.logs import PACKAGES, set_up_rank_logging


@pytest.fixture(scope="session")
def comm() -> Comm:
    return world()


@pytest.fixture(autouse=True)
def rank_logging() -> Iterator[None]:
    """Log as rank 0, and restore the logging of other tests after it."""
    loggers = [logging.getLogger(name) for name in PACKAGES]
    before = [(list(logger.handlers), logger.level, logger.propagate) for logger in loggers]
    set_up_rank_logging(0)
    yield
    for logger, (handlers, level, propagate) in zip(loggers, before, strict=True):
        logger.handlers[:], logger.level, logger.propagate = handlers, level, propagate


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Small tensors on several threads spend their time waiting for each other.

    Ranks have one by default.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
