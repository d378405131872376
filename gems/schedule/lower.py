"""Lowering: turn a schedule of compute actions into the list that the executor runs."""

from __future__ import annotations

import contextlib
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate, chain
from operator import add

from gems.errors import ScheduleError
from gems.schedule.action import (
    COMPUTE_KINDS,
    COPY_KINDS,
    RECV_KINDS,
    SEND_KINDS,
    WAIT_KINDS,
    Action,
    Kind,
)
from gems.schedule.costs import FREE, Network, StageCosts
from gems.schedule.dependencies import boundary_of, dependencies, transfers_after
from gems.schedule.schedule import Schedule
from gems.schedule.simulate import simulate

MADE_KINDS = COMPUTE_KINDS | COPY_KINDS | WAIT_KINDS
Receives = list[
    tuple[Action, int]
]  # of a rank, each with the index of the first action that needs it


def add_transfers(
    schedule: Schedule,
    costs: StageCosts | None = None,
    network: Network = FREE,
    cap: float | None = None,
    receives_ahead: int = 1,
) -> Schedule:
    """Insert each send after the compute that makes its data, and each receive before its reader.

    A message departs when both of its sides are posted. With `costs`, each receive is posted as
    late as possible without delaying its message in the simulated step: the longer the link takes,
    the earlier the posting. It is posted at least `receives_ahead` compute actions early; a larger
    number would only hold more buffers.
    If several actions need the same data, the receive precedes the first of them. Receives from a
    rank are posted in the order in which it sends, separately for forward and backward.

    Posting never blocks, and a receive always precedes the action that needs it, so no posting time
    causes a deadlock.
    """
    posted = replace(schedule, passes=(*schedule.passes, "add_transfers"))
    readers = [_first_readers(actions, posted) for actions in schedule.rank_schedules]
    places = [[max(0, reader - receives_ahead) for _, reader in needed] for needed in readers]
    if costs is not None and network.takes_time(costs.boundary_bytes):
        with contextlib.suppress(
            ScheduleError
        ):  # of a list that would not run, which is for the validator to name
            latest = _latest_places(schedule, posted, readers, costs, network, cap)
            places = [list(map(min, *both)) for both in zip(places, latest, strict=True)]
    return _with_receives(posted, readers, places)


def _first_readers(actions: Sequence[Action], posted: Schedule) -> list[tuple[Action, int]]:
    """Return a rank's receives, each with the index of the first action that needs it."""
    first: dict[Action, int] = {}
    for i, action in enumerate(actions):
        for need in dependencies(action, posted):
            if need.kind in RECV_KINDS:
                first.setdefault(need, i)
    return list(first.items())


def _latest_places(
    schedule: Schedule,
    posted: Schedule,
    readers: Sequence[Receives],
    costs: StageCosts,
    network: Network,
    cap: float | None,
) -> list[list[int]]:
    """Return the last index at which posting each receive delays nothing, by rank.

    The step is simulated with receives that are never late. A receive is then posted by the start
    of the action that needs it, less the time on the link. If messages compete for links, it is
    posted by the end of the action that makes the data, so that all messages depart as in that
    step.
    """
    if network.has_contention:
        schedule = _with_receives(posted, readers, [[0] * len(needed) for needed in readers])
    step = simulate(schedule, costs, network, cap)
    times = [
        [time for time in zip(actions, starts, ends, strict=True) if time[0].kind in MADE_KINDS]
        for actions, starts, ends in zip(schedule.rank_schedules, step.start, step.end, strict=True)
    ]
    data_ends = (
        {action: end for timed in times for action, _, end in timed}
        if network.has_contention
        else {}
    )
    places = []
    for rank, (needed, timed) in enumerate(zip(readers, times, strict=True)):
        # when the rank comes to each action
        free = list(
            accumulate(
                (0.0 if a.kind in COPY_KINDS else end for a, _, end in timed[:-1]), max, initial=0.0
            )
        )
        latest = []
        for receive, reader in needed:
            (send,) = dependencies(receive, posted)
            delay = 0.0
            limit = timed[reader][1]
            if network.has_contention:
                limit = data_ends[dependencies(send, posted)[0]]
            else:
                size = costs.boundary_bytes[boundary_of(receive)]
                delay = network.delay(posted.rank_of(send), rank, size)
            latest.append(bisect_right(free, limit, key=partial(add, delay)) - 1)
        places.append(latest)
    return places


