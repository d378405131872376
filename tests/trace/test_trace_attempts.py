"""The traces of attempts become one: each step once, in order, whatever the clocks said."""

from __future__ import annotations

import shutil
from pathlib import Path

import h5py
import numpy as np
import pytest

from analysis.io.load import load_parts
from analysis.metrics.run_metrics import run_metrics
from gems.trace import Trace, TracePart, part_path, read_trace, root_attributes, write_trace
from gems.trace.parts import GAP_NS

S = 1_000_000_000


def write_attempt(
    folder: Path,
    attempt: int,
    steps: range,
    begin_ns: int,
    utc_ns: int,
    *,
    continues: bool = True,
    ranks: int = 2,
    layout: int = 1,
) -> None:
    """Write the parts of an attempt whose monotonic clock said `begin_ns` at `utc_ns`.

    A step takes a second.
    """
    for rank in range(ranks):
        attributes = root_attributes(
            "measured",
            "x",
            ranks,
            hostname="n",
            attempt=attempt,
            first_step=steps.start,
            continues=int(continues),
            layout=layout,
            utc_ns=utc_ns,
            utc_at_ns=begin_ns,
        )
        part = TracePart(part_path(folder, rank), rank, attributes)
        for place, step in enumerate(steps):
            start = begin_ns + (place + 1) * S
            loss = attempt + step / 100 if rank == 0 else float("nan")
            part.add("events", (rank, step, 0, rank, -1, 0, 0, 0, start, start + S // 2, 0, 0, 0))
            part.add("rank_steps", (rank, step, start, start + S, 4, loss, 0, 2.5, 0.1))
            part.add("samples", (rank, start, -1, 7, float("nan"), float("nan")))
        part.close()


def archive(folder: Path, number: int) -> None:
    (folder / "attempts" / f"{number:03d}").mkdir(parents=True)
    (folder / "trace").rename(folder / "attempts" / f"{number:03d}" / "trace")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Write three attempts of a run.

    Steps 0 to 5 are on one node, 4 to 6 on a node that booted later, 6 to 7 on one whose day is
    behind.
    """
    write_attempt(tmp_path, 1, range(6), 500 * S, 1000 * S, continues=False)
    archive(tmp_path, 1)
    write_attempt(tmp_path, 2, range(4, 7), 3 * S, 1100 * S)
    archive(tmp_path, 2)
    write_attempt(tmp_path, 3, range(6, 8), 9 * S, 1050 * S)
    return tmp_path


def test_each_step_stands_once_and_is_of_the_attempt_that_counts(run: Path) -> None:
    trace = load_parts(run).trace
    assert trace.steps["step"].tolist() == list(range(8))
    assert trace.steps["attempt"].tolist() == [1, 1, 1, 1, 2, 2, 3, 3]
    assert trace.steps["loss"].tolist() == pytest.approx(
        [1.00, 1.01, 1.02, 1.03, 2.04, 2.05, 3.06, 3.07]
    )
    assert (np.diff(trace.steps["start_ns"]) >= S).all()
    for rank in (0, 1):
        events = trace.events[trace.events["rank"] == rank]
        assert events["step"].tolist() == list(range(8)) and (np.diff(events["start_ns"]) > 0).all()
    assert trace.attributes["attempts"] == [1, 2, 3] and trace.attributes["first_step"] == 0


def test_attempts_lie_by_the_time_of_day_and_never_over_each_other(run: Path) -> None:
    steps = load_parts(run).trace.steps
    # the second begins 100 s behind the first, by the clock of the first: 500 + 100, and its first
    # step 1 s later
    assert steps["start_ns"][4] == 601 * S
    # the third's day is 50 s early: it begins behind the end of what the second ran, also of what
    # is left out
    assert steps["start_ns"][6] == 604 * S + GAP_NS
    found = run_metrics(load_parts(run).trace)
    assert found.time_s == pytest.approx(8.0) and found.step_median_s == pytest.approx(1.0)


def test_an_attempt_from_the_first_step_has_nothing_before_it(run: Path) -> None:
    archive(run, 3)
    write_attempt(run, 4, range(2), 0, 2000 * S, continues=False)
    trace = load_parts(run).trace
    assert trace.steps["step"].tolist() == [0, 1] and trace.steps["attempt"].tolist() == [4, 4]


@pytest.mark.parametrize(("ranks", "layout"), [(1, 2), (3, 2), (2, 2), (3, 1)])
def test_attempts_on_another_layout_are_named_and_left_out(
    run: Path, ranks: int, layout: int
) -> None:
    archive(run, 3)
    write_attempt(run, 4, range(7, 10), 0, 2000 * S, ranks=ranks, layout=layout)
    archive(run, 4)
    write_attempt(run, 5, range(9, 12), 0, 3000 * S, ranks=ranks, layout=layout)
    loaded = load_parts(run)
    assert loaded.trace.steps["attempt"].tolist() == [4, 4, 5, 5, 5]
    assert (
        f"steps before 7 ran on another layout; their traces are {run}/attempts/003 and before"
        in loaded.notes
    )
    assert (
        run_metrics(loaded.trace).num_steps == 5 and len(run_metrics(loaded.trace).busy_s) == ranks
    )


def test_an_attempt_that_ran_no_step_takes_none_from_those_before(run: Path) -> None:
    shutil.rmtree(run / "trace")
    write_attempt(run, 3, range(7, 7), 9 * S, 1200 * S)
    assert load_parts(run).trace.steps["step"].tolist() == list(range(7))


def test_a_trace_without_the_column_is_of_one_attempt(tmp_path: Path) -> None:
    write_attempt(tmp_path, 1, range(2), 0, 0)
    write_trace(tmp_path / "trace.h5", load_parts(tmp_path).trace)
    with h5py.File(tmp_path / "trace.h5", "a") as file:
        assert file["steps/attempt"].attrs["long_name"]
        del file["steps/attempt"], file.attrs["schema_version"]
        file.attrs["schema_version"] = "1.0"
    old: Trace = read_trace(tmp_path / "trace.h5")
    assert old.steps["attempt"].tolist() == [1, 1] and run_metrics(old).time_s == pytest.approx(2.0)
