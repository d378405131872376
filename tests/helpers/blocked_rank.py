"""A rank program of an emulated run in which one rank comes to a stop in C: `...

FOLDER RANK STEP HOW`.
"""

from __future__ import annotations

import ctypes
import sys

from gems.engine.emulation import executor as emulated
from gems.engine.run import main
from gems.engine.transport.environment import launched_rank
from gems.schedule.action import Action, Kind

HOW = {
    "free": ctypes.CDLL,
    "holding": ctypes.PyDLL,
}  # whether other threads of the rank get a turn meanwhile


def never_return(libc: ctypes.CDLL) -> None:
    """Take a lock twice, from which no signal wakes anybody up."""
    lock = ctypes.create_string_buffer(64)
    libc.pthread_mutex_lock(lock)
    libc.pthread_mutex_lock(lock)


def block(rank: int, step: int, how: str) -> None:
    """Has `rank` never come back from the forward of micro-batch 1 in `step`."""
    compute = emulated.EmulatedExecutor._compute
    counts = {"done": 0}

    def run(self: emulated.EmulatedExecutor, action: Action) -> None:
        if counts["done"] == step and launched_rank() == rank and str(action).endswith("F1"):
            never_return(HOW[how](None))
        counts["done"] += action.kind is Kind.STEP
        compute(self, action)

    emulated.EmulatedExecutor._compute = run  # type: ignore[method-assign]


if __name__ == "__main__":
    folder, rank, step, how = sys.argv[1:]
    block(int(rank), int(step), how)
    main([folder])
