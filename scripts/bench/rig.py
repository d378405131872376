"""The rig of the benchmarks: options, runs, processes, rounds in turn, tables and JSON.

Tables go to stderr, one JSON object to stdout. A benchmark has cases, a measurement and columns.
`python -m scripts.bench.rig MODULE:FUNCTION ARGUMENTS` calls one function of a benchmark in its own
process, or on a rank.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from analysis.io.load import load_parts
from analysis.metrics.run_metrics import run_metrics, step_times_s
from gems.config.compose import compose
from gems.config.schema import RunSpec
from gems.errors import GemsError
from gems.launch.local_launcher import Output, mpiexec_argv, rank_environment, run_ranks
from gems.runs.folder import RunFolder
from gems.runs.prepare import prepare
from gems.utils.atomic_io import read_json
from gems.utils.host_memory import keep_freed_memory
from gems.utils.units import GIB, MIB

if TYPE_CHECKING:
    import torch

RUN_LIMIT_S = 550.0
POSITIONAL = ("overrides", "number")
HELP = {"json": "print one object on stdout", "only": "run the cases whose name contains ONLY"}
UNITS = {
    "ms": 1e3,
    "%": 100.0,
    "MiB": 1 / MIB,
    "GiB": 1 / GIB,
    "MB": 1e-6,
    "GB": 1e-9,
    "GB/s": 1e-9,
}
RESULTS = (
    "first_loss",
    "last_loss",
    "validation_accuracy",
    "validation_majority",
    "num_validation",
)
SHEETS = ("v100", "a100", "h100", "h200")  # GPUs of conf/machine
Rows = Iterable[dict[str, Any]]
K = TypeVar("K")
T = TypeVar("T")


def options(doc: str | None, argv: Sequence[str] | None, **defaults: Any) -> argparse.Namespace:
    """Parse options, each named by its default.

    False makes a switch, a tuple holds choices and a list values after commas; a dict is what
    argparse takes.
    """
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawTextHelpFormatter)
    for key, default in defaults.items():
        name = key.replace("_", "-")
        kind: dict[str, Any] = {"type": type(default), "default": default}
        if isinstance(default, dict):
            kind = default
        elif default is False:
            kind = {"action": "store_true"}
        elif isinstance(default, tuple):
            kind = {"choices": default, "default": default[0]}
        elif isinstance(default, list):
            kind["type"] = lambda text, values=default: [
                type(values[0])(word) for word in text.split(",")
            ]
        parser.add_argument(
            key if key in POSITIONAL else f"--{name}", **{"help": HELP.get(name), **kind}
        )
    return parser.parse_args(argv)


def answered(answer: object, has_failed: bool, as_json: bool = True) -> int:
    """Print an answer as JSON and return the exit code."""
    if as_json:
        print(json.dumps(answer))
    return int(has_failed)


def log(text: str) -> None:
    """Print a line on stderr at once."""
    print(text, file=sys.stderr, flush=True)


def processor() -> str:
    """Return the name of this machine's processor."""
    cpuinfo = Path("/proc/cpuinfo")
    names = re.findall(r"model name\s*: (.*)", cpuinfo.read_text()) if cpuinfo.exists() else []
    return names[0] if names else platform.processor() or platform.machine()


def machine() -> dict[str, Any]:
    """Print and return the facts of this machine: where and when figures were taken."""
    facts = {
        "cpu": processor(),
        "cores": os.cpu_count(),
        "load_at_start": os.getloadavg()[0],
        "python": platform.python_version(),
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
    }
    log(", ".join(f"{name} {value}" for name, value in facts.items()))
    return facts


