"""Set up what all tests share.

Tests have a cache of their own, and ranks that give way to each other, since there are more of them
than cores.
"""

from __future__ import annotations

import gc
import importlib.util
import os
import sys
from typing import Any

import pytest

from gems.utils.targets import import_module
from tests.fake_cuda.build import why_not
from tests.fake_cuda.load import install

# Folders and files that take a minute or more, or wait most of it: started last, they would leave
# workers of pytest-xdist idle.
FIRST = ("mpi", "test_hangs.py", "test_run.py")

# Hundreds of processes and ranks start: each would compile all modules anew, and pytest its tests.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

os.environ.setdefault(
    "OMP_NUM_THREADS", "1"
)  # before torch is loaded: the workers of pytest-xdist share the cores


IS_FAKE = os.environ.get("GEMS_TEST_DEVICE") == "fake_cuda"
if IS_FAKE:
    if (reason := why_not()) is not None:
        pytest.exit(reason, returncode=4)
    install()  # before torch is loaded


def pytest_configure(config: pytest.Config) -> None:
    if IS_FAKE:
        from tests.fake_cuda import plugin

        config.pluginmanager.register(plugin)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--every", type=int, default=1, metavar="N", help="run every Nth test only: a sample"
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    items.sort(
        key=lambda item: not {item.path.name, item.path.parent.name}.isdisjoint(FIRST), reverse=True
    )
    # what was imported and collected stays: each full collection would look through it again
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)
    every = config.getoption("--every")
    if every > 1:
        config.hook.pytest_deselected(
            items=[item for number, item in enumerate(items) if number % every]
        )
        items[:] = items[::every]


@pytest.fixture(autouse=True, scope="session")
def own_environment(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Keep results that took long out of the user's cache, and those of the user out of the tests.

    Workers of pytest-xdist share one cache: their folders are in that of the whole run.
    """
    if "GEMS_TEST_RANK" in os.environ:
        return  # a rank has the environment of the process that started it
    patch = pytest.MonkeyPatch()
    base = tmp_path_factory.getbasetemp()
    patch.setenv(
        "GEMS_CACHE_DIR",
        str((base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "cache"),
    )
    patch.delenv("COLUMNS", raising=False)  # which pytest-xdist sets: output would be wrapped
    patch.setenv("MPIR_CVAR_POLLS_BEFORE_YIELD", "10")  # MPICH's own is 1000


@pytest.fixture(scope="session")
def torchvision() -> Any:
    """Torchvision, also where its wheel is for GPUs."""
    pytest.importorskip("torch")
    if importlib.util.find_spec("torchvision") is None:
        pytest.skip("torchvision is not installed")
    return import_module("torchvision")
