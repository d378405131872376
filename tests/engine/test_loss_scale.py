"""The loss scale of float16."""

from __future__ import annotations

from gems.engine.optimization.loss_scale import GROWTH_STEPS, INITIAL, LossScale


def test_it_halves_at_once_and_doubles_after_many_good_steps():
    scale = LossScale()
    scale.update(False)
    assert scale.value == INITIAL / 2
    for _ in range(GROWTH_STEPS - 1):
        scale.update(True)
    other = LossScale()
    other.restore(scale.state())
    for each in (scale, other):
        assert each.value == INITIAL / 2
        each.update(True)
        assert each.value == INITIAL
        each.update(False)
        assert each.value == INITIAL / 2


def test_it_ends_at_one():
    scale = LossScale()
    for _ in range(40):
        scale.update(False)
    assert scale.value == 1 and not scale.can_shrink
    assert LossScale.for_precision("bf16_mixed") is None