class Table:
    """A table on stderr, printed row by row as results come.

    A column is `heading=key:format`, as in `step ms=step_s:>9.1f`: the key of a row's value (by
    default the heading), shown in the unit that ends the heading. A text keeps the width alone,
    None is a dash, and a key that a row lacks leaves its cell empty.
    """

    def __init__(self, *columns: str) -> None:
        self._columns: list[tuple[str, float, str, str]] = []
        heads = ""
        for column in columns:
            name, kind = column.rsplit(":", 1)
            heading, _, key = name.partition("=")
            width = (kind[0] if kind[0] in "<>" else ">") + re.findall(r"\d+", kind)[0]
            self._columns.append((key or heading, UNITS.get(heading.split()[-1], 1), kind, width))
            heads += f"{heading:{width}}"
        log(heads)

    def row(self, row: dict[str, Any], note: object = "") -> dict[str, Any]:
        """Print a row's cells and a note after them, and return the row."""
        cells = ""
        for key, scale, kind, width in self._columns:
            value = row.get(key, "")
            is_number = isinstance(value, int | float)
            cells += (
                f"{value * scale:{kind}}"
                if is_number
                else f"{'-' if value is None else value:{width}}"
            )
        log(cells.rstrip() + (f"  {note}" if note else ""))
        return row

    def rows(
        self, rows: Rows, note: Callable[[dict[str, Any]], object] = lambda row: ""
    ) -> list[dict[str, Any]]:
        """Print rows as they arrive, and return them."""
        return [self.row(row, note(row)) for row in rows]


def composed(*words: str | Sequence[str]) -> RunSpec:
    """Compose a run from overrides: several in a text, and those of a user in a list."""
    return compose(
        [word for part in words for word in (part.split() if isinstance(part, str) else part)]
    )


def gpu_machine(**rates: float) -> str:
    """Return the overrides of this machine's GPU.

    Its data sheet's rates if conf/ has one, and those given.
    Needs a GPU.
    """
    import torch

    name = torch.cuda.get_device_name().lower()
    known = next((machine for machine in SHEETS if machine in name), "cuda")
    return " ".join([f"machine={known}", *(f"machine.{key}={rate}" for key, rate in rates.items())])


def opened_device(bench: str, device: str, threads: int) -> torch.device | None:
    """Return the device on which a bench computes in this process.

    Say so and return None if there is no such GPU.
    """
    import torch

    torch.set_num_threads(threads)
    if device == "cuda" and not torch.cuda.is_available():
        log(f"{bench}: torch sees no GPU here: unmeasured")
        return None
    if device == "cpu":
        keep_freed_memory()  # as the ranks of a run
    return torch.device(device)


def square(side_px: int) -> str:
    """Return the overrides of square images."""
    return f"data.height_px={side_px} data.width_px={side_px}"


def in_turns(ways: Mapping[K, Callable[[], T]], rounds: int) -> dict[K, list[T]]:
    """Call every way once a round, A B A B, and return the results of each in order."""
    results: dict[K, list[T]] = {way: [] for way in ways}
    for _ in range(rounds):
        for way, call in ways.items():
            results[way].append(call())
    return results


def quartiles(ratios: Sequence[float]) -> dict[str, float]:
    """Return the middle half of ratios."""
    low, _, high = statistics.quantiles(ratios, n=4)
    return {"ratio_p25": low, "ratio_p75": high}


def spread(ratios: Sequence[float]) -> dict[str, float]:
    """Return the geometric mean, the least and the most of ratios; there must be one."""
    return {"mean": statistics.geometric_mean(ratios), "least": min(ratios), "most": max(ratios)}


def cause_of(lines: Sequence[str]) -> str:
    """Return the line of a program's output that says why it failed.

    A rank's error, its exception, or the last one.
    """
    ranks = [line for line in lines if re.match(r"\[rank \d+\] ERROR ", line)]
    errors = [
        line
        for line in lines
        if re.match(r"[\w.]*(Error|Errors|Exception|Exit|Interrupt)\b.*:", line)
    ]
    said = ranks[:1] or errors[-1:] or list(lines)[-1:]
    return " ".join(" ".join(said).split())[:300]


def start_ranks(num_ranks: int, *program: str, log_to: Path | None = None) -> None:
    """Run `python -m PROGRAM` on several ranks of this machine, one thread each.

    Raises:
        SystemExit: A rank failed; its last lines are the message.
    """
    argv = mpiexec_argv(num_ranks, [sys.executable, "-m", *program])
    ended = run_ranks(argv, rank_environment(1), Output(log_to, echo=False), RUN_LIMIT_S)
    if ended.returncode:
        raise SystemExit("\n".join(ended.tail) or f"exit code {ended.returncode}")


def call_argv(function: Callable[..., object], *arguments: object) -> tuple[str, str, str]:
    """Return the program that calls a module's function, with arguments that JSON can hold."""
    return (
        "scripts.bench.rig",
        f"{function.__globals__['__spec__'].name}:{function.__name__}",
        json.dumps(arguments),
    )


