"""A memory plan: the treatment of each layer's saved tensors until backward, and its actions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from itertools import pairwise
from typing import Any

from gems.errors import ConfigError
from gems.schedule.action import Action, Kind
from gems.schedule.schedule import Schedule

SCHEMA = "gems.memory/1"
KEEP = "keep"  # the policy that leaves all on the device
PASS = "add_memory"  # the pass that puts a plan into a schedule
Place = tuple[int, int]  # stage, and number of the segment in it


class Choice(StrEnum):
    """The policy of a segment.

    `KEEP` leaves what forward saved on the device. `OFFLOAD` copies it to host memory and back.
    `RECOMPUTE` keeps the segment's inputs only and runs its forward again; `SELECTIVE` also keeps
    what convolutions and matrix products gave, so that only normalisation, activation and pooling
    are recomputed. `OFFLOAD_INPUTS` recomputes too, and copies the inputs to host memory and back
    before the second run: activation checkpointing with offloaded checkpoints, which DeepSpeed
    calls `cpu_checkpointing` and FairScale `offload_to_cpu` of a checkpoint wrapper. What a stage
    is given by another one leaves only if it came in a message and the stage is one segment; else
    the first segment is recomputed and nothing else. What strips are left by earlier ones leaves in
    any case.
    """

    KEEP = "keep"
    OFFLOAD = "offload"
    RECOMPUTE = "recompute"
    SELECTIVE = "selective"
    OFFLOAD_INPUTS = "offload_inputs"

    @classmethod
    def _missing_(cls, value: object) -> Choice | None:
        return cls.SELECTIVE if value == "cheap" else None  # its name in older plans

    @property
    def is_recomputed(self) -> bool:
        """Whether the segment's forward is run a second time before its backward."""
        return self in (Choice.RECOMPUTE, Choice.SELECTIVE, Choice.OFFLOAD_INPUTS)

    @property
    def is_copied(self) -> bool:
        """Whether what the segment's forward keeps leaves for host memory."""
        return self in (Choice.OFFLOAD, Choice.OFFLOAD_INPUTS)

    @property
    def uncopied(self) -> Choice:
        """The choice that is left of it where no copy takes anything."""
        return {Choice.OFFLOAD: Choice.KEEP, Choice.OFFLOAD_INPUTS: Choice.RECOMPUTE}.get(
            self, self
        )


