"""Fixtures of the scripts' tests."""

from __future__ import annotations

from tests.engine.conftest import one_thread

__all__ = ["one_thread"]
