"""Torch's own pipeline schedules, to compare with."""

from __future__ import annotations

from types import ModuleType

import pytest


@pytest.fixture(scope="session")
def schedules() -> ModuleType:
    """Torch's module, whose import takes seconds."""
    module = pytest.importorskip("torch.distributed.pipelining.schedules")
    for name in ("_Action", "_validate_schedule", "_add_send_recv", "_simulate_comms_compute"):
        if not hasattr(module, name):
            pytest.skip(f"this torch has no {name}")
    return module