@dataclass(frozen=True, slots=True)
class Segment:
    """Neighbouring layers of a stage under one policy.

    `first` up to `end`, counted over the whole model.
    Of one that is copied, distances are counted in compute actions of the rank's list: `free_after`
    is how many may run between the posting of the copy out and the waiting for its end, after which
    the device memory is free (0: the rank waits at once); `ahead` how many run between the posting
    of the copy back and the backward that needs it, or the recompute right before that backward (0:
    on demand). With `is_awaited` the rank waits for the end of the copy back after the action that
    was posted next.
    """

    first: int
    end: int
    choice: Choice = Choice.KEEP
    free_after: int = 1
    ahead: int = 1
    is_awaited: bool = False


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """The segments of every stage, first layer to last.

    All micro-batches and directions of a stage are alike.
    `policy` names who made the plan. `least_bytes` is the size from which a saved storage is moved
    at all. With `only_conv_inputs` an offloaded segment moves of what it saved what its
    convolutions read, and no more. `counters` are figures that the policy gives of itself, such as
    what LMS reclaims in a step.
    """

    policy: str
    stages: tuple[tuple[Segment, ...], ...]
    least_bytes: int = 0
    counters: Mapping[str, Any] | None = None
    only_conv_inputs: bool = False

    @classmethod
    def keeping(cls, boundaries: tuple[int, ...]) -> MemoryPlan:
        """Return the plan that keeps everything, with one segment per stage."""
        return cls.by_layer(KEEP, boundaries, {}).joined()

    @classmethod
    def by_layer(
        cls, policy: str, boundaries: tuple[int, ...], layers: Mapping[int, Segment]
    ) -> MemoryPlan:
        """Return the plan with a segment per layer, kept unless `layers` has another."""
        stages = tuple(
            tuple(layers.get(layer, Segment(layer, layer + 1)) for layer in range(first, end))
            for first, end in pairwise(boundaries)
        )
        return cls(policy, stages)

    @property
    def boundaries(self) -> tuple[int, ...]:
        """The boundaries of the partition that the plan is for."""
        return (*(stage[0].first for stage in self.stages), self.stages[-1][-1].end)

    @property
    def can_be_captured(self) -> bool:
        """Whether segments may run as CUDA graphs, which save all that layers save, or nothing."""
        choices = {segment.choice for segments in self.stages for segment in segments}
        return Choice.SELECTIVE not in choices

    def joined(self) -> MemoryPlan:
        """Return the plan with neighbouring kept segments in one.

        Fewer actions, and the same memory.
        """
        stages = []
        for stage in self.stages:
            joined: list[Segment] = []
            for segment in stage:
                if joined and joined[-1].choice is segment.choice is Choice.KEEP:
                    segment = replace(joined.pop(), end=segment.end)
                joined.append(segment)
            stages.append(tuple(joined))
        return replace(self, stages=tuple(stages))

    def between(self, boundaries: Sequence[int]) -> MemoryPlan:
        """Return the plan with other boundaries, of one with a segment for each stage."""
        cuts = list(pairwise(boundaries))
        return self.changed(
            lambda place, segment: replace(segment, first=cuts[place[0]][0], end=cuts[place[0]][1])
        )

    def segment(self, place: Place) -> Segment:
        """Return a segment."""
        return self.stages[place[0]][place[1]]

    def changed(self, change: Callable[[Place, Segment], Segment]) -> MemoryPlan:
        """Return the plan with each segment as a function returns it."""
        stages = tuple(
            tuple(change((stage, number), segment) for number, segment in enumerate(segments))
            for stage, segments in enumerate(self.stages)
        )
        return replace(self, stages=stages)

    def to_json(self) -> dict[str, Any]:
        """Return the JSON document for the run folder."""
        return {"schema": SCHEMA, **asdict(self)}

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> MemoryPlan:
        """Read a document of `to_json`.

        Raises:
            ConfigError: another schema, or no whole plan.
        """
        found = document.get("schema")
        if found != SCHEMA:
            raise ConfigError("memory plan", found, f"must be of schema {SCHEMA}")
        try:
            stages = tuple(
                tuple(
                    Segment(**(dict(entry) | {"choice": Choice(entry["choice"])}))
                    for entry in stage
                )
                for stage in document["stages"]
            )
            return cls(
                str(document["policy"]),
                stages,
                int(document["least_bytes"]),
                document.get("counters"),
                bool(document.get("only_conv_inputs", False)),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(
                "memory plan", "json", f"not of schema {SCHEMA} ({error!r})"
            ) from error


def place_of(action: Action) -> Place:
    """Return the segment that an action of a segment acts on."""
    return action.stage, action.segment or 0


def plan_of_schedule(schedule: Schedule, boundaries: tuple[int, ...]) -> MemoryPlan:
    """Return the plan of a schedule that has memory actions of its own: a segment for each stage.

    Micro-batches may differ, so the choice of a segment only says what becomes of some of them.
    """
    kinds: dict[int, set[Kind]] = {}
    for _, action in schedule.actions():
        kinds.setdefault(action.stage, set()).add(action.kind)

    def choice(place: Place, segment: Segment) -> Segment:
        found = kinds[place[0]]
        choice = (
            Choice.OFFLOAD
            if Kind.OFFLOAD in found
            else Choice.RECOMPUTE
            if Kind.R in found
            else Choice.KEEP
        )
        return replace(segment, choice=choice)

    return replace(MemoryPlan.keeping(boundaries), policy=schedule.name).changed(choice)


def add_memory(schedule: Schedule, plan: MemoryPlan) -> Schedule:
    """Split the actions of a compute-only schedule into segments, and add the plan's actions.

    A schedule that has memory actions already (`plan_of_schedule`) keeps them, and only gets the
    segments. A copied segment gets OFFLOAD after its forward, FREE and PREFETCH at the plan's
    distances, and AWAIT if the plan says so. A recomputed segment gets R before its backward, and
    after its PREFETCH; not so a strip whose backward follows its forward. Copies that are posted at
    the same place come back in the order in which they are needed. If a copy would have to come
    back before it has left, that micro-batch has no copy: this happens for the last ones before the
    turn.
    """
    if schedule.has_memory_actions:
        rank_schedules = tuple(
            tuple(action._replace(segment=0) for action in actions)
            for actions in schedule.rank_schedules
        )
    else:
        rank_schedules = tuple(
            tuple(_with_memory(actions, plan, schedule)) for actions in schedule.rank_schedules
        )
    return replace(schedule, rank_schedules=rank_schedules, passes=(*schedule.passes, PASS))


def _may_leave(plan: MemoryPlan, schedule: Schedule, direction: int, place: Place) -> bool:
    """Return whether anything that a segment keeps for its recomputation may leave.

    These are inputs that no other segment reads: segments after the first of a stage may read its
    inputs. In strips it is also what earlier strips have left.
    """
    stage, number = place
    return (
        number > 0
        or schedule.num_strips > 1
        or (schedule.placement.is_received(direction, stage) and len(plan.stages[stage]) == 1)
    )


def _with_memory(
    actions: tuple[Action, ...], plan: MemoryPlan, schedule: Schedule
) -> Iterator[Action]:
    """Yield a rank's schedule in segments, and the actions before and after each."""
    compute: list[Action] = []
    for action in actions:
        numbers = range(len(plan.stages[action.stage]))
        compute += [
            action._replace(segment=each)
            for each in (numbers if action.kind is Kind.F else reversed(numbers))
        ]
    index_of = {action: index for index, action in enumerate(compute)}
    before: dict[int, list[Action]] = {}
    after: dict[int, list[Action]] = {}
    for index, action in enumerate(compute):
        segment = plan.segment(place_of(action))
        if action.kind not in (Kind.B, Kind.I) or not segment.choice.is_copied:
            continue
        if segment.choice is Choice.OFFLOAD_INPUTS and not _may_leave(
            plan, schedule, action.direction, place_of(action)
        ):
            continue
        made = index_of[action._replace(kind=Kind.F)]
        free = made + segment.free_after
        back = max(free + 1, index - segment.ahead)
        if free + 1 >= index:
            continue
        after.setdefault(made, []).insert(0, action._replace(kind=Kind.OFFLOAD))
        after.setdefault(free, []).append(action._replace(kind=Kind.FREE))
        before.setdefault(back, []).append(action._replace(kind=Kind.PREFETCH))
        if segment.is_awaited and back < index:
            after.setdefault(back, []).append(action._replace(kind=Kind.AWAIT))
    for index, action in enumerate(compute):
        yield from before.get(index, ())
        is_backward = action.kind in (Kind.B, Kind.I)
        if is_backward and plan.segment(place_of(action)).choice.is_recomputed:
            made = index_of[action._replace(kind=Kind.F)]
            if made < index - 1 or schedule.num_strips == 1:
                yield action._replace(kind=Kind.R)
        yield action
        yield from after.get(index, ())
