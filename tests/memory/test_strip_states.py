"""What a strip holds along its actions, and what a rank holds between strips."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate

import pytest

from gems.memory.strips import BetweenStrips, stages_as_layers, strip_states
from gems.profile.strip_profile import StripBytes, StripProfile
from gems.schedule.action import Action, Kind
from gems.schedule.placement import Placement
from gems.schedule.schedule import Schedule

STRIP = StripBytes(
    given=10,
    handed_on=12,
    given_back=12,
    handed_back=10,
    saved=(100, 7),
    saved_outputs=(12,),
    carried=(20, 3),
    saved_carried=(3,),
    saved_by_loss=(),
    left=23,
    waiting=0,
    loss_gradient=0,
    carried_back=23,
    slot=150,
    held_for_weights=60,
    shared_slot=0,
    made_for_weights=12,
    made_by_backward=0,
    forward_peak=150,
    backward_peak=40,
    input_gradient_peak=50,
    weight_gradient_peak=30,
)
F, B, I, W, R = Kind.F, Kind.B, Kind.I, Kind.W, Kind.R  # noqa: E741
OUT = Kind.OFFLOAD
FREE = Kind.FREE
BACK = Kind.PREFETCH


def run(
    *kinds: Kind, strip: StripBytes = STRIP, least: int = 0, inputs_leave: bool = False
) -> list[tuple[int, int, int, int]]:
    """Return bytes during each action, of activations and on the host after it, and what it moved."""
    states = strip_states(strip, tuple((kind, 0) for kind in kinds), least, inputs_leave)
    return [
        (each.during_bytes, each.activation_bytes, each.host_bytes, each.moved_bytes)
        for each in states
    ]


def test_kept() -> None:
    assert run(F, B) == [(150, 122, 0, 0), (162, 0, 0, 0)]
    assert run(F, I, W) == [(150, 122, 0, 0), (172, 60, 0, 0), (90, 0, 0, 0)]


def test_recomputed_keeps_what_it_was_left() -> None:
    forward, again, backward = run(F, R, B)
    assert forward == (150, 23, 0, 0)
    assert again == (173, 142, 0, 0)  # what only the forward needed is counted until the backward
    assert backward == (162, 0, 0, 0)  # and is gone


def test_left_for_the_host_but_small_storages_and_outputs() -> None:
    states = run(F, OUT, FREE, BACK, B, least=5)
    assert states[1] == (122, 122, 107, 107)
    assert states[2:] == [(122, 15, 107, 0), (122, 122, 107, 107), (162, 0, 0, 0)]
    assert run(F, OUT, FREE, B, least=5)[-1] == (15 + 40 + 107, 0, 0, 107)  # on demand


@pytest.mark.parametrize(("inputs_leave", "moved"), [(False, 23), (True, 33)])
def test_inputs_leave_with_what_it_was_left(inputs_leave: bool, moved: int) -> None:
    states = run(F, OUT, FREE, BACK, R, B, inputs_leave=inputs_leave)
    assert [host for _, _, host, _ in states] == [0, moved, moved, moved, moved, 0]
    assert [kept for _, kept, _, _ in states] == [moved, moved, 0, moved, moved + 119, 0]


def in_strips(*actions: Action) -> Schedule:
    return Schedule("1f1b", 6, Placement(1, ((0,),)), (actions,), num_strips=3)


def test_between_strips_there_are_rows_and_then_their_gradients() -> None:
    strips = (
        replace(STRIP, waiting=5),
        replace(STRIP, waiting=5),
        replace(STRIP, left=0, loss_gradient=15),
    )
    order = ((F, 0), (F, 1), (F, 2), (B, 2), (I, 1), (W, 1), (B, 0))
    actions = [Action(kind, 0, 3 + strip, 0) for kind, strip in order]
    between = BetweenStrips(StripProfile((0, 4), (strips,)), in_strips(*actions))
    seen = []
    activations = 0
    device = 0
    for action in actions:
        change = between.act(action)
        activations = activations + change.activation_bytes
        device = device + change.device_bytes
        seen.append((activations, device, change.counted_bytes))
    assert seen == [
        (28, 28, 0),
        (33, 33, 0),
        (0, 0, 0),
        (0, 38, 0),
        (0, 38, 23),
        (0, 38, 0),
        (0, 0, 23),
    ]


@pytest.mark.parametrize(
    ("order", "held", "during"),
    [
        ((F, F, F, B, I, W, B), [10, 20, 30, 20, 20, 10, 0], [10] * 3 + [0] * 4),
        ((F, F, F, R, B, R, B, R, B), [0, 0, 0, 10, 0, 10, 0, 10, 0], [10] * 3 + [10, 0] * 3),
    ],
)
def test_rows_are_held_while_a_strip_reads_them(
    order: tuple[Kind, ...], held: list[int], during: list[int]
) -> None:
    strips = (replace(STRIP, left=0, carried_back=0),) * 3
    left = iter((0, 1, 2))
    back = [2, 2, 1, 1, 0, 0] if R in order else [2, 1, 1, 0]
    turn = iter(back)
    actions = [Action(kind, 0, next(left if kind is F else turn), 0) for kind in order]
    between = BetweenStrips(StripProfile((0, 4), (strips,), reads_rows=True), in_strips(*actions))
    changes = [between.act(action) for action in actions]
    assert list(accumulate(change.device_bytes for change in changes)) == held
    assert [-change.counted_bytes for change in changes] == during


@pytest.mark.parametrize("num", [1, 2])
def test_stages_as_layers_have_the_mean_of_their_strips(num: int) -> None:
    strips = StripProfile((0, 4, 6)[: num + 1], ((STRIP, replace(STRIP, saved=(300, 7))),) * num)
    found = stages_as_layers(strips)
    assert found.num_layers == num and found.input_bytes == 10
    assert found.layers[0].stash_bytes == (122 - 3 + 322 - 3) // 2
