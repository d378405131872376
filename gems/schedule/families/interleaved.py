"""Interleaved 1F1B and looped breadth-first: several chunks of the model on each rank."""

from __future__ import annotations

from gems.errors import ConfigError
from gems.schedule.action import Action, backward, forward
from gems.schedule.placement import looped
from gems.schedule.registry import Request, Terms, schedule_family, with_sizes
from gems.schedule.schedule import Schedule

PLANNED_CHUNKS = (2, 4)
RIVAL_CHUNKS = (2, 3, 4)


def _step_units(s: Terms) -> float:
    """Return W + (P - 1)(f + b) / v for N >= P, else W + (P - 1 - (v - 1)(N - 1) / v)(f + b)."""
    return s.work + (s.p - 1 - (s.chunks - 1) * (min(s.n, s.p) - 1) / s.chunks) * (s.f + s.b)


def _peak_units(s: Terms) -> float:
    """Return ((v - 1) G + 2 P - 1) / v, but at most N.

    This is an upper bound if the groups are not full, and otherwise exact.
    """
    group = -(-s.n // max(1, s.n // s.p))
    return min(s.n, ((s.chunks - 1) * group + 2 * s.p - 1) / s.chunks)


@schedule_family(
    "interleaved_1f1b",
    peak_units=_peak_units,
    placement=looped,
    stages_per_rank=None,
    step_units=lambda s: None if s.n % max(1, s.n // s.p) else _step_units(s),
    planned=with_sizes("chunks", PLANNED_CHUNKS),
    rival=with_sizes("chunks", RIVAL_CHUNKS),
)
def interleaved_1f1b(request: Request) -> Schedule:
    """Build interleaved 1F1B (Narayanan et al. 2021, section 2.2), v = `chunks` stages per rank.

    Micro-batches run in N div P groups of G = ceil(N / groups), which is P if P divides N. A rank
    runs the forwards of a group chunk by chunk, and likewise, from the last chunk, the backwards;
    it warms up with (v - 1) G + 2 (P - 1 - rank) forwards. If the groups are full and N >= P, it
    takes N (f + b) + (P - 1)(f + b) / v time and holds at most ((v - 1) G + 2 P - 1) / v
    micro-batches of activations. If the groups are not full, the places without a micro-batch are
    left out.

    Raises:
        ConfigError: There are fewer than two chunks.
    """
    num_ranks = request.num_ranks
    num_micro_batches = request.num_micro_batches
    chunks = request.chunks
    _check_chunks("interleaved_1f1b", chunks)
    num_groups = max(1, num_micro_batches // num_ranks)
    size = -(-num_micro_batches // num_groups)
    groups = [range(first, first + size) for first in range(0, num_groups * size, size)]
    rank_schedules = []
    for rank in range(num_ranks):
        stages = range(rank, num_ranks * chunks, num_ranks)
        forwards = [forward(stage, m) for group in groups for stage in stages for m in group]
        backwards = [
            backward(stage, m) for group in groups for stage in reversed(stages) for m in group
        ]
        warmup = min(len(forwards), (chunks - 1) * size + 2 * (num_ranks - 1 - rank))
        actions: list[Action] = forwards[:warmup]
        for pair in zip(forwards[warmup:], backwards, strict=False):
            actions += pair
        actions += backwards[len(forwards) - warmup :]
        rank_schedules.append(
            tuple(action for action in actions if (action.micro_batch or 0) < num_micro_batches)
        )
    return Schedule(
        "interleaved_1f1b", num_micro_batches, looped(num_ranks, chunks), tuple(rank_schedules)
    )


@schedule_family(
    "looped_bfs",
    step_units=_step_units,
    peak_units=lambda s: s.n,
    placement=looped,
    stages_per_rank=None,
    planned=None,  # interleaved 1F1B takes the same time with less memory
    rival=with_sizes("chunks", RIVAL_CHUNKS),
)
def looped_bfs(request: Request) -> Schedule:
    """Build looped breadth-first (Lamy-Poirier 2023) with v = `chunks` stages per rank.

    All micro-batches pass a rank's first stage, then all pass its second, and so on; backwards
    start from the last. It takes N (f + b) + (P - 1)(f + b) / v time for N >= P and holds N
    micro-batches of activations.

    Raises:
        ConfigError: There are fewer than two chunks.
    """
    num_ranks = request.num_ranks
    micro_batches = range(request.num_micro_batches)
    chunks = request.chunks
    _check_chunks("looped_bfs", chunks)
    rank_schedules = []
    for rank in range(num_ranks):
        stages = range(rank, num_ranks * chunks, num_ranks)
        actions = [forward(stage, m) for stage in stages for m in micro_batches]
        rank_schedules.append(
            (*actions, *(backward(stage, m) for stage in reversed(stages) for m in micro_batches))
        )
    return Schedule(
        "looped_bfs", len(micro_batches), looped(num_ranks, chunks), tuple(rank_schedules)
    )


def _check_chunks(name: str, chunks: int) -> None:
    if chunks < 2:
        simple = "1f1b" if name == "interleaved_1f1b" else "gpipe"
        raise ConfigError(
            "schedule.chunks",
            chunks,
            f"must be 2 or more for {name}",
            f"one chunk a rank is schedule={simple}",
        )
