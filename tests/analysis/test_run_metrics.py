"""The figures of a run, held against closed forms and counts done by hand."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from analysis.cli.summary import summary_table
from analysis.io.load import load_trace
from analysis.io.run_config import RunFacts, run_facts
from analysis.metrics.run_metrics import Metrics, run_metrics, step_times_s
from gems.errors import ConfigError
from gems.trace import DTYPES, KINDS, Trace, root_attributes
from tests.helpers.closed_forms import bubble

MS = 1_000_000
CASES = [
    ("gems_master", 1, 4, 1),
    ("gems_master", 2, 4, 1),
    ("gems_master", 4, 8, 1),
    ("gems_master", 4, 16, 4),
    ("gems_mast", 4, 4, 2),
    ("1f1b", 1, 5, 1),
    ("1f1b", 2, 3, 1),
    ("1f1b", 4, 8, 1),
    ("gpipe", 4, 6, 1),
    ("layer_parallel", 2, 3, 1),
]


@pytest.mark.parametrize("backward_ms", [1, 2])
@pytest.mark.parametrize(("name", "partitions", "micro_batches", "parts"), CASES)
def test_bubble_is_the_closed_form_with_uniform_costs(
    simulate: Callable[..., Trace],
    name: str,
    partitions: int,
    micro_batches: int,
    parts: int,
    backward_ms: int,
) -> None:
    trace = simulate(
        name=name,
        partitions=partitions,
        micro_batches=micro_batches,
        parts=parts,
        backward_ns=backward_ms * MS,
    )
    metrics = run_metrics(trace)
    expected = bubble(name, partitions, micro_batches, 1.0, float(backward_ms), parts)
    assert metrics.bubble_measured == pytest.approx(expected, abs=1e-9)
    assert metrics.bubble_formula == pytest.approx(expected, abs=1e-9)
    assert metrics.forward_s == pytest.approx(1e-3)
    assert metrics.backward_s == pytest.approx(backward_ms * 1e-3)


def test_bubble_counts_reduction_step_and_link_as_idle(simulate: Callable[..., Trace]) -> None:
    trace = simulate(name="1f1b", partitions=2, micro_batches=4, step_ns=3 * MS, link_ns=MS // 2)
    metrics = run_metrics(trace)
    assert metrics.bubble_measured is not None and metrics.bubble_formula is not None
    assert metrics.bubble_measured > metrics.bubble_formula + 0.1
    assert metrics.bubble_formula == pytest.approx(1 / 5)


def test_replicas_do_not_change_the_bubble(simulate: Callable[..., Trace]) -> None:
    one, two = (run_metrics(simulate(partitions=2, micro_batches=4, replicas=n)) for n in (1, 2))
    assert len(two.busy_s) == 2 * len(one.busy_s)
    assert two.bubble_measured == pytest.approx(one.bubble_measured)


def test_busy_time_is_that_of_forward_and_backward(simulate: Callable[..., Trace]) -> None:
    metrics = run_metrics(
        simulate(partitions=4, micro_batches=8, steps=4, warmup_steps=1, step_ns=MS)
    )
    assert metrics.busy_s == pytest.approx([3 * 8 * 3e-3] * 4)


def by_hand(rows: Sequence[tuple[float, ...]], events: Sequence[tuple[int, ...]] = ()) -> Trace:
    """Build a trace of two ranks from step rows, and event rows without the last two columns."""
    full = [(*event, 0, 0, 0) for event in events]
    return Trace(
        attributes=root_attributes("measured", "x", 2),
        steps=np.array([(*(*row, 1)[:7], np.nan, np.nan) for row in rows], DTYPES["steps"]),
        events=np.array(full, DTYPES["events"]),
    )


def event(
    rank: int, step: int, kind: str, start_ms: int, end_ms: int, stage: int = 0, stream: int = 0
) -> tuple[int, ...]:
    """Return an event row up to end_ns."""
    return (rank, step, KINDS.index(kind), stage, -1, 0, 0, stream, start_ms * MS, end_ms * MS)


def test_warmup_steps_are_left_out() -> None:
    rows = [
        (0, 0, 900 * MS, 10, 3.0, 1),
        (1, 900 * MS, 1000 * MS, 10, 2.0, 0),
        (2, 1000 * MS, 1100 * MS, 10, 1.0, 0),
    ]
    metrics = run_metrics(
        by_hand(
            rows,
            [event(0, 0, "F", 0, 900), event(0, 1, "F", 900, 950), event(1, 2, "B", 1000, 1050)],
        )
    )
    assert (metrics.num_steps, metrics.num_warmup_steps, metrics.num_images) == (2, 1, 20)
    assert metrics.images_per_s == pytest.approx(20 / 0.2)
    assert metrics.step_median_s == pytest.approx(0.1)
    assert metrics.busy_s == pytest.approx([0.05, 0.05])
    assert metrics.bubble_measured == pytest.approx(1 - 0.1 / 0.4)
    assert metrics.forward_s == pytest.approx(0.05)
    assert (metrics.loss_first, metrics.loss_last) == (2.0, 1.0)


def test_images_per_s_counts_gaps_between_steps_and_step_time_does_not() -> None:
    metrics = run_metrics(
        by_hand([(0, 0, 100 * MS, 10, 1.0, 0), (1, 300 * MS, 400 * MS, 10, 1.0, 0)])
    )
    assert metrics.images_per_s == pytest.approx(20 / 0.4)
    assert metrics.step_median_s == pytest.approx(0.1)


def test_the_time_between_attempts_is_of_no_step() -> None:
    rows = [
        (0, 0, 100 * MS, 10, 1.0, 0, 1),
        (1, 110 * MS, 200 * MS, 10, 1.0, 0, 1),
        (2, 5000 * MS, 5100 * MS, 10, 1.0, 0, 3),
    ]
    metrics = run_metrics(by_hand(rows))
    assert metrics.time_s == pytest.approx(0.3) and metrics.images_per_s == pytest.approx(100)
    assert metrics.step_p95_s == pytest.approx(0.1)


def test_times_of_overlapping_steps_add_up_to_the_whole() -> None:
    rows = [
        (0, 0, 100 * MS, 1, 1.0, 0),
        (1, 60 * MS, 180 * MS, 1, 1.0, 0),
        (2, 150 * MS, 290 * MS, 1, 1.0, 0),
    ]
    times_s = step_times_s(by_hand(rows).steps)
    assert times_s == pytest.approx([0.100, 0.080, 0.110])
    metrics = run_metrics(by_hand(rows))
    assert metrics.time_s == pytest.approx(times_s.sum())
    assert metrics.step_median_s == pytest.approx(0.100)
    assert metrics.step_p95_s == pytest.approx(np.percentile(times_s, 95))
    assert (metrics.step_low_s, metrics.step_high_s) == pytest.approx((0.080, 0.110))


def test_stage_costs_are_medians_of_a_stage_and_mean_over_stages() -> None:
    durations = {0: (10, 10, 100), 1: (30, 30, 30)}
    events = []
    at = 0
    for stage, values in durations.items():
        for value in values:
            events.append(event(stage, 0, "F", at, at + value, stage))
            at += value
    metrics = run_metrics(by_hand([(0, 0, at * MS, 1, 1.0, 0)], events))
    assert metrics.forward_s == pytest.approx(0.020)
    assert metrics.backward_s is None


def test_only_the_compute_stream_is_busy() -> None:
    events = [
        event(0, 0, "F", 0, 10),
        event(1, 0, "F", 0, 10),
        event(0, 0, "SEND_F", 0, 90, stream=1),
    ]
    assert run_metrics(by_hand([(0, 0, 100 * MS, 1, 1.0, 0)], events)).busy_s == pytest.approx(
        [0.01, 0.01]
    )


def test_a_rank_without_events_is_unknown_not_idle() -> None:
    metrics = run_metrics(by_hand([(0, 0, 100 * MS, 1, 1.0, 0)], [event(0, 0, "F", 0, 10)]))
    assert metrics.busy_s[0] == pytest.approx(0.01)
    assert metrics.busy_s[1] is None
    assert metrics.bubble_measured is None
    assert metrics.peak_device_bytes == (0, None)


def assert_no_times(metrics: Metrics) -> None:
    """Holds that every figure of time is None."""
    assert (metrics.time_s, metrics.images_per_s, metrics.step_median_s, metrics.step_p95_s) == (
        None,
    ) * 4
    assert (metrics.step_low_s, metrics.step_high_s) == (None, None)
    assert (
        metrics.bubble_measured,
        metrics.bubble_formula,
        metrics.forward_s,
        metrics.backward_s,
    ) == (None,) * 4
    assert (metrics.loss_first, metrics.loss_last) == (None, None)
    assert set(metrics.busy_s) == {None}


def test_one_step_is_enough(simulate: Callable[..., Trace]) -> None:
    metrics = run_metrics(simulate(steps=1, warmup_steps=0, partitions=2, micro_batches=2))
    assert metrics.num_steps == 1
    assert metrics.step_median_s == metrics.step_p95_s == metrics.time_s
    assert metrics.time_s == pytest.approx(0.011)
    assert metrics.images_per_s == pytest.approx(16 / 0.011)
    assert metrics.loss_first == metrics.loss_last


def test_only_warmup_steps_give_no_times(simulate: Callable[..., Trace]) -> None:
    metrics = run_metrics(simulate(steps=2, warmup_steps=2, partitions=2))
    assert (metrics.num_steps, metrics.num_warmup_steps) == (0, 2)
    assert_no_times(metrics)
    assert None not in metrics.peak_device_bytes


def test_no_step_gives_no_figure() -> None:
    metrics = run_metrics(Trace(attributes=root_attributes("measured", "x", 2)))
    assert (metrics.num_steps, metrics.num_images) == (0, 0)
    assert_no_times(metrics)
    assert metrics.peak_device_bytes == metrics.peak_rss_bytes == (None, None)


def test_a_step_of_no_length_divides_nothing() -> None:
    metrics = run_metrics(
        by_hand([(0, 5, 5, 1, 1.0, 0)], [event(0, 0, "F", 0, 0), event(1, 0, "F", 0, 0)])
    )
    assert (metrics.images_per_s, metrics.bubble_measured) == (None, None)


def test_a_loss_that_is_not_known_is_none() -> None:
    assert run_metrics(by_hand([(0, 0, MS, 1, float("nan"), 0)])).loss_first is None


def test_peaks_take_each_rank_and_every_source(simulate: Callable[..., Trace]) -> None:
    trace = simulate(name="1f1b", partitions=4, micro_batches=8)
    samples = [
        (0, 0, 700, 100, 1.0, 0.1),
        (0, 1, 900, 50, 1.0, 0.1),
        (2, 0, -1, 30, np.nan, np.nan),
    ]
    trace.samples = np.array(samples, DTYPES["samples"])
    metrics = run_metrics(trace)
    stashes = [
        (peak - (5 << 20)) / (3 << 20) for peak in metrics.peak_device_bytes if peak is not None
    ]
    assert stashes == [4, 3, 2, 1]
    assert metrics.peak_rss_bytes == (100, None, 30, None)
    assert metrics.peak_driver_bytes == (900, None, None, None)


def test_energy_is_that_of_the_counted_steps(simulate: Callable[..., Trace]) -> None:
    """Power rises by 1 W a second on rank 0 and stays at 100 W on rank 1, sampled beside the steps' ends."""
    second = 1_000 * MS
    trace = by_hand([(0, 0, 2 * second, 4, 1.0, 1), (1, 2 * second, 4 * second, 4, 1.0, 0)])
    times = [number * second - second // 2 for number in range(8)]
    rows = [(0, t, -1, 1, 200 + t / second, 0.5) for t in times] + [
        (1, t, -1, 1, 100.0, 0.5) for t in times
    ]
    trace.samples = np.array([*rows, (1, second, -1, 1, np.nan, 0.5)], DTYPES["samples"])
    assert run_metrics(trace).joules_per_image == pytest.approx((2 * (200 + 3) + 2 * 100) / 4)
    trace.samples = np.array(rows[: len(times)], DTYPES["samples"])
    assert run_metrics(trace).joules_per_image is None, "of one rank nothing is known"


def test_a_killed_run_is_summarised_up_to_the_last_whole_step(
    tmp_path: Path, write_parts: Callable[..., Trace]
) -> None:
    run = {"partitions": 4, "steps": 5, "warmup_steps": 1}
    whole = write_parts(tmp_path, run, steps_of={2: 3})
    loaded = load_trace(tmp_path)
    metrics = run_metrics(loaded.trace)
    assert metrics.num_steps == 2
    assert metrics.bubble_measured == pytest.approx(run_metrics(whole).bubble_measured, abs=1e-9)
    assert metrics.bubble_formula is not None
    assert metrics.peak_rss_bytes == tuple((rank + 1) << 20 for rank in range(4))
    assert any("rank 2 finished 3 steps, others 5" in note for note in loaded.notes)


def test_clock_offsets_are_taken_out(tmp_path: Path, write_parts: Callable[..., Trace]) -> None:
    run = {"partitions": 2, "micro_batches": 4}
    whole = write_parts(tmp_path, run, offsets_ns={1: 7_000 * MS})
    merged = load_trace(tmp_path).trace
    assert merged.attributes["clock_offset_ns"] == [0, 7_000 * MS]
    assert merged.attributes["clock_error_ns"] == [5, 5]
    assert merged.attributes["hostnames"] == ["node0", "node1"]
    for column in ("rank", "kind", "start_ns", "end_ns", "micro_batch"):
        assert np.array_equal(merged.events[column], whole.events[column])
    assert np.array_equal(merged.steps["end_ns"], whole.steps["end_ns"])
    assert np.array_equal(merged.steps["loss"], whole.steps["loss"])
    assert run_metrics(merged).bubble_measured == pytest.approx(
        run_metrics(whole).bubble_measured, abs=1e-12
    )


def test_facts_come_from_the_resolved_configuration(simulate: Callable[..., Trace]) -> None:
    trace = simulate(partitions=2, micro_batches=8, parts=2, replicas=2)
    assert run_facts(trace) == RunFacts(
        "gems_master", partitions=2, replicas=2, micro_batches=8, parts=2
    )
    assert run_facts(Trace(attributes={})) == RunFacts()


@pytest.mark.parametrize(("strips", "wanted"), [("2", 2), ("[2, 3]", 6)])
def test_the_closed_form_is_not_that_of_strips(strips: str, wanted: int) -> None:
    whole = RunFacts("1f1b", partitions=4, replicas=1, micro_batches=8)
    assert whole.bubble(1.0, 2.0) == pytest.approx(3 / 11)
    trace = Trace(
        attributes={},
        run_yaml="schedule: {name: 1f1b}\n"
        f"parallel: {{partitions: 4, micro_batches: 8, strips: {strips}}}",
    )
    assert run_facts(trace).strips == wanted and run_facts(trace).bubble(1.0, 2.0) is None


def test_unknown_schedule_has_no_formula(simulate: Callable[..., Trace]) -> None:
    trace = simulate(partitions=2)
    trace.run_yaml = trace.run_yaml.replace("gems_master", "of_tomorrow")
    assert run_metrics(trace).bubble_formula is None


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[1]",
        "parallel: 3",
        "parallel: {partitions: 0}",
        "parallel: {partitions: two}",
        "parallel: {parts: true}",
    ],
)
def test_a_broken_run_yaml_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="run_yaml"):
        run_facts(Trace(attributes={}, run_yaml=text))


def test_the_allocators_peak_goes_before_the_ledgers(simulate: Callable[..., Trace]) -> None:
    trace = simulate(partitions=2)
    counted = run_metrics(trace).peak_device_bytes
    trace.attributes["peak_allocated_bytes"] = [1 << 40, -1]
    assert run_metrics(trace).peak_device_bytes == (1 << 40, counted[1])


def test_reserved_memory_is_shown_beside_allocated_memory(simulate: Callable[..., Trace]) -> None:
    trace = simulate(partitions=2)
    assert run_metrics(trace).peak_reserved_bytes == (None, None)
    trace.attributes["peak_reserved_bytes"] = [3 << 30, -1]
    assert run_metrics(trace).peak_reserved_bytes == (3 << 30, None)
    table = summary_table(run_metrics(trace), trace, {})
    assert re.search(r"peak, reserved by the allocator \[GiB\] +3\.\d* on rank 0", table)
