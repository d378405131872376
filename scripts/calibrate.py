"""Calibrate a machine: fit its constants to short probes of messages, sums and compute.

`python -m scripts.calibrate --out DIR/machine/NAME.yaml` starts two ranks here (`--ranks`); the
file then serves as `--config-dir DIR machine=NAME`. On a cluster the probe runs as a job, `srun -N
2 -n 2 python -m gems.engine.transport.speed_probe probe.json`, and `--probe probe.json` reads it.
`--kind emulated` calibrates emulated devices, whose messages wait for ranks to wake up. `--base
NAME` takes the rest from a machine of conf/. `--runs RUN ...` takes the noise from finished runs.
The copy engines of a GPU are timed too. `--held-out ANSWER.json` records the error that
`scripts.bench.fidelity` found with such a calibration.

Four real runs of two ranks then tell the pace, how much longer layers take in a run than alone
(`--steps`, 0 for none). It is written to the file, and kept in the cache for every prediction from
layers that were measured on this node.
"""

from __future__ import annotations

import json
import platform
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from gems import __version__
from gems.errors import ConfigError, GemsError
from gems.launch.local_launcher import QUIET, mpiexec_argv, rank_environment, run_ranks
from gems.profile.pace import RunPace
from gems.profile.store import keep_pace
from gems.schedule.action import COMPUTE_KINDS
from gems.simulation.calibration import Calibration, calibration_of, machine_yaml, merged, noise_of
from gems.trace import KINDS, read_trace
from gems.utils.atomic_io import read_json
from gems.utils.units import counted
from scripts.bench.pace import take_pace
from scripts.bench.rig import composed, options

if TYPE_CHECKING:
    import torch

LIMIT_S = 300.0
LARGE_COPY_BYTES = 256 * 2**20
ROUND_BYTES = 2**30  # that one timing moves
ROUNDS = 7


def main(argv: Sequence[str] | None = None) -> int:
    """Calibrate and write the file: one line on stderr and exit code 2 for bad input."""
    file: dict[str, Any] = {"type": Path, "metavar": "FILE"}
    arguments = options(
        __doc__,
        argv,
        out=file | {"required": True},
        kind=("real", "emulated"),
        probe=file,
        ranks={"type": int, "help": "default 2, and 8 for emulated devices"},
        runs={"type": Path, "nargs": "*", "default": [], "metavar": "RUN"},
        base={"metavar": "NAME"},
        device=("auto", "cpu", "cuda"),
        held_out=file,
        steps={
            "type": int,
            "default": 20,
            "metavar": "N",
            "help": "steps of each run that tells the pace",
        },
    )
    try:
        probe = (
            read_probe(arguments.probe)
            if arguments.probe
            else take_probe(arguments.kind, arguments.ranks)
        )
        copies = copy_rates() if arguments.device != "cpu" and arguments.kind == "real" else None
        machine = calibration_of({**probe, "copies": copies})
        has_pace = arguments.kind == "real" and not arguments.probe and arguments.steps > 0
        pace = measured_pace(machine, arguments.device, arguments.steps) if has_pace else None
        machine = merged(machine, [noise_of(compute_seconds(run)) for run in arguments.runs], pace)
        error = float(read_json(arguments.held_out)["median_error"]) if arguments.held_out else None
        write(arguments.out, machine, probe, arguments.base, arguments.device, error)
    except GemsError as refused:
        print("calibrate:", " ".join(str(refused).split()), file=sys.stderr)
        return refused.exit_code
    print(arguments.out)
    return 0


def read_probe(path: Path) -> dict[str, Any]:
    """Read the probe's result.

    Raises:
        ConfigError: No such file, or none of that form.
    """
    probe = read_json(path)
    if not probe:
        raise ConfigError("--probe", path, "is no answer of gems.engine.transport.speed_probe")
    return probe


def take_probe(kind: str, num_ranks: int | None = None) -> dict[str, Any]:
    """Run the probe on this machine and return its timings.

    Raises:
        ConfigError: The ranks did not start, or failed.
    """
    ranks = num_ranks or (2 if kind == "real" else 8)
    with tempfile.TemporaryDirectory() as scratch:
        result = Path(scratch) / "probe.json"
        argv = mpiexec_argv(
            ranks, [sys.executable, "-m", "gems.engine.transport.speed_probe", str(result), kind]
        )
        ended = run_ranks(argv, rank_environment(1), QUIET, LIMIT_S)
        if ended.returncode:
            raise ConfigError("--ranks", ranks, "the probe failed: " + " ".join(ended.tail[-3:]))
        return read_probe(result)


