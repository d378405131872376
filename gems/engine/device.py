"""The device of a rank, and the random generators on it."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import torch

from gems.config.schema import MachineConfig
from gems.engine.transport.environment import local_rank
from gems.errors import ConfigError
from gems.utils.host_memory import keep_freed_memory

DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16, "float16": torch.float16}


def seed_generators(device: torch.device, seed: int, replica: int, rank: int) -> None:
    """Seed the generators that layers draw from while they train, such as dropout; weights do not depend on them.

    Torch's default seed would make all replicas drop the same values. Python's and numpy's generators are seeded for
    layers of a user's own.
    """
    # the last number tells these states from those that weights are drawn from: numpy fills up with zeros
    state = np.random.SeedSequence((seed, replica, rank, 1)).generate_state(2, np.uint64)
    torch.default_generator.manual_seed(int(state[0]))
    if device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda.manual_seed(int(state[0]))
    random.seed(int(state[1]))
    np.random.seed(int(state[1]) % 2**32)


def open_device(machine: MachineConfig, order: Sequence[int] = ()) -> torch.device:
    """Open the rank's device and set its number of threads; more ranks on a node than visible GPUs share them.

    `order` is the GPU of each local rank (`cluster.device_order`): at some sites the GPUs nearest to the first cores,
    or to the first network card, are not the first ones. It has no effect if the scheduler bound the rank to one GPU.

    Raises:
        ConfigError: machine.device=cuda and torch sees no GPU, or `order` names other GPUs than are visible.
    """
    torch.set_num_threads(machine.threads_per_rank)
    if machine.device == "cpu" or (machine.device == "auto" and not torch.cuda.is_available()):
        keep_freed_memory()
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConfigError(
            "machine.device", "cuda", "torch sees no GPU here", "use machine=cpu, or a torch built for this GPU"
        )
    num_visible = torch.cuda.device_count()
    index = local_rank() % num_visible
    if num_visible > 1 and order:
        if len(order) != num_visible:  # some of the node's GPUs are hidden: the order would name the wrong ones
            raise ConfigError(
                "cluster.device_order", list(order), f"names {len(order)} GPUs, and this rank sees {num_visible}",
                "set cluster.device_order=[], or let ranks see all GPUs of a node (cluster.gpu_bind=none)",
            )  # fmt: skip
        index = order[index]
    device = torch.device("cuda", index)
    torch.cuda.set_device(device)
    return device
