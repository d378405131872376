"""Memory plans: keep, offload or recompute saved tensors, segment by segment."""

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
KEEP = "keep"  # the policy that leaves everything on the device
PASS = "add_memory"  # the pass that inserts a plan into a schedule
Place = tuple[int, int]  # stage, and number of the segment in it


class Choice(StrEnum):
    """The policy of a segment.

    `KEEP` leaves the saved tensors on the device. `OFFLOAD` copies them to host memory and back.
    `RECOMPUTE` keeps only the segment's inputs and runs its forward again; `SELECTIVE` also keeps
    the results of convolutions and matrix products, so only normalization, activation and pooling
    are recomputed. `OFFLOAD_INPUTS` recomputes, with the inputs in host memory until then
    (DeepSpeed's `cpu_checkpointing`, FairScale's `offload_to_cpu` of a checkpoint wrapper). The
    inputs of a stage are offloaded only if they were received in a message and the stage is one
    segment; otherwise its first segment is only recomputed. Carries of strips are always offloaded.
    """

    KEEP = "keep"
    OFFLOAD = "offload"
    RECOMPUTE = "recompute"
    SELECTIVE = "selective"
    OFFLOAD_INPUTS = "offload_inputs"

    @classmethod
    def _missing_(cls, value: object) -> Choice | None:
        return cls.SELECTIVE if value == "cheap" else None  # the name in older plans

    @property
    def is_recomputed(self) -> bool:
        """Whether the segment's forward is run a second time before its backward."""
        return self in (Choice.RECOMPUTE, Choice.SELECTIVE, Choice.OFFLOAD_INPUTS)

    @property
    def is_copied(self) -> bool:
        """Whether the segment's tensors are copied to host memory."""
        return self in (Choice.OFFLOAD, Choice.OFFLOAD_INPUTS)

    @property
    def uncopied(self) -> Choice:
        """The equivalent choice without copies."""
        return {Choice.OFFLOAD: Choice.KEEP, Choice.OFFLOAD_INPUTS: Choice.RECOMPUTE}.get(
            self, self
        )


