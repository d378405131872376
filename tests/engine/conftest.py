"""Fixtures of the engine's tests in one process: MPI starts as a world of one rank."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from gems.engine.transport.mpi import Comm, world


@pytest.fixture(scope="session")
def comm() -> Comm:
    return world()


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Small tensors on several threads spend their time waiting for each other; ranks have one by default."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
