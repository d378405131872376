"""Neighbours: the ranks of one node, which can be asked for their stacks by a signal."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from gems.utils.process_tree import start_time


@dataclass(frozen=True, slots=True)
class Neighbour:
    """A rank on this node; its process is known by its start too, since numbers come back and containers have their own."""

    rank: int
    pid: int
    started: str
    pid_namespace: int

    @classmethod
    def me(cls, rank: int) -> Neighbour:
        """Return this process."""
        try:
            namespace = Path("/proc/self/ns/pid").stat().st_ino
        except OSError:
            namespace = -1
        return cls(rank, os.getpid(), start_time(os.getpid()), namespace)


def ask(here: Sequence[Neighbour], rank: int) -> None:
    """Ask the other ranks among `here` for their stacks, by SIGUSR1, on behalf of `rank`."""
    me = next(one for one in here if one.rank == rank)
    for one in here:
        if one.rank != rank and one.pid_namespace == me.pid_namespace:
            with contextlib.suppress(OSError):
                if start_time(one.pid) == one.started:
                    os.kill(one.pid, signal.SIGUSR1)
