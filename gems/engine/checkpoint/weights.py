"""Weights by layer, as a finished run saves them, for any partition of the model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gems.errors import ConfigError
from gems.runs.folder import RunFolder
from gems.utils.atomic_io import atomic_write

if TYPE_CHECKING:
    from gems.engine.rank import Rank

Weights = dict[str, dict[str, Tensor]]


def save(rank: Rank, folder: Path) -> None:
    """Write a file {layer name: state dict} for each stage of this rank in direction 0.

    Only replica 0 writes.

    Other directions and replicas have equal copies. Each file appears complete or not at all.
    """
    if rank.replica:
        return
    for direction, stage in rank.stages.modules:
        if direction:
            continue
        state = {
            name: {key: value.cpu() for key, value in module.state_dict().items()}
            for name, module in rank.stages.named_layers((direction, stage))
        }
        folder.mkdir(parents=True, exist_ok=True)
        with atomic_write(folder / f"stage{stage:04d}.pt") as partial, partial.open("wb") as file:
            try:
                torch.save(state, file)
            except RuntimeError as error:  # torch cannot end its archive either, and hides why
                if isinstance(error.__context__, OSError):
                    raise error.__context__ from None
                raise


def load(folder: Path) -> Weights:
    """Read the state dict of each layer from a folder of weights or a run folder.

    Only tensors are unpickled.

    Raises:
        ConfigError: there are none, or a file is not readable.
    """
    inner = RunFolder(folder).checkpoint
    paths = sorted((inner if inner.is_dir() else folder).glob("stage*.pt"))
    if not paths:
        raise ConfigError(
            "train.initial_checkpoint",
            folder,
            "holds no checkpoint (stage*.pt)",
            "give a finished run's folder",
        )
    state: Weights = {}
    for path in paths:
        try:
            for name, tensors in torch.load(path, map_location="cpu", weights_only=True).items():
                state.setdefault(name, {}).update(tensors)  # stages may hold parts of one layer
        except Exception as error:
            raise ConfigError(
                "train.initial_checkpoint",
                path,
                f"cannot be read ({type(error).__name__}: {error})",
            ) from error
    return state
