"""The list scheduler of the finite schedule: it follows a template, and may run ahead of it."""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

from gems.schedule.action import Action, Kind
from gems.schedule.registry import CAPPED
from gems.schedule.schedule import Schedule
from gems.schedule.synthesis.problem import Act, Acting, Problem

NEVER = 1 << 60
NUM_OPERATIONS = 7  # per micro-batch on a stage


@dataclass(frozen=True, slots=True)
class Rules:
    """The decision rules of the list scheduler, in ticks.

    A forward starts at most `lead` before its key. A weight gradient counts as `defer` later than
    its key if a rank has a choice. A rank idles at most `patience` for an operation that will soon
    be ready and precedes the one that it could start. Activations are requested `ahead` operations
    early.
    """

    lead: int = NEVER
    defer: int = 0
    patience: int = 0
    ahead: int = 2


# (key, micro-batch, operation, time at which its data are available)
Item = tuple[int, int, int, int]


class ListScheduler:
    """A simulation of a step forward in time.

    Each rank takes the operation that is ready, has room, and has the lowest key. The forwards of a
    stage keep the order of the micro-batches, whatever their keys, because the statistics of batch
    norm depend on it. Room is granted so that every micro-batch that has started can still end, in
    the order of their starts (the banker's algorithm: Dijkstra 1965), so no order of the keys leads
    to a deadlock. `rank_schedules` contain micro-batch x 7 S + operation, numbered as in `Acting`.
    `span` is in ticks, or `NEVER` if the step did not end.
    """

    def __init__(
        self,
        problem: Problem,
        keys: Sequence[Sequence[int]],
        actings: Sequence[Acting],
        rules: Rules,
    ) -> None:
        ranks = range(problem.num_ranks)
        numbers = range(problem.num_micro_batches)
        self.problem = problem
        self.keys = keys
        self.actings = actings
        self.rules = rules
        self.num_stages = problem.num_stages
        # for each rank: when the rank and its copy engines are free, the sizes that are used and
        # being copied out, and the oldest micro-batch
        self.free, self.out_free, self.in_free = ([0] * problem.num_ranks for _ in range(3))
        self.used, self.leaving, self.oldest = ([0] * problem.num_ranks for _ in range(3))
        self.ready: list[list[Item]] = [[] for _ in ranks]
        self.weights: list[list[tuple[int, int, int]]] = [[] for _ in ranks]
        self.copies: list[list[tuple[int, int, int]]] = [[] for _ in ranks]
        self.rank_schedules: list[list[int]] = [[] for _ in ranks]
        ways = [m % problem.num_directions for m in numbers]
        self.held = [[0] * problem.num_micro_batches for _ in ranks]
        self.peak = [[actings[m].peak_at_first[ways[m]][rank] for m in numbers] for rank in ranks]
        counts = [
            [len(problem.rank_stages(rank, way)) for way in range(problem.num_directions)]
            for rank in ranks
        ]
        self.left = [[counts[rank][way] for way in ways] for rank in ranks]
        self.started: list[int] = []
        # for each direction and stage, the micro-batch whose forward comes next
        self.following = [[way] * self.num_stages for way in range(problem.num_directions)]
        self.queued: dict[tuple[int, int], list[Item]] = {}
        self.asked: dict[tuple[int, int], int] = {}
        self.away: dict[tuple[int, int], int] = {}
        self.restored: dict[tuple[int, int], int] = {}
        self.events: list[tuple[int, int]] = []
        self.todo = problem.num_steps
        self.span = 0
        for m in range(min(problem.num_directions, problem.num_micro_batches)):
            self.offer(problem.rank[m][0], (keys[m][0], m, 0, 0))
        events = self.events
        free = self.free
        while events:
            now, rank = heappop(events)
            if free[rank] <= now:
                self.decide(now, rank)
        if self.todo:
            self.span = NEVER

    def schedule(self) -> Schedule:
        """Return them as a schedule of actions."""
        stages = range(self.num_stages)
        kinds = [(Kind.F, stage) for stage in stages] + [
            (Kind.I, stage) for stage in reversed(stages)
        ]
        others = (Kind.W, Kind.R, Kind.OFFLOAD, Kind.PREFETCH, Kind.FREE)
        kinds += [(kind, stage) for kind in others for stage in stages]

        def action(code: int) -> Action:
            m, operation = divmod(code, NUM_OPERATIONS * self.num_stages)
            return Action(*kinds[operation], m, m % self.problem.num_directions)

        rank_schedules = tuple(tuple(map(action, actions)) for actions in self.rank_schedules)
        return Schedule(
            CAPPED, self.problem.num_micro_batches, self.problem.placement, rank_schedules
        )

    def offer(self, rank: int, item: Item) -> None:
        """Add an operation to those of a rank that wait for their turn."""
        insort(self.ready[rank], item)
        heappush(self.events, (item[3], rank))

    def decide(self, now: int, rank: int) -> None:
        """Start the next operation of an idle rank, or schedule when it decides again."""
        copies = self.copies[rank]
        while copies and copies[0][0] <= now:
            _, m, stage = heappop(copies)
            self.used[rank] -= self.problem.moved[stage]
            self.leaving[rank] -= self.problem.moved[stage]
            self.note(rank, m, 6 * self.num_stages + stage)
        best, coming, wake = self.choose(now, rank)
        weights = self.weights[rank]
        defer = self.rules.defer
        is_weight = bool(weights) and (
            best is None or (best[2] < 4 * self.num_stages and weights[0][0] + defer < best[0])
        )
        if coming is not None:
            rival = weights[0][0] + defer if is_weight else NEVER if best is None else best[0]
            if coming[0] < rival:
                heappush(self.events, (coming[3], rank))
                return
        if is_weight:
            self.start_weight_gradient(now, rank)
        elif best is None:
            if wake < NEVER:
                heappush(self.events, (wake, rank))
        else:
            self.ready[rank].remove(best)
            self.note(rank, best[1], best[2])
            if best[2] < 2 * self.num_stages:
                self.start_chain(now, rank, best)
            else:
                self.restore(now, rank, best)

    def choose(self, now: int, rank: int) -> tuple[Item | None, Item | None, int]:
        """Return the first operation that may start, an earlier one to come, and a wake time.

        At the wake time the rank must decide again.
        """
        num_stages = self.num_stages
        num_directions = self.problem.num_directions
        rules = self.rules
        horizon = now + rules.patience
        coming = None
        wake = NEVER
        refused = -1
        refused_size = 0
        for item in self.ready[rank]:
            key, m, operation, at = item
            if at > now:
                if at <= horizon and coming is None:
                    coming = item
                continue
            if num_stages <= operation < 2 * num_stages:
                size = self.problem.grows[2 * num_stages - 1 - operation]
            elif operation < num_stages:
                if m != self.following[m % num_directions][operation]:
                    continue
                if key > now + rules.lead:
                    wake = min(wake, key - rules.lead)
                    continue
                size = self.actings[m].takes[operation]
            elif operation < 4 * num_stages:
                size = self.problem.size[operation - 3 * num_stages]
                size -= self.problem.boundary[operation - 3 * num_stages]
            elif self.in_free[rank] > now:
                wake = min(wake, self.in_free[rank])
                continue
            else:
                size = self.problem.moved[operation - 5 * num_stages]
            if not size:
                return item, coming, wake
            if 0 <= refused < m and size >= refused_size and (m - refused) % num_directions == 0:
                continue  # an earlier micro-batch of its direction did not get this room
            if self.has_room(rank, m, operation, size):
                return item, coming, wake
            refused = m
            refused_size = size
        return None, coming, wake

    def has_room(self, rank: int, m: int, operation: int, size: int) -> bool:
        """Return whether `size` leaves room for all micro-batches in flight.

        These are all micro-batches that started earlier, and the rest of this one.
        """
        room = self.problem.cap - self.used[rank] - size
        if room < 0:
            return False
        room += self.leaving[rank]
        held = self.held[rank]
        peak = self.peak[rank]
        started = self.started
        for position in range(self.oldest[rank], len(started)):
            older = started[position]
            if older == m:
                break
            if peak[older] - held[older] > room:
                return False
            room += held[older]
        after = self.actings[m].peak_after[m % self.problem.num_directions][operation]
        return after - held[m] - size <= room

    def take(self, rank: int, m: int, size: int) -> None:
        """Count the size that an operation allocates, or frees if `size` is negative."""
        self.used[rank] += size
        self.held[rank][m] += size

    def note(self, rank: int, m: int, operation: int) -> None:
        """Append an operation to a rank's schedule."""
        self.rank_schedules[rank].append(m * NUM_OPERATIONS * self.num_stages + operation)

    def occupy(self, rank: int, until: int) -> None:
        """Keep a rank busy, and let it decide again at the end."""
        self.free[rank] = until
        heappush(self.events, (until, rank))

    def start_weight_gradient(self, now: int, rank: int) -> None:
        """Start a rank's first weight gradient, the last operation of a stage and micro-batch."""
        _, m, stage = heappop(self.weights[rank])
        self.take(rank, m, -self.problem.held[stage])
        self.note(rank, m, 2 * self.num_stages + stage)
        self.finish(rank, now + self.problem.weight_grad[stage])
        left = self.left[rank]
        started = self.started
        oldest = self.oldest[rank]
        left[m] -= 1
        while oldest < len(started) and not left[started[oldest]]:
            oldest += 1
        self.oldest[rank] = oldest

    def finish(self, rank: int, end: int) -> None:
        """Count an operation that ends at `end`."""
        self.todo -= 1
        self.span = max(self.span, end)
        self.occupy(rank, end)

    def start_chain(self, now: int, rank: int, item: Item) -> None:
        """Start a forward or an input gradient, and offer its successors."""
        _, m, operation, _ = item
        problem = self.problem
        acting = self.actings[m]
        num_stages = self.num_stages
        direction = m % problem.num_directions
        end = now + problem.time[operation]
        self.peak[rank][m] = acting.peak_after[direction][operation]
        if operation < num_stages:
            self.following[direction][operation] = m + problem.num_directions
            self.take(rank, m, acting.takes[operation])
            if acting.acts[operation] == Act.OFFLOAD:
                self.copy_out(rank, m, operation, end)
            if not operation:
                self.started.append(m)
                follower = m + problem.num_directions
                if follower < problem.num_micro_batches:
                    self.offer(rank, (self.keys[follower][0], follower, 0, end))
        else:
            stage = 2 * num_stages - 1 - operation
            self.take(rank, m, problem.held[stage] - problem.size[stage])
            heappush(self.weights[rank], (self.keys[m][2 * num_stages + stage], m, stage))
        for stage in acting.awaited[operation]:
            self.ask_back(now, m, stage, direction)
        following = operation + 1
        if following < 2 * num_stages:
            self.pass_on(m, following, end + problem.lag[direction][following], direction)
        self.finish(rank, end)

    def pass_on(self, m: int, operation: int, at: int, direction: int) -> None:
        """Offer the next operation of a chain; it waits for its activations if they are away."""
        stage = 2 * self.num_stages - 1 - operation
        if stage < self.num_stages and self.actings[m].acts[stage]:
            back = self.restored.get((m, stage))
            if back is None:
                self.asked[m, stage] = at
                return
            at = max(at, back)
        self.offer(
            self.problem.rank[direction][operation], (self.keys[m][operation], m, operation, at)
        )

    def copy_out(self, rank: int, m: int, stage: int, begin: int) -> None:
        """Post a copy to host memory, which starts when its engine is free."""
        end = max(begin, self.out_free[rank]) + self.problem.copy[stage]
        size = self.problem.moved[stage]
        self.out_free[rank] = end
        self.note(rank, m, 4 * self.num_stages + stage)
        self.held[rank][m] -= size
        self.leaving[rank] += size
        heappush(self.copies[rank], (end, m, stage))
        heappush(self.events, (end, rank))
        self.away[m, stage] = end

    def ask_back(self, now: int, m: int, stage: int, direction: int) -> None:
        """Offer the recomputation or copy back of a stage's activations, in order on each rank.

        In another order than that of the chain, the first one could take the room that the next one
        to be used needs.
        """
        num_stages = self.num_stages
        at = now
        key = self.keys[m][2 * num_stages - 1 - stage] - self.problem.recompute[stage]
        operation = 3 * num_stages + stage
        if self.actings[m].acts[stage] == Act.OFFLOAD:
            operation = 5 * num_stages + stage
            at = max(at, self.away.pop((m, stage)))
        rank = self.problem.rank[direction][stage]
        item = (key, m, operation, at)
        if (rank, m) in self.queued:
            self.queued[rank, m].append(item)
        else:
            self.queued[rank, m] = []
            self.offer(rank, item)

    def restore(self, now: int, rank: int, item: Item) -> None:
        """Start a recomputation on the rank or a copy back on its engine."""
        _, m, operation, _ = item
        problem = self.problem
        stage = operation % self.num_stages
        direction = m % problem.num_directions
        self.peak[rank][m] = self.actings[m].peak_after[direction][operation]
        if operation < 4 * self.num_stages:
            self.take(rank, m, problem.size[stage] - problem.boundary[stage])
            back = now + problem.recompute[stage]
            self.occupy(rank, back)
        else:
            self.take(rank, m, problem.moved[stage])
            back = self.in_free[rank] = now + problem.copy[stage]
            heappush(self.events, (now, rank))
        self.restored[m, stage] = back
        queue = self.queued[rank, m]
        if queue:
            self.offer(rank, (*queue[0][:3], max(now, queue.pop(0)[3])))
        else:
            del self.queued[rank, m]
        at = self.asked.get((m, stage))
        if at is not None:
            self.pass_on(m, 2 * self.num_stages - 1 - stage, at, direction)
