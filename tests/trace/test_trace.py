"""The trace layout: what is written is read, also after a kill, and newer layouts are refused."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import h5py
import numpy as np
import pytest

from gems.errors import ConfigError
from gems.schedule.action import Kind
from gems.trace import (
    COLUMNS,
    DTYPES,
    KINDS,
    STREAMS,
    Trace,
    TracePart,
    merge_parts,
    part_path,
    read_part,
    read_trace,
    root_attributes,
    write_trace,
)
from tests.helpers.small_disk import small_disk

ROOT = Path(__file__).resolve().parents[2]
TEXTS = ("run_yaml", "schedule/rows")


def event(rank: int, step: int, start_ns: int, end_ns: int, kind: str = "F") -> tuple[int, ...]:
    """Return a whole row of `/events`."""
    return (rank, step, KINDS.index(kind), 1, -1, 1, 7, 0, start_ns, end_ns, 11, 12, 13)


def sample_trace() -> Trace:
    """Build a small trace that uses every table, text and attribute type."""
    attributes = root_attributes(
        "measured",
        "abc",
        2,
        hostnames=["node0", "node1"],
        clock_offset_ns=[0, -5],
        git_commit="none",
        ratio=0.5,
    )
    return Trace(
        attributes=attributes,
        events=np.array([event(0, 0, 5, 9), event(1, 0, 3, 8, "B")], DTYPES["events"]),
        steps=np.array([(0, 3, 9, 4, 0.25, 1, 1, 2.5, 0.1)], DTYPES["steps"]),
        rank_steps=np.array([(0, 0, 3, 9, 4, 0.25, 1, 2.5, 0.1)], DTYPES["rank_steps"]),
        samples=np.array([(0, 4, -1, 1 << 40, np.nan, 0.5)], DTYPES["samples"]),
        run_yaml="name: größe\n",
        schedule_rows=("0F0 0B0", "1F0 1B0"),
        schedule_sha256="f" * 64,
        boundaries=(0, 3, 7),
    )


def test_a_trace_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "new" / "trace.h5"
    written = sample_trace()
    write_trace(path, written)
    read = read_trace(path)
    assert read.attributes == written.attributes
    for name in COLUMNS:
        assert getattr(read, name).dtype == DTYPES[name]
        for column in DTYPES[name].names or ():
            np.testing.assert_array_equal(
                getattr(read, name)[column], getattr(written, name)[column]
            )
    texts = ("run_yaml", "schedule_rows", "schedule_sha256", "boundaries")
    assert [getattr(read, name) for name in texts] == [getattr(written, name) for name in texts]
    assert (read.source, read.world_size) == ("measured", 2)
    assert [child.name for child in path.parent.iterdir()] == ["trace.h5"]


def test_a_trace_without_rows_is_read(tmp_path: Path) -> None:
    write_trace(tmp_path / "trace.h5", Trace(attributes=root_attributes("simulated", "abc", 3)))
    read = read_trace(tmp_path / "trace.h5")
    assert {name: len(getattr(read, name)) for name in COLUMNS} == dict.fromkeys(COLUMNS, 0)
    assert (read.schedule_rows, read.boundaries, read.run_yaml) == ((), (), "")


def datasets(path: Path) -> dict[str, dict[str, object]]:
    """Return the attributes of every dataset in a file."""
    found: dict[str, dict[str, object]] = {}
    with h5py.File(path, "r") as file:
        file.visititems(
            lambda name, item: (
                found.update({name: dict(item.attrs)}) if isinstance(item, h5py.Dataset) else None
            )
        )
    return found


def test_every_figure_carries_units_and_long_name(tmp_path: Path) -> None:
    write_trace(tmp_path / "trace.h5", sample_trace())
    found = {
        name: marks for name, marks in datasets(tmp_path / "trace.h5").items() if name not in TEXTS
    }
    assert {
        f"{table}/{column[0]}" for table, columns in COLUMNS.items() for column in columns
    } <= set(found)
    bare = [
        name for name, attributes in found.items() if not {"units", "long_name"} <= set(attributes)
    ]
    assert bare == []
    for name, attributes in found.items():
        for suffix, unit in (("_ns", "ns"), ("_bytes", "byte"), ("_w", "W")):
            if name.endswith(suffix):
                assert attributes["units"] == unit, name


def test_every_text_carries_units_and_long_name(tmp_path: Path) -> None:
    write_trace(tmp_path / "trace.h5", sample_trace())
    found = datasets(tmp_path / "trace.h5")
    assert [name for name in TEXTS if not {"units", "long_name"} <= set(found[name])] == []


def test_codes_are_named_in_the_file(tmp_path: Path) -> None:
    write_trace(tmp_path / "trace.h5", sample_trace())
    with h5py.File(tmp_path / "trace.h5", "r") as file:
        kinds = list(file["events"].attrs["kinds"])
        streams = list(file["events"].attrs["streams"])
    assert (kinds, streams) == (list(KINDS), list(STREAMS))
    assert set(KINDS) == {kind.value for kind in Kind} | {"INPUT"}


@pytest.mark.parametrize("version", ["2.0", "10.3", "next", ""])
def test_a_newer_or_unknown_major_is_refused(tmp_path: Path, version: str) -> None:
    whole = tmp_path / "trace.h5"
    part = part_path(tmp_path, 0)
    write_trace(whole, sample_trace())
    TracePart(part, 0, root_attributes("measured", "abc", 1)).close()
    for path, read in ((whole, read_trace), (part, read_part)):
        with h5py.File(path, "a") as file:
            file.attrs["schema_version"] = version
        with pytest.raises(ConfigError, match="cannot be read here") as caught:
            read(path)
        assert "\n" not in str(caught.value) and str(path) in str(caught.value)


def test_a_newer_minor_is_read(tmp_path: Path) -> None:
    write_trace(tmp_path / "trace.h5", sample_trace())
    with h5py.File(tmp_path / "trace.h5", "a") as file:
        file.attrs["schema_version"] = "1.9"
        file["events"]["of_tomorrow"] = np.zeros(2)
    assert len(read_trace(tmp_path / "trace.h5").events) == 2


@pytest.mark.parametrize("read", [read_trace, read_part])
def test_what_is_no_trace_is_refused_with_one_line(tmp_path: Path, read: object) -> None:
    (tmp_path / "text").write_text("no")
    for name in ("text", "missing"):
        with pytest.raises(ConfigError, match="not a readable trace file") as caught:
            read(tmp_path / name)  # type: ignore[operator]
        assert "\n" not in str(caught.value)


def write_part(
    folder: Path, rank: int, offset_ns: int, starts_ns: list[int], loss: float = float("nan")
) -> Path:
    """Write one rank's part: a step of 10 ns from each start on its clock, with B written before F."""
    path = part_path(folder, rank)
    attributes = root_attributes(
        "measured", "abc", 2, hostname=f"node{rank}", clock_offset_ns=offset_ns, clock_error_ns=3
    )
    part = TracePart(path, rank, attributes)
    for step, start in enumerate(starts_ns):
        part.add("events", event(rank, step, start + 5, start + 9, "B"))
        part.add("events", event(rank, step, start, start + 5))
        part.add(
            "rank_steps", (rank, step, start, start + 10, 8, loss / (step + 1), step == 0, 2.5, 0.1)
        )
        part.add("samples", (rank, start, -1, 100 + rank, np.nan, np.nan))
        part.flush()
    part.close()
    return path


