"""A user's own network as named layers, without importing torch in this process.

`model.target` names a class, or a function that returns a module. A child process constructs and
traces it. The result is cached by the configuration and by the source code: all files of the
target's outermost package, or the files in the folder of a module that is in no package.
"""

from __future__ import annotations

import importlib
import json
import sys
from functools import lru_cache
from typing import Any

from gems.config.schema import DataConfig, ModelConfig
from gems.data import task_of
from gems.errors import ConfigError
from gems.models.layer import Layer
from gems.utils.cache import cached
from gems.utils.targets import ask_child, locate, source_of
from gems.utils.units import format_size

# norms of a user's network: unchanged, by running statistics, by strip
_NORMS = ("batch", "frozen_batch", "ghost_batch")
_TORCH_PART = "gems.models.imported.parts"


def resolve_target(model: ModelConfig) -> ModelConfig:
    """Return the configuration of a user's network with all derived fields.

    The name is the name of the class. `path` is the folder that contains the package if it is not
    installed: the current folder, or one of PYTHONPATH. Keys that only apply to the toolkit's own
    networks take their defaults.

    Raises:
        ConfigError: The target is not a dotted name, the path is not a folder, or only networks of
            the toolkit have the norm.
    """
    target = str(model.target)
    if model.norm not in _NORMS:
        text = f"is for networks of the zoo; {target} has norms of its own"
        raise ConfigError(
            "model.norm", model.norm, text, "leave it out, or set frozen_batch or ghost_batch"
        )
    name, path = locate("model.target", target, model.path)
    return ModelConfig(
        name=name, target=target, kwargs=dict(model.kwargs), path=path, norm=model.norm
    )


def layers(model: ModelConfig, data: DataConfig) -> tuple[Layer, ...]:
    """Return the layers of a user's network for `data`'s images, in order, as parts of one whole.

    Raises:
        ConfigError: The network cannot be found, constructed, run on such images or divided into
            layers. The error names the line of the user's code.
    """
    text, source, described = _described(model, data)
    return tuple(
        Layer(
            name,
            kind,
            f"{_TORCH_PART}:part",
            (("text", text), ("index", index), ("source", source)),
            is_part=True,
        )
        for index, (name, kind) in enumerate(described["layers"])
    )


def check_batch(model: ModelConfig, data: DataConfig, micro_batch_size: int | None) -> None:
    """Raise ConfigError if a micro-batch is too small for a user's network, or as `layers` does.

    It is too small if a batch norm would see a single value per channel.
    """
    least = _described(model, data)[2]["min_batch"]
    if micro_batch_size is not None and micro_batch_size < least:
        text = (
            f"{model.target} takes {least} images of {format_size(data.sides)} px or more at a time"
        )
        advice = (
            f"set parallel.micro_batch_size={least}, or use group norm where batch norm would see a"
            " single value"
        )
        raise ConfigError("parallel.micro_batch_size", micro_batch_size, text, advice)


def num_outputs(model: ModelConfig, data: DataConfig) -> int:
    """Return the number of tensors in the output of a user's network, in training or evaluation.

    Raises:
        ConfigError: As in `layers`.
    """
    return int(_described(model, data)[2]["num_outputs"])


def _described(model: ModelConfig, data: DataConfig) -> tuple[str, str | None, dict[str, Any]]:
    """Return the request to describe the network, the hash of its code, and the description."""
    image = (data.channels, *data.sides_px)
    request = {
        "target": model.target,
        "kwargs": model.kwargs,
        "path": model.path,
        "norm": model.norm,
        "image": image,
    }
    try:
        text = json.dumps(request, sort_keys=True)
    except TypeError as error:
        raise ConfigError(
            "model.kwargs", model.kwargs, f"must be plain values ({error})"
        ) from error
    source = source_of(str(model.target), model.path)
    return text, source, _description(text, source, data.num_classes, task_of(data))


@lru_cache(maxsize=64)
def _description(text: str, source: str | None, num_classes: int, task: str) -> dict[str, Any]:
    """Return names and kinds of the layers; use this process only if torch is already loaded.

    Otherwise they come from the cache or a child process.
    """
    if "torch" in sys.modules:
        described: dict[str, Any] = importlib.import_module(_TORCH_PART).describe(
            text, num_classes, task
        )
        return described
    if source is None:
        return _ask(text, num_classes, task)
    return cached(
        None,
        "network",
        repr((text, source, num_classes, task)),
        lambda: _ask(text, num_classes, task),
    )


def _ask(text: str, num_classes: int, task: str) -> dict[str, Any]:
    """Let a child process describe the network."""
    return ask_child(
        "model.target", json.loads(text)["target"], _TORCH_PART, text, str(num_classes), task
    )
