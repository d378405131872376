"""The judge of the comparison with torch's schedules, and its count of bytes."""

from __future__ import annotations

import pytest
import torch

from scripts.bench.engine import Contender, LiveBytes, judge


def test_the_fastest_of_ours_that_keeps_their_peak_is_set_against_each_of_theirs():
    names = [("ours", "big"), ("ours", "small"), ("torch", "lean"), ("torch", "fast")]
    times = [[1.0, 1.0, 1.0], [2.0, 2.0, 2.2], [6.0, 6.0, 6.0], [3.0, 3.0, 3.0]]
    fast, lean = judge([Contender(*name) for name in names], times, [200, 90, 100, 250])
    assert (fast["theirs"], fast["ours"], fast["ratio"]) == ("torch fast", "big", 3.0)
    assert (lean["theirs"], lean["ours"], lean["ratio"]) == ("torch lean", "small", 3.0)
    assert lean["ratio_p25"] < 3.0 == lean["ratio_p75"]


def test_a_peak_that_none_of_ours_keeps_has_no_answer():
    found = judge([Contender("ours", "x"), Contender("torch", "y")], [[1.0], [2.0]], [11, 10])
    assert found == [{"theirs": "torch y", "ours": None}]


def test_bytes_are_counted_while_they_live_and_once_a_storage():
    with LiveBytes() as live:
        kept = torch.zeros(1000)
        view = kept.view(10, 100) + 0
        del view
        assert live.live_bytes == 4000
        gone = torch.zeros(500, dtype=torch.float64)
        del gone
    assert (live.live_bytes, live.peak_bytes) == (4000, 8000)
    assert kept.numel() == 1000


def test_bytes_of_a_backward_are_seen():
    weight = torch.ones(100, 100, requires_grad=True)
    with LiveBytes() as live:
        loss = (weight @ weight).sum()
        before = live.live_bytes
        loss.backward()
    assert weight.grad is not None
    assert before < 80_000 <= live.peak_bytes
    assert live.live_bytes == pytest.approx(weight.grad.nbytes, abs=100)
