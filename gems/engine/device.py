"""The device of a rank, and what differs between a processor and a GPU."""

from __future__ import annotations

import os

import torch

from gems.config import MachineConfig
from gems.engine.host_memory import keep_freed_memory
from gems.errors import ConfigError

DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}
LOCAL_RANK_VARIABLES = (
    "SLURM_LOCALID",
    "MPI_LOCALRANKID",
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "MV2_COMM_WORLD_LOCAL_RANK",
    "PALS_LOCAL_RANKID",
)


def local_rank() -> int:
    """Gives the place of this rank on its node, from whichever launcher says it; 0 when none does."""
    for name in LOCAL_RANK_VARIABLES:
        if name in os.environ:
            return int(os.environ[name])
    return 0


def open_device(machine: MachineConfig) -> torch.device:
    """Chooses the rank's device and sets its threads.

    With several GPUs visible the local rank picks one; with one visible (bound by the scheduler) it is that one, so
    ranks may also share a GPU.

    Raises:
        ConfigError: machine.device=cuda where torch sees no GPU.
    """
    torch.set_num_threads(machine.threads_per_rank)
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
    device = torch.device("cuda", local_rank() % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device
