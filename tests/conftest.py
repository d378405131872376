"""What all tests share: a cache of their own, and ranks that give way to each other, since there are more of them than cores."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True, scope="session")
def own_environment(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Keep results that took long out of the user's cache, and those of the user out of the tests."""
    patch = pytest.MonkeyPatch()
    patch.setenv("GEMS_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
    patch.setenv("MPIR_CVAR_POLLS_BEFORE_YIELD", "10")  # MPICH's own is 1000
