"""The start of a program that loads torch, without Python's garbage collector.

The collector would look through thousands of modules while they are imported: a rank takes a
quarter more time for it (4.2 s of a processor in place of 3.4, from its start to the end of a tiny
run).
"""

from __future__ import annotations

import gc

_is_program = False  # a collector that a user's own script has disabled stays so


def begin() -> None:
    """Collect nothing until `end`."""
    global _is_program
    gc.disable()
    _is_program = True


def end() -> None:
    """Collect what is made from now on, and never look through what is there.

    Nothing without a `begin`.
    """
    global _is_program
    if _is_program:
        gc.freeze()
        gc.enable()
    _is_program = False
