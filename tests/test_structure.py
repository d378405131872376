"""Test the folders of the packages.

Covers who may import whom, how large they are, and that no files import each other in a circle.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.helpers.processes import python

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("gems", "jobs", "analysis")
MAX_LINES = 650
MAX_MODULES = 15
# Folders of registered items, one file each, beside which no limit of modules is needed.
REGISTERED = (
    "gems.schedule.families",
    "gems.models.families",
    "gems.models.blocks",
    "gems.cli",
    "jobs.cli",
)
MAX_ROOT_MODULES = {"gems": 3, "jobs": 2, "analysis": 2}
ANY = ("*",)

# Each folder may import the folders above it in this table, and the libraries that its row names.
FOLDERS: dict[str, tuple[str, ...]] = {
    "gems.errors": (),
    "gems.utils": ("psutil", "yaml"),
    "gems.schedule": ("ortools",),
    "gems.trace": ("h5py", "numpy"),
    "gems.config": ("hydra", "omegaconf", "yaml"),
    "gems.data": (
        *("h5py", "nibabel", "numpy", "openslide", "PIL", "pydicom", "scipy", "skimage"),
        *("tifffile", "tiffslide", "torch", "zarr"),
    ),
    "gems.autograd": ("torch",),
    "gems.streaming": ("torch",),
    "gems.models": ("numpy", "torch"),
    "gems.losses": ("torch",),
    "gems.profile": ("h5py", "numpy", "torch"),
    "gems.memory": ("numpy", "scipy"),
    "gems.partition": ("numpy", "scipy", "ortools"),
    "gems.simulation": ("numpy",),
    "gems.plan": (),
    "gems.search": ("numpy", "scipy"),
    "gems.runs": ("numpy", "yaml"),
    "gems.launch": ("psutil",),
    "gems.engine": ANY,
    "gems.cli": ("numpy", "h5py"),
    "gems": ANY,
    "jobs.batch": (),
    "jobs.schedulers": ("submitit",),
    "jobs.status": (),
    "jobs.diagnosis": (),
    "jobs.probes": (),
    "jobs.preflight": ("psutil",),
    "jobs.launch": (),
    "jobs.studies": ("yaml",),
    "jobs.cli": ("yaml",),
    "jobs": (),
    "analysis.io": ("numpy", "yaml"),
    "analysis.metrics": ("numpy",),
    "analysis.scaling": ("numpy", "scipy"),
    "analysis.outside": (),
    "analysis.attribution": ("numpy",),
    "analysis.plots": ("numpy", "matplotlib"),
    "analysis.report": ("numpy", "yaml"),
    "analysis.export": ("numpy",),
    "analysis.cli": ("numpy",),
    "analysis": (),
}
# What a package may import of another one; nothing imports from an engine or from the verbs of
# another.
FOREIGN: dict[str, tuple[str, ...]] = {
    "gems": (),
    "jobs": (
        "gems.errors",
        "gems.utils",
        "gems.schedule",
        "gems.config",
        "gems.data",
        "gems.models",
        "gems.memory",
        "gems.partition",
        "gems.plan",
        "gems.search",
        "gems.simulation",
        "gems.runs",
        "gems.launch",
        "gems.cli.framework",
    ),
    "analysis": (
        "gems.errors",
        "gems.utils",
        "gems.trace",
        "gems.schedule",
        "gems.partition",
        "gems.simulation",
        "gems.config",
        "gems.models",
        "gems.profile",
        "gems.memory",
        "gems.search",
        "gems.runs",
        "gems.cli.framework",
    ),
}
# A library -> the only places that may import it.
ONLY_IN: dict[str, tuple[str, ...]] = {
    "hydra": ("gems.config",),
    "omegaconf": ("gems.config",),
    "mpi4py": ("gems.engine",),
    "mpi4py.MPI": ("gems.engine.transport.mpi",),
    "torch": (
        "gems.engine",
        "gems.autograd",
        "gems.streaming",
        "gems.profile.profilers",
        "gems.models.blocks",
        "gems.models.build",
        "gems.models.imported",
        "gems.models.mixed",
        "gems.losses",
        "gems.data.inspection",
    ),
    "submitit": ("jobs.schedulers.slurm_client",),
    "matplotlib": ("analysis.plots",),
    "ortools": ("gems.schedule.synthesis.solver", "gems.partition.dlplacer.cp_sat"),
}
# All of the packages that streaming may reach, through any number of imports.
OF_STREAMING = ("gems.streaming", "gems.autograd")
# Imports of today that these rules forbid, to be mended; each must still be there.
KNOWN: set[tuple[str, str]] = set()
KNOWN_CROWDED: set[str] = set()
KNOWN_CIRCLES: list[list[str]] = []
LOGIN_NODE = (
    "gems",
    "jobs.cli.submit",
    "jobs.__main__",
    "gems.__main__",
    "gems.config.compose",
    "gems.schedule",
)
NOT_THE_API = ("gems", "gems.__version__")
HEAVY = ("torch", "mpi4py", "h5py", "matplotlib", "skimage", "gems.engine", "gems.trace")


def is_below(name: str, *parents: str) -> bool:
    return any(name == parent or name.startswith(f"{parent}.") for parent in parents)


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def paths(*packages: str) -> list[Path]:
    return sorted(path for package in packages for path in (ROOT / package).rglob("*.py"))


MODULES = {module_name(path): path for path in paths(*PACKAGES)}


def imports(source: str, package: str) -> Iterator[str]:
    """Yield the dotted names that a source in `package` imports, also inside functions and by name.

    `from a import b` yields a.b, whether b is a module or something in a.
    """
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        if isinstance(node, ast.ImportFrom):
            parents = package.split(".")
            base = parents[: len(parents) + 1 - node.level] if node.level else []
            start = ".".join([*base, *([node.module] if node.module else [])])
            yield from (f"{start}.{alias.name}" for alias in node.names)
        if isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in (
            "import_module",
            "__import__",
        ):
            values = [word.value for word in node.args[:1] if isinstance(word, ast.Constant)]
            yield from (value for value in values if isinstance(value, str))


def folder_of(name: str) -> str:
    return max((folder for folder in FOLDERS if is_below(name, folder)), key=len, default=name)


def is_allowed(name: str, module: str) -> bool:
    if any(
        is_below(name, only) and not is_below(module, *homes) for only, homes in ONLY_IN.items()
    ):
        return False
    home = folder_of(module)
    top = name.split(".")[0]
    if top in sys.stdlib_module_names:
        return True
    if top not in PACKAGES:
        return FOLDERS[home] == ANY or is_below(name, *FOLDERS[home])
    if top != module.split(".")[0]:
        return is_below(name, *FOREIGN[module.split(".")[0]])
    order = list(FOLDERS)
    return name in (top, f"{top}.__version__") or order.index(folder_of(name)) <= order.index(home)


def faults(source: str, module: str, is_package: bool = False) -> list[str]:
    package = module if is_package else module.rpartition(".")[0]
    return [name for name in imports(source, package) if not is_allowed(name, module)]


@cache
def import_graph() -> dict[str, set[str]]:
    """Return the modules that each module imports, packages' own `__init__` among them.

    The page of the public API imports nothing until one of its names is used; who reads the version
    uses none.
    """
    graph: dict[str, set[str]] = {}
    for module, path in MODULES.items():
        package = module if path.name == "__init__.py" else module.rpartition(".")[0]
        found = set()
        for name in imports(path.read_text(), package):
            if name in NOT_THE_API:
                continue
            while name and name not in MODULES:
                name = name.rpartition(".")[0]
            found |= {name} - {"", module}
        graph[module] = found
    return graph


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Return the groups of modules that import each other.

    Strongly connected components (Tarjan 1972).
    """
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(module: str) -> None:
        index[module] = low[module] = len(index)
        stack.append(module)
        for other in sorted(graph.get(module, ())):
            if other not in index:
                visit(other)
                low[module] = min(low[module], low[other])
            elif other in stack:
                low[module] = min(low[module], index[other])
        if low[module] == index[module]:
            group = stack[stack.index(module) :]
            del stack[stack.index(module) :]
            if len(group) > 1:
                found.append(sorted(group))

    for module in sorted(graph):
        if module not in index:
            visit(module)
    return found


