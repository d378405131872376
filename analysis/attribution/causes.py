"""The causes of lost time: why a step takes longer than its useful compute.

They are measured by removing one disturbance after another.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np

from analysis.attribution.graph import Graph, Times, build_graph, replay, schedule_from
from analysis.attribution.measured import Measured, measure
from analysis.attribution.stage_times import USEFUL, balanced, undisturbed_times
from analysis.metrics.events import ranks_written
from gems.schedule.action import COMPUTE_KINDS, COPY_KINDS, RECV_KINDS, WAIT_KINDS, Kind
from gems.schedule.ledger import BRINGING_KINDS
from gems.trace import TIME_UNIT, Trace
from gems.utils.tables import table
from gems.utils.units import Unit, counted, time_unit

CAUSES = (
    "bubble",
    "imbalance",
    "point_to_point",
    "all_reduce",
    "memory",
    "recompute",
    "input",
    "host",
    "noise",
)
COLUMNS = ("rank", "part", "time_s", "share_of_step", "own_s")
LABELS = {
    cause: {"point_to_point": "point-to-point", "all_reduce": "all-reduce"}.get(cause, cause)
    for cause in CAUSES
}
# A cause that is removed first is also charged with its interactions with causes removed later.
ORDER = (
    "noise",
    "input",
    "host",
    "memory",
    "recompute",
    "all_reduce",
    "point_to_point",
    "imbalance",
    "bubble",
)


@dataclass(frozen=True, slots=True)
class Attribution:
    """Where the time of a step goes.

    ideal_s + sum(run_s.values()) = step_s, and the same holds on each rank.

    Attributes:
        num_steps: The number of counted steps, without warm-up steps.
        step_s: The mean time of a step, to the last rank's end.
        ideal_s: The useful compute (F, B, I, W) of a rank in undisturbed times, if all ranks had an
            equal share.
        causes_s: The seconds per step that each cause takes on each world rank; negative if a cause
            saved time.
        own_s: The part of causes_s that the rank itself spent, whether or not the others waited for
            it.
        residual_s: The measured step time minus that of the replay with nothing removed; part of
            `host`.
        times_from: The source of the undisturbed times, see
            `analysis.attribution.stage_times.undisturbed_times`.
        is_in_units: Whether a second represents a unit of time.
    """

    source: str
    num_steps: int
    step_s: float
    ideal_s: float
    causes_s: Mapping[str, tuple[float, ...]]
    own_s: Mapping[str, tuple[float, ...]]
    residual_s: float
    times_from: str
    is_in_units: bool = False

    @property
    def unit(self) -> Unit:
        """The unit in which its times are shown."""
        return time_unit([self.step_s], self.is_in_units)

    @property
    def run_s(self) -> dict[str, float]:
        """The seconds per step lost to each cause, averaged over the ranks."""
        return {cause: float(np.mean(self.causes_s[cause])) for cause in CAUSES}

    @property
    def efficiency(self) -> float:
        """The ideal time divided by the step time."""
        return self.ideal_s / self.step_s if self.step_s else 1.0

    def largest(self, count: int) -> list[tuple[str, float]]:
        """Return the causes that took most time, the largest first, in seconds per step."""
        lost = sorted(self.run_s.items(), key=lambda item: -item[1])
        return [(cause, time_s) for cause, time_s in lost[:count] if time_s > 0]


def attribute(trace: Trace) -> Attribution:
    """Decompose the time of a trace's counted steps exactly into ideal compute and nine causes.

    The schedule is replayed with the measured times of all actions and messages, and then with one
    cause after another removed. Each cause is charged with the time that its removal saves:

     1. noise: each action takes its undisturbed time (`undisturbed_times`); so a rank that is
        slower than its peers is noise;
     2. input: data are available at once;
     3. host: no optimizer step, no gaps while nothing is waited for, no late begin, no end after
        the last action; the residual of the replay is added;
     4. memory: copies and waits for free memory take no time;
     5. recompute: R takes no time;
     6. all_reduce: reductions end when the last rank of their group arrives;
     7. point_to_point: messages arrive when both sides are ready for them;
     8. imbalance: all stages take their mean time;
     9. bubble: the remaining time above the useful compute of a rank.

    All ranks lose the same time in total, because they end the step together: some spend it and
    others wait. A rank's share of a cause is the mean plus what the rank itself spent beyond the
    mean; the difference in idle time is distributed over the causes in proportion to the run's idle
    time.

    Raises:
        ConfigError: The trace has no counted steps, no schedule, or ranks that do not match it.
    """
    on_processor = trace.source == "measured" and trace.attributes.get("device") == "cpu"
    graph = build_graph(schedule_from(trace), copies_block=on_processor)
    measured = measure(trace, graph)
    step_s = float(measured.window.step_s.mean())
    undisturbed_s, times_from = undisturbed_times(trace, graph, measured.times.work_s)
    balanced_s = balanced(graph, undisturbed_s)
    ideal_s = float(balanced_s.sum()) / graph.num_ranks
    levels = _levels(graph, measured.times, undisturbed_s, balanced_s)
    spans = [float(replay(graph, level).mean()) for level in levels]
    residual_s = step_s - spans[0]
    lost = {
        cause: before - after
        for cause, (before, after) in zip(ORDER, pairwise((*spans, ideal_s)), strict=True)
    }
    lost["host"] += residual_s
    own = _own(graph, measured, undisturbed_s, ideal_s)
    causes = _by_rank(lost, own)
    copies = trace.world_size // ranks_written(trace)
    lost_s, own_s = (
        {cause: tuple(seconds[cause].tolist()) * copies for cause in CAUSES}
        for seconds in (causes, own)
    )
    return Attribution(
        trace.source,
        len(measured.window.steps),
        step_s,
        ideal_s,
        lost_s,
        own_s,
        residual_s,
        times_from,
        TIME_UNIT in trace.attributes,
    )


def _by_rank(lost: dict[str, float], own: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the loss of each rank by each cause, from the run's loss and the rank's time."""
    # A rank loses what it spent beyond the mean. In return it waited less; this is subtracted from
    # the causes of waiting.
    beyond = {cause: own[cause] - own[cause].mean() for cause in CAUSES}
    spent = np.sum(list(beyond.values()), axis=0)
    waits = {cause: max(0.0, lost[cause] - float(own[cause].mean())) for cause in CAUSES}
    total = sum(waits.values())
    shares = {
        cause: wait / total if total else float(cause == "bubble") for cause, wait in waits.items()
    }
    return {cause: lost[cause] + beyond[cause] - spent * shares[cause] for cause in CAUSES}


