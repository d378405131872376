"""Run the engine's tests on the fake device, part by part: `make test-device`.

Prints what passed, the races, and how often the host waited. ARGS='exactness resume' runs the parts
whose names begin so. Exit code 1 if one has failed.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from gems.launch.local_launcher import Output, mpiexec_argv, rank_environment, run_ranks
from scripts.gpu.parts import rows_of
from tests.fake_cuda.build import library, why_not
from tests.fake_cuda.children import REPORTS
from tests.fake_cuda.watch import APART, DIRECT

ROOT = Path(__file__).resolve().parent.parent.parent
NUM_RANKS = 4
LIMIT_S = 3600
(ENGINE_TESTS,) = (
    tuple(word for word in row.program if word.startswith("tests/"))
    for row in rows_of(1)
    if row.name == "engine tests"
)
DIRECTLY = {DIRECT: "1"}
LATE = {"GEMS_FAKE_CUDA_LATE": "3"}
TRANSPORT = "GEMS_TEST_TRANSPORT"
GLOO = {TRANSPORT: "gloo"}
GRAPHS = {"GEMS_TEST_CUDA_GRAPHS": "1"}
NCCL = {TRANSPORT: "nccl", APART: "1"}


@dataclass(frozen=True)
class Part:
    """Files of tests, on four ranks or in one process."""

    name: str
    paths: tuple[str, ...]
    chosen: str = ""
    environment: dict[str, str] = field(default_factory=dict)
    num_ranks: int = NUM_RANKS


def _mpi(name: str, chosen: str = "", **environment: str) -> Part:
    ways = {
        DIRECT: "device pointers",
        "GEMS_FAKE_CUDA_LATE": "late",
        TRANSPORT: environment.get(TRANSPORT, ""),
        "GEMS_TEST_CUDA_GRAPHS": "graphs",
    }
    way = ", ".join(way for key, way in ways.items() if key in environment) or "staged"
    return Part(f"{name}, {way}", (f"tests/mpi/test_{name}.py",), chosen, environment, num_ranks=1)


PARTS = (
    Part("the device", ("tests/fake_cuda/fake_device.py",), num_ranks=1),
    Part("graphs", ("tests/fake_cuda/fake_graphs.py",), num_ranks=1),
    Part("slots of graphs", ("tests/fake_cuda/fake_slots.py",), num_ranks=1),
    Part(
        "mutants",
        ("tests/fake_cuda/fake_mutants.py",),
        environment={"GEMS_FAKE_CUDA_SEEDS": "6"},
        num_ranks=1,
    ),
    Part("the engine's parts", ENGINE_TESTS, num_ranks=1),
    Part("waits, staged", ("tests/fake_cuda/fake_waits.py",)),
    Part("waits, device pointers", ("tests/fake_cuda/fake_waits.py",), environment=DIRECTLY),
    _mpi("exactness"),
    _mpi("exactness", **DIRECTLY),
    _mpi("exactness", "equals_one and (gems_master or zb_v) and 4-1", **LATE),
    _mpi("exactness", "equals_one and (4-1 or 2-2) or capped or far_ahead", **GLOO),
    _mpi("exactness", "equals_one and (4-1 or 2-2) or capped or far_ahead", **NCCL),
    _mpi("exactness", "equals_one and (gems_master or zb_v) and 4-1", **LATE, **NCCL),
    _mpi("exactness", "equals_one", **GRAPHS),
    _mpi("exactness", "equals_one and (gems_master or zb_v) and 4-1", **LATE, **GRAPHS),
    _mpi("memory"),
    _mpi("memory", **DIRECTLY),
    _mpi("memory", "bits_and_bytes and (resnet or unet) and 1f1b", **LATE),
    _mpi("memory", "bits_and_bytes and 1f1b", **NCCL),
    _mpi("memory", "bits_and_bytes", **GRAPHS),
    _mpi("resume"),
    _mpi("resume", **GRAPHS),
    _mpi("training"),
    _mpi("training", **GRAPHS),
    _mpi("tasks"),
    _mpi("draws"),
    _mpi("zoo"),
    _mpi("strips", "mixed_precision_computes and (resnet or unet)"),
    _mpi(
        "strips",
        "not_finite or ((trains_as_one and (gems_master or 1f1b or capped or zb_h1)"
        " or recomputed_and_leave)"
        " and not (frozen or standardised or alexnet or vgg or pooled or gated))",  # they draw
        **GRAPHS,
    ),
    _mpi("placed"),
    _mpi("transport"),
    Part("commands", ("tests/fake_cuda/fake_commands.py",), num_ranks=1),
    Part("on_gpu", ("tests/fake_cuda/fake_on_gpu.py",), num_ranks=1),
)


def main(argv: list[str]) -> int:
    """Run the parts that are named, or all."""
    if (reason := why_not()) is not None:
        print(f"skipped: {reason}")
        return 0
    library()
    failed = [
        part.name
        for part in PARTS
        if (not argv or part.name.startswith(tuple(argv))) and not _run(part)
    ]
    print(f"failed: {', '.join(failed)}" if failed else "all passed, 0 races")
    return int(bool(failed))


def _run(part: Part) -> bool:
    """Run a part and print its line; return whether it passed without a race."""
    start_s = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        returncode, lines = _pytest(part, {REPORTS: folder} | part.environment)
        reports = [
            json.loads(line)
            for path in Path(folder).iterdir()
            for line in path.read_text().splitlines()
        ]
    counts: Counter[str] = sum((Counter(report["counts"]) for report in reports), Counter())
    races = [race for report in reports for race in report["races"]]
    passed = max(
        (int(found[1]) for line in lines for found in re.finditer(r"(\d+) passed", line)), default=0
    )
    waits = ", ".join(
        f"{name[6:]} {n}" for name, n in sorted(counts.items()) if name.startswith("wait: ")
    )
    seconds = time.monotonic() - start_s
    print(
        f"{part.name}: {passed} passed, {len(races)} races, {seconds:.0f} s; host waits of all"
        f" ranks: {waits}"
    )
    for line in lines:
        if line.startswith("host waits a micro-batch"):
            print(f"  {line}", flush=True)
    is_good = returncode == 0 and not races and passed > 0
    if not is_good:
        print(*dict.fromkeys(races), *lines[-60:], sep="\n", flush=True)
    return is_good


def environment() -> dict[str, str]:
    """Return the environment of processes on the fake device."""
    paths = [str(ROOT), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    return rank_environment(1) | {
        "GEMS_TEST_DEVICE": "fake_cuda",
        "MPIR_CVAR_POLLS_BEFORE_YIELD": "10",
        "PYTHONPATH": os.pathsep.join(paths),
    }


def _pytest(part: Part, more: dict[str, str]) -> tuple[int, list[str]]:
    variables = environment() | more
    argv = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        *(["-k", part.chosen] if part.chosen else []),
    ]
    argv += [str(ROOT / path) for path in part.paths]
    if part.num_ranks > 1:
        lines: list[str] = []
        ended = run_ranks(
            mpiexec_argv(part.num_ranks, argv),
            variables,
            Output(None, False, lines.append),
            LIMIT_S,
        )
        return ended.returncode, [line.rstrip() for line in lines]
    child = subprocess.run(
        argv, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=LIMIT_S
    )
    return child.returncode, (child.stdout + child.stderr).splitlines()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