def test_folders_import_downwards_only() -> None:
    wrong = {
        (module, name)
        for module, path in MODULES.items()
        for name in faults(path.read_text(), module, path.name == "__init__.py")
    }
    assert sorted(wrong - KNOWN) == []
    assert sorted(KNOWN - wrong) == []


def test_no_files_import_each_other_in_a_circle() -> None:
    assert circles(import_graph()) == KNOWN_CIRCLES


def test_a_circle_is_found() -> None:
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}) == [["a", "b", "c"]]


def test_folders_and_files_are_of_a_size_that_can_be_read(
    capsys: pytest.CaptureFixture[str],
) -> None:
    lengths = {module: len(path.read_text().splitlines()) for module, path in MODULES.items()}
    counts = Counter(
        str(path.parent.relative_to(ROOT)).replace("/", ".") for path in MODULES.values()
    )
    largest = max((count, folder) for folder, count in counts.items() if folder not in REGISTERED)
    longest = max((length, module) for module, length in lengths.items())
    with capsys.disabled():
        print(
            f"\nmodules directly in gems {counts['gems']}, jobs {counts['jobs']}, analysis"
            f" {counts['analysis']}; largest folder {largest[1]} ({largest[0]}); longest file"
            f" {longest[1]} ({longest[0]} lines); circles of files {len(circles(import_graph()))}"
        )
    assert {
        folder: counts[folder]
        for folder, limit in MAX_ROOT_MODULES.items()
        if counts[folder] > limit
    } == {}
    # `__init__` is the folder's own page, not a module in it
    crowded = {f for f, n in counts.items() if n - 1 > MAX_MODULES and f not in REGISTERED}
    assert crowded == KNOWN_CROWDED
    assert {module: length for module, length in lengths.items() if length > MAX_LINES} == {}


