"""The device of a rank, and the random generators on it."""

from __future__ import annotations

import os
import random
from collections.abc import Sequence

import numpy as np
import torch

from gems.autograd.kernels import choose_kernels
from gems.config.cluster import NCCL
from gems.config.schema import MachineConfig
from gems.engine.transport.environment import local_rank
from gems.errors import ConfigError
from gems.utils.host_memory import keep_freed_memory

DTYPES = {
    "float32": torch.float32,
    "float64": torch.float64,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


def seed_generators(device: torch.device, seed: int, replica: int, rank: int) -> None:
    """Seed the generators from which layers such as dropout draw during training.

    Weights do not depend on them. Torch's default seed would make all replicas drop the same
    values. Python's and numpy's generators are seeded for layers of the user's own.
    """
    # the last number separates these states from those of weights: numpy pads with zeros
    state = np.random.SeedSequence((seed, replica, rank, 1)).generate_state(2, np.uint64)
    torch.default_generator.manual_seed(int(state[0]))
    if device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda.manual_seed(int(state[0]))
    random.seed(int(state[1]))
    np.random.seed(int(state[1]) % 2**32)


def open_device(machine: MachineConfig, order: Sequence[int] = ()) -> torch.device:
    """Open the rank's device and set its number of threads.

    If a node has more ranks than visible GPUs, the ranks share them. `order` is the GPU of each
    local rank (`cluster.device_order`): at some sites the GPUs nearest to the first cores, or to
    the first network card, are not the first ones. It has no effect if the scheduler bound the rank
    to one GPU. Torch's allocator gives at most `machine.device_bytes`, even on a larger GPU.

    Raises:
        ConfigError: `machine.device=cuda` and torch sees no GPU, or `order` names GPUs other than
            the visible ones.
    """
    torch.set_num_threads(machine.threads_per_rank)
    if (
        machine.transport == NCCL
    ):  # each edge has a stream, and streams that share a queue wait for one another
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    if machine.device == "cpu" or (machine.device == "auto" and not torch.cuda.is_available()):
        keep_freed_memory()
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConfigError(
            "machine.device",
            "cuda",
            "torch sees no GPU here",
            "use machine=cpu, or a torch built for this GPU",
        )
    num_visible = torch.cuda.device_count()
    index = local_rank() % num_visible
    if num_visible > 1 and order:
        if (
            len(order) != num_visible
        ):  # some of the node's GPUs are hidden: the order would name the wrong ones
            raise ConfigError(
                "cluster.device_order",
                list(order),
                f"names {len(order)} GPUs, and this rank sees {num_visible}",
                "set cluster.device_order=[], or let ranks see all GPUs of a node"
                " (cluster.gpu_bind=none)",
            )
        index = order[index]
    device = torch.device("cuda", index)
    torch.cuda.set_device(device)
    choose_kernels(machine)
    if machine.device_bytes is not None:
        share = machine.device_bytes / torch.cuda.get_device_properties(device).total_memory
        if share < 1:  # what does not fit the machine of the plan must not fit here
            torch.cuda.set_per_process_memory_fraction(share, device)
    return device


def use_own_stream(device: torch.device) -> None:
    """Let this thread leave the default stream of a GPU, of which no CUDA graph can be captured."""
    if device.type != "cuda":
        return
    computing = torch.cuda.current_stream(device)
    if computing == torch.cuda.default_stream(device):
        own = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        own.wait_stream(computing)
        torch.cuda.set_stream(own)


class Arrival:
    """A tensor on its way to a GPU, and the event of its arrival."""

    def __init__(self, tensor: torch.Tensor, event: torch.cuda.Event) -> None:
        self.tensor = tensor
        self.event = event

    def take(self) -> torch.Tensor:
        """Return the tensor; the current stream waits for it, the host does not."""
        stream = torch.cuda.current_stream(self.tensor.device)
        stream.wait_event(self.event)
        self.tensor.record_stream(stream)
        return self.tensor


class CopyIn:
    """Copies from pinned memory to a GPU on its own stream, into memory of that stream.

    So a copy waits for no compute. Memory that compute has freed may be in use until all posted
    work has run.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]

    def begin(self, tensor: torch.Tensor) -> Arrival:
        """Post the copy of a tensor."""
        with torch.cuda.stream(self._stream):
            copy = tensor.to(self._device, non_blocking=True)
        return Arrival(copy, self._stream.record_event())

    def add_piece(
        self, piece: torch.Tensor, first: int, shape: Sequence[int], arrival: Arrival | None = None
    ) -> Arrival:
        """Post the copy of a piece of a tensor, from element `first` on.

        It goes into the tensor of an earlier `arrival`, if there is one.
        """
        with torch.cuda.stream(self._stream):
            whole = (
                torch.empty(tuple(shape), dtype=piece.dtype, device=self._device)
                if arrival is None
                else arrival.tensor
            )
            whole.view(-1)[first : first + piece.numel()].copy_(piece, non_blocking=True)
        return Arrival(whole, self._stream.record_event())  # which is after the pieces before
