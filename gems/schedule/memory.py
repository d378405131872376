"""Memory over the time of a simulated step, rank by rank.

It covers activations, boundary buffers and copies in host memory.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass

from gems.schedule.action import COMPUTE_KINDS, RECV_KINDS, SEND_KINDS, Action, Kind
from gems.schedule.costs import StageCosts
from gems.schedule.dependencies import boundary_of, dependencies
from gems.schedule.ledger import TOLERANCE, Ledger
from gems.schedule.schedule import Schedule
from gems.schedule.simulate import Simulation

ACTIVATIONS, BOUNDARIES, HOST = range(3)
Change = tuple[float, int, float]


@dataclass(frozen=True, slots=True)
class Held:
    """The bytes that a rank holds from `time` on.

    `time` is in the unit of the costs. `activations` and `boundaries` (messages that leave or
    arrive) are on the device; `host` is in host memory.
    """

    time: float
    activations: float
    boundaries: float
    host: float

    @property
    def device(self) -> float:
        """Bytes on the device that come and go."""
        return self.activations + self.boundaries


@dataclass(frozen=True, slots=True)
class RankMemory:
    """The memory of one rank: its constant `parameters`, and the bytes that come and go."""

    parameters: float
    held: tuple[Held, ...]

    @property
    def peak(self) -> float:
        """The peak of the bytes on the device, including the parameters."""
        return self.parameters + max((point.device for point in self.held), default=0.0)

    def at(self, time: float) -> Held:
        """Return the memory held just after `time`."""
        place = bisect.bisect_right(self.held, time + TOLERANCE, key=lambda point: point.time)
        return self.held[place - 1] if place else Held(0.0, 0.0, 0.0, 0.0)


def memory_over_time(
    schedule: Schedule,
    costs: StageCosts,
    result: Simulation,
    activation_bytes: float = 1.0,
    param_bytes: float = 0.0,
) -> tuple[RankMemory, ...]:
    """Return each rank's memory over a simulated step.

    An action's activations are allocated when it starts and freed when it ends; those of a copy to
    host memory are freed when the copy ends. A send's buffer is held until the message has arrived,
    and a receive's buffer from its posting until the compute that needs it has ended. Host memory
    is held from the end of the copy out to the end of the copy back.

    `result` is the simulation of this schedule; transfers in its list have the boundary buffers.
    `activation_bytes` is the size of one unit of activations, and `param_bytes` the size of the
    parameters of one direction's stages on a rank.
    """
    memories = []
    for rank, actions in enumerate(schedule.rank_schedules):
        ledger = Ledger(schedule, costs)
        changes: list[Change] = []
        arriving: dict[Action, float] = {}
        last_reader = {
            need: action
            for action in actions
            if action.kind in COMPUTE_KINDS
            for need in dependencies(action, schedule)
        }
        for action, start, end in zip(actions, result.start[rank], result.end[rank], strict=True):
            kind = action.kind
            if kind in SEND_KINDS:
                size = costs.boundary_bytes[boundary_of(action)]
                changes += [(start, BOUNDARIES, size), (end, BOUNDARIES, -size)]
            elif kind in RECV_KINDS:
                arriving[action] = costs.boundary_bytes[boundary_of(action)]
                changes.append((start, BOUNDARIES, arriving[action]))
            elif kind is Kind.OFFLOAD:
                changes.append(
                    (end, ACTIVATIONS, -ledger.leaves_at_once(action) * activation_bytes)
                )
                changes.append((end, HOST, costs.moved(action) * activation_bytes))
            else:
                for need in dependencies(action, schedule) if kind in COMPUTE_KINDS else ():
                    if need in arriving and last_reader[need] is action:
                        changes.append((end, BOUNDARIES, -arriving.pop(need)))
                if kind is Kind.PREFETCH:
                    changes.append((end, HOST, -costs.moved(action) * activation_bytes))
                changes.append((start, ACTIVATIONS, ledger.brings(action) * activation_bytes))
                changes.append((end, ACTIVATIONS, -ledger.leaves(action) * activation_bytes))
        directions = {direction for direction, _ in schedule.placement.stages_on(rank)}
        memories.append(RankMemory(param_bytes * len(directions), _summed(changes)))
    return tuple(memories)


def _summed(changes: list[Change]) -> tuple[Held, ...]:
    """Add up the changes, with one point for all changes at the same time.

    Memory that is freed at a time makes room for allocations at that time.
    """
    points: list[Held] = []
    sums = [0.0, 0.0, 0.0]
    at = 0.0
    is_open = False
    for time, category, size in sorted(change for change in changes if change[2]):
        if is_open and time > at + TOLERANCE:
            points.append(Held(at, *sums))
            is_open = False
        if not is_open:
            at = time
            is_open = True
        sums[category] += size
    return (*points, Held(at, *sums)) if is_open else ()
