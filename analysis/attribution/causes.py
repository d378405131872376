"""The causes: why a step takes longer than its useful compute, found by removing one disturbance after another."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from analysis.attribution.graph import Graph, build_graph, schedule_from
from analysis.attribution.measured import Measured, measure
from analysis.attribution.replay import Times, replay
from analysis.attribution.stage_times import USEFUL, balanced, undisturbed_times
from analysis.metrics.events import ranks_written
from gems.schedule.action import COMPUTE_KINDS, COPY_KINDS, RECV_KINDS, WAIT_KINDS, Kind
from gems.schedule.ledger import BRINGING_KINDS
from gems.trace import Trace

CAUSES = (
    "bubble", "imbalance", "point_to_point", "all_reduce", "memory", "recompute", "input", "host", "noise",
)  # fmt: skip
# A cause that is removed first is also charged with its interactions with those removed later.
ORDER = (
    "noise", "input", "host", "memory", "recompute", "all_reduce", "point_to_point", "imbalance", "bubble",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Attribution:
    """Where the time of a step goes: ideal_s + sum(run_s.values()) = step_s, and the same on each rank.

    Attributes:
        source: measured, emulated or simulated.
        num_steps: steps counted, without warm-up steps.
        step_s: mean time of a step, the last rank's end counted.
        ideal_s: useful compute (F, B, I, W) of a rank in undisturbed times, if all ranks had an equal share.
        causes_s: seconds of a step that each cause takes on each world rank; below 0 if a cause saved time.
        own_s: the part of it that the rank itself spent, whether or not the others waited for it.
        residual_s: measured step time less that of the replay with nothing removed; part of `host`.
        times_from: source of the undisturbed times, see `analysis.attribution.stage_times.undisturbed_times`.
    """

    source: str
    num_steps: int
    step_s: float
    ideal_s: float
    causes_s: Mapping[str, tuple[float, ...]]
    own_s: Mapping[str, tuple[float, ...]]
    residual_s: float
    times_from: str

    @property
    def run_s(self) -> dict[str, float]:
        """Seconds a step lost to each cause, mean over the ranks."""
        return {cause: float(np.mean(self.causes_s[cause])) for cause in CAUSES}

    @property
    def efficiency(self) -> float:
        """Ideal over step time."""
        return self.ideal_s / self.step_s if self.step_s else 1.0

    def largest(self, count: int) -> list[tuple[str, float]]:
        """Return the causes that took most time, the largest first, with seconds a step."""
        lost = sorted(self.run_s.items(), key=lambda item: -item[1])
        return [(cause, time_s) for cause, time_s in lost[:count] if time_s > 0]


def attribute(trace: Trace) -> Attribution:
    """Decompose the time of a trace's counted steps exactly into ideal compute and nine causes.

    The schedule is replayed with the measured times of all actions and messages, and then with one cause after another
    removed; each is charged with the time that this saves:

    1. noise: each action takes its undisturbed time (`undisturbed_times`); so a rank slower than its peers is noise;
    2. input: data are available at once;
    3. host: no optimizer step, no gaps while nothing is waited for, no late begin, no end after the last action; the
       residual of the replay is added to it;
    4. memory: copies take no time, nor does waiting for free memory;
    5. recompute: R takes none;
    6. all_reduce: reductions end with the arrival of the last rank of their group;
    7. point_to_point: messages arrive when both sides are ready for them;
    8. imbalance: all stages take as long as their mean;
    9. bubble: what then remains above the useful compute of a rank.

    All ranks lose the same time in total, since they end the step together: some spend it and others wait. A rank's
    share of a cause is the mean plus what the rank itself spent beyond it; the difference in idle time is distributed
    over the causes in proportion to the run's idle time.

    Raises:
        ConfigError: a trace without counted steps, without its schedule, or with ranks that do not match it.
    """
    on_processor = trace.source == "measured" and trace.attributes.get("device") == "cpu"
    graph = build_graph(schedule_from(trace.schedule_rows), copies_block=on_processor)
    measured = measure(trace, graph)
    times, step_s = measured.times, float(measured.window.step_s.mean())
    undisturbed_s, times_from = undisturbed_times(trace, graph, times.work_s)
    balanced_s = balanced(graph, undisturbed_s)
    ideal_s = float(_by_rank(graph, balanced_s).mean())
    spans = [float(replay(graph, level).mean()) for level in _levels(graph, times, undisturbed_s, balanced_s)]
    residual_s = step_s - spans[0]
    lost = {cause: before - after for cause, (before, after) in zip(ORDER, pairwise((*spans, ideal_s)), strict=True)}
    lost["host"] += residual_s
    own = _own(graph, measured, undisturbed_s, ideal_s)
    causes = _by_cause(lost, own)
    copies = trace.world_size // ranks_written(trace)
    return Attribution(
        trace.source, len(measured.window.steps), step_s, ideal_s,
        {cause: _as_tuple(causes[cause], copies) for cause in CAUSES},
        {cause: _as_tuple(own[cause], copies) for cause in CAUSES},
        residual_s, times_from,
    )  # fmt: skip


def _levels(graph: Graph, times: Times, undisturbed_s: np.ndarray, balanced_s: np.ndarray) -> Iterator[Times]:
    """Yield the times as measured, and then without one cause after the other, in `ORDER` without its last.

    All share arrays that the next one changes.
    """
    times = replace(times, work_s=times.work_s.copy(), lag_s=times.lag_s.copy())
    work, lag = times.work_s, times.lag_s
    compute = graph.of_kinds(*COMPUTE_KINDS)
    yield times
    work[compute] = undisturbed_s[compute, None, None]
    yield times
    never = (np.full_like(given, -np.inf) for given in (times.data_s, times.input_s))
    times = replace(times, data_s=next(never), input_s=next(never))
    yield times
    none = np.zeros_like(times.begin_s)
    times = replace(times, begin_s=none, tail_s=none)
    lag[_with_gaps(graph)] = 0.0
    work[graph.of_kinds(Kind.STEP)] = 0.0
    yield times
    lag[nodes_awaiting_memory(graph)] = 0.0
    work[graph.of_kinds(*COPY_KINDS, *WAIT_KINDS)] = 0.0
    yield times
    work[graph.of_kinds(Kind.R)] = 0.0
    yield times
    work[graph.of_kinds(Kind.REDUCE_GRAD)] = 0.0
    yield times
    lag[graph.of_kinds(*RECV_KINDS)] = 0.0
    yield times
    work[compute] = balanced_s[compute, None, None]
    yield times


def nodes_awaiting_memory(graph: Graph) -> np.ndarray:
    """Return the nodes whose lag is waiting for free memory: those that bring activations while copies free it."""
    schedule = graph.schedule
    if not schedule.has_copies or schedule.has_any(Kind.FREE):
        return np.empty(0, dtype=np.int64)
    return graph.of_kinds(*(BRINGING_KINDS & COMPUTE_KINDS))


def _with_gaps(graph: Graph) -> np.ndarray:
    """Return the nodes whose lag is charged to the host."""
    copies = COPY_KINDS if graph.copies_block else ()
    acting = graph.of_kinds(*COMPUTE_KINDS, *copies, Kind.STEP)
    found: np.ndarray = np.setdiff1d(
        np.concatenate([acting, np.flatnonzero(graph.is_arrival)]), nodes_awaiting_memory(graph)
    )
    return found


def _own(graph: Graph, measured: Measured, undisturbed_s: np.ndarray, ideal_s: float) -> dict[str, np.ndarray]:
    """Return what each rank itself spent on each cause, (ranks x R,) in seconds a step; on the bubble it is 0."""
    times, for_memory = measured.times, nodes_awaiting_memory(graph)
    useful, compute = graph.of_kinds(*USEFUL), graph.of_kinds(*COMPUTE_KINDS)
    step = graph.of_kinds(Kind.STEP)
    blocking_copies = graph.of_kinds(*(COPY_KINDS if graph.copies_block else ()))

    def summed(nodes: np.ndarray, node_s: np.ndarray) -> np.ndarray:
        sums = np.zeros_like(times.begin_s)
        np.add.at(sums, graph.rank[nodes], node_s[nodes])
        return sums

    undisturbed = np.broadcast_to(undisturbed_s[:, None, None], times.work_s.shape)
    own = {
        "bubble": np.zeros_like(times.begin_s),
        "imbalance": summed(useful, undisturbed) - ideal_s,
        "point_to_point": measured.messages_s,
        "all_reduce": summed(graph.of_kinds(Kind.REDUCE_GRAD), times.work_s),
        "memory": measured.copies_s + summed(for_memory, times.lag_s) + summed(blocking_copies, times.work_s),
        "recompute": summed(graph.of_kinds(Kind.R), undisturbed),
        "input": measured.input_s,
        "host": summed(_with_gaps(graph), times.lag_s) + summed(step, times.work_s) + times.begin_s,
        "noise": summed(compute, times.work_s - undisturbed),
    }
    return {cause: own[cause].mean(axis=2).T.ravel() for cause in CAUSES}


def _by_cause(lost: Mapping[str, float], own: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return what each rank loses to each cause.

    The mean over ranks is `lost`, the sum over causes alike on all ranks.
    """
    more = {cause: own[cause] - own[cause].mean() for cause in CAUSES}
    spent = np.sum([more[cause] for cause in CAUSES], axis=0)
    waits = {cause: max(0.0, lost[cause] - float(own[cause].mean())) for cause in CAUSES}
    total = sum(waits.values())
    shares = {cause: wait / total if total else float(cause == "bubble") for cause, wait in waits.items()}
    return {cause: lost[cause] + more[cause] - spent * shares[cause] for cause in CAUSES}


def _by_rank(graph: Graph, node_s: np.ndarray) -> np.ndarray:
    """Sum times of nodes over each rank of the pipeline."""
    sums: np.ndarray = np.bincount(graph.rank, node_s, graph.num_ranks)
    return sums


def _as_tuple(values: np.ndarray, copies: int) -> tuple[float, ...]:
    return tuple(float(value) for value in values) * copies
