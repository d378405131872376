"""The figures of a run, from its trace."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from analysis.io.run_config import run_facts
from analysis.metrics.events import COMPUTE, USEFUL, of_kinds, ranks_written
from analysis.metrics.statistics import median_interval, percentile
from gems.trace import STREAMS, TIME_UNIT, Trace
from gems.utils.units import MS, UNITS, Unit

NS = 1e-9


@dataclass(frozen=True, slots=True)
class Metrics:
    """Figures over the whole steps of a run that are not warm-up steps.

    A figure is None if the trace does not contain it. Tuples have an item for each world rank; in a
    trace of one replica for all, its ranks represent the others. Peaks cover the whole trace,
    including warm-up and unfinished steps.

    Attributes:
        num_warmup_steps: Whole steps that are left out.
        num_images: Images of the counted steps, in all directions and replicas.
        time_s: Time from the first counted step's start to the last one's end, including gaps, for
            each attempt.
        step_median_s: Median of the step times, see `step_times_s`.
        step_low_s, step_high_s: Bounds of its 95 % interval; with fewer than 6 steps the extremes.
        step_p95_s: 95th percentile of the step times, linear between neighbours.
        busy_s: Time in F, B, I, W and R on the compute stream; None for a rank without events.
        bubble_measured: 1 - sum(busy_s) / (world size x time_s), of the trace's `source`.
        efficiency: Useful compute (F, B, I and W, but not the recomputation R) over world size x
            time_s.
        bubble_formula: The closed form of the schedule at `forward_s` and `backward_s`.
        forward_s: Median duration of F of a stage, averaged over the stages; backward_s is that of
            B, or of I and W together.
        peak_device_bytes: Most bytes held on the device: the allocator's peak on a GPU and the
            simulation's own, else the ledger's when an action ended.
        peak_reserved_bytes: Most bytes that the allocator of a GPU has taken from the driver, with
            what it holds free between allocations.
        peak_rss_bytes: Largest resident memory of the process, from samples.
        peak_driver_bytes: Largest device memory in use as reported by the driver, from samples.
        joules_per_image: Energy of the ranks' GPUs in the counted steps over their images, from
            samples of their power; None unless all ranks have some.
    """

    num_steps: int
    num_warmup_steps: int
    num_images: int
    time_s: float | None
    images_per_s: float | None
    step_median_s: float | None
    step_low_s: float | None
    step_high_s: float | None
    step_p95_s: float | None
    busy_s: tuple[float | None, ...]
    bubble_measured: float | None
    efficiency: float | None
    bubble_formula: float | None
    forward_s: float | None
    backward_s: float | None
    peak_device_bytes: tuple[int | None, ...]
    peak_reserved_bytes: tuple[int | None, ...]
    peak_rss_bytes: tuple[int | None, ...]
    peak_driver_bytes: tuple[int | None, ...]
    joules_per_image: float | None
    loss_first: float | None
    loss_last: float | None


def run_metrics(trace: Trace) -> Metrics:
    """Compute the figures of a run.

    Raises:
        ConfigError: `trace.run_yaml` is malformed.
    """
    facts = run_facts(trace)
    steps = np.sort(trace.steps, order="step")
    is_counted = steps["is_warmup"] == 0
    counted = steps[is_counted]
    step_s = step_times_s(steps)[is_counted]
    num_images = int(counted["images"].sum())
    time_s = None
    energy_j = None
    median = p95 = None
    losses: list[float | None] = [None, None]
    if len(counted):
        # ends of the attempts: no time passes between attempts
        ends = np.flatnonzero(np.diff(counted["attempt"], append=-1))
        starts = np.concatenate([[0], ends[:-1] + 1])
        time_s = float((counted["end_ns"][ends] - counted["start_ns"][starts]).sum()) * NS
        energy_j = _energy_j(trace, counted["start_ns"][starts], counted["end_ns"][ends])
        median = median_interval(step_s)
        p95 = percentile(step_s, 95)
        losses = [None if np.isnan(loss) else float(loss) for loss in counted["loss"][[0, -1]]]
    events = trace.events[np.isin(trace.events["step"], counted["step"])]
    busy_s = _times_s(trace, events, COMPUTE)
    forward_s = stage_mean_s(events, "F")
    backward_s = backward_mean_s(events)
    return Metrics(
        num_steps=len(counted),
        num_warmup_steps=len(steps) - len(counted),
        num_images=num_images,
        time_s=time_s,
        images_per_s=num_images / time_s if time_s else None,
        step_median_s=None if median is None else median.value,
        step_low_s=None if median is None else median.low,
        step_high_s=None if median is None else median.high,
        step_p95_s=p95,
        busy_s=busy_s,
        bubble_measured=None if (share := _share(busy_s, time_s)) is None else 1.0 - share,
        efficiency=_share(_times_s(trace, events, USEFUL), time_s),
        bubble_formula=facts.bubble(forward_s, backward_s, stage_mean_s(events, "W")),
        forward_s=forward_s,
        backward_s=backward_s,
        peak_device_bytes=_device_peaks(trace),
        peak_reserved_bytes=tuple(
            None if peak < 0 else int(peak)
            for peak in trace.attributes.get("peak_reserved_bytes", [-1] * trace.world_size)
        ),
        peak_rss_bytes=_peaks(trace.samples, "rss_bytes", trace.world_size),
        peak_driver_bytes=_peaks(trace.samples, "device_bytes", trace.world_size),
        joules_per_image=energy_j / num_images if energy_j is not None and num_images else None,
        loss_first=losses[0],
        loss_last=losses[1],
    )


def table_unit(trace: Trace) -> Unit:
    """Return the unit of times in tables and charts: ms, or the units of configured costs."""
    return UNITS if TIME_UNIT in trace.attributes else MS


def step_times_s(steps: np.ndarray) -> np.ndarray:
    """Return the time of each step in seconds; `steps` are rows of `/steps`, sorted by step.

    Without a barrier a rank begins step k + 1 while another is still ending step k. A step counts
    from the previous step's last end (or its own begin if that is later) to its own last end.
    """
    begin = steps["start_ns"].copy()
    begin[1:] = np.maximum(begin[1:], steps["end_ns"][:-1])
    times: np.ndarray = (steps["end_ns"] - begin) * NS
    return times


def _energy_j(trace: Trace, starts_ns: np.ndarray, ends_ns: np.ndarray) -> float | None:
    """Return the energy of all GPUs between times, by the trapezoidal rule over samples of power.

    Return None if it is unknown.
    """
    known = trace.samples[np.isfinite(trace.samples["power_w"])]
    total_j = 0.0
    for rank in range(trace.world_size):
        samples = np.sort(known[known["rank"] == rank], order="t_ns")
        if len(samples) < 2:
            return None
        for start_ns, end_ns in zip(starts_ns, ends_ns, strict=True):
            inside = samples["t_ns"][(samples["t_ns"] > start_ns) & (samples["t_ns"] < end_ns)]
            at_ns = np.concatenate([[start_ns], inside, [end_ns]])
            power_w = np.interp(at_ns, samples["t_ns"], samples["power_w"])
            total_j += float(((power_w[1:] + power_w[:-1]) / 2 * np.diff(at_ns)).sum()) * NS
    return total_j


def _times_s(trace: Trace, events: np.ndarray, kinds: tuple[str, ...]) -> tuple[float | None, ...]:
    """Return each rank's time in actions of some kinds on the compute stream.

    It is None for a rank without events.
    """
    compute = events[events["stream"] == STREAMS.index("compute")]
    compute = compute[of_kinds(compute, *kinds)]
    num_ranks = ranks_written(trace)
    times_ns = np.bincount(
        compute["rank"], compute["end_ns"] - compute["start_ns"], minlength=num_ranks
    )
    present = np.bincount(events["rank"], minlength=num_ranks)
    written = [float(times_ns[rank]) * NS if present[rank] else None for rank in range(num_ranks)]
    return tuple(written * (trace.world_size // num_ranks))


def _share(times_s: tuple[float | None, ...], time_s: float | None) -> float | None:
    """Return the share of all ranks' time.

    Return None if the time of a rank is missing, because unknown is not idle.
    """
    known = [time for time in times_s if time is not None]
    if not time_s or not known or len(known) < len(times_s):
        return None
    return sum(known) / (len(known) * time_s)


def stage_mean_s(events: np.ndarray, kind: str) -> float | None:
    """Return the median duration of a kind of action on a stage, averaged over the stages.

    It is in seconds; return None if there is no such action.
    """
    chosen = events[of_kinds(events, kind)]
    if not len(chosen):
        return None
    duration_ns = chosen["end_ns"] - chosen["start_ns"]
    medians = [
        np.median(duration_ns[chosen["stage"] == stage]) for stage in np.unique(chosen["stage"])
    ]
    return float(np.mean(medians)) * NS


def backward_mean_s(events: np.ndarray) -> float | None:
    """Return the median duration of a stage's backward, averaged over the stages, in seconds.

    The backward is B, or I and W together.
    """
    whole = stage_mean_s(events, "B")
    halves = stage_mean_s(events, "I"), stage_mean_s(events, "W")
    if whole is not None or halves[0] is None or halves[1] is None:
        return whole
    return halves[0] + halves[1]


def _peaks(table: np.ndarray, column: str, world_size: int) -> tuple[int | None, ...]:
    """Return the largest value of a column for each rank; negative values mean unknown."""
    peaks = np.full(world_size, -1, dtype=np.int64)
    np.maximum.at(peaks, table["rank"], table[column])
    return tuple(int(peak) if peak >= 0 else None for peak in peaks)


def _device_peaks(trace: Trace) -> tuple[int | None, ...]:
    """Return the allocator's own peaks if the trace has them, or else those of the events.

    The allocator's peaks include memory that an action held only while it ran.
    """
    written = _peaks(trace.events, "device_bytes", ranks_written(trace))
    counted = written * (trace.world_size // len(written))
    allocated = trace.attributes.get("peak_allocated_bytes")
    if allocated is None:
        return counted
    return tuple(
        counted_peak if peak < 0 else int(peak)
        for peak, counted_peak in zip(allocated, counted, strict=True)
    )
