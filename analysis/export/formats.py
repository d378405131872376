"""Export events for Perfetto and chrome://tracing or as a table, and step times for Extra-P.

Perfetto reads the Trace Event Format as JSON, with one process per rank and one thread per stream.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from heapq import heapreplace
from pathlib import Path

import numpy as np

from analysis.io.files import refuse_unwritable
from analysis.io.load import load_trace
from analysis.scaling.points import read_points
from gems.errors import ConfigError, one_of
from gems.trace import DTYPES, KINDS, STREAMS, Trace
from gems.utils.atomic_io import atomic_write

ROWS = 1 << 14  # rows per chunk
THREADS = 100  # number of threads reserved for a stream
COUNTERS = ("device_bytes", "host_bytes")
NAMES = {"kind": np.array(KINDS), "stream": np.array(STREAMS)}


def csv_pieces(trace: Trace) -> Iterator[str]:
    """Yield the head line, and then some thousand rows at a time, in the order of the trace."""
    columns = DTYPES["events"].names or ()
    yield ",".join(columns) + "\r\n"
    for first in range(0, len(trace.events), ROWS):
        part = trace.events[first : first + ROWS]
        shown = [
            (NAMES[name][part[name]] if name in NAMES else part[name]).tolist() for name in columns
        ]
        yield "".join(",".join(map(str, row)) + "\r\n" for row in zip(*shown, strict=True))


def extrap_lines(runs: Sequence[Path]) -> Iterator[str]:
    """Yield a line of JSON for each counted step, with ranks, seconds and callpath.

    A line is `{"params": {"p": ranks}, "metric": "time", "callpath": "step", "value": seconds}`.
    With several schedules, or runs of several sources, the callpath distinguishes them:
    `step->1f1b, simulated`.

    Raises:
        ConfigError: A run has no trace, or no step after warm-up.
    """
    points = read_points(runs)
    lines = {(point.line, point.source) for point in points}
    for point in points:
        callpath = "step" if len(lines) == 1 else f"step->{point.line}, {point.source}"
        for seconds in point.step_s:
            measured = {
                "params": {"p": point.ranks},
                "metric": "time",
                "callpath": callpath,
                "value": seconds,
            }
            yield json.dumps(measured) + "\n"


def perfetto_pieces(trace: Trace) -> Iterator[str]:
    """Yield the document in chunks.

    Names come first, then the events of each rank with counters of the bytes held at their ends.
    Times are in microseconds from the first event. The events of a thread must not overlap, but
    transfers do: transfers that overlap on a stream get additional threads (`link`, `link 2` ...).
    """
    origin_ns = int(trace.events["start_ns"].min()) if len(trace.events) else 0
    about = {
        "source": trace.source,
        "signature": str(trace.attributes.get("signature", "")),
        "world_size": trace.world_size,
    }
    yield f'{{"displayTimeUnit":"ms","otherData":{json.dumps(about)},"traceEvents":[\n'
    mark = f"{trace.source} run {about['signature']}".strip()
    yield json.dumps({"name": "trace", "ph": "M", "pid": 0, "args": {"name": mark}})
    hosts = trace.attributes.get("hostnames", ())
    ranks, firsts = np.unique(trace.events["rank"], return_index=True)
    for rank, first, end in zip(
        ranks.tolist(), firsts, np.append(firsts, len(trace.events))[1:], strict=True
    ):
        events = trace.events[first:end]
        threads = thread_numbers(events)
        host = f" on {hosts[rank]}" if rank < len(hosts) and hosts[rank] else ""
        yield _names(rank, f"rank {rank}{host}, {trace.source}", np.unique(threads).tolist())
        for begin in range(0, len(events), ROWS):
            yield _rows(
                rank, events[begin : begin + ROWS], threads[begin : begin + ROWS], origin_ns
            )
        yield from _counters(rank, events, origin_ns)
    yield "\n]}\n"


def thread_numbers(events: np.ndarray) -> np.ndarray:
    """Return a thread for each event of a rank.

    It is 100 x the stream of the event, plus a number if the event overlaps with others on the
    stream.
    """
    threads = events["stream"].astype(np.int64) * THREADS
    for stream in np.unique(events["stream"]).tolist():
        indices = np.flatnonzero(events["stream"] == stream)
        indices = indices[np.argsort(events["start_ns"][indices], kind="stable")]
        starts = events["start_ns"][indices]
        ends = events["end_ns"][indices]
        if not (starts[1:] < ends[:-1]).any():
            continue
        free: list[tuple[int, int]] = [(int(ends[0]), 0)]  # when each thread is free again
        extra = [0]
        for start, end in zip(starts[1:].tolist(), ends[1:].tolist(), strict=True):
            thread = free[0][1] if free[0][0] <= start else len(free)
            if thread == len(free):
                free.append((end, thread))
                free.sort()
            else:
                heapreplace(free, (end, thread))
            extra.append(thread)
        threads[indices] += np.minimum(extra, THREADS - 1)
    return threads


def _names(rank: int, name: str, threads: list[int]) -> str:
    rows: list[tuple[str, dict[str, int], dict[str, object]]] = [
        ("process_name", {}, {"name": name}),
        ("process_sort_index", {}, {"sort_index": rank}),
    ]
    for thread in threads:
        stream, more = divmod(thread, THREADS)
        of = {"tid": thread}
        rows.append(("thread_name", of, {"name": STREAMS[stream] + f" {more + 1}" * bool(more)}))
        rows.append(("thread_sort_index", of, {"sort_index": thread}))
    return "".join(
        ",\n" + json.dumps({"name": kind, "ph": "M", "pid": rank, **of, "args": told})
        for kind, of, told in rows
    )


def _rows(rank: int, events: np.ndarray, threads: np.ndarray, origin_ns: int) -> str:
    columns = ("kind", "stage", "segment", "direction", "micro_batch", "step", "moved_bytes")
    times = (
        (events["start_ns"] - origin_ns) * 1e-3,
        (events["end_ns"] - events["start_ns"]) * 1e-3,
        threads,
    )
    rows = zip(
        *(column.tolist() for column in times),
        *(events[name].tolist() for name in columns),
        strict=True,
    )
    return "".join(
        f',\n{{"name":"{KINDS[kind]}","cat":"{KINDS[kind]}","ph":"X","pid":{rank},"tid":{thread}'
        f',"ts":{at_us:.3f},"dur":{us:.3f},"args":{{"stage":{stage},"segment":{segment}'
        f',"direction":{direction},"micro_batch":{micro_batch},"step":{step},'
        f'"moved_bytes":{moved}}}}}'
        for at_us, us, thread, kind, stage, segment, direction, micro_batch, step, moved in rows
    )


def _counters(rank: int, events: np.ndarray, origin_ns: int) -> Iterator[str]:
    """Yield the bytes held over time, at their changes."""
    for name in COUNTERS:
        known = events[events[name] >= 0]
        known = known[np.argsort(known["end_ns"], kind="stable")]
        changes = known[np.diff(known[name], prepend=-1) != 0]
        if not changes[name].any():
            continue
        for first in range(0, len(changes), ROWS):
            part = changes[first : first + ROWS]
            rows = zip(
                ((part["end_ns"] - origin_ns) * 1e-3).tolist(), part[name].tolist(), strict=True
            )
            yield "".join(
                f',\n{{"name":"{name}","ph":"C","pid":{rank},"ts":{at_us:.3f}'
                f',"args":{{"bytes":{num_bytes}}}}}'
                for at_us, num_bytes in rows
            )


OF_ONE_RUN: dict[str, tuple[str, Callable[[Trace], Iterator[str]]]] = {
    "perfetto": ("perfetto.json", perfetto_pieces),
    "csv": ("events.csv", csv_pieces),
}
EXTRAP = "extrap"
EXTRAP_FILE = "extrap.jsonl"


@dataclass(frozen=True, slots=True)
class Export:
    """The exported file, its format and its size."""

    path: Path
    format: str
    size_bytes: int


def export_runs(runs: Sequence[Path], name: str, out: Path | None = None) -> Export:
    """Write an export in chunks: `perfetto` and `csv` of one run, `extrap` of one or several.

    The default file is in the folder of the trace or, for several runs, next to the folder of the
    first.

    Raises:
        ConfigError: The format is unknown or accepts only one run, a run cannot be read, or the
            file cannot be written.
    """
    if name == EXTRAP:
        first = runs[0].resolve()
        file_name = EXTRAP_FILE
        pieces = extrap_lines(runs)
    elif name not in OF_ONE_RUN:
        raise ConfigError("format", name, one_of((*OF_ONE_RUN, EXTRAP)))
    elif len(runs) != 1:
        raise ConfigError(
            "export", f"{len(runs)} runs", f"{name} takes one run", "name one, or --format extrap"
        )
    else:
        first, (file_name, write) = runs[0], OF_ONE_RUN[name]
        pieces = write(load_trace(first).trace)
    folder = first if first.is_dir() and len(runs) == 1 else first.parent
    path = out or folder / file_name
    with refuse_unwritable(path):
        with atomic_write(path) as partial, partial.open("w", encoding="utf-8", newline="") as file:
            file.writelines(pieces)
        return Export(path, name, path.stat().st_size)
