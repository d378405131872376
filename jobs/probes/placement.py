"""Show the result of a placement check (machine=probe)."""

from __future__ import annotations

from typing import IO

from gems.cli.framework import print_json
from gems.errors import RankFailedError
from gems.runs.folder import RunFolder
from gems.utils.atomic_io import read_json
from gems.utils.stdio import report


def show_placement(folder: RunFolder, out: IO[str] | None, as_json: bool) -> int:
    """Report the result of a placement check, which leaves no trace.

    The check has failed if the first rank left no placement.
    """
    found = read_json(folder.result_json)
    if not found:
        report("jobs", f"no rank of the probe {folder.path} has answered")
        return RankFailedError.exit_code
    if as_json:
        print_json(found)
        return 0
    gpus = (
        (found["visible_gpus"] or "those of its node")
        if found["gpus_on_node"]
        else "none asked for"
    )
    ranks = f"{found['num_ranks']} ranks on {found['num_nodes']} nodes are where the run wants them"
    print(
        f"probe   {ranks}; rank 0 is on {found['node']} and sees GPUs: {gpus}", file=out, flush=True
    )
    return 0
