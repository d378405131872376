"""docs/how-to/extend.md: the files that it shows are written outside of the package, and its commands are run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.pages import ROOT, blocks

PAGE = ROOT / "docs" / "how-to" / "extend.md"
FILES = ("my_schedules.py", "my_policies.py", "my_costs.py", "my_stages.py", "my_data.py")
QUICK = ["model.depth=8", "data.height_px=32", "data.width_px=32", "parallel.micro_batch_size=2"]
TOLERANCE = 1e-12
pytestmark = pytest.mark.usefixtures("warm")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("extend")
    for block in blocks(PAGE.read_text()):
        if block.language == "python":
            (made / block.text.partition(":")[0].removeprefix("# ")).write_text(block.text + "\n")
    assert sorted(path.name for path in made.iterdir()) == sorted(FILES)
    return made


def run(folder: Path, program: str, *argv: str) -> str:
    """Run a program that is installed beside this interpreter."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "GEMS_CACHE_DIR": str(folder / "cache")}
    words = [str(Path(sys.executable).with_name(program)), *argv]
    ended = subprocess.run(
        words, cwd=folder, env=environment, capture_output=True, text=True, timeout=240
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def shown(folder: Path, verb: str, *more: str) -> str:
    """Run the page's command of a verb with more overrides."""
    (text,) = (block for block in blocks(PAGE.read_text()) if block.language == "sh")
    (command,) = (line for line in text.commands() if f" {verb} " in line)
    return run(folder, *command.split(), *more)


def ask(folder: Path, program: str) -> Any:
    """Evaluate a program with the plugins imported; it prints JSON."""
    return json.loads(
        run(folder, "python", "-c", f"import json, my_schedules, my_policies, my_data\n{program}")
    )


def test_verify_is_exact_with_plugins_of_every_kind(folder: Path) -> None:
    found = json.loads(shown(folder, "verify", *QUICK))
    assert (found["schedule"], found["partitions"]) == ("mine", 2)
    assert found["max_rel_error"] <= TOLERANCE


def test_a_run_on_two_ranks_trains(folder: Path) -> None:
    shown(folder, "submit", *QUICK)
    (spec,) = folder.glob("runs/*/run.yaml")
    assert f"plugins_dir: {folder}" in spec.read_text()
    summary = run(folder, "gems-analysis", "summary", str(spec.parent))
    assert "mine" in summary


def test_simulation_takes_the_time_of_the_closed_form(folder: Path) -> None:
    found = json.loads(shown(folder, "simulate"))
    program = (
        "from gems.schedule import FAMILIES, Terms\n"
        "mine, terms = FAMILIES['mine'], Terms(4, 8, f=1.0, i=1.0, w=1.0)\n"
        "print(json.dumps([mine.step_units(terms), mine.peak_units(terms)]))"
    )
    assert [found["step_s"], max(found["peak_units"])] == pytest.approx(ask(folder, program))


def test_simulation_takes_the_times_of_the_cost_source(folder: Path) -> None:
    alone = ["parallel.partitions=1", "parallel.micro_batches=1", "schedule=1f1b", *QUICK]
    words = ["plugins=[my_costs]", "data=synthetic", "--json", *alone]
    found = json.loads(run(folder, "gems", "simulate", "cost=mine", *words))
    layers = json.loads(run(folder, "gems", "profile", *words))["layers"]
    assert found["step_s"] == pytest.approx(3e-9 * sum(each["output_bytes"] for each in layers))


def test_the_planner_tries_schedule_and_policy(folder: Path) -> None:
    choices = json.loads(shown(folder, "plan", *QUICK))["choices"]
    assert "mine" in {choice["schedule"] for choice in choices}
    program = (
        "from gems.search.candidate import candidates\n"
        "print(json.dumps(sorted({one.memory for one in candidates(2, 8, 20)})))"
    )
    assert "mine" in ask(folder, program)


def test_the_schedule_is_a_rival_of_the_search(folder: Path) -> None:
    program = (
        "from gems.schedule import Request\n"
        "from gems.schedule.families.published_schedules import published_schedules\n"
        "print(json.dumps([each.name for each in published_schedules(Request(4, 8, cap=8.0))]))"
    )
    assert "mine" in ask(folder, program)


def test_an_unknown_plugin_is_refused_in_one_line(folder: Path) -> None:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    argv = [sys.executable, "-m", "gems", "schedule", "plugins=[no_such_module]"]
    ended = subprocess.run(
        argv, cwd=folder, env=environment, capture_output=True, text=True, timeout=60
    )
    assert ended.returncode == 2
    assert "plugins=no_such_module" in ended.stderr and len(ended.stderr.splitlines()) == 1


def test_a_name_of_a_plugin_that_was_not_named_is_refused(folder: Path) -> None:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    argv = [sys.executable, "-m", "gems", "schedule", "schedule=mine"]
    ended = subprocess.run(
        argv, cwd=folder, env=environment, capture_output=True, text=True, timeout=60
    )
    assert ended.returncode == 2 and "schedule=mine" in ended.stderr
