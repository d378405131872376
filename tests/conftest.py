"""Set up what all tests share.

Tests have a cache of their own, and ranks that give way to each other, since there are more of them
than cores.
"""

from __future__ import annotations

import functools
import gc
import importlib.util
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gems.runs import code_archive, provenance
from gems.utils.targets import import_module
from tests.fake_cuda.build import why_not
from tests.fake_cuda.load import install
from tests.helpers.commands import Gems, runner
from tests.helpers.warm_python import warm_python

# Folders and files that take half a minute or more, or wait for it, in the order in which they start:
# the last to start would leave workers of pytest-xdist idle.
FIRST = ("mpi", "test_fake_cuda.py", "test_run.py", "test_hangs.py", "streaming")

# Hundreds of processes and ranks start: each would compile all modules anew, and pytest its tests.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# before torch is loaded: threads of small layers wait for each other, and sums have one order
os.environ["OMP_NUM_THREADS"] = "1"

IS_FAKE = os.environ.get("GEMS_TEST_DEVICE") == "fake_cuda"
if IS_FAKE:
    if (reason := why_not()) is not None:
        pytest.exit(reason, returncode=4)
    install()  # before torch is loaded


def pytest_configure(config: pytest.Config) -> None:
    gc.disable()  # until all is imported and collected, most of which stays
    if IS_FAKE:
        from tests.fake_cuda import plugin

        config.pluginmanager.register(plugin)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--every", type=int, default=1, metavar="N", help="run every Nth test only: a sample"
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    items.sort(key=_place)
    # what was imported and collected stays: each full collection would look through it again
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)
    gc.enable()
    every = config.getoption("--every")
    if every > 1:
        config.hook.pytest_deselected(
            items=[item for number, item in enumerate(items) if number % every]
        )
        items[:] = items[::every]


def _place(item: pytest.Item) -> int:
    names = (item.path.name, item.path.parent.name)
    return next((place for place, name in enumerate(FIRST) if name in names), len(FIRST))


@pytest.hookimpl(optionalhook=True)  # of pytest-xdist
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Give all tests of tests/mpi to one worker, whose ranks then start only once; others by file."""
    if config.getoption("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class ByFile(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return "mpi" if nodeid.startswith("tests/mpi/") else super()._split_scope(nodeid)

    return ByFile(config, log)


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


@pytest.fixture(autouse=True, scope="session")
def same_checkout() -> None:
    """Read our own code, hash it, and ask git about it once: each prepared run would do so again."""
    patch = pytest.MonkeyPatch()
    root = code_archive.code_root()
    read = code_archive._sources
    key_of = code_archive._key
    hash_of = code_archive.hash_of
    ask = provenance._git
    read_once = functools.cache(lambda: tuple(read(root)))
    key_once = functools.cache(key_of)
    hashes: dict[tuple[int, ...], str] = {}
    ask_once = functools.cache(ask)

    def git(where: Path, *words: str, **more: Any) -> bytes | None:
        return (ask_once if where == root else ask)(where, *words, **more)

    def hash_by_file(path: Path) -> str:
        stat = path.stat()  # runs of the same code share one file by hard links
        key = stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns
        if key not in hashes:
            hashes[key] = hash_of(path)
        return hashes[key]

    patch.setattr(code_archive, "_sources", lambda at: read_once() if at == root else read(at))
    patch.setattr(code_archive, "_key", lambda sources: key_once(tuple(sources)))
    patch.setattr(code_archive, "hash_of", hash_by_file)
    patch.setattr(provenance, "_git", git)


@pytest.fixture(scope="session")
def warm_executable(
    own_environment: None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    """A Python that starts in 0.1 s (tests/helpers/warm_python.py), one for all workers of pytest-xdist."""
    base = tmp_path_factory.getbasetemp()
    if IS_FAKE:  # torch must be loaded with the device
        yield sys.executable
        return
    with warm_python((base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "warm") as it:
        yield it


@pytest.fixture(scope="module")
def warm(warm_executable: str) -> Iterator[None]:
    """Let the processes that the tests of a file start be those of `warm_executable`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "executable", warm_executable)
        yield


@pytest.fixture
def gems(
    capfd: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Gems:
    """Run commands of `gems` in this process, in a folder of their own."""
    return runner(capfd, tmp_path, monkeypatch)


@pytest.fixture(scope="session")
def torchvision() -> Any:
    """Torchvision, also where its wheel is for GPUs."""
    pytest.importorskip("torch")
    if importlib.util.find_spec("torchvision") is None:
        pytest.skip("torchvision is not installed")
    return import_module("torchvision")
