"""Short runs in ranks of this machine, in a temporary folder.

They are used to verify, evaluate and predict.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from gems.config.schema import BenchmarkConfig, RunSpec
from gems.errors import RankFailedError
from gems.launch.local_launcher import mpiexec_argv, rank_environment, run_ranks
from gems.plan.evaluate import evaluate
from gems.runs.folder import RunFolder
from gems.runs.prepare import prepare
from gems.utils.atomic_io import read_json, write_json
from gems.utils.run_module import RUN_MODULE

TIME_LIMIT_S = 900.0
REQUEST_JSON = "request.json"


def run_program(
    spec: RunSpec,
    function: str,
    verb: str,
    request: Mapping[str, Any] | None = None,
    timeout_s: float | None = TIME_LIMIT_S,
    needs_labels: bool = True,
    trains: bool = True,
) -> dict[str, Any]:
    """Run a function in the ranks of a resolved run, in a scratch folder, and return the result.

    The result is the content of result.json. The function, as module:name, is one that
    `gems.engine.run` accepts; it finds `request` as request.json in the folder. No step counts
    for figures, so no warm-up steps are skipped.

    Raises:
        ConfigError: The configuration cannot be run here.
        DoesNotFitError: A rank would hold more than its device.
        RankFailedError: A rank ended before there was a result; its exit code is that of the first
            rank that failed.
    """
    with tempfile.TemporaryDirectory(prefix=f"gems-{verb}-") as scratch:
        scratch_spec = replace(spec, runs_dir=scratch, benchmark=BenchmarkConfig(skip_steps=0))
        folder = prepare(scratch_spec, evaluate(scratch_spec, trains), needs_labels)
        if request is not None:
            write_json(folder.path / REQUEST_JSON, dict(request))
        program = [sys.executable, *RUN_MODULE, "gems.engine.run", str(folder.path), function]
        argv = mpiexec_argv(spec.world_size, program)
        ended = run_ranks(
            argv, rank_environment(spec.machine.threads_per_rank), timeout_s=timeout_s
        )
        result = read_json(folder.result_json)
        if ended.returncode or not result:
            raise _failure(folder, ended.returncode, verb)
    return result


def _failure(folder: RunFolder, returncode: int, verb: str) -> RankFailedError:
    """Return the error of the first rank that failed, with its exit code."""
    records = [read_json(path) for path in sorted(folder.path.glob("FAILED.rank*.json"))]
    records.sort(key=lambda record: str(record["utc"]))
    if not records:
        return RankFailedError(
            f"{verb}: the ranks ended with code {returncode} and left no record of why"
        )
    error = RankFailedError(f"{verb}: rank {records[0]['rank']} failed: {records[0]['cause']}")
    error.exit_code = int(records[0]["exit_code"])
    return error
