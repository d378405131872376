"""Who may import whom, read from the imports: the table of the design, held over every file."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("gems", "jobs", "analysis")
MAX_LINES = 330
ANYTHING = ("*",)
DYNAMIC = ("import_module", "__import__")

PURE = (
    "gems.errors", "gems.quiet", "gems.config", "gems.machine", "gems.schedule_checks", "gems.cluster", "gems.cluster_checks", "gems.presets", "gems.checks", "gems.value_checks", "gems.value_types", "gems.resolve", "gems.compose", "gems.overrides", "gems.cli", "gems.runfolder", "gems.signature", "gems.preparation", "gems.json_files", "gems.provenance", "gems.snapshot", "gems.heartbeat", "gems.standing", "gems.waiting",
    "gems.cache", "gems.program", "gems.planned", "gems.policies", "gems.cutting", "gems.costed", "gems.memory",
    "gems.witness", "gems.process_family", "gems.probe_rank", "gems.ranks", "gems.placing", "gems.plan", "gems.schedule", "gems.partition", "gems.models", "gems.data",
)  # fmt: skip

# A package or module -> what it may import beside the standard library and itself: other rows of this table, and
# libraries. A file belongs to the row with the longest name that fits. A new package is one line here.
ALLOWED: dict[str, tuple[str, ...]] = {
    "gems": (),
    "gems.__main__": ("gems.cli",),
    "gems.errors": (),
    "gems.config": ("gems.errors", "gems.cluster", "gems.machine", "gems.value_types"),
    "gems.machine": (),
    "gems.schedule_checks": ("gems.errors", "gems.config", "gems.schedule"),
    "gems.cluster": ("gems.errors",),
    "gems.cluster_checks": ("gems.errors", "gems.cluster"),
    "gems.presets": ("gems.errors", "yaml"),
    "gems.checks": ("gems.errors", "gems.config", "gems.memory", "gems.partition", "gems.schedule"),
    "gems.value_types": ("gems.errors",),
    "gems.value_checks": ("gems.errors", "gems.config", "gems.schedule"),
    "gems.resolve": (
        "gems.errors", "gems.checks", "gems.cluster_checks", "gems.config", "gems.data", "gems.models", "gems.models.imported",
        "gems.partition", "gems.schedule", "gems.schedule_checks", "gems.value_checks",
    ),
    "gems.compose": (
        "gems.errors", "gems.config", "gems.overrides", "gems.presets", "gems.resolve", "hydra", "omegaconf", "yaml",
    ),
    "gems.overrides": ("gems.errors", "gems.config", "gems.presets", "hydra", "omegaconf", "yaml"),
    "gems.cli": ("gems.errors", "gems.config", "gems.compose", "gems.overrides", "gems.presets"),
    "gems.cache": ("gems",),
    "gems.cutting": (
        "gems.errors", "gems.cache", "gems.config", "gems.memory", "gems.models", "gems.partition", "gems.profile",
        "gems.profile.store", "gems.schedule",
    ),
    "gems.calibration": ("gems.errors", "gems.schedule", "numpy"),
    "gems.compare_cuts": ("gems.cutting", "gems.partition", "gems.schedule"),
    "gems.costed": ("gems.config", "gems.cutting", "gems.profile", "gems.profile.store", "gems.program", "gems.schedule"),
    "gems.largest": ("gems.config", "gems.cutting", "gems.errors", "gems.memory", "gems.models", "gems.schedule"),
    "gems.drawing": ("gems", "gems.errors"),
    "gems.plan": ("gems.errors", "numpy", "scipy"),
    "gems.plan.search": ("gems.plan", "gems.profile", "gems.schedule"),
    "gems.candidate_cuts": ("gems.cutting", "gems.partition", "gems.plan.search", "gems.profile", "gems.schedule", "numpy"),
    "gems.stepping": ("gems.config", "gems.memory", "gems.partition", "gems.program", "gems.schedule"),
    "gems.planning": (
        "gems.config", "gems.costed", "gems.cutting", "gems.errors", "gems.memory", "gems.candidate_cuts", "gems.plan.search", "gems.planned",
        "gems.policies", "gems.profile", "gems.profile.scaling", "gems.profile.store", "gems.program", "gems.schedule", "gems.stepping",
    ),
    "gems.what_fits": ("gems.errors", "gems.plan.search", "gems.planning"),
    "gems.experiment_file": ("gems.config", "gems.errors", "gems.overrides", "yaml"),
    "gems.show_plan": (
        "gems", "gems.cli", "gems.compose", "gems.config", "gems.errors", "gems.experiment_file", "gems.plan", "gems.plan.search",
        "gems.planning", "gems.resolve", "gems.show_hybrid", "gems.what_fits",
    ),
    "gems.policies": ("gems.config", "gems.errors", "gems.memory"),
    "gems.planned": (
        "gems.errors", "gems.cache", "gems.config", "gems.cutting", "gems.memory", "gems.models", "gems.policies",
        "gems.profile", "gems.profile.store", "gems.program", "gems.resolve", "gems.schedule", "gems.stepping",
    ),
    "gems.show_memory": (
        "gems.checks", "gems.cli", "gems.config", "gems.cutting", "gems.drawing", "gems.errors", "gems.memory", "gems.planned",
        "gems.policies", "gems.program", "gems.resolve", "gems.schedule", "gems.stepping",
    ),
    "gems.show_partition": (
        "gems.cli", "gems.compare_cuts", "gems.config", "gems.cutting", "gems.drawing", "gems.program", "gems.resolve",
        "gems.show_largest",
    ),
    "gems.show_largest": (
        "gems.cli", "gems.config", "gems.cutting", "gems.largest", "gems.profile", "gems.profile.store", "gems.program",
    ),
    "gems.quiet": (),
    "gems.memory": ("gems.errors", "gems.quiet", "gems.partition", "gems.profile", "gems.schedule", "numpy", "scipy"),
    "gems.memory.vdnn.paper": ("gems.errors", "gems.memory", "gems.models"),
    "gems.program": ("gems.errors", "gems.cache", "gems.config", "gems.placing", "gems.schedule", "gems.schedule.capped.solver"),
    "gems.runfolder": (
        "gems.errors", "gems.config", "gems.json_files", "gems.memory", "gems.schedule", "gems.signature", "gems.snapshot",
        "yaml",
    ),
    "gems.signature": ("gems.config",),
    "gems.noise": ("gems.schedule", "numpy"),
    "gems.preparation": (
        "gems.errors", "gems.config", "gems.json_files", "gems.planned", "gems.provenance", "gems.runfolder",
        "gems.signature", "gems.snapshot", "yaml",
    ),
    "gems.json_files": (),
    "gems.provenance": ("gems.config", "gems.json_files", "gems.models.imported", "gems.snapshot"),
    "gems.snapshot": ("gems", "gems.cache"),
    "gems.snapshot_main": (),
    "gems.heartbeat": (),
    "gems.standing": ("gems.errors", "gems.heartbeat", "gems.schedule"),
    "gems.waiting": ("gems.heartbeat", "gems.schedule", "gems.standing"),
    "gems.witness": (),
    "gems.shared_memory": (),
    "gems.probe_rank": (),
    "gems.process_family": (),
    "gems.ranks": ("gems.errors", "gems.process_family", "gems.shared_memory"),
    "gems.show_schedule": (
        "gems.cli", "gems.config", "gems.costed", "gems.errors", "gems.planned", "gems.program", "gems.schedule",
    ),
    "gems.show_simulation": (
        "gems.cli", "gems.config", "gems.costed", "gems.cutting", "gems.memory", "gems.models", "gems.noise", "gems.planned",
        "gems.program", "gems.resolve", "gems.schedule", "gems.show_schedule", "gems.stepping",
    ),
    "gems.ways": ("gems.config", "gems.costed", "gems.errors", "gems.plan", "gems.program", "gems.schedule", "gems.show_simulation", "numpy"),
    "gems.show_hybrid": ("gems.cli", "gems.config", "gems.errors", "gems.plan", "gems.ways"),
    "gems.simulated": (
        "gems", "gems.errors", "gems.config", "gems.noise", "gems.program", "gems.resolve", "gems.json_files", "gems.runfolder", "gems.schedule",
        "gems.signature", "gems.trace", "numpy",
    ),
    "gems.verify": (
        "gems.errors", "gems.cli", "gems.config", "gems.costed", "gems.json_files", "gems.models", "gems.preparation",
        "gems.ranks", "gems.runfolder",
    ),
    "gems.placing": ("gems.cache", "gems.config", "gems.errors", "gems.plan.dlplacer", "gems.profile.store", "gems.schedule"),
    "gems.show_dlplacer": ("gems.cli", "gems.config", "gems.drawing", "gems.errors", "gems.models", "gems.placing", "gems.plan.dlplacer", "gems.program"),
    "gems.plan.dlplacer": ("gems.errors", "gems.quiet", "gems.plan.dlplacer.exact", "numpy", "scipy"),
    "gems.plan.dlplacer.exact": ("gems.plan.dlplacer", "ortools"),
    "gems.trace": ("gems.errors", "h5py", "numpy"),
    "gems.schedule": ("gems.errors", "gems.schedule.capped.solver"),
    "gems.schedule.capped.solver": ("gems.schedule", "ortools"),
    "gems.profile": ("gems.errors",),
    "gems.profile.identity": ("gems", "gems.config", "gems.models.imported"),
    "gems.profile.store": ("gems.profile.hdf5", "h5py", "gems.errors", "gems.cache", "gems.config", "gems.models", "gems.profile", "gems.profile.identity"),
    "gems.profile.scaling": ("gems.errors", "gems.profile"),
    "gems.profile.hdf5": ("gems.profile", "h5py", "numpy"),
    "gems.profile.kernels": ("torch",),
    "gems.profile.slots": ("torch",),
    "gems.profile.products": ("torch",),
    "gems.profile.live": ("gems.profile.kernels", "torch"),
    "gems.profile.ends": ("gems.models.build", "gems.profile.live", "gems.profile.slots", "torch"),
    "gems.profile.meter": (
        "gems.engine", "gems.profile", "gems.profile.ends", "gems.profile.kernels", "gems.profile.live",
        "gems.profile.slots", "torch",
    ),
    "gems.profile.chain": (
        "gems.models", "gems.profile", "gems.profile.ends", "gems.profile.meter", "gems.profile.slots", "torch",
    ),
    "gems.profile.whole": ("gems.config", "gems.models.build", "gems.profile.ends", "torch"),
    "gems.profile.roofline": (
        "gems.errors", "gems.config", "gems.profile.chain", "gems.profile.ends", "gems.profile.live",
        "gems.profile.products", "torch",
    ),
    "gems.profile.fake": (
        "gems.config", "gems.models", "gems.models.build", "gems.profile", "gems.profile.chain", "gems.profile.identity",
        "gems.profile.kernels", "gems.profile.meter", "gems.profile.roofline", "gems.profile.whole", "torch",
    ),
    "gems.profile.measured": (
        "gems.engine", "gems.errors", "gems.config", "gems.models", "gems.models.build", "gems.profile", "gems.profile.chain",
        "gems.profile.ends", "gems.profile.identity", "gems.profile.kernels", "gems.profile.meter", "gems.profile.whole",
        "torch",
    ),
    "gems.profile.incremental": (
        "gems.config", "gems.models", "gems.models.build", "gems.profile", "gems.profile.fake",
        "gems.profile.ends", "gems.profile.kernels", "gems.profile.live", "gems.profile.measured", "torch",
    ),
    "gems.profile.branches": (
        "gems.config", "gems.errors", "gems.models", "gems.models.blocks", "gems.models.build", "gems.plan.dlplacer",
        "gems.profile.ends", "gems.profile.fake", "gems.profile.kernels", "gems.profile.meter", "gems.profile.roofline",
        "gems.profile.store", "gems.profile.whole", "torch",
    ),
    "gems.profile.take": (
        "gems.errors", "gems.config", "gems.models", "gems.profile", "gems.profile.fake", "gems.profile.incremental",
        "gems.profile.measured", "gems.profile.store", "torch",
    ),
    "gems.show_profile": (
        "gems.cli", "gems.config", "gems.errors", "gems.partition", "gems.profile", "gems.profile.store", "gems.profile.scaling",
        "gems.profile.hdf5", "h5py",
    ),
    "gems.partition": ("gems.errors", "gems.profile", "numpy"),
    "gems.data": ("gems.errors", "gems.config", "numpy", "PIL", "skimage"),
    "gems.models": ("gems.errors", "gems.config", "gems.models.imported"),
    "gems.models.imported": ("gems", "gems.errors", "gems.cache", "gems.config", "gems.models", "gems.models.parts"),
    "gems.models.user_code": ("gems.errors", "numpy", "torch"),
    "gems.models.tracing": ("gems.errors", "gems.models.user_code", "torch"),
    "gems.models.division": ("gems.models.tracing", "torch"),
    "gems.models.parts": (
        "gems.errors", "gems.models.division", "gems.models.tracing", "gems.models.user_code", "torch",
    ),
    "gems.models.blocks": ("gems.models", "torch"),
    "gems.models.build": ("gems.config", "gems.data", "gems.models", "gems.models.parts", "numpy", "torch"),
    "gems.engine": ANYTHING,
    "jobs": (*PURE, "yaml", "submitit"),
    "analysis": (
        "gems.errors", "gems.config", "gems.json_files", "gems.noise", "gems.profile", "gems.profile.hdf5", "gems.program",
        "gems.runfolder", "gems.trace", "gems.schedule", "gems.plan", "numpy", "matplotlib", "yaml", "analysis.vdnn",
    ),
    "analysis.vdnn": ("analysis", "gems.compose", "gems.config", "gems.memory.vdnn.paper", "gems.models"),
}  # fmt: skip

# A library -> the only places that may import it, those that may import anything among them.
ONLY_IN: dict[str, tuple[str, ...]] = {
    "hydra": ("gems.compose", "gems.overrides"),
    "omegaconf": ("gems.compose", "gems.overrides"),
    "mpi4py": ("gems.engine",),
    "mpi4py.MPI": ("gems.engine.transport",),
    "torch": (
        "gems.engine",
        "gems.models.blocks",
        "gems.models.build",
        "gems.models.user_code",
        "gems.models.tracing",
        "gems.models.division",
        "gems.models.parts",
        *(
            f"gems.profile.{name}"
            for name in (
                "kernels",
                "slots",
                "products",
                "live",
                "ends",
                "meter",
                "chain",
                "whole",
                "roofline",
                "fake",
                "measured",
                "incremental",
                "take",
                "branches",
            )
        ),
    ),
    "submitit": ("jobs",),
    "matplotlib": ("analysis",),
    "gems.engine": ("gems.engine", "gems.profile.meter", "gems.profile.measured"),
}
LOGIN_NODE = ("jobs.submit", "jobs.__main__", "gems.__main__", "gems.compose", "gems.schedule")
HEAVY = ("torch", "mpi4py", "h5py", "matplotlib", "skimage", "gems.engine", "gems.trace")


def is_below(name: str, *parents: str) -> bool:
    return any(name == parent or name.startswith(f"{parent}.") for parent in parents)


def module_of(path: Path) -> str:
    """Gives the dotted name of a file of the repository."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def files(*packages: str) -> list[Path]:
    return sorted(path for package in packages for path in (ROOT / package).rglob("*.py"))