def _with_receives(
    posted: Schedule, readers: Sequence[Receives], places: Sequence[Sequence[int]]
) -> Schedule:
    """Return the lowered list, with each receive before the action at its place."""
    rank_schedules = []
    after = [
        [transfers_after(action, posted) for action in actions] for actions in posted.rank_schedules
    ]
    sent = {
        receive: (rank, number)
        for rank, transfers in enumerate(after)
        for number, (_, receive, _) in enumerate(chain.from_iterable(transfers))
    }
    for rank, actions in enumerate(posted.rank_schedules):
        receives: dict[int, list[Action]] = {}
        for receive, place in _in_sent_order(
            [receive for receive, _ in readers[rank]], places[rank], sent
        ):
            receives.setdefault(place, []).append(receive)
        lowered: list[Action] = []
        for place, action in enumerate(actions):
            lowered += receives.get(place, ())
            lowered.append(action)
            lowered += [send for send, _, _ in after[rank][place]]
        rank_schedules.append(tuple(lowered))
    return _with_needs(posted, tuple(rank_schedules), posted.passes)


def _in_sent_order(
    receives: Sequence[Action], places: Sequence[int], sent: Mapping[Action, tuple[int, int]]
) -> list[tuple[Action, int]]:
    """Return a rank's receives with their places, in the order of the sends on each edge.

    Each receive keeps its place or moves to an earlier one. `sent` maps each receive to the rank
    that sends it and the number of the message. Process groups match messages by their order,
    whereas MPI matches them by tags.
    """
    edges: dict[tuple[int, Kind], list[int]] = {}
    for at, receive in enumerate(receives):
        if receive in sent:  # else the list would not run, which is for the validator to name
            edges.setdefault((sent[receive][0], receive.kind), []).append(at)
    ordered = list(zip(receives, places, strict=True))
    for slots in edges.values():
        as_sent = sorted(slots, key=lambda at: sent[receives[at]])
        earliest = list(accumulate((places[at] for at in reversed(as_sent)), min))[::-1]
        for slot, at, place in zip(slots, as_sent, earliest, strict=True):
            ordered[slot] = receives[at], place
    return ordered


def lower(
    schedule: Schedule,
    costs: StageCosts | None = None,
    network: Network = FREE,
    cap: float | None = None,
) -> Schedule:
    """Run all passes: add transfers, and for training the gradient reductions and optimizer steps.

    With `costs`, receives are posted early enough for the time on the links of `network`; see
    `add_transfers`. If a rank computes on after a stage's last weight gradient, the sum of that
    stage over the replicas starts at that point (see `Placement.sums_by_stage`).
    """
    lowered = add_transfers(schedule, costs, network, cap)
    if schedule.forward_only:
        return lowered
    rank_schedules = []
    for rank, actions in enumerate(lowered.rank_schedules):
        stage = schedule.placement.lowest_stage(rank)
        done = _with_starts(actions) if schedule.placement.sums_by_stage else actions
        rank_schedules.append((*done, Action(Kind.REDUCE_GRAD, stage), Action(Kind.STEP, stage)))
    return _with_needs(lowered, tuple(rank_schedules), (*lowered.passes, "add_reduce", "add_step"))


def _with_starts(actions: Sequence[Action]) -> list[Action]:
    """Insert START_REDUCE for each stage but the last to end, after its last compute and sends."""
    last = {action.stage: at for at, action in enumerate(actions) if action.kind in COMPUTE_KINDS}
    ends = {at: stage for stage, at in last.items() if at != max(last.values())}
    started: list[Action] = []
    ended: int | None = None
    for at, action in enumerate(actions):
        if ended is not None and action.kind not in SEND_KINDS:
            started.append(Action(Kind.START_REDUCE, ended))
            ended = None
        started.append(action)
        ended = ends.get(at, ended)
    return started


def _with_needs(
    schedule: Schedule, rank_schedules: tuple[tuple[Action, ...], ...], passes: tuple[str, ...]
) -> Schedule:
    """Return the schedule with rank schedules that contain more actions.

    The dependencies of its present actions are unchanged, so they are copied and not derived again.
    """
    more = replace(schedule, rank_schedules=rank_schedules, passes=passes)
    more.needs.update(schedule.needs)
    return more


def compute_only(schedule: Schedule) -> Schedule:
    """Remove everything that lowering has added.

    Compute actions and the copies to and from host memory, with their waits, remain.
    """
    rank_schedules = tuple(
        tuple(a for a in actions if a.kind in MADE_KINDS) for actions in schedule.rank_schedules
    )
    return replace(schedule, rank_schedules=rank_schedules, passes=())