def test_merging_sorts_by_rank_and_start_on_one_clock(tmp_path: Path) -> None:
    paths = [
        write_part(tmp_path, 1, 1000, [1002, 1102], loss=4.0),
        write_part(tmp_path, 0, 0, [0, 100]),
    ]
    merged = merge_parts(paths, {"signature": "new", "note": "x"})
    assert merged.events["rank"].tolist() == [0] * 4 + [1] * 4
    assert merged.events["start_ns"].tolist() == [0, 5, 100, 105, 2, 7, 102, 107]
    assert merged.steps.tolist() == [
        (0, 0, 12, 8, 4.0, 1, 1, 2.5, 0.1),
        (1, 100, 112, 8, 2.0, 0, 1, 2.5, 0.1),
    ]
    assert sorted(merged.samples["t_ns"].tolist()) == [0, 2, 100, 102]
    assert merged.attributes["hostnames"] == ["node0", "node1"]
    assert (merged.attributes["clock_offset_ns"], merged.attributes["clock_error_ns"]) == (
        [0, 1000],
        [3, 3],
    )
    assert (merged.attributes["signature"], merged.attributes["note"]) == ("new", "x")
    assert not {"rank", "hostname"} & set(merged.attributes)
    write_trace(tmp_path / "trace.h5", merged)
    assert read_trace(tmp_path / "trace.h5").attributes == merged.attributes


