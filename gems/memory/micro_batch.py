"""The bytes that one micro-batch holds on a stage along its own actions, by the rules of `Residency`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from gems.memory.residency import Residency
from gems.memory.stage_storages import MAX_STAGES, Group, StageStorages, as_bytes
from gems.schedule.action import COMPUTE_KINDS, COPY_KINDS, WAIT_KINDS, Action, Kind

MicroBatchKey = tuple[int, int, int | None]  # direction, stage, micro-batch
Script = tuple[tuple[Kind, int], ...]  # the actions of one micro-batch on a stage in order: kind and segment
OWN_KINDS = COMPUTE_KINDS | COPY_KINDS | WAIT_KINDS


@dataclass(frozen=True, slots=True)
class State:
    """What a micro-batch holds during an action of its own, and after it, in bytes."""

    during_bytes: int = 0
    device_bytes: int = 0
    activation_bytes: int = 0
    host_bytes: int = 0
    moved_bytes: int = 0


class MicroBatch:
    """Replays the actions of a micro-batch on a stage.

    Besides saved storages it holds values between segments until the last segment that reads them has run, the gradient
    between two segments, and from I to W what W reads.
    """

    def __init__(self, storages: StageStorages, script: Script) -> None:
        kinds = {kind: {segment for each, segment in script if each is kind} for kind in Kind}
        self._storages = storages
        self._spans = storages.layers.spans
        self._script = script
        self._recomputed = kinds[Kind.R]
        self._freed = kinds[Kind.FREE]
        self._has_backward = bool(kinds[Kind.B] or kinds[Kind.I])
        self.residency = Residency(kinds[Kind.OFFLOAD])
        self._passing: dict[Group, None] = {}
        self._held_for_weights: dict[int, int] = {}
        self._used_up: dict[int, list[Group]] = {}
        self._gradient_bytes = 0
        self._moved_bytes = 0

    def run(self) -> tuple[State, ...]:
        """Return the state at each action of the script."""
        return tuple(self._act(kind, segment) for kind, segment in self._script)

    def _act(self, kind: Kind, segment: int) -> State:
        self._moved_bytes = 0
        before = self._device_bytes
        during = before
        if kind is Kind.F:
            during += self._forward_peak(segment)
            self._forward(segment)
        elif kind is Kind.R:
            during += self._recompute_peak(segment)
            self._save_recomputed(segment)
        elif kind in (Kind.B, Kind.I):
            during = self._backward(kind, segment)
        elif kind is Kind.W:
            during += as_bytes(self._spans.weight_gradient_peak[self._storages.spans_of[segment]])
            self.residency.done(~segment)
            del self._held_for_weights[segment]
        else:
            self._copy(kind, segment)
        after = self._device_bytes
        return State(
            max(during, after) if kind is Kind.PREFETCH else during,
            after,
            self._activation_bytes,
            self.residency.host_bytes,
            self._moved_bytes,
        )

    @property
    def _activation_bytes(self) -> int:
        return self.residency.device_bytes + sum(self._held_for_weights.values())

    @property
    def _device_bytes(self) -> int:
        is_counted = self.residency.is_on_device
        passing = self._storages.total([group for group in self._passing if not is_counted(group)])
        used_up = sum(self._used_up_bytes(segment) for segment in self._used_up)
        return self._activation_bytes + passing + self._gradient_bytes - used_up

    def _used_up_bytes(self, segment: int) -> int:
        """Return what was kept only for a recompute that has run: the store counts it until the backward."""
        return sum(
            self._storages.num_bytes[group]
            for group in self._used_up[segment]
            if self.residency[group].savers == {segment}
        )

    def _forward_peak(self, segment: int) -> int:
        layers, span = self._storages.layers, self._storages.spans_of[segment]
        if self._has_backward and segment not in self._recomputed:
            return as_bytes(layers.spans.forward_peak[span])
        return layers.first_forward_peak_bytes(*span, self._has_backward and self._storages.is_selective[segment])

    def _recompute_peak(self, segment: int) -> int:
        layers, span = self._storages.layers, self._storages.spans_of[segment]
        if self._storages.is_selective[segment]:
            return layers.selective_recompute_peak_bytes(*span)
        return as_bytes(layers.spans.forward_peak[span])

    def _forward(self, segment: int) -> None:
        storages = self._storages
        if self._has_backward and segment in self._recomputed:
            self._save([*storages.takes[segment], *self._saved_products(segment)], segment)
        elif self._has_backward:
            self._save(storages.saves[segment], segment)
        is_last = segment == storages.num_segments - 1
        self._passing = {} if is_last else dict.fromkeys(storages.hands[segment])

    def _save(self, groups: Sequence[Group], segment: int) -> None:
        for group in groups:
            self.residency.save(group, self._storages.num_bytes[group], segment, group.is_movable)

    def _save_recomputed(self, segment: int) -> None:
        """Save what a recompute makes again, though W of a later segment may still hold the first copy of it."""
        storages = self._storages
        for group in storages.saves[segment]:
            is_kept = group.maker < segment or (storages.is_selective[segment] and group.is_product)
            is_second = not is_kept and group in self.residency
            key = ("second", group) if is_second else group
            self.residency.save(key, storages.num_bytes[group], segment, group.is_movable)

        kept = [*storages.takes[segment], *self._saved_products(segment)]
        self._used_up[segment] = [group for group in kept if segment not in group.savers]

    def _saved_products(self, segment: int) -> list[Group]:
        storages = self._storages
        return [group for group in storages.makes[segment] if group.is_product and storages.is_selective[segment]]

    def _backward(self, kind: Kind, segment: int) -> int:
        """Run the backward of a segment and return the bytes held during it."""
        storages, spans = self._storages, self._spans
        span = storages.spans_of[segment]
        self._moved_bytes = storages.total(self.residency.prefetch(segment))
        self._gradient_bytes = 0
        peak = spans.backward_peak if kind is Kind.B else spans.input_gradient_peak
        during = self._device_bytes - as_bytes(spans.stash[span]) + as_bytes(peak[span])
        if kind is Kind.I:
            # of what is held for W, its inputs are storages that others may hold too
            self._save(storages.weights_read[segment], ~segment)
            self._held_for_weights[segment] = storages.held_for_weights_bytes(segment)
        self.residency.done(segment)
        self._used_up.pop(segment, None)
        if segment:
            self._gradient_bytes = storages.layers.profile.layers[span[0] - 1].output_grad_bytes
        return during

    def _copy(self, kind: Kind, segment: int) -> None:
        storages = self._storages
        if kind is Kind.OFFLOAD:
            taken = self.residency.offload(segment, storages.hands[segment])
            self._moved_bytes = storages.total(taken)
            if segment not in self._freed:
                self.residency.free(segment)
        elif kind is Kind.FREE:
            self.residency.free(segment)
        elif kind is Kind.PREFETCH:
            self._moved_bytes = storages.total(self.residency.prefetch(segment))


@lru_cache(maxsize=MAX_STAGES)
def micro_batch_states(storages: StageStorages, script: Script) -> tuple[State, ...]:
    """Return the state at each action of a micro-batch on a stage; equal scripts are run once."""
    return MicroBatch(storages, script).run()


def micro_batch_scripts(row: Iterable[Action]) -> dict[MicroBatchKey, Script]:
    """Return the actions of each micro-batch on each stage of a rank, in their order."""
    found: dict[MicroBatchKey, list[tuple[Kind, int]]] = {}
    for kind, stage, micro_batch, direction, segment in row:
        if kind in OWN_KINDS:
            found.setdefault((direction, stage, micro_batch), []).append((kind, segment or 0))
    return {place: tuple(script) for place, script in found.items()}
