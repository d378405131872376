"""What all tests share: a cache of their own."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True, scope="session")
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Keeps results that took long out of the user's cache, and those of the user out of the tests."""
    patch = pytest.MonkeyPatch()
    patch.setenv("GEMS_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