def _levels(
    graph: Graph, times: Times, undisturbed_s: np.ndarray, balanced_s: np.ndarray
) -> Iterator[Times]:
    """Yield the measured times, then the times without one cause after another of `ORDER`.

    They share arrays that change.
    """
    times = replace(times, work_s=times.work_s.copy(), lag_s=times.lag_s.copy())
    work = times.work_s
    lag = times.lag_s
    compute = graph.of_kinds(*COMPUTE_KINDS)
    yield times
    work[compute] = undisturbed_s[compute, None, None]
    yield times
    times = replace(
        times,
        **{name: np.full_like(getattr(times, name), -np.inf) for name in ("data_s", "input_s")},
    )
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
    """Return the nodes whose lag is a wait for free memory.

    These nodes allocate activations while copies free memory.
    """
    schedule = graph.schedule
    if not schedule.has_copies or schedule.has_any(Kind.FREE):
        return np.empty(0, dtype=np.int64)
    return graph.of_kinds(*(BRINGING_KINDS & COMPUTE_KINDS))


# nodes whose lag is charged to the host
def _with_gaps(graph: Graph) -> np.ndarray:
    acting = graph.of_kinds(*COMPUTE_KINDS, *(COPY_KINDS if graph.copies_block else ()), Kind.STEP)
    nodes: np.ndarray = np.append(acting, np.flatnonzero(graph.is_arrival))
    return np.setdiff1d(nodes, nodes_awaiting_memory(graph))


