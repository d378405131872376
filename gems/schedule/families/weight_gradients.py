"""Place the weight gradients: in the time that a rank would wait, and if memory requires them."""

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import replace

from gems.schedule.action import Action, Kind, weight_gradient
from gems.schedule.costs import StageCosts, uniform
from gems.schedule.schedule import Schedule
from gems.schedule.simulate import simulate

_SLACK = 1e-9
_SHARE = 0.25


def place_weight_gradients(schedule: Schedule, costs: StageCosts, most_held: int) -> Schedule:
    """Add a W for every I to a schedule of F and I, whose order stays.

    W fills the bubbles (Qi et al. 2023). A rank runs its oldest W if it would wait for its next
    action, or if the next forward would hold more than `most_held` pairs of stage and micro-batch;
    the remaining W follow its last action. With unequal times it is not obvious how short a wait
    justifies a W. So the faster of two schedules is taken: the one for equal times, and one with a
    W in each wait of at least a quarter of its time. Whether `most_held` can be kept depends on the
    order of F and I alone; a schedule that cannot keep it exceeds it, because otherwise it would
    wait for ever.
    """
    equal = uniform(schedule.num_ranks, schedule.num_stages)
    plain = _Filling(schedule, equal, most_held, 1.0).schedule()
    if len({*costs.forward, *costs.split_input_grad, *costs.weight_grad}) == 1:
        return plain
    eager = _Filling(schedule, costs, most_held, _SHARE)
    return eager.schedule() if eager.span() < simulate(plain, costs).span else plain


class _Filling:
    """A simulation of all ranks at once, in the order of time.

    A micro-batch passes through 2 S places, F of stages 0 to S - 1 and I of stages S - 1 to 0; an
    action waits for the previous place of the same micro-batch.
    """

    def __init__(self, order: Schedule, costs: StageCosts, most_held: int, share: float) -> None:
        ranks = range(order.num_ranks)
        self.order = order
        self.most_held = most_held
        self.share = share
        self.num_stages = order.num_stages
        self.weight_times = costs.weight_grad
        self.times = (*costs.forward, *reversed(costs.split_input_grad))
        self.ended: list[list[float | None]] = [
            [None] * order.num_micro_batches for _ in self.times
        ]
        self.rank_schedules: list[list[Action]] = [[] for _ in ranks]
        self.todo = [deque(actions) for actions in order.rank_schedules]
        self.owed: list[deque[Action]] = [deque() for _ in ranks]
        self.held = [0 for _ in ranks]
        self.last = [0.0 for _ in ranks]
        self.waiting: dict[tuple[int, int], int] = {}
        self.free = [(0.0, rank) for rank in ranks]
        while self.free:
            now, rank = heapq.heappop(self.free)
            self.last[rank] = now
            if self.todo[rank]:
                self.advance(rank, now)

    def schedule(self) -> Schedule:
        rank_schedules = tuple(
            (*actions, *owed) for actions, owed in zip(self.rank_schedules, self.owed, strict=True)
        )
        return replace(self.order, rank_schedules=rank_schedules)

    def span(self) -> float:
        rests = (sum(self.weight_times[weight.stage] for weight in owed) for owed in self.owed)
        return max(last + rest for last, rest in zip(self.last, rests, strict=True))

    def advance(self, rank: int, now: float) -> None:
        """Start one action of a free rank, or note the action that must wake it."""
        action = self.todo[rank][0]
        owed = self.owed[rank]
        stage = action.stage
        m = action.micro_batch or 0
        is_forward = action.kind is Kind.F
        place = stage if is_forward else 2 * self.num_stages - 1 - stage
        ready = self.ended[place - 1][m] if place else 0.0
        if owed:
            time = self.weight_times[owed[0].stage]
            wait = (self.soonest(place - 1, m, now) if ready is None else ready) - now
            is_full = is_forward and self.held[rank] >= self.most_held
            if is_full or wait > max(_SLACK, self.share * time - _SLACK):
                self.held[rank] -= 1
                self.rank_schedules[rank].append(owed.popleft())
                heapq.heappush(self.free, (now + time, rank))
                return
        if ready is None:
            self.waiting[place - 1, m] = rank
            return
        self.rank_schedules[rank].append(self.todo[rank].popleft())
        if is_forward:
            self.held[rank] += 1
        else:
            owed.append(weight_gradient(stage, m))
        end = self.ended[place][m] = max(now, ready) + self.times[place]
        heapq.heappush(self.free, (end, rank))
        waits = self.waiting.pop((place, m), None)
        if waits is not None:
            heapq.heappush(self.free, (end, waits))

    def soonest(self, place: int, micro_batch: int, now: float) -> float:
        """Return the earliest possible end of a place that has not begun."""
        time = 0.0
        while place >= 0:
            end = self.ended[place][micro_batch]
            if end is not None:
                return max(now, end) + time
            time += self.times[place]
            place -= 1
        return now + time
