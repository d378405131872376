"""Collection: the ranks' traces become one trace, pictures and a table, in a process of its own."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from gems.cli import Options
from gems.errors import ConfigError
from gems.runfolder import RunFolder


def collect(
    folder: RunFolder, *, table_on_stderr: bool = False, as_json: bool = False, is_quiet: bool = False
) -> int:
    """Merges what the ranks left and prints the summary; gives the exit code of `python -m analysis collect`.

    `is_quiet` puts the summary in logs/summary.txt. Plotting and HDF5 are loaded by the child alone.
    """
    sys.stdout.flush()
    words = [sys.executable, "-m", "analysis", "collect", str(folder.path), *(["--json"] if as_json else [])]
    with contextlib.ExitStack() as stack:
        out: IO[str] | None = sys.stderr if table_on_stderr else None
        if is_quiet:
            out = stack.enter_context((folder.logs / "summary.txt").open("w"))
        return subprocess.run(words, stdin=subprocess.DEVNULL, stdout=out).returncode


def collect_verb(words: Sequence[str], options: Options) -> int:
    """Runs `python -m jobs collect RUN_FOLDER`.

    Raises:
        ConfigError: not one folder, or one that holds no run.
    """
    if len(words) != 1:
        raise ConfigError(
            "collect", " ".join(words), "takes one run folder", "python -m jobs collect RUN_FOLDER"
        )
    folder = RunFolder(Path(words[0]).resolve())
    folder.read_spec()
    return collect(folder, as_json=options.json)
