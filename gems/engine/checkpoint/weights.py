"""Weights by layer, saved by a finished run, from which any partition of the model can start."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from gems.engine.pipeline import Pipeline
from gems.errors import ConfigError
from gems.models import layers_of
from gems.runs.folder import RunFolder
from gems.utils.atomic_io import atomic_write

Weights = dict[str, dict[str, Tensor]]


def save(pipeline: Pipeline, folder: Path) -> None:
    """Write a file {layer name: state dict} for each stage of this rank, if it is in direction 0 of replica 0.

    Other directions and replicas have equal copies. Files appear complete or not at all.
    """
    if pipeline.replica:
        return
    for direction, stage in pipeline.modules:
        if direction:
            continue
        state = {
            name: {key: value.cpu() for key, value in module.state_dict().items()}
            for name, module in pipeline.named_layers((direction, stage))
        }
        folder.mkdir(parents=True, exist_ok=True)
        with atomic_write(folder / f"stage{stage:04d}.pt") as partial, partial.open("wb") as file:
            torch.save(state, file)


def load(folder: Path) -> Weights:
    """Read all stages from a folder of weights or a run folder; only tensors are unpickled.

    Raises:
        ConfigError: there are none, or a file is not readable.
    """
    inner = RunFolder(folder).checkpoint
    paths = sorted((inner if inner.is_dir() else folder).glob("stage*.pt"))
    if not paths:
        raise ConfigError(
            "train.initial_checkpoint", folder, "holds no checkpoint (stage*.pt)", "give a finished run's folder"
        )
    state: Weights = {}
    for path in paths:
        try:
            for name, tensors in torch.load(path, map_location="cpu", weights_only=True).items():
                state.setdefault(name, {}).update(tensors)  # stages may hold parts of one layer
        except Exception as error:
            raise ConfigError(
                "train.initial_checkpoint", path, f"cannot be read ({type(error).__name__}: {error})"
            ) from error
    return state


def restore(pipeline: Pipeline, state: Weights) -> None:
    """Load weights into every stage of this rank, whatever partition they were saved with.

    Raises:
        ConfigError: they are of another model.
    """

    def misfit(name: str) -> ConfigError:
        return ConfigError(
            "train.initial_checkpoint", pipeline.spec.train.initial_checkpoint,
            f"does not fit this model at layer {name}", "use the model that it was trained with",
        )  # fmt: skip

    names = {layer.name for layer in layers_of(pipeline.spec.model, pipeline.spec.data)}
    if state.keys() != names:  # a deeper network of the same family has layers that would fit
        raise misfit(min(state.keys() ^ names))
    for key in pipeline.modules:
        for name, module in pipeline.named_layers(key):
            wanted = state[name]
            if pipeline.stage_modules.operators:  # one of them may have a part of a layer
                wanted = {tensor: value for tensor, value in wanted.items() if tensor in module.state_dict()}
            try:
                module.load_state_dict(wanted)
            except RuntimeError as error:
                raise misfit(name) from error
