"""Collection: the ranks' traces become one trace, pictures and a table, in a process of its own."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from typing import IO

from gems.cli.framework import print_json
from gems.errors import RankFailedError
from gems.runs.folder import RunFolder
from gems.utils.atomic_io import read_json
from jobs.slurm.resources import PROBE


def collect(folder: RunFolder, *, table_on_stderr: bool = False, as_json: bool = False, is_quiet: bool = False) -> int:
    """Merge the ranks' traces and print the summary; return the exit code of `python -m analysis collect`.

    `is_quiet` writes the summary to logs/summary.txt. Plotting and HDF5 are loaded by the child alone.
    """
    if folder.read_spec().machine.kind == PROBE:
        return _show_probe(folder, table_on_stderr=table_on_stderr, as_json=as_json, is_quiet=is_quiet)
    sys.stdout.flush()
    words = [sys.executable, "-m", "analysis", "collect", str(folder.path), *(["--json"] if as_json else [])]
    with contextlib.ExitStack() as stack:
        out: IO[str] | None = sys.stderr if table_on_stderr else None
        if is_quiet:
            out = stack.enter_context((folder.logs / "summary.txt").open("w"))
        return subprocess.run(words, stdin=subprocess.DEVNULL, stdout=out).returncode


def _show_probe(folder: RunFolder, *, table_on_stderr: bool, as_json: bool, is_quiet: bool) -> int:
    """Report what a probe found, which has no trace. Without an answer of its first rank it has failed."""
    found = read_json(folder.result_json)
    if not found:
        print(f"jobs: no rank of the probe {folder.path} has answered", file=sys.stderr)
        return RankFailedError.exit_code
    if as_json:
        print_json(found)
        return 0
    gpus = found["visible_gpus"] or "those of its node"
    line = (
        f"probe   {found['num_ranks']} ranks on {found['num_nodes']} nodes are where the run wants them; "
        f"rank 0 is on {found['node']} and sees GPUs: {gpus if found['gpus_on_node'] else 'none asked for'}"
    )
    if is_quiet:
        (folder.logs / "summary.txt").write_text(f"{line}\n")
    else:
        print(line, file=sys.stderr if table_on_stderr else sys.stdout, flush=True)
    return 0
