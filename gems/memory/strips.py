"""What a rank holds in strips.

Each strip is a micro-batch with bytes of its own, and leaves some to the next.
Under strips a segment is a stage: what becomes of a strip of it becomes of all its layers.
"""

from __future__ import annotations

import sys
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from itertools import pairwise
from operator import mul
from typing import NamedTuple

from gems.memory.model import Counts
from gems.memory.residency import Residency, Script, State
from gems.profile import LayerProfile, ModelProfile
from gems.profile.model_profile import TIMES, Saved
from gems.profile.strip_profile import STRIP_SHARES, StripBytes, StripProfile
from gems.schedule.action import Action, Kind
from gems.schedule.schedule import Schedule

_PEAKS = {
    Kind.F: "forward_peak",
    Kind.R: "forward_peak",
    Kind.B: "backward_peak",
    Kind.I: "input_gradient_peak",
    Kind.W: "weight_gradient_peak",
}
_SIZES = {
    "inputs": "given",
    "gradients": "given_back",
    "outputs": "handed_on",
    "input_gradients": "handed_back",
}


@cache
def strip_states(
    strip: StripBytes, script: Script, least_bytes: int, inputs_leave: bool
) -> tuple[State, ...]:
    """Return the state of a strip at each of its actions, by the rules of the engine's store.

    A strip that is recomputed keeps the rows it received from the strip before, and the tensors
    that the loss saves; if the `inputs_leave`, they count among these. Storages below `least_bytes`
    are not copied.
    """
    kinds = {kind for kind, _ in script}
    residency = Residency({0} if Kind.OFFLOAD in kinds else ())
    outputs = _named("output", strip.saved_outputs)
    own = _named("saved", strip.saved) | outputs
    kept_state = own | _named("kept", strip.saved_carried)
    if Kind.R in kinds:
        kept_state = _named("carried", strip.carried)
        if inputs_leave:
            kept_state["given", 0] = strip.given
    used_up_again = sum(kept_state.values()) - sum(strip.saved_carried)
    kept_state |= _named("loss", strip.saved_by_loss)
    held_bytes = used_up = 0
    states = []
    for kind, _ in script:
        moved: list[Hashable] = []
        during = residency.device_bytes + held_bytes - used_up
        during += getattr(strip, _PEAKS[kind]) if kind in _PEAKS else 0
        if kind in (Kind.F, Kind.R):
            for key, size in (kept_state if kind is Kind.F else own).items():
                residency.save(key, size, 0, size >= least_bytes)
            # these were kept only for the operations that have just run again
            used_up = used_up_again if kind is Kind.R else 0
        elif kind in (Kind.B, Kind.I):
            moved = residency.prefetch(0)
            during += _total(residency, moved)
            held_bytes = strip.held_for_weights if kind is Kind.I else 0
            used_up = 0
        elif kind is Kind.W:
            held_bytes = 0
        elif kind is Kind.OFFLOAD:
            moved = residency.offload(0, outputs)
        elif kind is Kind.PREFETCH:
            moved = residency.prefetch(0)
        if kind is Kind.FREE or (kind is Kind.OFFLOAD and Kind.FREE not in kinds):
            residency.free(0)
        moved_bytes = _total(residency, moved)
        if kind in (Kind.B, Kind.I):
            residency.done(0)
        active = residency.device_bytes + held_bytes
        during = max(during, active) if kind is Kind.PREFETCH else during
        states.append(State(during, active - used_up, active, residency.host_bytes, moved_bytes))
    return tuple(states)


def _named(name: str, sizes: Iterable[int]) -> dict[Hashable, int]:
    return {(name, number): size for number, size in enumerate(sizes)}


def _total(residency: Residency, keys: Iterable[object]) -> int:
    return sum(residency.states[key].num_bytes for key in keys)


class Change(NamedTuple):
    """By how much an action changes what is held between strips.

    `counted_bytes` of that its own peak has already.
    """

    activation_bytes: int = 0
    device_bytes: int = 0
    counted_bytes: int = 0


