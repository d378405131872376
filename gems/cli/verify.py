"""`gems verify`: starts ranks that run the configured schedule and compare it with one unsplit process."""

from __future__ import annotations

import sys
import tempfile
from dataclasses import replace

from gems.cli.framework import Options, print_json
from gems.config.schema import RunSpec
from gems.errors import RankFailedError
from gems.launch.local_launcher import mpiexec_argv, rank_environment, run_ranks
from gems.models import title_of
from gems.runs.folder import RunFolder
from gems.runs.prepare import prepare
from gems.utils.atomic_io import read_json

STEPS = 2
TOLERANCES = {"float64": 1e-12, "float32": 1e-3, "bfloat16": 1.0}
TIME_LIMIT_S = 900.0


def verify(spec: RunSpec, options: Options) -> int:
    """Run two steps in float64 (or train.dtype when it is not the default) and prints the largest relative error.

    Compared are every parameter, gradient and running statistic of every copy on every rank, and the most activation
    bytes that each rank held with what the schedule predicts. Gives 1 when the error is above 1e-12 in float64 or the
    bytes differ.

    Raises:
        RankFailedError: a rank ended before the comparison was done.
    """
    dtype = "float64" if spec.train.dtype == "float32" else spec.train.dtype
    with tempfile.TemporaryDirectory(prefix="gems-verify-") as scratch:
        train = replace(spec.train, dtype=dtype, steps=STEPS, warmup_steps=0)
        short = replace(spec, runs_dir=scratch, train=train)
        folder = prepare(short)
        argv = mpiexec_argv(
            spec.world_size, [sys.executable, "-m", "gems.engine.verification.compare", str(folder.path)]
        )
        ended = run_ranks(argv, rank_environment(spec.machine.threads_per_rank), log=None, timeout_s=TIME_LIMIT_S)
        found = read_json(folder.result_json)
        if ended.returncode or not found:
            raise _failure(folder, ended.returncode)
    document = {
        "schedule": spec.schedule.name,
        "partitions": spec.parallel.partitions,
        "replicas": spec.parallel.replicas,
        "micro_batches": spec.parallel.micro_batches,
        "model": title_of(spec.model),
        "dtype": dtype,
        "steps": STEPS,
        **found,
    }
    same_bytes = found["peak_activation_bytes"] == found["predicted_activation_bytes"]
    passed = float(found["max_rel_error"]) <= TOLERANCES[dtype] and same_bytes
    if options.json:
        print_json(document)
    else:
        verdict = "equal" if float(found["max_rel_error"]) <= TOLERANCES[dtype] else "DIFFERENT"
        print(
            f"{spec.schedule.name}, {spec.parallel.partitions} partitions x {spec.parallel.replicas} replicas: {verdict}, "
            f"max relative error {found['max_rel_error']:.2e} in {dtype} ({found['worst']})"
        )
        print(
            f"activations at most, bytes by rank: {_listed(found['peak_activation_bytes'])}, "
            + ("as predicted" if same_bytes else f"PREDICTED {_listed(found['predicted_activation_bytes'])}")
        )
        if found["unsplit_layers"]:
            print(f"full backward at I, because it cannot be split: {', '.join(found['unsplit_layers'])}")
    return 0 if passed else 1


def _listed(numbers: list[int]) -> str:
    return " ".join(map(str, numbers))


def _failure(folder: RunFolder, returncode: int) -> RankFailedError:
    """Report what the first failing rank left, with its exit code."""
    records = [read_json(path) for path in sorted(folder.path.glob("FAILED.rank*.json"))]
    records.sort(key=lambda record: str(record["utc"]))
    if not records:
        return RankFailedError(f"verify: the ranks ended with code {returncode} and none said why")
    error = RankFailedError(f"verify: rank {records[0]['rank']} failed: {records[0]['cause']}")
    error.exit_code = int(records[0]["exit_code"])
    return error
