"""Fixtures of tests that every rank of a world of four runs together."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator

import pytest
import torch

from gems.autograd.kernels import choose_kernels
from gems.config.schema import MachineConfig
from gems.engine.transport.mpi import Comm, Transport, abort, meet, world
from gems.utils.logs import set_up_rank_logging
from tests.device import ON_GPU

ALONE_S = 60.0
_failed: list[threading.Timer] = []


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    """Go on if all ranks come to the end of a test that has failed.

    End all if one waits, or with -x at once.
    The others may wait for this one for ever.
    """
    outcome = yield
    report = outcome.get_result()
    if report.failed:
        print(
            f"rank {world().rank}: {item.name}\n{report.longreprtext}", file=sys.stderr, flush=True
        )
        if item.config.option.maxfail or report.when == "teardown":
            abort(1)
        timer = threading.Timer(ALONE_S, os._exit, [1])  # whereupon mpiexec ends the other ranks
        timer.daemon = True
        timer.start()
        _failed.append(timer)


@pytest.fixture(scope="session")
def comm() -> Comm:
    set_up_rank_logging(world().rank)
    return world()


@pytest.fixture(scope="session")
def control(comm: Comm) -> Transport:
    return Transport(
        comm, hang_timeout_s=200, sleep_s=0.002
    )  # idle ranks leave the cores to others


@pytest.fixture(autouse=True, scope="session")
def same_bits_each_time() -> None:
    """Let a GPU compute as with machine.deterministic=true; what has no such kernel is warned of."""
    if ON_GPU:
        choose_kernels(MachineConfig(deterministic=True))
        torch.use_deterministic_algorithms(True, warn_only=True)


@pytest.fixture(autouse=True)
def together(control: Transport) -> Iterator[None]:
    """Keep ranks in the same test."""
    yield
    control.barrier()
    while _failed:
        _failed.pop().cancel()


def sub_world(comm: Comm, size: int) -> Comm | None:
    """Return the first `size` ranks a world of their own, and the rest None; collective."""
    meet(comm)
    part = comm.Split(0 if comm.rank < size else 1, comm.rank)
    return part if comm.rank < size else None  # type: ignore[return-value]