MODULES = {module_of(path) for path in files(*PACKAGES)}


def imports_of(source: str, package: str) -> Iterator[str]:
    """Gives the dotted names that a source in `package` imports, also inside functions and by name.

    `from a import b` gives a.b, whether b is a module or something in a.
    """
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        if isinstance(node, ast.ImportFrom):
            parents = package.split(".")
            base = parents[: len(parents) + 1 - node.level] if node.level else []
            start = ".".join([*base, *([node.module] if node.module else [])])
            yield from (f"{start}.{alias.name}" for alias in node.names)
        if isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in DYNAMIC:
            values = [word.value for word in node.args[:1] if isinstance(word, ast.Constant)]
            yield from (value for value in values if isinstance(value, str))


def row_of(name: str) -> str:
    """Gives the row of the table that a module, or something in it, belongs to."""
    return max((row for row in ALLOWED if is_below(name, row)), key=len, default=name)


def is_allowed(name: str, module: str) -> bool:
    if not all(is_below(module, *homes) for only, homes in ONLY_IN.items() if is_below(name, only)):
        return False
    row = row_of(module)
    allowed = (row, *ALLOWED[row])
    if ALLOWED[row] == ANYTHING or is_below(name, *sys.stdlib_module_names):
        return True
    if row_of(name) in allowed:  # `from gems import trace` is of the row gems.trace, and not of gems
        return True
    return is_below(name, *(other for other in allowed if other not in ALLOWED))