def test_a_step_that_one_rank_lacks_is_not_whole(tmp_path: Path) -> None:
    paths = [write_part(tmp_path, 0, 0, [0, 100, 200]), write_part(tmp_path, 1, 0, [0, 100])]
    merged = merge_parts(paths, {})
    assert merged.steps["step"].tolist() == [0, 1]
    assert sorted(merged.rank_steps["step"].tolist()) == [0, 0, 1, 1, 2]
    assert np.isnan(merged.steps["loss"]).all()


def test_rows_wait_for_the_flush_and_attributes_do_not(tmp_path: Path) -> None:
    path = part_path(tmp_path, 0)
    part = TracePart(path, 0, root_attributes("measured", "abc", 1))
    part.add("events", event(0, 0, 0, 5))
    assert len(read_part(path).events) == 0
    part.set_attributes({"clock_offset_ns": 42})
    part.flush()
    part.add("events", event(0, 1, 10, 15))
    seen = read_part(path)
    assert seen.events["step"].tolist() == [0] and seen.attributes["clock_offset_ns"] == 42
    part.close()
    part.close()
    assert read_part(path).events["step"].tolist() == [0, 1]


CHILD = """
import sys
from pathlib import Path
from gems.trace import TracePart, root_attributes
part = TracePart(Path(sys.argv[1]), 3, root_attributes("measured", "abc", 4))
for step in range(200):
    for start in range(40):
        part.add("events", (3, step, 0, 0, -1, 0, start, 0, start, start + 1, 0, 0, 0))
    part.add("rank_steps", (3, step, 0, 40, 8, 0.5, 0, 2.5, 0.1))
    part.flush()
for start in range(5000):
    part.add("events", (3, 200, 0, 0, -1, 0, start, 0, start, start + 1, 0, 0, 0))
print("flushed", flush=True)
sys.stdin.read()
"""


def test_a_part_is_readable_after_sigkill(tmp_path: Path) -> None:
    path = tmp_path / "rank0003.h5"
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, str(path)],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with child:
        assert child.stdout is not None
        assert child.stdout.readline() == "flushed\n"
        os.kill(child.pid, signal.SIGKILL)
        assert child.wait(timeout=60) == -signal.SIGKILL
    part = read_part(path)
    assert part.attributes["rank"] == 3
    assert len(part.events) == 200 * 40
    assert part.rank_steps["step"].tolist() == list(range(200))
    merged = merge_parts([path], {})
    assert merged.rank_steps["step"].tolist() == list(range(200))
    assert not len(merged.steps)  # the other ranks' parts are missing


