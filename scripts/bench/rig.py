"""The rig of the benchmarks: runs on this machine, rounds in turns, tables on stderr and one JSON object on stdout."""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from gems.launch.local_launcher import mpiexec_argv, rank_environment, run_ranks
from gems.runs.prepare import prepare

if TYPE_CHECKING:
    import numpy as np
    import torch

    from gems.config.schema import RunSpec
    from gems.runs.folder import RunFolder

MIB, GIB = 2**20, 2**30
RUN_LIMIT_S = 550.0
T = TypeVar("T")


def log(text: str) -> None:
    """Print a line on stderr at once."""
    print(text, file=sys.stderr, flush=True)


def machine() -> dict[str, Any]:
    """Print one line about this machine, and return it as facts: where and when figures were taken."""
    facts = {
        "cpu": _cpu(), "cores": os.cpu_count(), "load_at_start": os.getloadavg()[0],
        "python": platform.python_version(),
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
    }  # fmt: skip
    log(", ".join(f"{name} {value}" for name, value in facts.items()))
    return facts


def _cpu() -> str:
    try:
        names = re.findall(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    except OSError:
        names = []
    return names[0] if names else platform.processor() or platform.machine()


def parser(doc: str | None, *flags: str) -> argparse.ArgumentParser:
    """Return a parser whose help is a module's docstring, with those of `--json`, `--only` and `--threads` named."""
    made = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawTextHelpFormatter)
    if "json" in flags:
        made.add_argument("--json", action="store_true", help="print one object on stdout")
    if "only" in flags:
        made.add_argument("--only", default="", metavar="WORD", help="run the cases whose name contains WORD")
    if "threads" in flags:
        made.add_argument("--threads", type=int, default=1, help="threads of torch")
    return made


class Table:
    """A table on stderr, printed row by row as results come.

    A column is `heading:format`, as in `step ms:>9.1f`. A cell that is no number keeps the format's width alone.
    """

    def __init__(self, *columns: str) -> None:
        pairs = [column.rsplit(":", 1) for column in columns]
        self._formats = [kind for _, kind in pairs]
        self._widths = [
            f"{kind[0] if kind[0] in '<>' else '>'}{re.findall(r'[0-9]+', kind)[0]}" for kind in self._formats
        ]
        self.row(*(heading for heading, _ in pairs))

    def row(self, *cells: object, note: str = "") -> None:
        """Print the cells, of which there may be fewer than columns, and a note after them."""
        shown = [
            f"{'-' if cell is None else cell:{kind if isinstance(cell, int | float) else width}}"
            for cell, kind, width in zip(cells, self._formats, self._widths, strict=False)
        ]
        log("".join(shown) + (f"  {note}" if note else ""))


def in_turns(ways: Mapping[str, Callable[[], T]], rounds: int) -> dict[str, list[T]]:
    """Call every way once a round, A B A B, and return the results of each in order."""
    found: dict[str, list[T]] = {way: [] for way in ways}
    for _ in range(rounds):
        for way, call in ways.items():
            found[way].append(call())
    return found


def seconds(call: Callable[[], object]) -> float:
    """Return how long a call takes."""
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def quartiles(ratios: Sequence[float]) -> dict[str, float]:
    """Return the middle half of ratios."""
    low, _, high = statistics.quantiles(ratios, n=4)
    return {"ratio_p25": low, "ratio_p75": high}


def spread(ratios: Sequence[float]) -> dict[str, float]:
    """Return the geometric mean, the least and the most of ratios; there must be one."""
    return {"mean": statistics.geometric_mean(ratios), "least": min(ratios), "most": max(ratios)}


def start_ranks(
    num_ranks: int, *program: str, log_to: Path | None = None, timeout_s: float = RUN_LIMIT_S, gloo: bool = False
) -> None:
    """Run `python -m PROGRAM` on several ranks of this machine, one thread each; `gloo` is for torch.distributed too.

    Raises:
        SystemExit: a rank failed; its last lines are the message.
    """
    environment = rank_environment(1)
    if gloo:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
    argv = mpiexec_argv(num_ranks, [sys.executable, "-m", *program])
    ended = run_ranks(argv, environment, log_to, timeout_s=timeout_s, echo=False)
    if ended.returncode:
        raise SystemExit("\n".join(ended.tail) or f"exit code {ended.returncode}")


@contextmanager
def finished_run(spec: RunSpec, timeout_s: float = RUN_LIMIT_S) -> Iterator[RunFolder]:
    """Run a configuration on this machine, and yield its folder, which is temporary."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = prepare(replace(spec, runs_dir=scratch))
        start_ranks(
            spec.world_size, "gems.engine.run", str(folder.path), log_to=folder.logs / "ranks.log", timeout_s=timeout_s
        )
        yield folder


def counted_steps_s(folder: RunFolder) -> np.ndarray:
    """Return the seconds of a run's steps without its warm-up."""
    from analysis.io.load import load_parts
    from analysis.metrics.run_metrics import step_times_s

    steps = load_parts(folder.path).trace.steps
    times_s: np.ndarray = step_times_s(steps)[steps["is_warmup"] == 0]
    return times_s


def child(module: str, *words: str, limit_s: float = RUN_LIMIT_S) -> dict[str, Any]:
    """Run one case in a process of its own, and return the object on its last line, or `{"failed": why}`."""
    command = [sys.executable, "-m", module, *words]
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=limit_s)
    except subprocess.TimeoutExpired:
        return {"failed": f"did not end within {limit_s:.0f} s"}
    if ended.returncode:
        return {"failed": " ".join(ended.stderr.splitlines()[-1:])[:300] or f"exit code {ended.returncode}"}
    found: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
    return found


def allocator_peaks(device: torch.device, static_bytes: int, call: Callable[[], object]) -> tuple[int, int | None]:
    """Return the most bytes allocated and reserved during a call (reserved: None on a processor).

    torch's profiler reports every allocation and release on a processor, from the call's start on; `static_bytes` are
    what was there before.
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
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    held = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    return static_bytes + most, None
