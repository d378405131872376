"""Every shell command and every Python block of README and docs is run, in a copy of the repository."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.helpers.pages import PAGES, ROOT, blocks, name

pytestmark = [pytest.mark.docs, pytest.mark.timeout(900)]
COMMAND_LIMIT_S = 300.0
WITH_CODE = [
    page for page in PAGES if any(b.language in ("sh", "python") for b in blocks(page.read_text()))
]


def copy_repository(folder: Path) -> Path:
    """Copy what git knows or would add; .venv is the running environment, and counts as set up."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    )
    for path in filter(None, listed.stdout.split("\0")):
        if (ROOT / path).is_file():
            target = folder / path
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / path, target)
            os.utime(target, (0, 0))
    (folder / ".venv").symlink_to(sys.prefix)
    return folder


def run(words: list[str], folder: Path) -> None:
    programs = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = {
        **os.environ,
        "PATH": programs,
        "PYTHONPATH": str(folder),
        "PYTHONWARNINGS": "error::SyntaxWarning",
    }
    ended = subprocess.run(
        words,
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=COMMAND_LIMIT_S,
    )
    assert ended.returncode == 0, (
        f"{words[-1]}\nended with {ended.returncode}\n{ended.stdout}\n{ended.stderr}"
    )


@pytest.mark.parametrize("page", WITH_CODE, ids=name)
def test_blocks(page: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = copy_repository(tmp_path)
    times = []
    for block in blocks(page.read_text()):
        if block.run_by or block.needs:
            continue
        commands = [
            ["bash", "-euo", "pipefail", "-c", line] for line in (*block.setup, *block.commands())
        ]
        if block.language == "python":
            script = folder / "block.py"
            script.write_text(block.text)
            commands = [[sys.executable, str(script)]]
        if block.language in ("sh", "python"):
            for words in commands:
                start = time.monotonic()
                run(words, folder)
                times.append(f"{time.monotonic() - start:6.1f} s  {words[-1]}")
    with capsys.disabled():
        print(f"\n{name(page)}", *times, sep="\n")