class BetweenStrips:
    """What a rank holds of its images between strips.

    What the next one is left, or its gradient on the way back. If rows of images are read by strip,
    the first stage also holds those of the strips that still read them, and if masks are, the last
    stage that of the strip that runs.
    """

    def __init__(self, strips: StripProfile, schedule: Schedule) -> None:
        self._strips = strips
        self._schedule = schedule
        self._num = strips.num_strips
        self._last_stage = len(strips.stages) - 1
        self._held: dict[tuple[int, int, int], tuple[int, int]] = {}  # activations, and gradients

    def act(self, action: Action) -> Change:
        """Record that an action has run, and return what it changes."""
        kind, stage, micro_batch, direction, _ = action
        assert micro_batch is not None
        number, strip = divmod(micro_batch, self._num)
        key = (direction, stage, number)
        of_stage = self._strips.stages[stage]
        before = self._held.get(key, (0, 0))
        if kind is Kind.F:
            waiting = (
                sum(strip_bytes.waiting for strip_bytes in of_stage[: strip + 1])
                if strip < self._num - 1
                else 0
            )
            after = of_stage[strip].left + waiting, 0
        elif kind in (Kind.B, Kind.I):
            after = 0, (of_stage[strip].carried_back + of_stage[-1].loss_gradient) * (strip > 0)
        else:
            return self._read(action, strip, Change())
        self._held[key] = after
        counted = before[1] - of_stage[-1].loss_gradient * (before[1] > 0)
        change = Change(after[0] - before[0], sum(after) - sum(before), counted)
        return self._read(action, strip, change)

    def _read(self, action: Action, strip: int, change: Change) -> Change:
        """Return a change with the rows that are read, and dropped or kept."""
        kind = action.kind
        is_read = kind in (Kind.F, Kind.R)
        if self._strips.reads_masks and action.stage == self._last_stage and is_read:
            mask_bytes = self._strips.masks[strip]
            change = change._replace(counted_bytes=change.counted_bytes - mask_bytes)
        if action.stage or not (self._strips.reads_rows or self._strips.byte_images):
            return change
        rows = self._strips.stages[0][strip].given
        is_read_again = kind is Kind.F and self._schedule.has(Kind.R, *action[1:])
        is_done = kind in (Kind.B, Kind.W)
        return change._replace(
            device_bytes=change.device_bytes + rows * (is_read - is_read_again - is_done),
            counted_bytes=change.counted_bytes - rows * is_read,
        )


def held_masks(strips: StripProfile, schedule: Schedule, rank: int, has_slots: bool) -> int:
    """Return the bytes of masks that a rank holds throughout a step.

    Those of all micro-batches that end there, unless masks are read by strip. Beside the slots of
    CUDA graphs, that is counted as the largest part.
    """
    last = schedule.num_stages - 1
    ends = [way for way, stage in schedule.placement.stages_on(rank) if stage == last]
    if not ends or not strips.masks:
        return 0
    if strips.reads_masks:
        return max(strips.masks) * has_slots
    directions = list(schedule.whole_directions().values())
    return sum(strips.masks) * sum(map(directions.count, ends))


def slot_bytes(strips: StripProfile, stage: int, is_split: bool) -> int:
    """Return the bytes of the activations of an image in a slot of CUDA graphs."""
    return sum(strip.slot + is_split * strip.made_for_weights for strip in strips.stages[stage])


def shared_slot_bytes(strips: StripProfile, stage: int, is_split: bool) -> list[int]:
    """Return the bytes of a slot that strips under a memory policy share, for each strip."""
    return [strip.shared_slot + is_split * strip.made_by_backward for strip in strips.stages[stage]]


def in_passing(strips: StripProfile, stage: int, is_split: bool) -> int:
    """Return the bytes of the temporary tensors of an image's graphs, which slots do not share."""
    of_stage = strips.stages[stage]
    most = max(
        max(strip.forward_peak - strip.kept + strip.left, strip.backward_peak + strip.carried_back)
        for strip in of_stage
    )
    of_weights = is_split * strips.most(stage, "weight_gradient_peak")
    return most + sum(strip.waiting for strip in of_stage) + of_weights


