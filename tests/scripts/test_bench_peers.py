"""The peers of the comparison.

Each computes what one unsplit process does, and its bytes are counted.
"""

from __future__ import annotations

import threading

import pytest
import torch

from scripts.bench import rig
from scripts.bench.engine import DEFAULTS, OURS, THEIRS, Contender, LiveBytes, measured
from scripts.bench.peers import LOOP

TINY = [DEFAULTS, rig.square(16), "parallel.micro_batch_size=1"]


@pytest.mark.timeout(120)
@pytest.mark.usefixtures("warm")
@pytest.mark.parametrize(
    "contender",
    [
        Contender(LOOP, "1f1b"),
        Contender(THEIRS, "ScheduleZBVZeroBubble", 4),
        Contender(OURS, "1f1b"),
    ],
)
def test_a_peer_computes_what_one_unsplit_process_does(contender: Contender) -> None:
    found = measured(contender, TINY, True, 1, 1)
    assert found["error"] < 1e-4 and len(found["seconds"]) == 1
    assert found["peak_bytes"] > 1 << 20


def test_bytes_of_another_thread_are_counted_too() -> None:
    kept: list[torch.Tensor] = []

    def work(live: LiveBytes) -> None:
        with live.in_thread():
            kept.append(torch.zeros(1000))

    with LiveBytes() as live:
        thread = threading.Thread(target=work, args=(live,))
        thread.start()
        thread.join()
        assert live.live_bytes == 4000
        kept.clear()
        assert (live.live_bytes, live.peak_bytes) == (0, 4000)
