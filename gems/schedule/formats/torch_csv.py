"""A schedule as the CSV of torch.distributed.pipelining: one line a rank, compute actions only."""

from __future__ import annotations

import csv
import io
import re

from gems.errors import ConfigError
from gems.schedule.action import Action, Kind
from gems.schedule.placement import Placement
from gems.schedule.schedule import Schedule

_KINDS = (Kind.F, Kind.B, Kind.I, Kind.W)
_CELL = re.compile(r"(\d+)(F|B|I|W)(\d+)")
_OVERLAPPED = re.compile(r"\((.*)\)OVERLAP_F_B")


def to_torch_csv(schedule: Schedule) -> str:
    """Return the compute-only CSV that torch's runtime loads, as in `0F0,0F1,0B0`.

    B is a whole backward. Transfers, reductions and steps are omitted, since torch inserts its own.

    Raises:
        ConfigError: the format does not support the schedule's directions, segments, recomputation
            or copies to host memory.
    """
    for is_so, what in (
        (schedule.num_directions > 1, f"it runs {schedule.num_directions} directions"),
        (schedule.has_any(Kind.R), "it recomputes"),
        (schedule.has_any(Kind.OFFLOAD), "it copies to host memory"),
        (any(schedule.num_segments), "its stages run in segments"),
    ):
        if is_so:
            raise ConfigError(
                "format", "torch", f"cannot say schedule {schedule.name}: {what}", "use --json"
            )
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    for actions in schedule.rank_schedules:
        writer.writerow(str(action) for action in actions if action.kind in _KINDS)
    return text.getvalue()


def from_torch_csv(text: str, name: str = "torch") -> Schedule:
    """Read torch's compute-only CSV; empty cells, which are idle steps, are skipped.

    An overlapped pair `(0F3;1B2)OVERLAP_F_B` becomes its parts one after the other. The placement
    and the number of micro-batches follow from the actions.

    Raises:
        ConfigError: a cell is not a compute action, a stage is on two ranks, or the stages are not
            0 to S - 1.
    """
    rank_schedules = tuple(
        tuple(action for cell in cells for action in _actions(cell.strip(), line))
        for line, cells in enumerate(csv.reader(io.StringIO(text)), 1)
    )
    rank_of: dict[int, int] = {}
    for rank, actions in enumerate(rank_schedules):
        for action in actions:
            if rank_of.setdefault(action.stage, rank) != rank:
                raise ConfigError(
                    "schedule",
                    name,
                    f"stage {action.stage} is on rank {rank_of[action.stage]} and on rank {rank}",
                )
    if not rank_of or set(rank_of) != set(range(len(rank_of))):
        numbers = ", ".join(map(str, sorted(rank_of))) or "none"
        raise ConfigError(
            "schedule", name, f"its stages must be numbered from 0 on without gaps, not {numbers}"
        )
    return Schedule(
        name=name,
        num_micro_batches=1
        + max(action.micro_batch or 0 for actions in rank_schedules for action in actions),
        placement=Placement(
            len(rank_schedules), (tuple(rank_of[stage] for stage in range(len(rank_of))),)
        ),
        rank_schedules=rank_schedules,
        forward_only=not any(
            action.kind in (Kind.B, Kind.I) for actions in rank_schedules for action in actions
        ),
    )


def _actions(cell: str, line: int) -> list[Action]:
    overlapped = _OVERLAPPED.fullmatch(cell)
    actions = []
    for word in overlapped[1].split(";") if overlapped else [cell]:
        if not word:
            continue
        match = _CELL.fullmatch(word.strip())
        if match is None:
            raise ConfigError(
                "schedule",
                repr(cell),
                f"is no compute action in line {line}",
                "allowed: [stage]F|B|I|W[micro-batch], as in 0F3: torch's compute_only format",
            )
        actions.append(Action(Kind(match[2]), int(match[1]), int(match[3])))
    return actions