def boundary_sizes(
    strips: StripProfile, held: Counts, has_slots: bool
) -> Iterator[tuple[dict[str, int], str, int]]:
    """Yield counts, their field and the largest size, for boundary tensors and for the images.

    Rows that are read, or made of bytes, are counted as they come (`BetweenStrips`), but beside the
    slots of CUDA graphs as whole images.
    """
    is_whole = has_slots or not (strips.reads_rows or strips.byte_images)
    image_bytes = sum(strip.given for strip in strips.stages[0]) * is_whole + strips.byte_images
    for (_, stage), counts in held.items():
        yield from ((counts, name, strips.most(stage, field)) for name, field in _SIZES.items())
        yield counts, "images", image_bytes if stage == 0 else 0


def stages_as_layers(strips: StripProfile, profile: ModelProfile | None = None) -> ModelProfile:
    """Return the profile of one strip, in which each stage is a layer.

    Its times shared evenly, its bytes the mean.
    Times and parameters come from the profile of the model's layers, if it is given.
    """
    num = strips.num_strips
    stages = []
    for number, (first, end) in enumerate(pairwise(strips.boundaries)):
        layers = profile.layers[first:end] if profile else ()
        of_stage = strips.stages[number]
        saved = tuple(Saved(size) for size in _means(of_stage, "saved"))
        outputs = tuple(Saved(size, last_use=1) for size in _means(of_stage, "saved_outputs"))
        stages.append(
            LayerProfile(
                name=f"stage {number}",
                kind="stage",
                **{name: sum(getattr(layer, name) for layer in layers) / num for name in TIMES},
                param_bytes=sum(layer.param_bytes for layer in layers),
                buffer_bytes=sum(layer.buffer_bytes for layer in layers),
                stash_bytes=sum(storage.num_bytes for storage in (*saved, *outputs)),
                output_bytes=sum(strip.handed_on for strip in of_stage) // num,
                output_grad_bytes=sum(strip.given_back for strip in of_stage) // num,
                forward_peak_bytes=strips.most(number, "forward_peak"),
                backward_peak_bytes=strips.most(number, "backward_peak"),
                held_for_weights_bytes=sum(strip.held_for_weights for strip in of_stage) // num,
                saved=(*saved, *outputs),
            )
        )
    given_bytes = sum(strip.given for strip in strips.stages[0]) // num
    if profile is None:
        return ModelProfile("", 0, 0, 1, "", "", "fake", tuple(stages), given_bytes)
    facts = {**profile.facts, STRIP_SHARES: strip_shares(profile, strips.boundaries)}
    return replace(profile, layers=tuple(stages), input_bytes=given_bytes, facts=facts)


def strip_shares(profile: ModelProfile, boundaries: Sequence[int]) -> list[list[float]]:
    """Return the share of each strip in the work of each stage; empty if the profile has none."""
    of_layers = profile.facts.get(STRIP_SHARES, ())
    shares = []
    if len(of_layers) != profile.num_layers:
        return []
    for first, end in pairwise(boundaries):
        times = [max(layer.time_s, sys.float_info.min) for layer in profile.layers[first:end]]
        by_strip = zip(*of_layers[first:end], strict=True)
        shares.append([sum(map(mul, times, of_strip)) / sum(times) for of_strip in by_strip])
    return shares


def _means(strips: Sequence[StripBytes], name: str) -> tuple[int, ...]:
    """Return the bytes of the storages of the middle strip, in proportion to the mean of all."""
    middle: tuple[int, ...] = getattr(strips[len(strips) // 2], name)
    total = sum(sum(getattr(strip, name)) for strip in strips) / len(strips)
    share = total / sum(middle) if sum(middle) else 0.0
    return tuple(filter(None, (round(size * share) for size in middle)))