def measured_pace(links: Calibration, device: str, steps: int) -> RunPace:
    """Run and fit the pace of this machine, and keep it in the cache."""
    machine = composed(f"machine.device={device}").machine
    pace = take_pace(links, steps, [f"machine.device={device}"])
    for name in {device, "auto"}:  # which is this device, if the machine has no other
        keep_pace(pace, None, replace(machine, device=name))
    return pace


def compute_seconds(run: Path) -> np.ndarray:
    """Return the compute seconds of each counted step and rank of a finished run.

    Raises:
        ConfigError: No trace there.
    """
    trace = read_trace(run / "trace.h5" if run.is_dir() else run)
    codes = [
        code for code, name in enumerate(KINDS) if name in {kind.value for kind in COMPUTE_KINDS}
    ]
    steps = trace.steps["step"][trace.steps["is_warmup"] == 0]
    events = trace.events[
        np.isin(trace.events["kind"], codes) & np.isin(trace.events["step"], steps)
    ]
    times_s = np.zeros((len(steps), int(events["rank"].max(initial=0)) + 1))
    places = np.searchsorted(np.sort(steps), events["step"])
    np.add.at(times_s, (places, events["rank"]), (events["end_ns"] - events["start_ns"]) * 1e-9)
    return times_s


def copy_rates() -> dict[str, float] | None:
    """Time pinned copies each way on this process's GPU; None without one."""
    import torch

    if not torch.cuda.is_available():
        return None
    rates = bandwidth(torch.device("cuda", 0), LARGE_COPY_BYTES)
    return {name: rates[name] for name in ("d2h_bytes_per_s", "h2d_bytes_per_s")}


def bandwidth(
    device: torch.device, copy_bytes: int, is_pinned: bool = True, round_bytes: int = ROUND_BYTES
) -> dict[str, float]:
    """Measure copies between a GPU and host memory.

    Each way alone, and both at once on streams of their own.
    Return the size of a copy and medians of bytes per second; `duplex` ones are while the other way
    is busy too. Copies of pageable memory (not `is_pinned`) wait for each other. A timing moves
    `round_bytes` or a copy more.
    """
    import torch

    count = max(1, round_bytes // copy_bytes)
    on_device = [torch.zeros(copy_bytes, dtype=torch.uint8, device=device) for _ in range(2)]
    on_host = [torch.zeros(copy_bytes, dtype=torch.uint8, pin_memory=is_pinned) for _ in range(2)]
    # target, source and stream of each way
    lanes = {
        "d2h": (on_host[0], on_device[0], torch.cuda.Stream(device)),
        "h2d": (on_device[1], on_host[1], torch.cuda.Stream(device)),
    }

    def rates(*ways: str, copies: int = count) -> list[float]:
        """Return the bytes per second of each way while all of them copy.

        Copies are posted in turn.
        """
        torch.cuda.synchronize(device)
        spans = {
            way: (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
            for way in ways
        }
        for way in ways:
            spans[way][0].record(lanes[way][2])
        for _ in range(copies):
            for way in ways:
                target, source, stream = lanes[way]
                with torch.cuda.stream(stream):
                    target.copy_(source, non_blocking=True)
        for way in ways:
            spans[way][1].record(lanes[way][2])
        torch.cuda.synchronize(device)
        return [
            copies * copy_bytes / (start.elapsed_time(end) * 1e-3) for start, end in spans.values()
        ]

    rates("d2h", "h2d", copies=1)  # warms up
    rounds = [(*rates("d2h"), *rates("h2d"), *rates("d2h", "h2d")) for _ in range(ROUNDS)]
    names = (f"{kind}{way}_bytes_per_s" for kind in ("", "duplex_") for way in lanes)
    medians = (statistics.median(times) for times in zip(*rounds, strict=True))
    return {"copy_bytes": copy_bytes, **dict(zip(names, medians, strict=True))}


def write(
    out: Path,
    found: Calibration,
    probe: dict[str, Any],
    base: str | None,
    device: str,
    error: float | None,
) -> None:
    """Write the machine's file.

    Raises:
        ConfigError: It cannot be written.
    """
    nodes = probe["nodes"]
    is_emulated = probe["kind"] == "emulated"
    origin = (
        f"{counted(len(nodes), 'node')} ({', '.join(nodes)[:80]}), {datetime.now(UTC):%Y-%m-%d}"
    )
    comments = [
        (
            f"python -m scripts.calibrate, gems {__version__}, Python {platform.python_version()},"
            f" {probe['mpi']},"
        ),
        f"{probe['sums']['ranks']} ranks on {platform.processor() or platform.machine()}",
    ]
    kind, device = ("emulated", "cpu") if is_emulated else ("real", device)
    text = machine_yaml(found, out.stem, kind, device, origin, comments, base, error)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(text)
    except OSError as failure:
        raise ConfigError("--out", out, f"cannot be written ({failure.strerror})") from failure
    print(json.dumps({"machine": str(out), **found.machine()}), file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