def test_every_row_is_of_something_that_is_there() -> None:
    names = [*FOLDERS, *(name for foreign in FOREIGN.values() for name in foreign)]
    homes = [home for homes in ONLY_IN.values() for home in homes]
    assert [name for name in (*names, *homes, *REGISTERED) if name not in MODULES] == []


@pytest.mark.parametrize(
    ("module", "source", "expected"),
    [
        ("gems.schedule.bounds", "import torch", ["torch"]),
        ("gems.schedule.bounds", "def f():\n    from torch import nn", ["torch.nn"]),
        ("gems.schedule.bounds", "if TYPE_CHECKING:\n    import numpy as np", ["numpy"]),
        (
            "gems.schedule.bounds",
            "from gems.config.schema import RunSpec",
            ["gems.config.schema.RunSpec"],
        ),
        ("gems.schedule.bounds", "from gems import config", ["gems.config"]),
        ("gems.schedule.bounds", "from ..engine import run", ["gems.engine.run"]),
        ("gems.schedule.bounds", "from .. import trace", ["gems.trace"]),
        ("gems.schedule.bounds", "import importlib\nimportlib.import_module('h5py')", ["h5py"]),
        (
            "gems.schedule.bounds",
            "from . import simulate\nfrom .simulate import simulate\nimport math, re",
            [],
        ),
        ("gems.schedule.bounds", "from gems.errors import ConfigError", []),
        ("gems.memory.plan", "from gems.partition.even import even", ["gems.partition.even.even"]),
        (
            "gems.partition.even",
            "from gems.profile import ModelProfile\nfrom gems.memory import model",
            [],
        ),
        ("gems.models.families.resnet", "import torch", ["torch"]),
        ("gems.data.folder", "import torchvision", ["torchvision"]),
        ("gems.data.folder", "import PIL.Image", []),
        ("gems.runs.folder", "import hydra", ["hydra"]),
        ("gems.engine.run", "from omegaconf import OmegaConf", ["omegaconf.OmegaConf"]),
        ("gems.engine.run", "from mpi4py import MPI", ["mpi4py.MPI"]),
        (
            "gems.engine.run",
            "from mpi4py import __version__\nimport anything, torch\nfrom gems import trace",
            [],
        ),
        ("gems.engine.run", "import jobs.cli.submit, submitit", ["jobs.cli.submit", "submitit"]),
        ("gems.engine.run", "from gems.cli.framework import Verb", ["gems.cli.framework.Verb"]),
        ("gems.engine.transport.mpi", "from mpi4py import MPI", []),
        ("jobs.cli.submit", "import torch, mpi4py, h5py", ["torch", "mpi4py", "h5py"]),
        (
            "jobs.cli.submit",
            "from gems import trace\nimport gems.engine.run",
            ["gems.trace", "gems.engine.run"],
        ),
        ("jobs.cli.submit", "from gems.cli.plan import plan", ["gems.cli.plan.plan"]),
        ("jobs.cli.submit", "import yaml\nfrom jobs.schedulers.slurm_client.jobs import Job", []),
        (
            "jobs.schedulers.slurm_client.jobs",
            "from jobs.cli.status import status",
            ["jobs.cli.status.status"],
        ),
        (
            "analysis.io.load",
            "from gems.launch.local_launcher import run_ranks\nimport jobs",
            ["gems.launch.local_launcher.run_ranks", "jobs"],
        ),
        (
            "analysis.plots.timeline",
            "import matplotlib.pyplot\nfrom gems.schedule.bounds import bubble",
            [],
        ),
    ],
)
def test_the_check_can_fail(module: str, source: str, expected: list[str]) -> None:
    assert faults(source, module) == expected


