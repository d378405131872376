"""A cache of its own for each test, and torchvision beside a torch for processors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("GEMS_CACHE_DIR", str(folder))
    return folder


@pytest.fixture(scope="session")
def torchvision() -> Any:
    """Import torchvision; its wheel for GPUs lacks, beside a torch for processors, two operators that it describes."""
    torch = pytest.importorskip("torch")
    import importlib.util

    if importlib.util.find_spec("torchvision") is None:
        pytest.skip("torchvision is not installed")
    try:
        import torchvision
    except RuntimeError:
        library = torch.library.Library("torchvision", "DEF")
        for name in ("nms", "qnms"):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        import torchvision
    return torchvision
