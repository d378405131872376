"""A device of the studies by four rates, and how long a call takes on it."""

from __future__ import annotations

from dataclasses import dataclass

from gems.memory.policies.vdnn.paper.calls import Call, CallKind


@dataclass(frozen=True, slots=True)
class Device:
    """The rates that kernels and copies reach: floating-point operations and bytes per second."""

    flops_per_s: float
    memory_bytes_per_s: float
    d2h_bytes_per_s: float
    h2d_bytes_per_s: float

    def forward_s(self, call: Call) -> float:
        """Return the seconds of a call: of a convolution by its arithmetic alone, of others by the bytes they move.

        A ReLU takes none: the rate of convolutions is that of whole networks, their ReLUs among it.
        """
        if call.kind is CallKind.CONV:
            return call.flops / self.flops_per_s
        return max(call.flops / self.flops_per_s, call.moved_bytes / self.memory_bytes_per_s)

    def backward_s(self, call: Call) -> float:
        """Return the seconds of backward: twice forward, once for the first convolution, whose images need no gradient."""
        is_first = call.kind is CallKind.CONV and call.reads == 0
        return (1 if is_first else 2) * self.forward_s(call)