def faults(source: str, module: str, is_package: bool = False) -> list[str]:
    """Gives the imports of a source that the tables forbid."""
    package = module if is_package else module.rpartition(".")[0]
    return [name for name in imports_of(source, package) if not is_allowed(name, module)]


@pytest.mark.parametrize("path", files(*PACKAGES), ids=module_of)
def test_every_file_keeps_to_the_table(path: Path) -> None:
    module = module_of(path)
    assert row_of(module) != "gems" or module == "gems", f"give {module} a row in the table of this test"
    assert faults(path.read_text(), module, path.name == "__init__.py") == []


def test_every_row_is_of_something_that_is_there() -> None:
    assert [row for row in ALLOWED if row not in MODULES] == []
    assert [home for homes in ONLY_IN.values() for home in homes if home not in MODULES] == []


@pytest.mark.parametrize(
    ("module", "source", "expected"),
    [
        ("gems.schedule.grid", "import torch", ["torch"]),
        ("gems.schedule.grid", "def f():\n    from torch import nn", ["torch.nn"]),
        ("gems.schedule.grid", "if TYPE_CHECKING:\n    import numpy as np", ["numpy"]),
        ("gems.schedule.grid", "from gems.config import RunSpec", ["gems.config.RunSpec"]),
        ("gems.schedule.grid", "from gems import config", ["gems.config"]),
        ("gems.schedule.grid", "from ..engine import run", ["gems.engine.run"]),
        ("gems.schedule.grid", "from .. import trace", ["gems.trace"]),
        ("gems.schedule.grid", "import importlib\nimportlib.import_module('h5py')", ["h5py"]),
        ("gems.schedule.grid", "from . import replay\nfrom .replay import Replay\nimport math, re", []),
        ("gems.schedule.grid", "from gems.errors import ConfigError", []),
        ("gems.partition.even", "from gems.schedule import generate", ["gems.schedule.generate"]),
        ("gems.partition.even", "from gems.profile import ModelProfile", []),
        ("gems.resolve", "from gems.models.build import build_layers", ["gems.models.build.build_layers"]),
        ("gems.resolve", "from gems.models import blocks, layers_of", ["gems.models.blocks"]),
        ("gems.models.resnet", "import torch", ["torch"]),
        ("gems.models.resnet", "from gems.models.build import x", ["gems.models.build.x"]),
        ("gems.data.folder", "import torchvision", ["torchvision"]),
        ("gems.data.folder", "import PIL.Image", []),
        ("gems.runfolder", "import hydra", ["hydra"]),
        ("gems.engine.run", "from omegaconf import OmegaConf", ["omegaconf.OmegaConf"]),
        ("gems.engine.run", "from mpi4py import MPI", ["mpi4py.MPI"]),
        ("gems.engine.run", "import mpi4py.MPI", ["mpi4py.MPI"]),
        ("gems.engine.run", "from mpi4py import __version__\nimport anything, torch\nfrom gems import trace", []),
        ("gems.engine.run", "import jobs.submit, submitit", ["submitit"]),
        ("gems.engine.transport", "from mpi4py import MPI", []),
        ("jobs.submit", "import torch, mpi4py, h5py", ["torch", "mpi4py", "h5py"]),
        ("jobs.submit", "from gems import trace\nimport gems.engine.run", ["gems.trace", "gems.engine.run"]),
        ("jobs.submit", "from gems.models import build", ["gems.models.build"]),
        ("jobs.submit", "import submitit, yaml\nfrom jobs.spec import JobSpec\nfrom .blame import blame", []),
        ("analysis.load", "from gems.ranks import run_ranks\nimport jobs", ["gems.ranks.run_ranks", "jobs"]),
        ("analysis.load", "import matplotlib.pyplot\nfrom gems.schedule.bounds import bubble", []),
    ],
)  # fmt: skip
def test_the_check_can_fail(module: str, source: str, expected: list[str]) -> None:
    assert faults(source, module) == expected


