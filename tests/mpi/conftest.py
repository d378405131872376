"""Tests that a world of four ranks runs together.

Pytest sends each to the ranks, and the fixtures are theirs.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from gems.autograd.kernels import choose_kernels
from gems.config.schema import MachineConfig, RunSpec
from gems.engine.transport.mpi import Comm, broadcast, meet, world
from gems.plan.evaluate import Plan, evaluate
from gems.utils.logs import set_up_rank_logging
from tests.helpers.device import NAME
from tests.mpi.world import IN_RANK, World

if not IN_RANK:

    def pytest_itemcollected(item: pytest.Function) -> None:
        item.fixturenames = ["ranks"]  # those that the test asks for are set up in the ranks

    def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool:
        outcome, text = pyfuncitem.funcargs["ranks"].run(pyfuncitem.nodeid)
        if outcome == "failed":
            pytest.fail(text, pytrace=False)
        if outcome == "skipped":
            pytest.skip(text)
        return True


@pytest.fixture(scope="package")
def ranks(warm_executable: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    started = World(tmp_path_factory.mktemp("ranks"), warm_executable)
    yield started
    started.close()


@pytest.fixture(scope="session")
def comm() -> Comm:
    set_up_rank_logging(world().rank)
    return world()


@pytest.fixture(autouse=True, scope="session")
def same_bits_each_time() -> None:
    """Let a GPU compute as with machine.deterministic=true; what has no such kernel is warned of."""
    if NAME == "cuda":
        choose_kernels(MachineConfig(deterministic=True))
        torch.use_deterministic_algorithms(True, warn_only=True)


def plan_once(comm: Comm, spec: RunSpec, trains: bool = True) -> Plan:
    """Plan a run on the first rank, which tells the others, as of one that is submitted; collective."""
    return broadcast(comm, evaluate(spec, trains) if comm.rank == 0 else None)


_parts: dict[int, Comm] = {}


def sub_world(comm: Comm, size: int) -> Comm | None:
    """Return the first `size` ranks a world of their own, and the rest None; collective.

    All tests have the same ones: ranks that share cores take long to agree on another.
    """
    if size not in _parts:
        meet(comm)
        _parts[size] = comm.Split(0 if comm.rank < size else 1, comm.rank)
    return _parts[size] if comm.rank < size else None
