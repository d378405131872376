"""A rank out of memory: the memory that it held, the predicted peak, and what to change.

The memory is reported by torch's allocator and by the rank's own count. The module uses torch only
if it is loaded already, since a rank may fail before.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from gems.runs.failure_cause import FailureCause, classify_error, device_memory_remedies
from gems.runs.folder import RunFolder
from gems.utils.host_memory import rss_bytes
from gems.utils.units import GIB, KIB, MIB, format_bytes

if TYPE_CHECKING:
    from gems.engine.supervision.recorder import Recorder

ASKED = re.compile(r"[Tt]ried to allocate (\d+(?:\.\d+)?) ?(bytes|KiB|MiB|GiB)")
UNITS = {"bytes": 1, "KiB": KIB, "MiB": MIB, "GiB": GIB}
NOTE = "memory_state"  # the attribute of an exception that has what its rank held


@dataclass(frozen=True, slots=True)
class MemoryState:
    """The memory that a rank holds, in bytes; None if its device or its stage of life has no value.

    Attributes:
        counted_bytes: Bytes that the rank counts on its device, by kind.
        allocated_bytes: Bytes that torch's allocator has handed out.
        reserved_bytes: Bytes that the allocator holds of the device, including the allocated ones.
        fragment_bytes: Free pieces of blocks that are partly in use, which no larger request can
            use.
        process_bytes: Host memory of the process, if that is the device's memory.
    """

    counted_bytes: dict[str, int] | None = None
    allocated_bytes: int | None = None
    reserved_bytes: int | None = None
    fragment_bytes: int | None = None
    process_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class OutOfMemory:
    """A failed request for memory, with the memory that the rank held and the prediction.

    Unknown values are None. `limit_bytes` is the device's memory, or `machine.device_bytes` if that
    is less.
    """

    state: MemoryState
    asked_bytes: int | None
    limit_bytes: int | None
    predicted_peak_bytes: int | None
    advice: tuple[str, ...]

    def describe(self) -> str:
        """Describe what was held and what was predicted, in one line."""
        state = self.state
        parts = []
        if self.asked_bytes is not None:
            parts.append(f"{format_bytes(self.asked_bytes)} were asked for")
        if state.allocated_bytes is not None and state.reserved_bytes is not None:
            of = "" if self.limit_bytes is None else f" of {format_bytes(self.limit_bytes)}"
            more = (
                f", and has {format_bytes(state.reserved_bytes - state.allocated_bytes)} more"
                " reserved"
            )
            if state.fragment_bytes is not None:
                more += f" ({format_bytes(state.fragment_bytes)} in fragments)"
            parts.append(
                f"torch's allocator has given out {format_bytes(state.allocated_bytes)}{of}{more}"
            )
        if state.process_bytes is not None:
            parts.append(f"the process holds {format_bytes(state.process_bytes)}")
        if state.counted_bytes is None:
            parts.append("the rank was outside of a step, where it counts nothing")
        else:
            kinds = ", ".join(
                f"{name} {format_bytes(size)}" for name, size in state.counted_bytes.items() if size
            )
            total = format_bytes(sum(state.counted_bytes.values()))
            parts.append(f"the rank counts {total}" + (f": {kinds}" if kinds else ""))
        if self.predicted_peak_bytes is None:
            parts.append("no peak was predicted")
        else:
            parts.append(f"the predicted peak is {format_bytes(self.predicted_peak_bytes)}")
        return "; ".join(parts)

    def to_dict(self) -> dict[str, Any]:
        """Return all fields and the description, for a record."""
        fields = asdict(self)
        return {"text": self.describe(), **fields.pop("state"), **fields}


def note_memory(error: BaseException, recorder: Recorder) -> None:
    """Note in an out-of-memory exception what the rank holds, before it is freed; never raise."""
    with contextlib.suppress(Exception):
        if classify_error(error).cause not in (
            FailureCause.DEVICE_MEMORY,
            FailureCause.HOST_MEMORY,
        ):
            return
        device = recorder.device
        state = _allocator_state() if device is not None and device.type == "cuda" else None
        state = state or MemoryState(process_bytes=rss_bytes())
        setattr(error, NOTE, replace(state, counted_bytes=recorder.held_by_kind()))


def explain_out_of_memory(error: BaseException, folder: RunFolder, rank: int) -> OutOfMemory | None:
    """Return the views of a rank whose memory was full; None if the error shows another cause.

    Where the memory of the host is full and the rank computes on a GPU, what it holds there does
    not matter.
    """
    cause = classify_error(error).cause
    allocator = _allocator_state()
    if cause is not FailureCause.DEVICE_MEMORY and (
        cause is not FailureCause.HOST_MEMORY or allocator is not None
    ):
        return None
    state: MemoryState = (
        getattr(error, NOTE, None) or allocator or MemoryState(process_bytes=rss_bytes())
    )
    spec = predicted = None
    with contextlib.suppress(Exception):
        spec = folder.read_spec()
    with contextlib.suppress(Exception):
        predicted = folder.predicted_peak_bytes(rank)
    request = ASKED.search(str(error))
    requested_bytes = None if request is None else round(float(request[1]) * UNITS[request[2]])
    limits = [
        _total_bytes() if allocator is not None else None,
        spec.machine.device_bytes if spec else None,
    ]
    return OutOfMemory(
        state,
        requested_bytes,
        min((limit for limit in limits if limit is not None), default=None),
        predicted,
        device_memory_remedies(
            spec.memory if spec else None,
            spec.parallel if spec else None,
            _is_fragmented(state, requested_bytes),
        ),
    )


def _is_fragmented(state: MemoryState, asked_bytes: int | None) -> bool:
    """Return whether the free pieces of torch's allocator would have been enough, in one."""
    if state.fragment_bytes is None or asked_bytes is None or state.fragment_bytes < asked_bytes:
        return False
    from gems.engine.transport.staging import ALLOCATOR_SETTINGS, EXPANDABLE

    return not any(
        EXPANDABLE.lower() in os.environ.get(name, "").lower() for name in ALLOCATOR_SETTINGS
    )


def _allocator_state() -> MemoryState | None:
    """Return what torch's allocator of the current GPU holds; None if none is in use."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return None
    known = torch.cuda.memory_stats()
    kinds = ("allocated_bytes", "reserved_bytes", "inactive_split_bytes")
    allocated, reserved, fragments = (int(known[f"{kind}.all.current"]) for kind in kinds)
    return MemoryState(None, allocated, reserved, fragments)


def _total_bytes() -> int:
    torch = sys.modules["torch"]
    return int(torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory)