def in_child(
    function: Callable[..., object],
    *arguments: object,
    limit_s: float = RUN_LIMIT_S,
    threads: int | None = None,
) -> dict[str, Any]:
    """Call a module's function in a child process; return its object, or `{"failed": why}`."""
    command = [sys.executable, "-m", *call_argv(function, *arguments)]
    environment = os.environ | ({} if threads is None else {"OMP_NUM_THREADS": str(threads)})
    try:
        ended = subprocess.run(
            command, capture_output=True, text=True, timeout=limit_s, env=environment
        )
    except subprocess.TimeoutExpired:
        return {"failed": f"did not end within {limit_s:.0f} s"}
    if ended.returncode:
        return {"failed": cause_of(ended.stderr.splitlines()) or f"exit code {ended.returncode}"}
    result: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
    return result


@contextmanager
def finished_run(spec: RunSpec) -> Iterator[RunFolder]:
    """Run a configuration on this machine, and yield its folder, which is temporary."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = prepare(replace(spec, runs_dir=scratch))
        start_ranks(
            spec.world_size, "gems.engine.run", str(folder.path), log_to=folder.logs / "ranks.log"
        )
        yield folder


def counted_steps_s(folder: RunFolder) -> np.ndarray:
    """Return the seconds of a run's steps without its warm-up."""
    steps = load_parts(folder.path).trace.steps
    times_s: np.ndarray = step_times_s(steps)[steps["is_warmup"] == 0]
    return times_s


def trained_in_turns(specs: Mapping[str, RunSpec], rounds: int) -> list[dict[str, Any]]:
    """Train in turn; return a row for each method, with ratios to the first one of the round.

    A way that fails in a round has no times; of one whose first way fails there are no ratios.
    """
    found = in_turns({way: partial(trained, spec) for way, spec in specs.items()}, rounds)
    first = next(iter(found.values()))
    rows = []
    for way, runs in found.items():
        if failed := next((run for run in runs if "failed" in run), None):
            rows.append({"way": way, **failed})
            continue
        pairs = zip(first, runs, strict=True)
        ratios = [run["step_s"] / base["step_s"] for base, run in pairs if "step_s" in base]
        step_s = statistics.median(run["step_s"] for run in runs)
        ratio = statistics.median(ratios) if ratios else None
        images_per_s = specs[way].parallel.global_batch / step_s
        row = {"way": way, **runs[0], "step_s": step_s, "ratio": ratio}
        rows.append(row | {"images_per_s": images_per_s})
    return rows


def trained(spec: RunSpec) -> dict[str, Any]:
    """Train on this machine.

    Return the median step, the peaks of the fullest rank and the results, or why it does not run.
    """
    try:
        with finished_run(spec) as folder:
            result = read_json(folder.result_json)
            metrics = run_metrics(load_parts(folder.path).trace)
            return {
                "step_s": statistics.median(counted_steps_s(folder).tolist()),
                "images_per_s": metrics.images_per_s,
                "activation_bytes": max(result["peak_activation_bytes"]),
                "predicted_bytes": max(result["predicted_activation_bytes"]),
                "device_bytes": max(size or 0 for size in metrics.peak_device_bytes),
                "rss_bytes": max(size or 0 for size in metrics.peak_rss_bytes),
                **{name: result[name] for name in RESULTS if name in result},
            }
    except (GemsError, SystemExit) as error:
        return {"failed": cause_of(str(error).splitlines())}


def allocator_peaks(
    device: torch.device, static_bytes: int, call: Callable[[], object]
) -> tuple[int, int | None]:
    """Return the most bytes allocated and reserved during a call (reserved: None on a processor).

    torch's profiler reports every allocation and release on a CPU, from the call's start on;
    `static_bytes` were allocated before.
    """
    import torch
    from torch.profiler import ProfilerActivity, profile

    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        call()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        call()
    events = [
        event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"
    ]
    allocated = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        allocated += event.nbytes()
        most = max(most, allocated)
    return static_bytes + most, None


if __name__ == "__main__":
    module, _, name = sys.argv[1].partition(":")
    print(json.dumps(getattr(import_module(module), name)(*json.loads(sys.argv[2]))))