@dataclass(frozen=True, slots=True)
class Segment:
    """Neighbouring layers of a stage under one policy: `first` up to `end`, counted over the model.

    The distances of copies are in compute actions of the rank. `free_after` actions may run between
    the posting of the copy out and the wait for its end, which frees the device memory (0: the rank
    waits at once). `ahead` actions run between the posting of the copy back and the backward, or
    the recompute before it, that needs the data (0: on demand). If `is_awaited`, the rank waits for
    the copy back after the next action.
    """

    first: int
    end: int
    choice: Choice = Choice.KEEP
    free_after: int = 1
    ahead: int = 1
    is_awaited: bool = False


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """The segments of every stage, from the first layer to the last.

    They apply to all micro-batches and directions of a stage. `policy` is the name of the policy
    that made the plan, and `counters` has its statistics. Saved storages below `least_bytes` are
    never moved. If `only_conv_inputs`, offloaded segments move only inputs of convolutions. With
    `except_last`, the micro-batch whose forward comes last in its direction is not recomputed,
    since its backward follows at once (torchgpipe's checkpoint="except_last").
    """

    policy: str
    stages: tuple[tuple[Segment, ...], ...]
    least_bytes: int = 0
    counters: Mapping[str, Any] | None = None
    only_conv_inputs: bool = False
    except_last: bool = False

    @classmethod
    def keeping(cls, boundaries: tuple[int, ...]) -> MemoryPlan:
        """Return the plan that keeps everything, with one segment per stage."""
        return cls.by_layer(KEEP, boundaries, {}).joined()

    @classmethod
    def by_layer(
        cls, policy: str, boundaries: tuple[int, ...], layers: Mapping[int, Segment]
    ) -> MemoryPlan:
        """Return the plan with one segment per layer: that of `layers`, or else a kept one."""
        stages = tuple(
            tuple(layers.get(layer, Segment(layer, layer + 1)) for layer in range(first, end))
            for first, end in pairwise(boundaries)
        )
        return cls(policy, stages)

    @property
    def boundaries(self) -> tuple[int, ...]:
        """The boundaries of the plan's partition."""
        return (*(stage[0].first for stage in self.stages), self.stages[-1][-1].end)

    def joined(self) -> MemoryPlan:
        """Join neighbouring kept segments: fewer actions with the same memory."""
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
        """Return the plan with other boundaries; each stage must be one segment."""
        cuts = list(pairwise(boundaries))
        return self.changed(
            lambda place, segment: replace(segment, first=cuts[place[0]][0], end=cuts[place[0]][1])
        )

    def segment(self, place: Place) -> Segment:
        """Return the segment at a place."""
        return self.stages[place[0]][place[1]]

    def changed(self, change: Callable[[Place, Segment], Segment]) -> MemoryPlan:
        """Return the plan with a function applied to every segment."""
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
            ConfigError: the schema is another one, or the plan is incomplete.
        """
        schema = document.get("schema")
        if schema != SCHEMA:
            raise ConfigError("memory plan", schema, f"must be of schema {SCHEMA}")
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
                bool(document.get("except_last", False)),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(
                "memory plan", "json", f"not of schema {SCHEMA} ({error!r})"
            ) from error


def place_of(action: Action) -> Place:
    """Return the stage and segment of an action."""
    return action.stage, action.segment or 0


def plan_of_schedule(schedule: Schedule, boundaries: tuple[int, ...]) -> MemoryPlan:
    """Return the plan of a schedule with memory actions of its own: one segment per stage.

    The choice of a segment may hold for some micro-batches only.
    """
    kinds: dict[int, set[Kind]] = {}
    for _, action in schedule.actions():
        kinds.setdefault(action.stage, set()).add(action.kind)

    def choice(place: Place, segment: Segment) -> Segment:
        stage_kinds = kinds[place[0]]
        choice = (
            Choice.OFFLOAD
            if Kind.OFFLOAD in stage_kinds
            else Choice.RECOMPUTE
            if Kind.R in stage_kinds
            else Choice.KEEP
        )
        return replace(segment, choice=choice)

    return replace(MemoryPlan.keeping(boundaries), policy=schedule.name).changed(choice)


def add_memory(schedule: Schedule, plan: MemoryPlan) -> Schedule:
    """Split the actions of a compute-only schedule into segments, and add the plan's actions.

    Memory actions that the schedule already has (`plan_of_schedule`) stay as they are. A copied
    segment gets OFFLOAD after its forward, FREE and PREFETCH at the plan's distances, and AWAIT if
    the plan has it. A recomputed segment gets R before its backward and after its PREFETCH, except
    for a strip whose backward directly follows its forward, and for the last micro-batch if the
    plan says so. Copies posted at the same place return in the order in which they are needed. A
    micro-batch whose copy would return before it has left is not copied; these are the last ones
    before the turn.
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
    """Return whether any input of a recomputed segment may be offloaded.

    Only inputs that no other segment reads may; later segments may read the inputs of a stage. In
    strips, carries always may.
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
    """Yield a rank's schedule in segments, with the plan's actions around them."""
    compute: list[Action] = []
    for action in actions:
        numbers = range(len(plan.stages[action.stage]))
        compute += [
            action._replace(segment=number)
            for number in (numbers if action.kind is Kind.F else reversed(numbers))
        ]
    index_of = {action: index for index, action in enumerate(compute)}
    last = {
        action.direction: action.micro_batch // schedule.num_strips
        for action in compute
        if action.kind is Kind.F and action.micro_batch is not None and plan.except_last
    }
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
        forward = index_of[action._replace(kind=Kind.F)]
        free = forward + segment.free_after
        back = max(free + 1, index - segment.ahead)
        if free + 1 >= index:
            continue
        after.setdefault(forward, []).insert(0, action._replace(kind=Kind.OFFLOAD))
        after.setdefault(free, []).append(action._replace(kind=Kind.FREE))
        before.setdefault(back, []).append(action._replace(kind=Kind.PREFETCH))
        if segment.is_awaited and back < index:
            after.setdefault(back, []).append(action._replace(kind=Kind.AWAIT))
    for index, action in enumerate(compute):
        yield from before.get(index, ())
        is_backward = action.kind in (Kind.B, Kind.I)
        if is_backward and plan.segment(place_of(action)).choice.is_recomputed:
            forward = index_of[action._replace(kind=Kind.F)]
            whole = (action.micro_batch or 0) // schedule.num_strips
            is_kept = last.get(action.direction) == whole
            if not is_kept and (forward < index - 1 or schedule.num_strips == 1):
                yield action._replace(kind=Kind.R)
        yield action
        yield from after.get(index, ())
