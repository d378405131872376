"""Event-driven simulation of one step of a schedule.

It covers the compute, link and copy streams of every rank, and tells where the time goes.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter

from gems.errors import ScheduleError
from gems.schedule.action import COMPUTE_KINDS, COPY_KINDS, RECV_KINDS, SEND_KINDS, Action, Kind
from gems.schedule.costs import FREE, Network, StageCosts
from gems.schedule.dependencies import dependencies, stages_summed
from gems.schedule.ledger import BRINGING_KINDS, LEAVING_KINDS, Ledger
from gems.schedule.schedule import Schedule

_I = Kind.I
_R = Kind.R
_STEP = Kind.STEP
_REDUCE_GRAD = Kind.REDUCE_GRAD
_START_REDUCE = Kind.START_REDUCE
_OFFLOAD = Kind.OFFLOAD
_PREFETCH = Kind.PREFETCH
_USEFUL_KINDS = COMPUTE_KINDS - {_R}
Span = tuple[float, float]
Posting = tuple[int, int, float]  # rank, place in its schedule, and time


@dataclass(frozen=True, slots=True)
class Pace:
    """The disturbances of one pipeline that the costs of its stages do not include.

    Compute on `slow_rank`, a rank of the pipeline, takes `slowdown` times as long. If `slowdowns`
    is given, everything on rank r takes `slowdowns[r]` times as long. A rank on which a direction
    begins reads its inputs one after the other from the beginning of the step, and each takes
    `input` units of time. `late` maps each reduction to the earliest time at which peers in other
    replicas join it.
    """

    slow_rank: int | None = None
    slowdown: float = 1.0
    input: float = 0.0
    slowdowns: tuple[float, ...] = ()
    late: Mapping[Action, float] = field(default_factory=dict, hash=False)

    def factor(self, rank: int, action: Action) -> float:
        """Return the factor by which an action on `rank` takes longer than its cost."""
        usual = self.slowdowns[rank] if self.slowdowns else 1.0
        return (
            usual * self.slowdown
            if rank == self.slow_rank and action.kind in COMPUTE_KINDS
            else usual
        )

    def inputs_ready(self, schedule: Schedule, rank: int) -> dict[Action, float]:
        """Return when each forward's input is ready, in units of time after the start of the step.

        Only forwards that read an input are included.
        """
        if not self.input:
            return {}
        first = schedule.first_segment(0)
        readers = (
            a
            for a in schedule.rank_schedules[rank]
            if a.kind is Kind.F and a.stage == 0 and a.segment == first
        )
        return {action: (number + 1) * self.input for number, action in enumerate(readers)}


EVEN = Pace()


@dataclass(frozen=True, slots=True)
class Simulation:
    """The time at which each action ran, in the units of the costs.

    `start` and `end` follow `Schedule.rank_schedules`. For a transfer they are posting and arrival,
    for START_REDUCE posting and end of the sum, for a copy begin and end on the copy engine. `peak`
    is the most activations that each rank held at once, in their unit.
    """

    start: tuple[tuple[float, ...], ...]
    end: tuple[tuple[float, ...], ...]
    span: float
    busy: tuple[float, ...]
    peak: tuple[float, ...]

    @property
    def efficiency(self) -> float:
        """Useful compute divided by ranks x span.

        Recomputation does not count as useful, nor does the extra time of a split backward.
        """
        return sum(self.busy) / (len(self.busy) * self.span) if self.span else 1.0


def simulate(
    schedule: Schedule,
    costs: StageCosts,
    network: Network = FREE,
    cap: float | None = None,
    pace: Pace = EVEN,
) -> Simulation:
    """Simulate one step on all ranks at once.

    Transfers and copies are posted; the action that needs the data waits. If the schedule contains
    no transfers, data still takes the network's time. `cap` is the most activations that a rank may
    hold: an action that allocates some waits, in the order of the list, until copies to host memory
    make room.

    Raises:
        ScheduleError: an action waits for something that never comes (a deadlock, a missing
        partner, or no room).
    """
    return _Simulator(schedule, costs, network, cap, pace).run()


class _Simulator:
    def __init__(
        self, schedule: Schedule, costs: StageCosts, network: Network, cap: float | None, pace: Pace
    ) -> None:
        ranks = range(schedule.num_ranks)
        self.schedule = schedule
        self.costs = costs
        self.network = network
        self.pace = pace
        self.inputs_ready = dict(
            item for rank in ranks for item in pace.inputs_ready(schedule, rank).items()
        )
        self.reduced: dict[int, float] = {}
        self.clock = [0.0] * schedule.num_ranks
        self.next = [0] * schedule.num_ranks
        self.start: list[list[float]] = [[] for _ in ranks]
        self.end: list[list[float]] = [[] for _ in ranks]
        self.busy = [0.0] * schedule.num_ranks
        self.splits_cost = any(costs.split)
        self.ledgers = [Ledger(schedule, costs, cap) for _ in ranks]
        self.engines: dict[tuple[int, Kind], float] = {}
        self.done: dict[Action, float] = {}
        # transfers with one side posted, by their sends
        self.sends: dict[Action, Posting] = {}
        self.receives: dict[Action, tuple[Posting, Action]] = {}
        self.waiting: dict[Action, list[int]] = {}
        self.arrived: dict[int, dict[int, float]] = {}
        self.ready = [(0.0, rank) for rank in ranks]
        # without transfers in the list data takes the network's time on its way to another rank
        self.has_delay = network.takes_time(costs.boundary_bytes)
        self.is_delayed = self.has_delay and not schedule.has_transfers

    def run(self) -> Simulation:
        rank_schedules = self.schedule.rank_schedules
        ready = self.ready
        clock = self.clock
        following = self.next
        # ranks must run in the order of time only if messages compete for links
        keeps_time = self.network.has_contention
        while ready:
            now, rank = heapq.heappop(ready)
            actions = rank_schedules[rank]
            while following[rank] < len(actions):
                if keeps_time and clock[rank] > now and ready and ready[0][0] < clock[rank]:
                    heapq.heappush(ready, (clock[rank], rank))
                    break
                if not self.advance(rank, actions[following[rank]]):
                    break
                following[rank] += 1
        self.refuse_stuck()
        span = max((max(ends, default=0.0) for ends in self.end), default=0.0)
        peak = tuple(ledger.peak for ledger in self.ledgers)
        return Simulation(
            tuple(map(tuple, self.start)), tuple(map(tuple, self.end)), span, tuple(self.busy), peak
        )

    def advance(self, rank: int, action: Action) -> bool:
        """Run one action if it can run; otherwise note which event must wake this rank."""
        kind = action[0]
        needs = dependencies(action, self.schedule)
        if kind in RECV_KINDS:
            (send,) = needs
            posting = self.post(rank)
            sent = self.sends.pop(send, None)
            if sent is None:
                self.receives[send] = posting, action
            else:
                self.transfer(send, action, sent, posting)
            return True
        if kind is _REDUCE_GRAD:
            return self.reduce(rank, action)
        begin = self.clock[rank]
        if kind is _START_REDUCE:
            self.stamp(rank, begin, self.sum_gradients(action, (rank,), begin))
            return True
        for need in needs:
            ended = self.done.get(need)
            if ended is None:
                self.waiting.setdefault(need, []).append(rank)
                return False
            if self.is_delayed and need.stage != action.stage:
                ended += _delay(need, action, self.schedule, self.costs, self.network)
            if ended > begin:
                begin = ended
        if kind in SEND_KINDS:
            posting = self.post(rank)
            received = self.receives.pop(action, None)
            if received is None:
                self.sends[action] = posting
            else:
                self.transfer(action, received[1], posting, received[0])
            return True
        if kind in COPY_KINDS:
            self.copy(rank, action, begin)
            return True
        if self.inputs_ready:
            begin = max(begin, self.inputs_ready.get(action, 0.0))
        if kind in BRINGING_KINDS:
            begin = self.ledgers[rank].take(rank, action, begin)
        time = self.costs.time(action)
        finish = begin + (time if self.pace is EVEN else time * self.pace.factor(rank, action))
        if kind in LEAVING_KINDS:
            self.ledgers[rank].give(action)
        self.clock[rank] = finish
        self.start[rank].append(begin)
        self.end[rank].append(finish)
        if kind is not _STEP:
            if kind in _USEFUL_KINDS:
                is_longer = kind is _I and self.splits_cost
                self.busy[rank] += time - self.costs.held("split", action) if is_longer else time
            self.finish(action, finish)
        return True

    def post(self, rank: int) -> Posting:
        """Post one side of a transfer."""
        now = self.clock[rank]
        start = self.start[rank]
        start.append(now)
        self.end[rank].append(now)
        return rank, len(start) - 1, now

    def transfer(self, send: Action, receive: Action, sender: Posting, receiver: Posting) -> None:
        """Send data, after both sides are posted, as soon as the lanes are free."""
        arrival = max(sender[2], receiver[2])
        if self.has_delay or self.network.has_contention:
            size = self.costs.boundary_bytes[min(send.stage, receive.stage)]
            latency, transmission = self.network.parts(sender[0], receiver[0], size)
            if self.network.has_contention:
                out, into = self.network.lanes(sender[0], receiver[0])
                arrival = self.pass_through(
                    [(out, Kind.SEND_F), (into, Kind.RECV_F)], arrival, transmission
                )
            arrival += latency + transmission
        self.end[sender[0]][sender[1]] = self.end[receiver[0]][receiver[1]] = arrival
        self.finish(receive, arrival)

    def copy(self, rank: int, action: Action, begin: float) -> None:
        """Start a copy on its engine (one per rank and direction); the rank goes on."""
        engine = (rank, action.kind)
        begin = max(begin, self.engines.get(engine, 0.0))
        if action.kind is _PREFETCH:
            begin = self.ledgers[rank].take(rank, action, begin)
        finish = begin + self.costs.time(action)
        if action.kind is _OFFLOAD:
            self.ledgers[rank].give_at(action, finish)
        self.engines[engine] = finish
        self.stamp(rank, begin, finish)
        self.finish(action, finish)

    def reduce(self, rank: int, action: Action) -> bool:
        """Join a collective; the last peer to arrive releases all of them."""
        group = self.arrived.setdefault(action.stage, {})
        peers = self.schedule.placement.peers_of(rank)
        if rank not in group:
            group[rank] = self.clock[rank]
            if len(group) < len(peers):
                return False
            for peer in peers:
                if peer != rank:
                    heapq.heappush(self.ready, (self.clock[rank], peer))
        elif len(group) < len(peers):
            return False
        if action.stage not in self.reduced:
            self.reduced[action.stage] = self.sum_gradients(action, peers, max(group.values()))
        begin, self.clock[rank] = self.clock[rank], self.reduced[action.stage]
        self.stamp(rank, begin, self.clock[rank])
        return True

    def sum_gradients(self, action: Action, ranks: Sequence[int], ready: float) -> float:
        """Sum gradients over ranks that are ready, after their earlier sums; return the end."""
        begin = max(ready, self.pace.late.get(action, 0.0))
        stages = stages_summed(action, self.schedule)
        ways = [(rank, _REDUCE_GRAD) for rank in ranks]
        begin = max(begin, *(self.engines.get(way, 0.0) for way in ways))
        link_time = sum(self.costs.reduce_link[stage] for stage in stages)
        if self.network.has_contention and link_time:
            lanes = {self.network.outer_lane(rank) for rank in ranks}
            outer = [(lane, kind) for lane in lanes for kind in (Kind.SEND_F, Kind.RECV_F)]
            begin = self.pass_through(outer, begin, link_time)
        end = begin + sum(self.costs.reduce[stage] for stage in stages)
        self.engines.update(dict.fromkeys(ways, end))
        return end

    def pass_through(self, ways: Sequence[tuple[int, Kind]], begin: float, time: float) -> float:
        """Occupy lanes, which pass one message at a time, once all are free; return that time."""
        begin = max(begin, *(self.engines.get(way, 0.0) for way in ways))
        self.engines.update(dict.fromkeys(ways, begin + time))
        return begin

    def stamp(self, rank: int, start: float, end: float) -> None:
        self.start[rank].append(start)
        self.end[rank].append(end)

    def finish(self, action: Action, time: float) -> None:
        self.done[action] = time
        for rank in self.waiting.pop(action, ()):
            heapq.heappush(self.ready, (max(time, self.clock[rank]), rank))

    def refuse_stuck(self) -> None:
        """Raise ScheduleError if a rank waits in a cycle, or for something that never comes."""
        rank_schedules = self.schedule.rank_schedules
        stuck = {
            rank: actions[self.next[rank]]
            for rank, actions in enumerate(rank_schedules)
            if self.next[rank] < len(actions)
        }
        path: list[int] = []
        rank = min(stuck, default=None)
        while rank is not None and rank not in path:
            path.append(rank)
            rank = next(
                (other for other in self.awaited(rank, stuck[rank]) if other in stuck), None
            )
        if not path:
            return
        rank = path[-1] if rank is None else min(path[path.index(rank) :])
        action = stuck[rank]
        needs = [str(need) for need in dependencies(action, self.schedule) if need not in self.done]
        what = f"waits for {', '.join(needs)}" if needs else "waits for its peers"
        raise ScheduleError(rank, action, f"{what}, which never comes")

    def awaited(self, rank: int, action: Action) -> Iterator[int]:
        """Yield the ranks that a stuck action waits for."""
        if action.kind is Kind.REDUCE_GRAD:
            here = self.arrived.get(action.stage, {})
            yield from (peer for peer in self.schedule.placement.peers_of(rank) if peer not in here)
        for need in dependencies(action, self.schedule):
            if need not in self.done:
                sends = dependencies(need, self.schedule) if need.kind in RECV_KINDS else (need,)
                yield from map(self.schedule.rank_of, sends)


@dataclass(frozen=True, slots=True)
class RankTime:
    """The time of one rank in one step, in the unit of the costs; the parts add up to the step.

    `useful` is F, B, I and W; `recompute` is R. `link` is the exposed communication: the rank waits
    while the awaited message is under way. `input` is waiting for the input of a micro-batch,
    `reduce` the gradient reduction including the wait for peers, and `step` the optimizer step.
    `idle` is the rest: the rank waits for others to compute, for room under the cap, or for copies
    to come back.
    """

    useful: float
    recompute: float
    link: float
    reduce: float
    step: float
    idle: float
    input: float = 0.0


def rank_times(
    schedule: Schedule,
    costs: StageCosts,
    simulation: Simulation,
    network: Network = FREE,
    pace: Pace = EVEN,
) -> tuple[RankTime, ...]:
    """Split each rank's step into its parts.

    `network` and `pace` must be the ones with which `simulation` was made.
    """
    spans = {
        action: (start, end)
        for actions, starts, ends in zip(
            schedule.rank_schedules, simulation.start, simulation.end, strict=True
        )
        for action, start, end in zip(actions, starts, ends, strict=True)
        if action.kind is not Kind.STEP and action.kind is not Kind.REDUCE_GRAD
    }
    times = []
    for rank, (actions, starts, ends) in enumerate(
        zip(schedule.rank_schedules, simulation.start, simulation.end, strict=True)
    ):
        free = 0.0
        parts = dict.fromkeys(("useful", "recompute", "link", "input", "reduce", "step"), 0.0)
        inputs_ready = pace.inputs_ready(schedule, rank)
        for action, start, end in zip(actions, starts, ends, strict=True):
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
        times.append(RankTime(**parts, idle=simulation.span - sum(parts.values())))
    return tuple(times)


def _flight(
    action: Action,
    schedule: Schedule,
    costs: StageCosts,
    network: Network,
    spans: dict[Action, Span],
) -> Span:
    """Return when the last message that an action needs departed and arrived."""
    last = (0.0, 0.0)
    for need in dependencies(action, schedule):
        if need.kind in RECV_KINDS:
            (send,) = dependencies(need, schedule)
            last = max(
                last, (max(spans[need][0], spans[send][0]), spans[need][1]), key=itemgetter(1)
            )
        elif need.stage != action.stage and need.kind not in COPY_KINDS:
            end = spans[need][1]
            arrival = end + _delay(need, action, schedule, costs, network)
            last = max(last, (end, arrival), key=itemgetter(1))
    return last


def _delay(
    need: Action, action: Action, schedule: Schedule, costs: StageCosts, network: Network
) -> float:
    """Return the time of data on its way from one stage to another, without transfers."""
    here = schedule.rank_of(need)
    there = schedule.rank_of(action)
    if here == there:
        return 0.0
    return network.delay(here, there, costs.boundary_bytes[min(need.stage, action.stage)])
