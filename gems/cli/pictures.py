"""Drawing: pictures of answers, which the analysis makes in a process of its own, so that no verb loads matplotlib."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gems
from gems.errors import ConfigError, one_of

LIMIT_S = 120
PICTURES = (".png", ".pdf", ".svg")
ROOT = Path(gems.__file__).resolve().parents[1]


def check_picture(path: Path) -> None:
    """Refuse a picture that could not be written, before the work is done.

    Raises:
        ConfigError: another suffix, or no such folder.
    """
    if path.suffix not in PICTURES:
        raise ConfigError("--picture", path, one_of(PICTURES))
    if not path.absolute().parent.is_dir():
        raise ConfigError("--picture", path, "its folder does not exist", "make the folder first")


def draw(verb: str, answer: Mapping[str, Any], path: Path) -> str:
    """Let `python -m analysis VERB` draw an answer, and gives the picture's path."""
    with tempfile.TemporaryDirectory(prefix=f"gems-{verb}-") as scratch:
        document = Path(scratch) / f"{verb}.json"
        document.write_text(json.dumps(answer))
        argv = [sys.executable, "-m", "analysis", verb, str(document), "--out", str(path.absolute())]
        search = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        subprocess.run(
            argv, check=True, timeout=LIMIT_S, stdout=subprocess.DEVNULL, env=os.environ | {"PYTHONPATH": search}
        )
    return str(path)
