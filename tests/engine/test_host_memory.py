"""Freed memory stays with the process: the page faults of tensors that come and go."""

from __future__ import annotations

import platform
from pathlib import Path

import pytest

from tests.helpers.processes import python

PROGRAM = """
import resource, sys
import torch
from gems.utils.host_memory import keep_freed_memory
torch.set_num_threads(1)
if sys.argv[1] == "kept":
    assert keep_freed_memory()
faults = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_minflt
def step():
    kept = [torch.ones(1 << 21) for _ in range(3)]
for _ in range(5):
    step()
before = faults()
for _ in range(10):
    step()
print(faults() - before)
"""


def page_faults(mode: str) -> int:
    ended = python("-c", PROGRAM, mode, cwd=Path(__file__).parents[2], check=True)
    return int(ended.stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc can be told")
def test_tensors_that_come_and_go_cost_no_page_faults():
    """Ten times three tensors of 8 MB are 61440 pages of 4 KiB.

    The heap takes a few steps to find its size.
    """
    assert page_faults("kept") < 1000


def test_another_c_library_is_left_alone(monkeypatch):
    from gems.utils import host_memory

    monkeypatch.setattr(host_memory.ctypes, "CDLL", lambda name: object())
    assert not host_memory.keep_freed_memory()
