"""A network whose third layer fails in a way that is asked for, after some forward runs on a rank."""

from __future__ import annotations

import ctypes

from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor


class Fault(nn.Module):
    """Passes its input on, until its run number `after`: then it raises, or blocks in C for ever."""

    def __init__(self, fault: str, after: int) -> None:
        super().__init__()
        self.fault = fault
        self.left = after

    def forward(self, x: Tensor) -> Tensor:
        if isinstance(x, FakeTensor):  # a profile is taken
            return x
        self.left -= 1
        if self.left < 0 and self.fault == "raise":
            raise ValueError("the weights went\nout of bounds")
        if self.left < 0 and self.fault == "host_memory":
            raise MemoryError("no room for 7 GiB")
        if self.left < 0 and self.fault == "block":
            ctypes.CDLL(None).pause()
        return x


class FaultyNet(nn.Sequential):
    """A small network of layers that any four ranks can share, with a fault in the third."""

    def __init__(self, fault: str, after: int, width: int = 4, num_classes: int = 2) -> None:
        super().__init__(
            nn.Conv2d(3, width, 3, padding=1),
            nn.Conv2d(width, width, 3, padding=1),
            Fault(fault, after),
            nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, num_classes)),
        )