def test_clocks_that_drift_are_set_right_between_two_measurements(tmp_path: Path) -> None:
    """A clock 100 ns ahead at its 1000 and 300 ns ahead at its 2000: half-way it is 200 ns ahead."""
    clock = {
        "clock_offset_ns": 100,
        "clock_error_ns": 1,
        "clock_at_ns": 1000,
        "clock_end_offset_ns": 300,
        "clock_end_error_ns": 1,
        "clock_end_at_ns": 2000,
    }
    part = TracePart(tmp_path / "rank0000.h5", 0, root_attributes("measured", "0" * 8, 1, **clock))
    for time_ns in (900, 1000, 1500, 2000, 2500):
        part.add("samples", (0, time_ns, -1, 1, 0.0, 0.0))
    part.close()
    merged = merge_parts([tmp_path / "rank0000.h5"], {})
    assert merged.samples["t_ns"].tolist() == [800, 900, 1300, 1700, 2200]
    assert merged.attributes["clock_offset_ns"] == [100]
    assert "clock_end_at_ns" not in merged.attributes


def test_the_allocators_peaks_are_kept_by_rank(tmp_path: Path) -> None:
    for rank, peak in ((0, 7), (1, None)):
        more = {} if peak is None else {"peak_allocated_bytes": peak}
        TracePart(
            tmp_path / f"rank{rank:04d}.h5", rank, root_attributes("measured", "0" * 8, 2, **more)
        ).close()
    merged = merge_parts(sorted(tmp_path.glob("*.h5")), {})
    assert merged.attributes["peak_allocated_bytes"] == [7, -1]


def test_a_part_of_an_older_version_has_no_norm_and_no_rate(tmp_path: Path) -> None:
    paths = [write_part(tmp_path, rank, 0, [0, 100]) for rank in range(2)]
    for path in paths:
        with h5py.File(path, "r+") as file:
            table = file["rank_steps"][()]
            old = [name for name in table.dtype.names if name not in ("grad_norm", "learning_rate")]
            del file["rank_steps"]
            file["rank_steps"] = table[old]
    merged = merge_parts(paths, {})
    assert merged.steps["step"].tolist() == [0, 1] and bool(
        np.isnan(merged.steps["learning_rate"]).all()
    )
    write_trace(tmp_path / "trace.h5", merged)
    with h5py.File(tmp_path / "trace.h5", "r+") as file:
        del file["steps/grad_norm"], file["rank_steps/grad_norm"]
    assert bool(np.isnan(read_trace(tmp_path / "trace.h5").steps["grad_norm"]).all())


@pytest.mark.parametrize("is_for_good", [False, True])
def test_rows_wait_for_a_full_disk_and_the_file_stays_readable(
    tmp_path: Path, is_for_good: bool
) -> None:
    """In a process of its own: HDF5 ends it by SIGSEGV if a file cannot be closed."""
    program = """
import sys
from pathlib import Path
from gems.trace import TracePart, part_path, read_part
from tests.helpers.small_disk import SmallDisk
from tests.trace.test_trace import event
disk = SmallDisk(Path(sys.argv[1]))
part = TracePart(part_path(disk.path, 0), 0, {"schema_version": "1.0"})
for step in range(40):
    if step == 10:
        part.flush()
        disk.fill()
    for number in range(100):
        part.add("events", event(0, step, number, number + 1))
    part.set_attributes({"last": step})
    part.flush()
    if step == 30 and not int(sys.argv[2]):
        disk.free()
part.close()
print(len(read_part(part_path(disk.path, 0)).events), read_part(part_path(disk.path, 0)).attributes["last"])
"""
    with small_disk(tmp_path / "disk", 512) as disk:
        words = [sys.executable, "-c", program, str(disk.path), str(int(is_for_good))]
        ended = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=60)
        assert ended.returncode == 0, ended.stderr
        waiting = f"{part_path(disk.path, 0)} waits in memory for the disk: No space left on device"
        assert ended.stderr.splitlines()[0] == waiting
        num_rows, last = map(int, ended.stdout.split())
        if is_for_good:
            assert (
                1000 <= num_rows < 1100
                and last == 9
                and f"lacks {4000 - num_rows} rows" in ended.stderr
            )
        else:
            assert (num_rows, last) == (4000, 39) and len(ended.stderr.splitlines()) == 1
