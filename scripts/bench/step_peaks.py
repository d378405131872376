"""The most bytes that each counted step of a run held on a device, from the times in its trace.

A trace keeps the most of a whole run, which one late message among all steps decides; it is the median step that a
simulation without noise can be compared with.
"""

from __future__ import annotations

import numpy as np

from gems.errors import ConfigError
from gems.schedule.action import Action
from gems.schedule.costs import StageCosts
from gems.schedule.memory import memory_over_time
from gems.schedule.schedule import Schedule
from gems.schedule.simulate import Simulation
from gems.trace import KINDS, Trace

NAME = ("kind", "stage", "segment", "direction", "micro_batch")


def step_peaks(
    trace: Trace, schedule: Schedule, costs: StageCosts, unit_s: float, activation_bytes: float
) -> np.ndarray:
    """Return the most bytes that come and go on any rank in each counted step, (steps,): activations and messages.

    Args:
        trace: of an emulated or simulated run, with the events of every action.
        schedule: the lowered one that it ran.
        costs: of its stages, boundaries in bytes.
        unit_s: seconds of a unit of the costs.
        activation_bytes: bytes of a unit of activations.

    Raises:
        ConfigError: a step lacks an action.
    """
    counted = trace.steps["step"][trace.steps["is_warmup"] == 0]
    events = trace.events[np.isin(trace.events["step"], counted)]
    pipelines = 1 + int(events["rank"].max(initial=0)) // schedule.num_ranks
    found = np.zeros((len(counted), pipelines))
    for number, step in enumerate(counted):
        of_step = events[events["step"] == step]
        for replica in range(pipelines):
            played = _played(of_step, schedule, replica, unit_s)
            held = memory_over_time(schedule, costs, played, activation_bytes)
            found[number, replica] = max(rank.peak for rank in held)
    peaks: np.ndarray = found.max(axis=1)
    return peaks


def _played(events: np.ndarray, schedule: Schedule, replica: int, unit_s: float) -> Simulation:
    """Return the times of one replica's actions in one step, in units from its first event."""
    first_ns = events["start_ns"].min()
    starts, ends = [], []
    for rank, row in enumerate(schedule.rows):
        mine = events[events["rank"] == replica * schedule.num_ranks + rank]
        names = zip(*(mine[column].tolist() for column in NAME), strict=True)
        spans = zip(mine["start_ns"] - first_ns, mine["end_ns"] - first_ns, strict=True)
        times = dict(zip(names, spans, strict=True))
        found = [times.get(_name(action)) for action in row]
        if None in found:
            raise ConfigError("trace", f"rank {rank}", f"lacks {row[found.index(None)]}")
        start_ns, end_ns = zip(*filter(None, found), strict=True)
        starts.append(tuple(float(time) * 1e-9 / unit_s for time in start_ns))
        ends.append(tuple(float(time) * 1e-9 / unit_s for time in end_ns))
    return Simulation(tuple(starts), tuple(ends), 0.0, (), ())


def _name(action: Action) -> tuple[int, ...]:
    numbers = (action.segment, action.micro_batch)
    segment, micro_batch = (-1 if number is None else number for number in numbers)
    return KINDS.index(action.kind.value), action.stage, segment, action.direction, micro_batch
