"""Host copies: the state as it was at one moment, while training goes on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gems.engine.checkpoint.shard import Piece
from gems.engine.checkpoint.state import LOSSES, State, state_of
from gems.engine.pipeline import Pipeline

_NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8",
    torch.bool: "BOOL",
}  # fmt: skip


class HostCopy:
    """Copies a state to the host, into memory that is kept from one checkpoint to the next.

    On a GPU the copies go into pinned memory on a stream of their own: the compute stream waits at once for what the next
    forward changes, and for the rest only before the optimizer's next step.
    """

    def __init__(self, device: torch.device, optimizer: torch.optim.Optimizer) -> None:
        self._kept: dict[str, Tensor] = {}
        self._cuda: Any = torch.cuda if device.type == "cuda" else None
        self._device = device
        self._stream: Any = self._cuda.Stream(device) if self._cuda is not None else None
        self._copied: Any = None
        if self._cuda is not None:
            optimizer.register_step_pre_hook(lambda *_: self._hold_back())

    def take(self, state: State) -> None:
        """Begin to copy; `pieces` gives the copies, from any thread, once they are there."""
        self._kept = {name: self._room_for(name, tensor) for name, tensor in (state.early | state.late).items()}
        if self._cuda is None:
            self._copy(state.early)
            self._copy(state.late)
            return
        computing = self._cuda.current_stream(self._device)
        self._stream.wait_stream(computing)
        with self._cuda.stream(self._stream):
            self._copy(state.early)
            computing.wait_event(self._stream.record_event())
            self._copy(state.late)
            self._copied = self._stream.record_event()

    def pieces(self) -> dict[str, Piece]:
        """Wait for the copies and gives them as bytes; they stand until the next `take`."""
        if self._copied is not None:
            self._copied.synchronize()
        return {
            name: Piece(_NAMES[tensor.dtype], tuple(tensor.shape), _bytes_of(tensor))
            for name, tensor in self._kept.items()
        }

    def _copy(self, tensors: dict[str, Tensor]) -> None:
        for name, tensor in tensors.items():
            self._kept[name].copy_(tensor, non_blocking=True)

    def _room_for(self, name: str, tensor: Tensor) -> Tensor:
        kept = self._kept.get(name)
        if kept is not None and kept.shape == tensor.shape and kept.dtype == tensor.dtype:
            return kept
        return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.device.type != "cpu")

    def _hold_back(self) -> None:
        if self._copied is not None:
            self._cuda.current_stream(self._device).wait_event(self._copied)


class PipelineSource:
    """What a rank's shard is made of: its share of the pipeline's state; on rank 0 the losses too."""

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline
        self._copy = HostCopy(pipeline.device, pipeline.optimizer)

    def take(self, losses: Sequence[float]) -> None:
        """Copy the state as it is now; `losses` are those of all steps before."""
        state = state_of(self._pipeline)
        if self._pipeline.comm.rank == 0:
            state.early[LOSSES] = torch.tensor(losses, dtype=torch.float64)
        self._copy.take(state)

    def pieces(self) -> dict[str, Piece]:
        """Return what was copied last, as bytes."""
        return self._copy.pieces()


def _bytes_of(tensor: Tensor) -> memoryview:
    return tensor.reshape(-1).view(torch.uint8).numpy().data