def _own(
    graph: Graph, measured: Measured, undisturbed_s: np.ndarray, ideal_s: float
) -> dict[str, np.ndarray]:
    """Return the time that each rank itself spent on each cause, (ranks x R,) in seconds per step.

    It is 0 for the bubble.
    """
    times = measured.times
    of_kinds = graph.of_kinds

    def summed(nodes: np.ndarray, node_s: np.ndarray) -> np.ndarray:
        sums = np.zeros_like(times.begin_s)
        np.add.at(sums, graph.rank[nodes], node_s[nodes])
        return sums

    undisturbed = np.broadcast_to(undisturbed_s[:, None, None], times.work_s.shape)
    copies_s = summed(of_kinds(*COPY_KINDS), times.work_s) if graph.copies_block else 0.0
    own = {
        "bubble": np.zeros_like(times.begin_s),
        "imbalance": summed(of_kinds(*USEFUL), undisturbed) - ideal_s,
        "point_to_point": measured.messages_s,
        "all_reduce": summed(of_kinds(Kind.REDUCE_GRAD), times.work_s),
        "memory": measured.copies_s + summed(nodes_awaiting_memory(graph), times.lag_s) + copies_s,
        "recompute": summed(of_kinds(Kind.R), undisturbed),
        "input": measured.input_s,
        "host": (
            summed(_with_gaps(graph), times.lag_s)
            + summed(of_kinds(Kind.STEP), times.work_s)
            + times.begin_s
        ),
        "noise": summed(of_kinds(*COMPUTE_KINDS), times.work_s - undisturbed),
    }
    return {cause: own[cause].mean(axis=2).T.ravel() for cause in CAUSES}


def attribution_dict(found: Attribution) -> dict[str, Any]:
    """Return an attribution as plain data.

    It contains seconds per step for the run, and lists of them by rank.
    """
    return {
        **{
            name: getattr(found, name)
            for name in ("source", "num_steps", "step_s", "ideal_s", "efficiency")
        },
        "causes_s": found.run_s,
        "rank_causes_s": found.causes_s,
        "rank_own_s": found.own_s,
        "residual_s": found.residual_s,
        "pace": found.times_from,
    }


def attribution_table(found: Attribution, with_ranks: bool = False) -> str:
    """Return a row for each part of the step, in time and percent of the step.

    If `with_ranks`, there is also a row for each rank.
    """
    unit = found.unit
    parts = {"ideal": found.ideal_s} | {
        LABELS[cause]: time_s for cause, time_s in found.run_s.items()
    }
    parts["step"] = found.step_s
    rows = [(name, time_s / unit.size, _percent(time_s, found)) for name, time_s in parts.items()]
    head = (
        f"{found.source} run, mean of {counted(found.num_steps, 'step')}; undisturbed times from"
        f" {found.times_from}"
    )
    shown = table(
        {"": "", f"time [{unit.name}]": ".3f", "of the step [%]": ".2f"}, rows, title=head, indent=2
    )
    if not with_ranks:
        return shown
    shares = {
        cause: [_percent(time_s, found) for time_s in found.causes_s[cause]] for cause in CAUSES
    }
    used = {
        LABELS[cause]: of_ranks for cause, of_ranks in shares.items() if any(map(abs, of_ranks))
    }
    ideal = _percent(found.ideal_s, found)
    of_ranks = zip(*used.values(), strict=True)
    by_rank = [(rank, ideal, *shares_of_rank) for rank, shares_of_rank in enumerate(of_ranks)]
    columns = {"rank": "d", "ideal": ".2f"} | dict.fromkeys(used, ".2f")
    return f"{shown}\n\n{table(columns, by_rank, title='% of the step', indent=2)}"


def largest_line(found: Attribution) -> str:
    """Return the three largest causes in one line, such as `bubble 27.3, host 1.2`."""
    parts = [f"{LABELS[cause]} {_percent(time_s, found):.1f}" for cause, time_s in found.largest(3)]
    return ", ".join(parts) or "nothing"


def attribution_rows(found: Attribution) -> list[dict[str, object]]:
    """Return a row for each part of the step, for the run (rank empty) and for each rank."""
    rows: list[tuple[object, ...]] = [("", "ideal", found.ideal_s, found.efficiency, found.ideal_s)]
    for rank in (None, *range(len(found.causes_s[CAUSES[0]]))):
        for cause in CAUSES:
            own = found.own_s[cause]
            time_s = found.run_s[cause] if rank is None else found.causes_s[cause][rank]
            own_s = float(np.mean(own)) if rank is None else own[rank]
            rows.append(("" if rank is None else rank, cause, time_s, time_s / found.step_s, own_s))
    return [dict(zip(COLUMNS, row, strict=True)) for row in rows]


def _percent(time_s: float, found: Attribution) -> float:
    share = 100 * time_s / found.step_s if found.step_s else 0.0
    return 0.0 if abs(share) < 0.005 else share
