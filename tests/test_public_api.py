"""`import gems`: what it offers, and that it loads nothing before it is used."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import gems
from gems.launch.local_launcher import mpiexec_argv, rank_environment
from tests.helpers.warm_python import REAL

ROOT = Path(gems.__file__).resolve().parent.parent
SMALL = [
    "data=synthetic",
    "data.height_px=16",
    "data.width_px=16",
    "schedule=1f1b",
    "parallel.micro_batches=2",
    "train.steps=3",
]


pytestmark = pytest.mark.usefixtures("warm")


def run(
    program: str, num_ranks: int = 1, executable: str | None = None
) -> subprocess.CompletedProcess[str]:
    argv = [executable or sys.executable, "-c", program]
    return subprocess.run(
        argv if num_ranks == 1 else mpiexec_argv(num_ranks, argv),
        cwd=ROOT,
        env=rank_environment(1),
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_import_loads_nothing_heavy() -> None:
    program = """
import sys, gems
before = set(sys.modules)
assert not {"torch", "mpi4py", "hydra", "h5py", "numpy"} & before, before
gems.compose(["experiment=quickstart"])
gems.ConfigError, gems.RunSpec
assert not {"torch", "mpi4py", "h5py"} & set(sys.modules)
"""
    ended = run(program, executable=REAL)
    assert (ended.returncode, ended.stderr) == (0, "")


def test_names_are_typed_and_documented() -> None:
    """Type checkers read the imports below TYPE_CHECKING, and users the docstrings."""
    tree = ast.parse((ROOT / "gems" / "__init__.py").read_text())
    typed = {
        alias.asname: f"{node.module}:{alias.name}"
        for block in tree.body
        if isinstance(block, ast.If)
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert sorted(gems.__all__) == sorted([*typed, "__version__"]) == dir(gems)
    for name in typed:
        thing = getattr(gems, name)
        module, _, attribute = typed[name].partition(":")
        assert thing is getattr(sys.modules[module], attribute)
        assert thing.__doc__ and thing.__doc__.splitlines()[0].endswith("."), name
    with pytest.raises(AttributeError, match="no attribute 'retrain'"):
        gems.retrain  # noqa: B018


@pytest.mark.parametrize("package", ["gems", "jobs", "analysis"])
def test_packages_are_typed(package: str) -> None:
    assert (ROOT / package / "py.typed").is_file()


def test_train_and_read_in_one_process(tmp_path: Path) -> None:
    ended = run(f"""
import gems
result = gems.train(gems.compose({[*SMALL, f"runs_dir={tmp_path}"]!r}))
assert result.num_steps == 3 and 0 <= result.validation_accuracy <= 1
trace = gems.load_trace(result.folder)
assert trace.source == "measured" and list(trace.steps["step"]) == [0, 1, 2]
weights = gems.load_weights(result.folder)
assert len(weights) > 5
import torch
assert gems.load_model(result.folder)(torch.zeros(2, 3, 32, 32)).shape == (2, 2)
""")
    assert ended.returncode == 0, ended.stderr


def test_train_in_two_ranks(tmp_path: Path) -> None:
    words = [*SMALL, "parallel.partitions=2", "train.evaluate=false", f"runs_dir={tmp_path}"]
    ended = run(
        f"""
import os, pathlib, gems
loss = gems.train(gems.compose({words!r})).last_loss
pathlib.Path({str(tmp_path)!r}, f"loss{{os.getpid()}}").write_text(str(loss))
""",
        num_ranks=2,
    )
    assert ended.returncode == 0, ended.stderr
    first, second = (float(path.read_text()) for path in tmp_path.glob("loss*"))
    assert first == second > 0


def test_a_world_of_another_size(tmp_path: Path) -> None:
    words = [*SMALL, "parallel.partitions=2", f"runs_dir={tmp_path}"]
    ended = run(f"import gems; gems.train(gems.compose({words!r}))")
    assert "needs 2 ranks, and this world has 1; start the program by mpiexec -n 2" in ended.stderr
    assert not list(tmp_path.iterdir())


def test_a_rank_that_fails_ends_all(tmp_path: Path) -> None:
    (tmp_path / "stage0000.pt").write_text("no weights")
    words = [
        *SMALL,
        "parallel.partitions=2",
        f"runs_dir={tmp_path}",
        f"train.initial_checkpoint={tmp_path}",
    ]
    ended = run(f"import gems; gems.train(gems.compose({words!r}))", num_ranks=2)
    assert ended.returncode == 2
    assert "cannot be read" in ended.stderr


def test_plan_simulate_and_verify() -> None:
    spec = gems.compose([*SMALL, "parallel.partitions=2"])
    plan = gems.plan_run(spec)
    assert plan.schedule.num_ranks == 2 and len(plan.boundaries) == 3
    # (N + P - 1)(f + b) with f = i = w = 1 of a whole rank's work
    prediction = gems.simulate(spec)
    assert prediction.step.span == 9
    assert prediction.to_json()["efficiency"] == pytest.approx(6 / 9)
    verification = gems.verify(spec)
    assert (
        verification.is_equal
        and verification.has_predicted_bytes
        and verification.dtype == "float64"
    )
    with pytest.raises(gems.ConfigError):
        gems.compose(["parallel.partitions=0"])
