"""Weights by layer, as a finished run leaves them, so that any cut of the model can start from them."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from gems.engine.pipeline import Pipeline
from gems.errors import ConfigError
from gems.models import layers_of
from gems.runs.folder import RunFolder

State = dict[str, dict[str, Tensor]]


def save(pipeline: Pipeline, folder: Path) -> None:
    """Write the stages that this rank holds in direction 0 of replica 0: {layer name: state dict} a stage.

    The other direction and the other replicas hold equal copies. Files appear complete or not at all.
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
        path = folder / f"stage{stage:04d}.pt"
        partial = path.with_suffix(".partial")
        torch.save(state, partial)
        partial.replace(path)


def load(folder: Path) -> State:
    """Read all stages of a checkpoint, or of the run folder that holds one; nothing but tensors is unpickled.

    Raises:
        ConfigError: there is no checkpoint, or a file of it is not readable.
    """
    inner = RunFolder(folder).checkpoint
    paths = sorted((inner if inner.is_dir() else folder).glob("stage*.pt"))
    if not paths:
        raise ConfigError(
            "train.initial_checkpoint", folder, "holds no checkpoint (stage*.pt)", "give a finished run's folder"
        )
    state: State = {}
    for path in paths:
        try:
            for name, tensors in torch.load(path, map_location="cpu", weights_only=True).items():
                state.setdefault(name, {}).update(tensors)  # stages may hold parts of one layer
        except Exception as error:
            raise ConfigError(
                "train.initial_checkpoint", path, f"cannot be read ({type(error).__name__}: {error})"
            ) from error
    return state


def restore(pipeline: Pipeline, state: State) -> None:
    """Put the weights of a checkpoint into every stage of this rank, whatever the cut it was saved with.

    Raises:
        ConfigError: the checkpoint is of another model.
    """

    def misfit(name: str) -> ConfigError:
        return ConfigError(
            "train.initial_checkpoint", pipeline.spec.train.initial_checkpoint,
            f"does not fit this model at layer {name}", "use the model that it was trained with",
        )  # fmt: skip

    names = {layer.name for layer in layers_of(pipeline.spec.model, pipeline.spec.data)}
    if state.keys() != names:  # a deeper network of the same family holds layers that would fit
        raise misfit(min(state.keys() ^ names))
    for held in pipeline.modules:
        for name, module in pipeline.named_layers(held):
            wanted = state[name]
            if not pipeline.contents.has_whole_layers:
                wanted = {key: value for key, value in wanted.items() if key in module.state_dict()}
            try:
                module.load_state_dict(wanted)
            except RuntimeError as error:
                raise misfit(name) from error
