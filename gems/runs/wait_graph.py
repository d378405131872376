"""The graph of waiting ranks: find those that block all others, from heartbeats and schedule."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from gems.errors import ConfigError
from gems.runs.heartbeat import FINISHED, Beat
from gems.schedule.action import COMPUTE_KINDS, RECV_KINDS, SEND_KINDS, Action, Kind
from gems.schedule.dependencies import dependencies, other_stage, partner_of
from gems.schedule.schedule import Schedule

SILENT_AFTER_S = 10.0  # signs of life come every second, but a network file system may delay them
SENDS = "sends to leave"  # the wait of a rank whose own messages have not left yet
SHOWN = 3
RECORDED_ROOTS = 8
Point = tuple[int, int]  # (step, index in the rank's schedule); -1 is before the first action


class State(StrEnum):
    """The activity of a rank, the likelier cause of a hang first; the value is its text."""

    SILENT = "is silent"
    FINISHED = "has finished"
    WORKS = "works"
    WAITS = "waits"


@dataclass(frozen=True, slots=True)
class RankState:
    """A rank's last mark, the time since then, what it waits for, and the ranks it waits for."""

    rank: int
    node: str
    pid: int
    step: int
    action: str
    since_s: float
    state: State
    waits_for: str = ""
    of_ranks: tuple[int, ...] = ()

    def text(self, who: str, after: tuple[int, ...] = ()) -> str:
        """Describe the rank in a clause; `after` begins with the rank that it waits for."""
        where = f"in step {self.step}, action {self.action}"
        if self.step < 0 or self.state is State.FINISHED:
            where = f"outside of the steps ({self.action})"
        since = f"{where} since {self.since_s:.0f} s"
        if self.state is not State.WAITS:
            return f"{who} {self.state} {since}"
        receive = parse_action(self.waits_for)
        is_receive = receive is not None and receive.kind in RECV_KINDS
        what = partner_of(receive) if receive is not None and is_receive else self.waits_for
        return f"{who} waits {since} for {what}" + (f" of rank {after[0]}" if after else "")


