"""The projections of Pal et al.: gains from the inputs, crossings, and what is known of each input."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gems.planner.hybrid.pal import DEGREE, NETWORKS, Mark, Network, Verdict

INCEPTION, GNMT, BIGLSTM = NETWORKS


def gain(network: Network, devices: int) -> float:
    return network.case.gain(devices // DEGREE, DEGREE) - 1.0


@pytest.mark.parametrize(
    ("network", "devices", "published"),
    [(INCEPTION, 256, 0.265), (INCEPTION, 64, 0.155), (GNMT, 256, 0.08), (BIGLSTM, 32, 0.22)],
)
def test_published_gains_come_out_to_their_last_digit(
    network: Network, devices: int, published: float
) -> None:
    assert gain(network, devices) == pytest.approx(published, abs=0.0005)
    (found,) = (each for each in network.published if each.devices == devices)
    assert found.gain == published


def test_inceptions_other_gain_is_as_its_epochs_say() -> None:
    assert gain(INCEPTION, 128) == pytest.approx(1.32 / 2 * 12 / 7 - 1)
    assert [gain(INCEPTION, devices) < 0 for devices in (2, 32, 64, 128)] == [
        True,
        True,
        False,
        False,
    ]


def test_gains_follow_their_inputs_and_not_the_printed_figures() -> None:
    slower = replace(INCEPTION, speedup=replace(INCEPTION.speedup, value=1.2, low=1.2, high=1.2))
    assert gain(slower, 256) == pytest.approx(1.2 / 2 * 23 / 12 - 1)
    assert slower.published == INCEPTION.published


def test_crossings() -> None:
    found = INCEPTION.break_even()
    assert (found.below, found.listed, found.devices) == (32, 64, 54)
    for network, listed in ((GNMT, 256), (BIGLSTM, 32)):
        found = network.break_even()
        assert (found.below, found.listed) == (None, listed), "the inputs do not reach below"
    place = GNMT.noise_break_even
    assert place is not None and place == pytest.approx(100.8, abs=0.1)
    law = GNMT.noise_scale
    assert law is not None
    batch = GNMT.worker_batch.value
    assert law.epochs(256 * batch) / law.epochs(128 * batch) == pytest.approx(1.878)
    assert law.epochs(place * batch) / law.epochs(place / 2 * batch) == pytest.approx(
        GNMT.needed_ratio
    )
    assert BIGLSTM.noise_scale is None and BIGLSTM.noise_break_even is None
    assert INCEPTION.noise_break_even == pytest.approx(33.6, abs=0.1)


def test_every_input_says_how_well_it_is_known() -> None:
    for network in NETWORKS:
        marks = {each.name: each.mark for each in network.inputs}
        assert not any(mark.is_confirmed for mark in marks.values()), (
            "no input was read in the paper"
        )
        assert marks["SU^2"] is Mark.RECALLED and marks["batch of a worker"] is Mark.DOUBTFUL
        assert marks["scaling efficiency"] is Mark.ASSUMED
        assert all(each.low <= each.value <= each.high for each in network.inputs)
    assert [each.mark for network in NETWORKS for each in network.published] == [
        Mark.CONFIRMED,
        Mark.RECALLED,
        Mark.CONFIRMED,
        Mark.CONFIRMED,
    ]
    assert all(
        each.devices_mark is Mark.RECALLED for network in NETWORKS for each in network.published
    )


def test_only_inceptions_gain_is_independent_of_what_was_published() -> None:
    assert [network.verdict for network in NETWORKS] == [
        Verdict.REPRODUCED,
        Verdict.CONSISTENT,
        Verdict.CONSISTENT,
    ]