def test_streaming_is_a_library_of_its_own() -> None:
    graph = import_graph()
    reached: set[str] = set()
    left = [module for module in MODULES if is_below(module, "gems.streaming")]
    while left:
        module = left.pop()
        if module not in reached:
            reached.add(module)
            left += graph[module]
    assert [name for name in sorted(reached) if not is_below(name, *OF_STREAMING)] == []


def test_mpi_is_started_in_one_place() -> None:
    users = [
        module_name(path)
        for path in paths(*PACKAGES, "scripts")
        if any(
            is_below(name, "mpi4py.MPI")
            for name in imports(path.read_text(), module_name(path).rpartition(".")[0])
        )
    ]
    assert users == ["gems.engine.transport.mpi"]


def private_names(source: str) -> list[str]:
    """Return the names of torch with an underscore in front that a file takes, but for operations."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.module and is_below(node.module, "torch"):
            found += [f"{node.module}.{each.name}" for each in node.names]
        elif isinstance(node, ast.Import):
            found += [each.name for each in node.names if is_below(each.name, "torch")]
        elif isinstance(node, ast.Attribute) and is_below(name := ast.unparse(node), "torch"):
            found.append(name)
    plain = (
        name for name in found if re.fullmatch(r"[\w.]+", name) and not is_below(name, "torch.ops")
    )
    private = [name for name in plain if re.search(r"\._(?!_)", name)]
    return [
        name
        for name in private
        if not any(other != name and is_below(other, name) for other in private)
    ]


@pytest.mark.cases
def test_private_names_of_torch_are_taken_in_one_place() -> None:
    taken = {
        module: names
        for module, path in MODULES.items()
        if (names := private_names(path.read_text()))
    }
    assert set(taken) == {"gems.autograd.torch_internals"}, taken


def test_a_private_name_is_found() -> None:
    source = (
        "import torch._dynamo\nfrom torch.utils import"
        " _pytree\ntorch._C._cuda(torch.ops.aten._to_copy, torch.nn)"
    )
    assert private_names(source) == ["torch._dynamo", "torch.utils._pytree", "torch._C._cuda"]


@pytest.mark.parametrize("module", LOGIN_NODE)
def test_the_login_node_loads_nothing_heavy(module: str) -> None:
    program = f"import sys, {module}; print(*[name for name in {HEAVY!r} if name in sys.modules])"
    ended = python("-c", program)
    assert (ended.returncode, ended.stdout.strip(), ended.stderr) == (0, "", "")


def test_what_counts_as_heavy_is_seen_when_it_is_loaded() -> None:
    program = f"import sys, gems.trace; print(*[name for name in {HEAVY!r} if name in sys.modules])"
    ended = python("-c", program)
    assert ended.stdout.split() == ["h5py", "gems.trace"]
