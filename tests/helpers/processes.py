"""Python processes of their own, and what they say."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def python(
    *words: str | Path,
    cwd: Path = ROOT,
    env: Mapping[str, str] | None = None,
    check: bool = False,
    timeout_s: float = 250,
    executable: str | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run Python with these words and wait for its end; `check` raises if it fails."""
    return subprocess.run(
        [executable or sys.executable, *words],
        cwd=cwd,
        env=env,
        check=check,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )
