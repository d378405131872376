"""What becomes of activations between forward and backward, stage by stage, and what a rank must keep free for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

from gems.schedule.synthesis.problem import Problem


class Act(IntEnum):
    """Activations stay, are computed anew, or leave for host memory and come back."""

    KEEP = 0
    RECOMPUTE = 1
    OFFLOAD = 2


@dataclass(frozen=True, slots=True)
class Acting:
    """The acts of one micro-batch's stages, and what follows from them.

    Operations are numbered over S stages: forward s, input gradient 2 S - 1 - s, weight gradient 2 S + s,
    recomputation 3 S + s, copy out 4 S + s, copy back 5 S + s. `takes[s]` is what forward brings,
    `awaited[d][c]` the stages whose activations are asked back when operation c of the chain starts, and
    `peak_after[d][operation]` the most that the operation's rank holds of this micro-batch from then on.
    """

    acts: tuple[int, ...]
    takes: tuple[int, ...]
    awaited: tuple[tuple[int, ...], ...]
    peak_at_first: tuple[tuple[int, ...], ...]
    peak_after: tuple[tuple[int, ...], ...]


def acting(problem: Problem, acts: Sequence[int], ahead: int) -> Acting:
    """Works out what follows from `acts`, where activations are asked back `ahead` operations of the chain early."""
    num_stages = problem.num_stages
    awaited: list[list[int]] = [[] for _ in range(2 * num_stages)]
    for stage in reversed(range(num_stages)):
        if acts[stage]:
            awaited[max(num_stages - 1, 2 * num_stages - 1 - stage - ahead)].append(stage)
    after = [_peaks(problem, acts, direction) for direction in range(problem.num_directions)]
    return Acting(
        acts=tuple(acts),
        takes=tuple(
            problem.boundary[stage] if act == Act.RECOMPUTE else problem.size[stage] for stage, act in enumerate(acts)
        ),
        awaited=tuple(map(tuple, awaited)),
        peak_at_first=tuple(first for first, _ in after),
        peak_after=tuple(table for _, table in after),
    )


def _peaks(problem: Problem, acts: Sequence[int], direction: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Simulate one micro-batch alone on each rank, and gives the most held in all and after each operation."""
    num_stages = problem.num_stages
    table, first = [0] * (6 * num_stages), [0] * problem.num_ranks
    for rank in range(problem.num_ranks):
        played: list[tuple[int, int]] = []
        held = 0
        for operation, taken, given in _alone(problem, acts, problem.stages_of(rank, direction)):
            held += taken
            played.append((operation, held))
            held -= given
        most = 0
        for operation, level in reversed(played):
            table[operation] = most
            most = max(most, level)
        first[rank] = most
    return tuple(first), tuple(table)


def _alone(problem: Problem, acts: Sequence[int], stages: Sequence[int]) -> list[tuple[int, int, int]]:
    """Return (operation, size taken, size given back) of one micro-batch on one rank, in order."""
    num_stages = problem.num_stages
    played = []
    for stage in stages:
        size, boundary = problem.size[stage], problem.boundary[stage]
        taken = boundary if acts[stage] == Act.RECOMPUTE else size
        played.append((stage, taken, size if acts[stage] == Act.OFFLOAD else 0))
    for stage in reversed(stages):
        size, boundary = problem.size[stage], problem.boundary[stage]
        if acts[stage] == Act.RECOMPUTE:
            played.append((3 * num_stages + stage, size - boundary, 0))
        elif acts[stage] == Act.OFFLOAD:
            played.append((5 * num_stages + stage, size, 0))
        played.append((2 * num_stages - 1 - stage, 0, size))
    return played


def least_room(problem: Problem, acts: Sequence[int]) -> int:
    """Return the least cap, in the problem's sizes, under which every micro-batch can pass."""
    return max(max(_peaks(problem, acts, direction)[0]) for direction in range(problem.num_directions))
