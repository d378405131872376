"""Processes that a test starts get the fake device too.

They are started as `sys.executable`, in the place of which there is a script that installs the
device first.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
REPORTS = (  # the folder to which processes write what they have counted, one JSON line each
    "GEMS_FAKE_CUDA_REPORTS"
)
WITHOUT = ("jobs", "analysis")  # commands of the login node, without torch

PYTHON = """#!/bin/sh
case "$1" in
  -m|-c|-u|-P) exec {python} -m tests.fake_cuda "$@" ;;
  *) exec {python} "$@" ;;
esac
"""
BESIDE = """#!/bin/sh
exec {program} "$@"
"""


def take_over(folder: Path) -> None:
    """Make `sys.executable` a script in `folder` that starts Python with the fake device."""
    python = Path(sys.executable)
    script = folder / "bin" / "python"
    if python == script:
        return
    script.parent.mkdir(parents=True, exist_ok=True)
    for path, text in (
        (script, PYTHON.format(python=shlex.quote(str(python)))),
        (
            script.with_name("mpiexec"),
            BESIDE.format(program=shlex.quote(str(python.with_name("mpiexec")))),
        ),
    ):
        if path.name == "mpiexec" and not python.with_name("mpiexec").exists():
            continue
        if not path.exists() or path.read_text() != text:
            fresh = path.with_name(f".{path.name}-{os.getpid()}")
            fresh.write_text(text)
            fresh.chmod(0o755)
            fresh.replace(path)
    paths = [str(ROOT), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(paths))
    sys.executable = str(script)


def report(what: str, counts: dict[str, int], races: list[str]) -> None:
    """Write a line for whoever started the tests."""
    if folder := os.environ.get(REPORTS):
        with (Path(folder) / f"{os.getpid()}.jsonl").open("a") as file:
            file.write(json.dumps({"what": what, "counts": counts, "races": races}) + "\n")
