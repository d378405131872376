"""`python -m jobs collect`: the traces of a run folder, merged, drawn and summed up."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from gems.cli.framework import Options
from gems.errors import ConfigError
from gems.runs.folder import RunFolder
from jobs.launch.launch import collect as collect_traces


def collect(words: Sequence[str], options: Options) -> int:
    """Run `python -m jobs collect RUN_FOLDER`.

    Raises:
        ConfigError: not one folder, or one that holds no run.
    """
    if len(words) != 1:
        raise ConfigError("collect", " ".join(words), "takes one run folder", "python -m jobs collect RUN_FOLDER")
    folder = RunFolder(Path(words[0]).resolve())
    folder.read_spec()
    return collect_traces(folder, as_json=options.json)
