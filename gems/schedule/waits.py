"""Where the time of a simulated step goes on each rank: compute, waiting for messages, and idling."""

from __future__ import annotations

from dataclasses import dataclass

from gems.schedule.action import COMPUTE_KINDS, COPY_KINDS, RECV_KINDS, Action, Kind
from gems.schedule.costs import FREE, Network, StageCosts
from gems.schedule.dependencies import dependencies
from gems.schedule.pace import EVEN, Pace
from gems.schedule.schedule import Schedule
from gems.schedule.simulate import Simulation

Span = tuple[float, float]


@dataclass(frozen=True, slots=True)
class RankTime:
    """The time of one rank in one step, in the unit of the costs; the parts add up to the step.

    `useful` is F, B, I and W; `recompute` is R; `link` is waiting while the awaited message was under way, the exposed
    communication; `input` is waiting for the input of a micro-batch; `reduce` is the gradient reduction with its waiting for
    peers; `step` the optimizer's; `idle` the rest, in which the rank waits for others to compute, for room under the
    cap, or for copies to come back.
    """

    useful: float
    recompute: float
    link: float
    reduce: float
    step: float
    idle: float
    input: float = 0.0


def rank_times(
    schedule: Schedule, costs: StageCosts, played: Simulation, network: Network = FREE, pace: Pace = EVEN
) -> tuple[RankTime, ...]:
    """Split each rank's step into its parts; `network` and `pace` are those that `played` was simulated with."""
    spans = {
        action: (start, end)
        for row, starts, ends in zip(schedule.rows, played.start, played.end, strict=True)
        for action, start, end in zip(row, starts, ends, strict=True)
        if action.kind is not Kind.STEP and action.kind is not Kind.REDUCE_GRAD
    }
    times = []
    for rank, (row, starts, ends) in enumerate(zip(schedule.rows, played.start, played.end, strict=True)):
        free = 0.0
        parts = dict.fromkeys(("useful", "recompute", "link", "input", "reduce", "step"), 0.0)
        inputs_ready = pace.inputs_ready(schedule, rank)
        for action, start, end in zip(row, starts, ends, strict=True):
            kind = action.kind
            if kind in COMPUTE_KINDS:
                parts["recompute" if kind is Kind.R else "useful"] += end - start
                if start > free:
                    parts["input"] += max(0.0, min(start, inputs_ready.get(action, 0.0)) - free)
                    departed, arrived = _flight(action, schedule, costs, network, spans)
                    parts["link"] += max(0.0, min(start, arrived) - max(free, departed))
            elif kind is Kind.REDUCE_GRAD or kind is Kind.STEP:
                parts["step" if kind is Kind.STEP else "reduce"] += end - start
            else:
                continue
            free = end
        times.append(RankTime(**parts, idle=played.span - sum(parts.values())))
    return tuple(times)


def _flight(action: Action, schedule: Schedule, costs: StageCosts, network: Network, spans: dict[Action, Span]) -> Span:
    """Return when the last message that an action needs set out and arrived."""
    last = (0.0, 0.0)
    for need in dependencies(action, schedule):
        if need.kind in RECV_KINDS:
            (send,) = dependencies(need, schedule)
            last = max(last, (max(spans[need][0], spans[send][0]), spans[need][1]), key=_arrival)
        elif need.stage != action.stage and need.kind not in COPY_KINDS:
            here, there = schedule.rank_of(need), schedule.rank_of(action)
            size = costs.boundary_bytes[min(need.stage, action.stage)]
            delay = network.delay(here, there, size) if here != there else 0.0
            last = max(last, (spans[need][1], spans[need][1] + delay), key=_arrival)
    return last


def _arrival(span: Span) -> float:
    return span[1]
