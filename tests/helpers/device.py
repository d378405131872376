"""What tests of the engine run on.

GEMS_TEST_DEVICE is fake_cuda (see tests/fake_cuda), cuda, or cpu by default; GEMS_TEST_TRANSPORT is
machine.transport.
"""

from __future__ import annotations

import os

import torch

NAME = os.environ.get("GEMS_TEST_DEVICE", "cpu")
if NAME not in ("cpu", "cuda", "fake_cuda"):
    raise ValueError(f"GEMS_TEST_DEVICE={NAME}: allowed are cpu, cuda and fake_cuda")
DEVICE = torch.device("cpu") if NAME == "cpu" else torch.device("cuda", 0)
ON_GPU = DEVICE.type == "cuda"
TRANSPORT = os.environ.get("GEMS_TEST_TRANSPORT", "auto")


def forget_races() -> None:
    """Forget the races of what a test does wrong on purpose."""
    if NAME == "fake_cuda":
        from tests.fake_cuda.load import native

        native().clear_races()
