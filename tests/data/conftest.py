"""A cache of its own for each test, and torchvision."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from gems.utils.targets import import_module


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("GEMS_CACHE_DIR", str(folder))
    return folder


@pytest.fixture(scope="session")
def torchvision() -> Any:
    """Torchvision, also where its wheel is for GPUs."""
    pytest.importorskip("torch")
    if importlib.util.find_spec("torchvision") is None:
        pytest.skip("torchvision is not installed")
    return import_module("torchvision")
