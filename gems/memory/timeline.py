"""The bytes that a rank holds along its schedule under a memory plan, storage by storage."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from gems.memory.in_flight import BoundaryTensors
from gems.memory.micro_batch import OWN_KINDS, MicroBatchKey, State, micro_batch_scripts, micro_batch_states
from gems.memory.model import MESSAGE_COPIES, Optimizer
from gems.memory.plan import MemoryPlan
from gems.memory.stage_storages import as_bytes, profile_storages, segments_of
from gems.profile import ModelProfile
from gems.schedule.action import COMPUTE_KINDS, RANK_KINDS, Action
from gems.schedule.schedule import Schedule

_NOTHING = State()
# the fields of HeldCounts for tensors between stages, and the tables of their bytes
_BOUNDARY = (
    ("inputs", "given"), ("images", "given"), ("gradients", "given_back"), ("outputs", "handed_on"),
    ("input_gradients", "handed_back"),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Point:
    """What a rank holds during an action, its transients included, and after it, in bytes.

    `activation_bytes` are the saved storages on the device after the action, `moved_bytes` the size of a copy.
    """

    action: Action
    during_bytes: int
    device_bytes: int
    activation_bytes: int
    host_bytes: int
    moved_bytes: int = 0


@dataclass(frozen=True, slots=True)
class RankTimeline:
    """The points of a rank's schedule, one per action."""

    points: tuple[Point, ...]

    @property
    def peak_bytes(self) -> int:
        """The peak on the device."""
        return max(point.during_bytes for point in self.points)

    @property
    def peak_activation_bytes(self) -> int:
        """The peak of saved storages on the device."""
        return max(point.activation_bytes for point in self.points)

    @property
    def peak_host_bytes(self) -> int:
        """The peak in host memory."""
        return max(point.host_bytes for point in self.points)


def rank_timeline(
    profile: ModelProfile, plan: MemoryPlan, schedule: Schedule, rank: int, optimizer: Optimizer
) -> RankTimeline:
    """Return the bytes along a rank's lowered schedule, by the rules that the engine's store follows (`Residency`).

    Counted are parameters, gradients and optimizer state, buffers, the images of the step, tensors between stages,
    saved storages, values and gradients between segments, and the transients of each action. If the schedule does not
    wait for a copy to host memory (no FREE), what it moves counts as freed when the copy is posted.
    """
    replay = _Replay(profile, plan, schedule, rank, optimizer)
    return RankTimeline(tuple(replay.run(action) for action in schedule.rows[rank]))


class _Replay:
    def __init__(
        self, profile: ModelProfile, plan: MemoryPlan, schedule: Schedule, rank: int, optimizer: Optimizer
    ) -> None:
        self._boundary = BoundaryTensors(schedule, rank)
        self._states = _states(profile, plan, schedule, rank)
        self._last: dict[MicroBatchKey, State] = {}
        self._device_bytes = self._activation_bytes = self._host_bytes = 0
        spans, cuts = profile_storages(profile).spans, plan.boundaries
        self._static_bytes = 0
        self._sizes = []
        for held in self._boundary.held:
            span = (cuts[held[1]], cuts[held[1] + 1])
            self._static_bytes += optimizer.copies * as_bytes(spans.params[span])
            self._static_bytes += MESSAGE_COPIES * as_bytes(spans.buffers[span])
            for name, table in _BOUNDARY:
                num_bytes = as_bytes(getattr(spans, table)[span])
                self._sizes.append((self._boundary.counts[held], name, num_bytes))
        self._boundary_bytes = self._count_boundary()

    def run(self, action: Action) -> Point:
        kind, stage, micro_batch, direction, _ = action
        if kind in OWN_KINDS:
            return self._run_own(action, (direction, stage, micro_batch))
        if kind in RANK_KINDS:
            self._boundary.settle()
        else:
            self._boundary.post(action)
        self._boundary_bytes = self._count_boundary()
        return self._point(action, self._outside_bytes + self._device_bytes)

    def _run_own(self, action: Action, place: MicroBatchKey) -> Point:
        """Run an action of a micro-batch; tensors between stages change with compute actions only."""
        is_compute = action.kind in COMPUTE_KINDS
        if is_compute:
            self._boundary.begin(action)
            self._boundary_bytes = self._count_boundary()
        before, state = self._last.get(place, _NOTHING), next(self._states[place])
        during = self._outside_bytes + self._device_bytes - before.device_bytes + state.during_bytes
        self._last[place] = state
        self._device_bytes += state.device_bytes - before.device_bytes
        self._activation_bytes += state.activation_bytes - before.activation_bytes
        self._host_bytes += state.host_bytes - before.host_bytes
        if is_compute:
            self._boundary.end(action)
            self._boundary_bytes = self._count_boundary()
        return self._point(action, during, state.moved_bytes)

    @property
    def _outside_bytes(self) -> int:
        return self._static_bytes + self._boundary_bytes

    def _count_boundary(self) -> int:
        return sum(counts[name] * num_bytes for counts, name, num_bytes in self._sizes)

    def _point(self, action: Action, during: int, moved_bytes: int = 0) -> Point:
        device_bytes = self._outside_bytes + self._device_bytes
        return Point(action, during, device_bytes, self._activation_bytes, self._host_bytes, moved_bytes)


def _states(
    profile: ModelProfile, plan: MemoryPlan, schedule: Schedule, rank: int
) -> dict[MicroBatchKey, Iterator[State]]:
    """Return the states of each micro-batch on each stage of a rank."""
    layers = profile_storages(profile)
    storages = {
        stage: layers.stage(segments_of(plan, schedule, stage), plan.least_bytes)
        for _, stage in schedule.placement.stages_on(rank)
    }
    return {
        place: iter(micro_batch_states(storages[place[1]], script))
        for place, script in micro_batch_scripts(schedule.rows[rank]).items()
    }
