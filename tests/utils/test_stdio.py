"""What a library prints from C does not reach a command's stdout."""

from __future__ import annotations

from tests.helpers.processes import python

PROGRAM = """
import ctypes
from gems.utils.stdio import stdout_to_stderr
print("before")
with stdout_to_stderr():
    ctypes.CDLL(None).puts(b"from C")
    print("from Python", flush=True)
print("after")
"""


def test_stdout_is_left_alone() -> None:
    ended = python("-c", PROGRAM)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout == "before\nafter\n"
    assert set(ended.stderr.splitlines()) == {"from C", "from Python"}