class WaitGraph:
    """The ranks of a run at one moment; only the necessary entries of `beats` are read."""

    def __init__(
        self,
        schedule: Schedule,
        beats: Mapping[int, Beat],
        now_ns: int,
        silent_after_s: float = SILENT_AFTER_S,
    ) -> None:
        self._schedule = schedule
        self._beats = beats
        self._now_ns = now_ns
        self._silent_ns = silent_after_s * 1e9
        self._index: dict[int, dict[Action, int]] = {}

    def state(self, rank: int) -> RankState:
        """Return the activity of a rank.

        Raises:
            KeyError: The rank has left no mark.
        """
        beat = self._beats[rank]
        state = self._state(rank)
        waits = state is State.WAITS
        since_s = max(0.0, (self._now_ns - max(beat.time_ns, beat.moved_ns)) * 1e-9)
        return RankState(
            rank,
            beat.node,
            beat.pid,
            beat.step,
            beat.action,
            since_s,
            state,
            (beat.waits_for or self._guess(rank)) if waits else "",
            self._awaited(rank) if waits else (),
        )

    def held_up_by(self, rank: int) -> Iterator[Beat]:
        """Yield the marks of all ranks that `rank` waits for, directly or through others."""
        seen = {rank}
        queue = [rank]
        for at in queue:
            if at not in self._beats:
                continue
            if at != rank:
                yield self._beats[at]
            after = self._awaited(at) if self._state(at) is State.WAITS else ()
            queue += [other for other in after if other not in seen]
            seen.update(after)

    def _state(self, rank: int) -> State:
        beat = self._beats[rank]
        if beat.action == FINISHED:
            return State.FINISHED
        if self._is_silent(beat):
            return State.SILENT
        if beat.waits_for:
            return State.WAITS
        return State.WORKS if beat.alive_ns or not self._guess(rank) else State.WAITS

    def _is_silent(self, beat: Beat) -> bool:
        return (
            beat.alive_ns > 0 and self._now_ns - max(beat.alive_ns, beat.time_ns) > self._silent_ns
        )

    def _guess(self, rank: int) -> str:
        """Infer from the schedule what a rank waits for, or return "" if it need not wait."""
        action = parse_action(self._beats[rank].action)
        if action is None or action not in self._indices(rank):
            return ""
        if action.kind is Kind.REDUCE_GRAD:
            return "the sum of gradients" if self._late(rank) else ""
        if action.kind in COMPUTE_KINDS:
            for need in dependencies(action, self._schedule):
                if need.kind in RECV_KINDS and (other := self._peer(rank, need)) in self._beats:
                    # the index of the send, which has not been posted yet
                    index = self._indices(other).get(partner_of(need))
                    if index is not None and self._point(other) < (self._beats[rank].step, index):
                        return str(need)
        return ""

    def _awaited(self, rank: int) -> tuple[int, ...]:
        """Return the ranks that a waiting rank waits for."""
        what = self._beats[rank].waits_for or self._guess(rank)
        receive = parse_action(what)
        if receive is not None and receive.kind in RECV_KINDS:
            return (self._peer(rank, receive),)
        return self._without_receive(rank) if what == SENDS else self._late(rank)

    def _late(self, rank: int) -> tuple[int, ...]:
        """Return the ranks that hold up the collective operation of `rank`.

        They have not reached it, or they are there and do not wait.
        """
        action = parse_action(self._beats[rank].action)
        num_ranks = self._schedule.num_ranks
        is_sum = action is not None and action.kind is Kind.REDUCE_GRAD
        ranks: Iterable[int] = self._beats
        if is_sum:
            replicas = -(-len(self._beats) // num_ranks)
            ranks = self._schedule.placement.reduce_group(rank % num_ranks, replicas)
        step, index = self._point(rank)
        late = []
        for other in ranks:
            if other == rank or other not in self._beats:
                continue
            indices = self._indices(other)
            point = self._point(other)
            beat = self._beats[other]
            meets = -1 if index < 0 else len(indices) - 1
            if is_sum:
                meets = next(
                    (i for action, i in indices.items() if action.kind is Kind.REDUCE_GRAD), meets
                )
            is_there = point == (step, meets) and (beat.waits_for != "" or not beat.alive_ns)
            if self._is_silent(beat) or (point <= (step, meets) and not is_there):
                late.append(other)
        return tuple(late)

    def _without_receive(self, rank: int) -> tuple[int, ...]:
        """Return the ranks that are silent or have not posted a receive of this rank's messages."""
        late: dict[int, None] = {}
        for action in self._indices(rank):
            if action.kind in SEND_KINDS and (other := self._peer(rank, action)) in self._beats:
                index = self._indices(other).get(partner_of(action), -1)
                if self._is_silent(self._beats[other]) or self._point(other) <= (
                    self._beats[rank].step,
                    index,
                ):
                    late[other] = None
        return tuple(late)

    def _peer(self, rank: int, transfer: Action) -> int:
        """Return the world rank at the other end of a transfer."""
        first = rank - rank % self._schedule.num_ranks
        return first + self._schedule.placement.ranks[transfer.direction][other_stage(transfer)]

    def _point(self, rank: int) -> Point:
        beat = self._beats[rank]
        if beat.action == FINISHED:
            return (1 << 62, 0)
        action = parse_action(beat.action)
        return beat.step, -1 if action is None else self._indices(rank).get(action, -1)

    def _indices(self, rank: int) -> dict[Action, int]:
        place = rank % self._schedule.num_ranks
        if place not in self._index:
            self._index[place] = {
                action: i for i, action in enumerate(self._schedule.rank_schedules[place])
            }
        return self._index[place]


def parse_action(mark: str) -> Action | None:
    """Return the schedule's action that a mark names.

    Return None for a phase outside the schedule, such as a checkpoint.
    """
    try:
        return Action.parse(mark)
    except ConfigError:
        return None


@dataclass(frozen=True, slots=True)
class WaitingChain:
    """The ranks that cause a wait, and the states of all ranks.

    `roots` are the ranks that hold up others and wait for nobody, the likeliest cause first: silent
    ranks come before ranks that work, and among equals the one that has been in its action longest.
    `cycle` lists ranks that wait for each other in a ring, if nobody else holds them up.
    """

    states: Mapping[int, RankState]
    roots: tuple[RankState, ...]
    cycle: tuple[int, ...] = ()

    def root_records(self) -> list[dict[str, Any]]:
        """Return the first roots as records for STALLED.json."""
        return [asdict(root) | {"state": root.state.value} for root in self.roots[:RECORDED_ROOTS]]

    def path(self, rank: int) -> tuple[int, ...]:
        """Return the ranks from `rank` to a root; each waits for the next.

        The path of a ring ends at the rank with which it began.
        """
        paths: dict[int, tuple[int, ...]] = {rank: (rank,)}
        queue = [rank]
        for at in queue:
            for after in self.states[at].of_ranks:
                if after not in paths and after in self.states:
                    paths[after] = (*paths[at], after)
                    queue.append(after)
        for root in self.roots:
            if root.rank in paths:
                return paths[root.rank]
        if rank in self.cycle:
            at = self.cycle.index(rank)
            return (*self.cycle[at:], *self.cycle[: at + 1])
        return max(paths.values(), key=len)

    def text(self, rank: int | None = None) -> str:
        """Describe in one line the chain of waits from `rank` to the root.

        The default is the rank that has waited longest.
        """
        if rank is None or rank not in self.states:
            waiting = [one for one in self.states.values() if one.state is State.WAITS]
            if not waiting:
                return (
                    "; ".join(root.text(f"rank {root.rank}") for root in self.roots[:SHOWN])
                    or "no rank waits"
                )
            rank = max(waiting, key=lambda one: one.since_s).rank
        path = self.path(rank)
        parts = [self.states[rank].text(f"rank {rank}", path[1:2])]
        for i, at in enumerate(path[1:], 1):
            if at == rank:
                parts.append("which closes the ring")
            elif i < SHOWN or i >= len(path) - SHOWN + 1:
                parts.append(self.states[at].text("which", path[i + 1 : i + 2]))
            elif i == SHOWN:
                parts.append(
                    f"and so on over {len(path) - 2 * SHOWN + 1} ranks to rank {path[-SHOWN + 1]}"
                )
        return ", ".join(parts)


def waiting_chain(
    schedule: Schedule,
    beats: Mapping[int, Beat],
    now_ns: int | None = None,
    silent_after_s: float = SILENT_AFTER_S,
) -> WaitingChain:
    """Find the ranks that hold up others, from each rank's last mark.

    `beats` is indexed by world rank, pipeline by pipeline. `now_ns` is the wall clock, by default
    the last mark or sign of life of any rank. A rank is silent if it has given no sign of life for
    `silent_after_s`: it is stopped, dead, or held.
    """
    if now_ns is None:
        now_ns = max((max(beat.time_ns, beat.alive_ns) for beat in beats.values()), default=0)
    graph = WaitGraph(schedule, beats, now_ns, silent_after_s)
    states = {rank: graph.state(rank) for rank in sorted(beats)}
    held_up = {rank for one in states.values() for rank in one.of_ranks if rank in states}
    waiting = [one for one in states.values() if one.state is State.WAITS]
    ends = [one for one in states.values() if not one.of_ranks]
    if waiting:
        ends = [one for one in ends if one.rank in held_up or one.state is State.SILENT]
    else:  # nobody is held up: take the ranks that have not finished
        ends = [one for one in ends if one.state is not State.FINISHED]
    cycle = () if ends else _cycle(states)
    if not ends and not cycle:  # all wait in one operation that every rank has joined
        ends = waiting
    order = list(State)
    roots = sorted(ends, key=lambda one: (order.index(one.state), -one.since_s, one.rank))
    return WaitingChain(states, tuple(roots), cycle)


def _cycle(states: Mapping[int, RankState]) -> tuple[int, ...]:
    """Return ranks that wait for each other in a ring, or an empty tuple."""
    for start in states:
        path = [start]
        while (
            after := next((r for r in states[path[-1]].of_ranks if r in states), None)
        ) is not None:
            if after in path:
                return tuple(path[path.index(after) :])
            path.append(after)
    return ()