def test_relative_imports_of_a_package_start_at_itself() -> None:
    assert faults("from . import build", "gems.models", is_package=True) == ["gems.models.build"]
    assert faults("from . import layer", "gems.models", is_package=True) == []


def test_mpi_is_started_in_one_place() -> None:
    users = [
        module_of(path)
        for path in files(*PACKAGES, "scripts")
        if any(
            is_below(name, "mpi4py.MPI")
            for name in imports_of(path.read_text(), module_of(path).rpartition(".")[0])
        )
    ]
    assert users == ["gems.engine.transport"]


@pytest.mark.parametrize("module", LOGIN_NODE)
def test_the_login_node_loads_nothing_heavy(module: str) -> None:
    program = f"import sys, {module}; print(*[name for name in {HEAVY!r} if name in sys.modules])"
    ended = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert (ended.returncode, ended.stdout.strip(), ended.stderr) == (0, "", "")


def test_what_counts_as_heavy_is_seen_when_it_is_loaded() -> None:
    program = f"import sys, gems.trace; print(*[name for name in {HEAVY!r} if name in sys.modules])"
    ended = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert ended.stdout.split() == ["h5py", "gems.trace"]


def test_a_file_has_one_noun_and_not_too_many_lines() -> None:
    lengths = {module_of(path): len(path.read_text().splitlines()) for path in files(*PACKAGES)}
    assert {module: length for module, length in lengths.items() if length > MAX_LINES} == {}
