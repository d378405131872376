"""Who waits for whom: from the ranks' last marks and the schedule to the ranks that hold all others up."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from gems.runs.heartbeat import Beat
from gems.runs.rank_state import SILENT_AFTER_S, Standing, State, World, action_of
from gems.schedule.action import RECV_KINDS
from gems.schedule.dependencies import partner_of
from gems.schedule.schedule import Schedule

SHOWN = 3


@dataclass(frozen=True, slots=True)
class WaitingChain:
    """Who waits for whom. `roots` are the ranks that hold others up and wait for nobody, the likeliest first.

    Silent ones stand before those that work, and among these goes first who has been longest in one action. `cycle`
    are ranks that wait for each other in a ring, when nobody else holds them up. `standings` are those of all ranks.
    """

    standings: Mapping[int, Standing]
    roots: tuple[Standing, ...]
    cycle: tuple[int, ...] = ()

    def path(self, rank: int) -> tuple[int, ...]:
        """Return the ranks from `rank` to a root, each waiting for the next; a ring ends where it began."""
        goals = [root.rank for root in self.roots]
        ways: dict[int, tuple[int, ...]] = {rank: (rank,)}
        queue = [rank]
        for at in queue:
            for after in self.standings[at].of_ranks:
                if after not in ways and after in self.standings:
                    ways[after] = (*ways[at], after)
                    queue.append(after)
        found = [ways[goal] for goal in goals if goal in ways]
        if found:
            return found[0]
        if rank in self.cycle:
            at = self.cycle.index(rank)
            return (*self.cycle[at:], *self.cycle[: at + 1])
        return max(ways.values(), key=len)

    def text(self, rank: int | None = None) -> str:
        """Describe in one line for whom `rank` waits, and that one, to the root.

        Without a rank, who has waited longest.
        """
        if rank is None or rank not in self.standings:
            waiting = [one for one in self.standings.values() if one.state is State.WAITS]
            if not waiting:
                return "; ".join(_told(f"rank {root.rank}", root) for root in self.roots[:SHOWN]) or "no rank waits"
            rank = max(waiting, key=lambda one: one.since_s).rank
        path = self.path(rank)
        parts = [_told(f"rank {rank}", self.standings[rank], path[1:2])]
        for i, at in enumerate(path[1:], 1):
            if at == rank:
                parts.append("which closes the ring")
            elif i < SHOWN or i >= len(path) - SHOWN + 1:
                parts.append(_told("which", self.standings[at], path[i + 1 : i + 2]))
            elif i == SHOWN:
                parts.append(f"and so on over {len(path) - 2 * SHOWN + 1} ranks to rank {path[-SHOWN + 1]}")
        return ", ".join(parts)


def waiting_chain(
    schedule: Schedule, beats: Mapping[int, Beat], now_ns: int | None = None, silent_after_s: float = SILENT_AFTER_S
) -> WaitingChain:
    """Find who waits for whom, from each rank's last mark.

    Args:
        schedule: the lowered one that every pipeline runs.
        beats: by rank of the world; ranks of one pipeline follow each other, pipeline by pipeline.
        now_ns: the wall clock; without it the last mark or sign of life of any rank.
        silent_after_s: a rank without a sign of life for as long as this is silent: stopped, dead, or held.
    """
    now = _now(beats.values()) if now_ns is None else now_ns
    world = World(schedule, beats, now, silent_after_s)
    standings = {rank: world.standing(rank) for rank in sorted(beats)}
    held_up = {rank for one in standings.values() for rank in one.of_ranks if rank in standings}
    waiting = any(one.state is State.WAITS for one in standings.values())
    ends = [
        one
        for rank, one in standings.items()
        if not one.of_ranks and (rank in held_up or one.state is State.SILENT or not waiting)
    ]
    if not waiting:  # nobody is held up: then whoever does not finish
        ends = [one for one in ends if one.state is not State.FINISHED]
    cycle = () if ends else _cycle(standings)
    if not ends and not cycle:  # all wait in one operation that nobody has yet to join
        ends = [one for one in standings.values() if one.state is State.WAITS]
    order = list(State)
    roots = sorted(ends, key=lambda one: (order.index(one.state), -one.since_s, one.rank))
    return WaitingChain(standings, tuple(roots), cycle)


def _now(beats: Iterable[Beat]) -> int:
    return max((max(beat.time_ns, beat.alive_ns) for beat in beats), default=0)


def _cycle(standings: Mapping[int, Standing]) -> tuple[int, ...]:
    """Return ranks that wait for each other in a ring; nothing where there is none."""
    for start in standings:
        path = [start]
        while (after := next((r for r in standings[path[-1]].of_ranks if r in standings), None)) is not None:
            if after in path:
                return tuple(path[path.index(after) :])
            path.append(after)
    return ()


def _told(who: str, one: Standing, after: tuple[int, ...] = ()) -> str:
    since = f"since {one.since_s:.0f} s"
    if one.state is not State.WAITS:
        return f"{who} {one.state} {one.place} {since}"
    receive = action_of(one.waits_for)
    what = one.waits_for
    if receive is not None and receive.kind in RECV_KINDS:
        what = str(partner_of(receive))
    ranks = f" of rank {after[0]}" if after else ""
    return f"{who} waits {one.place} {since} for {what}{ranks}"
