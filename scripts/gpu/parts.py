"""The three parts of a call of at most eight minutes, as rows.yaml has them."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import yaml

from scripts.gpu.row import Row, answer, pytest_counts

LIMIT_S = 480.0
FAKE_ROW_LIMIT_S = 600.0
MARGIN_S = 10.0  # of it, for what stands before and after the rows
# pytest without the settings of setup.cfg, whose plugins a machine may lack
PYTEST = "pytest -q -rfE -p no:cacheprovider -o addopts="
_PARTS = yaml.safe_load(Path(__file__).with_name("rows.yaml").read_text())
TITLES = {part: entry["title"] for part, entry in _PARTS.items()}


def rows_of(part: int, is_small: bool = False, is_fake: bool = False) -> tuple[Row, ...]:
    """Return a part's rows in order.

    Small ones for a slow device, for tests of a real or a fake one. A fake device is made of host
    memory, and shares its cores with all else that runs, so its rows wait long before they fail.
    """
    return tuple(
        _row(entry | (entry.get("small", {}) if is_small else {}), is_fake)
        for entry in _PARTS[part]["rows"]
    )


def _row(entry: dict[str, Any], is_fake: bool) -> Row:
    environment = {} if is_fake else entry.get("environment", {})
    read = answer(entry.get("read", ""))
    if "tests" in entry:
        chosen = ["-k", entry["only"]] if "only" in entry else []
        program = [*PYTEST.split(), *chosen, *entry["tests"]]
        device = {"GEMS_TEST_DEVICE": "fake_cuda" if is_fake else "cuda"}
        environment = entry.get("environment", {}) | device
        read = pytest_counts
    elif "call" in entry:
        arguments = json.dumps(entry.get("arguments", []))
        program = ["scripts.bench.rig", f"scripts.gpu.cases:{entry['call']}", arguments]
    else:
        program = shlex.split(entry["program"])
    return Row(
        entry["name"],
        entry["question"],
        tuple(program),
        FAKE_ROW_LIMIT_S if is_fake else entry["limit_s"],
        environment,
        read,
        entry.get("columns", ""),
    )
