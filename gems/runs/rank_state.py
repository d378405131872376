"""Where each rank stands: what it does by its last mark, and for which ranks it waits by the schedule."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum

from gems.errors import ConfigError
from gems.runs.heartbeat import Beat
from gems.schedule.action import COMPUTE_KINDS, RECV_KINDS, SEND_KINDS, Action, Kind
from gems.schedule.dependencies import dependencies, other_stage, partner_of
from gems.schedule.schedule import Schedule

SILENT_AFTER_S = 10.0  # signs of life come every second; on a network's file system they may lag
FINISHED = "finished"
SENDS = "sends to leave"  # what a rank says that waits for its own messages to go
Point = tuple[int, int]  # (step, index in the rank's row); -1 is before the first action


class State(StrEnum):
    """What a rank does; the value is how it is told."""

    SILENT = "is silent"
    FINISHED = "has finished"
    WORKS = "works"
    WAITS = "waits"


@dataclass(frozen=True, slots=True)
class Standing:
    """Where a rank stands.

    It has the rank's last mark, for how long it works or waits there, what it waits for, and of which ranks.
    """

    rank: int
    node: str
    pid: int
    step: int
    action: str
    since_s: float
    state: State
    waits_for: str = ""
    of_ranks: tuple[int, ...] = ()

    @property
    def place(self) -> str:
        """Describe step and action."""
        if self.step < 0 or self.state is State.FINISHED:
            return f"outside of the steps ({self.action})"
        return f"in step {self.step}, action {self.action}"


class World:
    """The ranks of a run at one moment. Reads of `beats` only what it is asked for."""

    def __init__(
        self, schedule: Schedule, beats: Mapping[int, Beat], now_ns: int, silent_after_s: float = SILENT_AFTER_S
    ) -> None:
        self._schedule, self._beats, self._now_ns = schedule, beats, now_ns
        self._silent_ns = silent_after_s * 1e9
        self._index: dict[int, dict[Action, int]] = {}

    def standing(self, rank: int) -> Standing:
        """Return where a rank stands.

        Raises:
            KeyError: it has left no mark.
        """
        beat = self._beats[rank]
        state = self._state(rank)
        of_ranks = self._awaited(rank) if state is State.WAITS else ()
        what = (beat.waits_for or self._guess(rank)) if state is State.WAITS else ""
        since_s = max(0.0, (self._now_ns - max(beat.time_ns, beat.moved_ns)) * 1e-9)
        return Standing(rank, beat.node, beat.pid, beat.step, beat.action, since_s, state, what, of_ranks)

    def held_up_by(self, rank: int) -> Iterator[Beat]:
        """Yield the marks of all ranks that `rank` waits for, directly or through others."""
        seen, queue = {rank}, [rank]
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
        return beat.alive_ns > 0 and self._now_ns - max(beat.alive_ns, beat.time_ns) > self._silent_ns

    def _guess(self, rank: int) -> str:
        """Report what a rank must be waiting for that does not tell itself; nothing where it need not wait."""
        action, row = self._action(rank), self._row(rank)
        if action is None or action not in row:
            return ""
        if action.kind is Kind.REDUCE_GRAD:
            return "the sum of gradients" if self._late(rank, *self._meeting(rank)) else ""
        if action.kind in COMPUTE_KINDS:
            needs = [need for need in dependencies(action, self._schedule) if need.kind in RECV_KINDS]
            return next((str(need) for need in needs if self._is_unsent(rank, need)), "")
        return ""

    def _awaited(self, rank: int) -> tuple[int, ...]:
        """Return the ranks that a waiting one waits for."""
        what = self._beats[rank].waits_for or self._guess(rank)
        receive = action_of(what)
        if receive is not None and receive.kind in RECV_KINDS:
            return (self._peer(rank, receive),)
        if what == SENDS:
            return self._deaf(rank)
        return self._late(rank, *self._meeting(rank))

    def _meeting(self, rank: int) -> tuple[Kind | None, Iterable[int]]:
        """Return the operation of several ranks that this one is in, and who takes part."""
        action, placement = self._action(rank), self._schedule.placement
        if action is not None and action.kind is Kind.REDUCE_GRAD:
            replicas = -(-len(self._beats) // self._schedule.num_ranks)
            return Kind.REDUCE_GRAD, placement.reduce_group(rank % self._schedule.num_ranks, replicas)
        return None, self._beats

    def _late(self, rank: int, kind: Kind | None, ranks: Iterable[int]) -> tuple[int, ...]:
        """Return those who have not come to the operation that `rank` waits in, or are there and do not wait."""
        step, index = self._point(rank)
        late = []
        for other in ranks:
            if other == rank or other not in self._beats:
                continue
            row = self._row(other)
            meets = -1 if index < 0 else len(row) - 1
            if kind is not None:
                meets = next((i for action, i in row.items() if action.kind is kind), meets)
            point, beat = self._point(other), self._beats[other]
            is_there = point == (step, meets) and (beat.waits_for != "" or not beat.alive_ns)
            if self._is_silent(beat) or (point <= (step, meets) and not is_there):
                late.append(other)
        return tuple(late)

    def _deaf(self, rank: int) -> tuple[int, ...]:
        """Return the ranks that have yet to post a receive of this rank's messages, or move none."""
        deaf = []
        for action in self._row(rank):
            if action.kind not in SEND_KINDS:
                continue
            other = self._peer(rank, action)
            if other in deaf or other not in self._beats:
                continue
            receive = partner_of(action)
            index = self._row(other).get(receive, -1)
            if self._is_silent(self._beats[other]) or self._point(other) <= (self._beats[rank].step, index):
                deaf.append(other)
        return tuple(deaf)

    def _is_unsent(self, rank: int, receive: Action) -> bool:
        """Whether the message of a receive cannot have been posted yet."""
        other = self._peer(rank, receive)
        if other not in self._beats:
            return False
        send = partner_of(receive)
        index = self._row(other).get(send)
        return index is not None and self._point(other) < (self._beats[rank].step, index)

    def _peer(self, rank: int, transfer: Action) -> int:
        """Return the rank of the world at the other end of a transfer."""
        first = rank - rank % self._schedule.num_ranks
        ranks = self._schedule.placement.ranks[transfer.direction]
        return first + ranks[other_stage(transfer)]

    def _point(self, rank: int) -> Point:
        beat, action = self._beats[rank], self._action(rank)
        if beat.action == FINISHED:
            return (1 << 62, 0)
        return beat.step, -1 if action is None else self._row(rank).get(action, -1)

    def _action(self, rank: int) -> Action | None:
        return action_of(self._beats[rank].action)

    def _row(self, rank: int) -> dict[Action, int]:
        place = rank % self._schedule.num_ranks
        if place not in self._index:
            self._index[place] = {action: i for i, action in enumerate(self._schedule.rows[place])}
        return self._index[place]


def action_of(mark: str) -> Action | None:
    """Return the action of the schedule that a mark names; None for a phase outside of it, such as a checkpoint."""
    try:
        return Action.parse(mark)
    except ConfigError:
        return None
