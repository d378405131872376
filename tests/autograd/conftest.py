"""One thread of torch for small layers, for which more only wait for each other."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.helpers.cutting import one_thread


@pytest.fixture(autouse=True)
def single_thread() -> Iterator[None]:
    with one_thread():
        yield
