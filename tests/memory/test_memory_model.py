"""The memory model on figures that can be added up by hand, and its tables beside its own answers."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from gems.memory.model import OPTIMIZERS, MemoryModel, time_costs
from gems.profile import LayerProfile
from gems.profile.model_profile import LIBRARY_BYTES
from gems.profile.spans import Spans
from gems.schedule import generate
from gems.schedule.lower import lower
from tests.helpers.profiles import profile, random_profile

FIRST = LayerProfile(
    "first",
    "x",
    param_bytes=10,
    buffer_bytes=1,
    stash_bytes=100,
    saved_later=((1, 40),),
    output_bytes=40,
    output_grad_bytes=40,
    forward_peak_bytes=150,
    backward_peak_bytes=60,
    held_for_weights_bytes=30,
)
LAST = LayerProfile(
    "last",
    "x",
    param_bytes=20,
    buffer_bytes=2,
    stash_bytes=200,
    output_bytes=8,
    output_grad_bytes=8,
    forward_peak_bytes=260,
    backward_peak_bytes=90,
    held_for_weights_bytes=50,
)
BY_HAND = Spans(profile([FIRST, LAST], input_bytes=5))


def test_1f1b_by_hand() -> None:
    """Rank 0 at its first B: state 32, images 10, another stash 100, a send 40, a receive ahead 40, and 160 of B.

    Rank 1 at its first B: state 64, its input and the next one 80, and 290 of B.
    """
    model = MemoryModel(BY_HAND, OPTIMIZERS["sgd"])
    assert model.peak_bytes(lower(generate("1f1b", 2, 2)), (0, 1, 2)) == (382, 434)


def test_each_rank_counts_once_what_libraries_hold() -> None:
    with_libraries = Spans(replace(BY_HAND.profile, facts={LIBRARY_BYTES: 1000}))
    schedule = lower(generate("chimera", 2, 2))
    before, after = (MemoryModel(spans, OPTIMIZERS["sgd"]) for spans in (BY_HAND, with_libraries))
    for rank, cost in enumerate(after.rank_costs(schedule)):
        assert len(cost.stages) == 2
        assert (
            after.peak_bytes(schedule, (0, 1, 2))[rank]
            == before.peak_bytes(schedule, (0, 1, 2))[rank] + 1000
        )


def test_a_split_backward_by_hand() -> None:
    """Check the peak of one rank at I, by hand.

    State is 96 and images 5, the stash 340, the peak of the first layer's I 60, 50 are left by the
    last, 8 given.
    """
    model = MemoryModel(BY_HAND, OPTIMIZERS["sgd"])
    whole = model.peak_bytes(lower(generate("layer_parallel", 1, 1)), (0, 2))
    split = model.peak_bytes(lower(generate("zb_h1", 1, 1)), (0, 2))
    state = 3 * 30 + 2 * 3
    assert whole == (state + 5 + 430,), "backward begins with all that forward kept"
    assert split == (state + 5 + 340 + 90 + 8,)


@pytest.mark.parametrize(("name", "copies"), [("sgd_plain", 2), ("sgd", 3), ("adam", 4)])
def test_state_follows_the_optimizer(name: str, copies: int) -> None:
    def peak(layers: list[LayerProfile]) -> int:
        (found,) = MemoryModel(Spans(profile(layers, 0)), OPTIMIZERS[name]).peak_bytes(
            lower(generate("1f1b", 1, 1)), (0, 1)
        )
        return found

    assert peak([LayerProfile("heavy", "x", param_bytes=1000)]) == 1000 * copies


def test_two_directions_hold_two_stages() -> None:
    model = MemoryModel(BY_HAND, OPTIMIZERS["sgd"])
    schedule = lower(generate("gems_master", 2, 2))
    plain = model.peak_bytes(lower(generate("1f1b", 2, 2)), (0, 1, 2))
    both = model.peak_bytes(schedule, (0, 1, 2))
    assert both[0] == both[1], "of the pair {r, P-1-r} both hold the same two stages"
    assert both[0] > max(plain) - 200, "and their states together"
    assert {costs.stages for costs in model.rank_costs(schedule)} == {(0, 1)}


@pytest.mark.parametrize(
    "name", ["1f1b", "gpipe", "gems_master", "zb_v", "interleaved_1f1b", "chimera"]
)
def test_tables_and_answers_agree(name: str) -> None:
    """What a solver reads from the tables is what is printed for the cut."""
    spans = Spans(random_profile(20, seed=1, decay=0.9))
    model = MemoryModel(spans, OPTIMIZERS["adam"])
    schedule = lower(generate(name, 4, 8))
    cuts = tuple(round(20 * s / schedule.num_stages) for s in range(schedule.num_stages + 1))
    costs = model.rank_costs(schedule)
    assert len(costs) == 4
    expected = tuple(
        round(each.at([(cuts[s], cuts[s + 1]) for s in each.stages])) for each in costs
    )
    assert model.peak_bytes(schedule, cuts) == expected
    for each in costs:
        if len(each.stages) == 1:
            assert len(each.moments) == 1, "one stage's moments are folded into one table"


def test_a_longer_queue_holds_more() -> None:
    model = MemoryModel(Spans(random_profile(12)), OPTIMIZERS["sgd"])
    cuts = (0, 3, 6, 9, 12)
    gpipe = [max(model.peak_bytes(lower(generate("gpipe", 4, n)), cuts)) for n in (1, 2, 4, 8)]
    capped = [max(model.peak_bytes(lower(generate("1f1b", 4, n)), cuts)) for n in (4, 8, 16)]
    assert all(a < b for a, b in pairwise(gpipe))
    assert capped[0] < capped[1], "images of the whole step are there"
    assert capped[2] - capped[1] <= 2 * (capped[1] - capped[0])


def test_time_of_a_step_by_rank() -> None:
    spans = Spans(profile([LayerProfile(f"l{i}", "x", 1.0, 2.0, 3.0) for i in range(4)]))
    (only,) = {costs.stages for costs in time_costs(spans, lower(generate("gems_master", 2, 4)))}
    assert only == (0, 1)
    (costs,) = time_costs(spans, lower(generate("gems_master", 2, 4)))
    assert costs.at([(0, 1), (1, 4)]) == 2 * 6.0 + 2 * 18.0, (
        "half of the micro-batches in each direction"
    )
    chain = time_costs(spans, lower(generate("1f1b", 2, 4)))
    assert [each.at([(0, 1)]) for each in chain] == [24.0, 24.0]


def test_an_average_and_low_copies_are_counted():
    """Ten bytes of parameters: 4 copies under Adam, one more of the average, half a one of 16 bits."""
    plain, averaged, both = (
        OPTIMIZERS[f"adam{more}"].static_bytes(10, 0) for more in ("", "+average", "+average+mixed")
    )
    assert (plain, averaged, both) == (40, 50, 55)
