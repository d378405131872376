"""Exports, read back: Perfetto's JSON, the table of events, the lines for Extra-P."""

from __future__ import annotations

import csv
import json
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from analysis.__main__ import main
from analysis.export.formats import THREADS, export_runs, thread_numbers
from gems.errors import ConfigError
from gems.trace import DTYPES, KINDS, STREAMS, Trace, write_trace

MS = 1_000_000
Simulate = Callable[..., Trace]


@pytest.fixture
def trace(simulate: Simulate) -> Trace:
    """Return a run of four ranks with transfers that overlap."""
    made = simulate(link_ns=MS // 5, reduce_ns=MS)
    made.attributes["hostnames"] = ['node"0', "node1", "", "node3"]
    return made


@pytest.fixture
def run(trace: Trace, tmp_path: Path) -> Path:
    """Return its folder."""
    write_trace(tmp_path / "trace.h5", trace)
    return tmp_path


@pytest.fixture
def rows(run: Path) -> list[dict[str, Any]]:
    """Return the rows of its export for Perfetto."""
    document = json.loads(export_runs([run], "perfetto").path.read_text())
    assert document["otherData"]["source"] == "simulated"
    found: list[dict[str, Any]] = document["traceEvents"]
    return found


def test_perfetto_has_every_event_in_microseconds(rows: list[dict[str, Any]], trace: Trace) -> None:
    events = [row for row in rows if row["ph"] == "X"]
    assert len(events) == len(trace.events)
    origin_ns = int(trace.events["start_ns"].min())
    names = ("stage", "micro_batch", "direction", "step", "moved_bytes")
    found = sorted(
        (
            row["pid"],
            round(1e3 * row["ts"]),
            round(1e3 * row["dur"]),
            row["name"],
            *(row["args"][name] for name in names),
        )
        for row in events
    )
    assert found == sorted(
        (
            int(event["rank"]),
            int(event["start_ns"]) - origin_ns,
            int(event["end_ns"] - event["start_ns"]),
            KINDS[event["kind"]],
            *(int(event[name]) for name in names),
        )
        for event in trace.events
    )


def test_a_thread_is_of_one_stream_and_its_events_do_not_overlap(
    rows: list[dict[str, Any]],
) -> None:
    threads = defaultdict(list)
    for row in rows:
        if row["ph"] == "X":
            threads[row["pid"], row["tid"]].append((row["ts"], row["ts"] + row["dur"], row["name"]))
    assert any(thread % THREADS for _, thread in threads), "some transfers overlap"
    for (_, thread), spans in threads.items():
        is_link = STREAMS[thread // THREADS] == "link"
        assert all((name.startswith(("SEND", "RECV"))) == is_link for *_, name in spans)
        ends = [end for _, end, _ in sorted(spans)]
        begins = [begin for begin, _, _ in sorted(spans)]
        assert all(begin >= end - 1e-6 for end, begin in zip(ends, begins[1:], strict=False))


def test_threads_take_up_again_what_is_free(trace: Trace) -> None:
    events = trace.events[:4].copy()
    events["stream"], events["start_ns"], events["end_ns"] = 1, [0, 1, 2, 10], [5, 3, 9, 12]
    assert thread_numbers(events).tolist() == [100, 101, 102, 101]
    events["end_ns"] = events["start_ns"] + 1
    assert thread_numbers(events).tolist() == [100] * 4


def test_perfetto_names_ranks_and_streams_and_counts_bytes(
    rows: list[dict[str, Any]], trace: Trace
) -> None:
    names = {row["pid"]: row["args"]["name"] for row in rows if row["name"] == "process_name"}
    assert names[0] == 'rank 0 on node"0, simulated' and names[2] == "rank 2, simulated"
    threads = {row["args"]["name"] for row in rows if row["name"] == "thread_name"}
    assert {"compute", "link", "link 2"} <= threads
    for rank in range(4):
        held = [row["args"]["bytes"] for row in rows if row["ph"] == "C" and row["pid"] == rank]
        mine = trace.events["device_bytes"][trace.events["rank"] == rank]
        assert max(held) == mine.max() and set(held) <= set(mine.tolist())


def test_the_table_of_events_is_read_back(run: Path, trace: Trace) -> None:
    made = export_runs([run], "csv", run / "mine.csv")
    with made.path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == list(DTYPES["events"].names or ())
    assert len(rows) == len(trace.events) and made.size_bytes == made.path.stat().st_size
    for name in ("rank", "start_ns", "end_ns", "device_bytes", "micro_batch"):
        assert [int(row[name]) for row in rows] == trace.events[name].tolist()
    assert [row["kind"] for row in rows] == [KINDS[kind] for kind in trace.events["kind"]]
    assert {row["stream"] for row in rows} == {"compute", "link"}


def test_pieces_are_joined_without_a_seam(
    run: Path, trace: Trace, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = {name: export_runs([run], name).path.read_bytes() for name in ("perfetto", "csv")}
    monkeypatch.setattr("analysis.export.formats.ROWS", 7)
    assert {name: export_runs([run], name).path.read_bytes() for name in whole} == whole


def test_extrap_has_a_line_a_step_and_repetitions_of_a_point(
    simulate: Simulate, tmp_path: Path
) -> None:
    runs = []
    for place, partitions in enumerate((2, 4, 4)):
        runs.append(tmp_path / f"run{place}")
        write_trace(runs[-1] / "trace.h5", simulate(partitions=partitions, steps=4))
    made = export_runs(runs, "extrap")
    assert made.path == tmp_path / "extrap.jsonl"
    lines = [json.loads(line) for line in made.path.read_text().splitlines()]
    assert [line["params"]["p"] for line in lines] == [2] * 3 + [4] * 6
    assert {(line["metric"], line["callpath"]) for line in lines} == {("time", "step")}
    steps = simulate(partitions=2, steps=4).steps
    assert [line["value"] for line in lines[:3]] == pytest.approx(
        ((steps["end_ns"] - steps["start_ns"]) * 1e-9)[1:].tolist()
    )


def test_extrap_tells_schedules_and_sources_apart(simulate: Simulate, tmp_path: Path) -> None:
    for name, fields in (("a", {"name": "1f1b"}), ("b", {"name": "gpipe", "source": "emulated"})):
        write_trace(tmp_path / name / "trace.h5", simulate(**fields))
    made = export_runs([tmp_path / "a", tmp_path / "b"], "extrap", tmp_path / "x.jsonl")
    lines = [json.loads(line) for line in made.path.read_text().splitlines()]
    assert {line["callpath"] for line in lines} == {
        "step->1f1b, simulated",
        "step->gpipe, emulated",
    }


def test_what_cannot_be_exported_is_refused(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match="takes one run"):
        export_runs([run, run], "csv")
    with pytest.raises(ConfigError, match="allowed: perfetto, csv, extrap"):
        export_runs([run], "otf2")
    with pytest.raises(ConfigError, match="cannot be written"):
        export_runs([run], "csv", run / "none" / "x.csv")
    assert main(["export", str(run), "--format", "otf2"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_the_command_says_what_it_wrote(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", str(run / "trace.h5"), "--format", "csv", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    path = run / "events.csv"
    assert answer == {"path": str(path), "format": "csv", "size_bytes": path.stat().st_size}
    assert not list(run.glob("*.partial"))


def test_a_trace_without_events_is_exported(simulate: Simulate, tmp_path: Path) -> None:
    trace = simulate()
    trace.events = np.empty(0, DTYPES["events"])
    write_trace(tmp_path / "trace.h5", trace)
    document = json.loads(export_runs([tmp_path], "perfetto").path.read_text())
    assert [row["ph"] for row in document["traceEvents"]] == ["M"]
    assert export_runs([tmp_path], "csv").path.read_text().count("\n") == 1
