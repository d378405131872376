"""The subject of a profile: the model, its samples, and the settings under which layers run."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from operator import attrgetter
from typing import Any

from gems.config.schema import (
    DataConfig,
    LossConfig,
    MachineConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    ProfileConfig,
    RunSpec,
    TrainConfig,
)
from gems.config.training import captures_graphs
from gems.data import task_of
from gems.utils.targets import source_of

# fields of the data, besides the sides, that the layers and the loss see
_SEEN = ("channels", "num_classes", "length")


@dataclass(frozen=True, slots=True)
class Subject:
    """The sections of a resolved run on which its profiles depend, and the folder of the cache."""

    model: ModelConfig
    data: DataConfig
    parallel: ParallelConfig
    profile: ProfileConfig
    machine: MachineConfig
    optimizer: OptimizerConfig
    loss: LossConfig
    train: TrainConfig
    plugins: list[str]
    plugins_dir: str | None
    cache_dir: str | None

    @classmethod
    def of(cls, spec: RunSpec) -> Subject:
        """Return the subject of a resolved run's profiles."""
        return cls(*(getattr(spec, name) for name in cls.__slots__))

    def values(self, keys: Iterable[str]) -> dict[str, Any]:
        """Return the values of keys of the configuration."""
        return {key: attrgetter(key)(self) for key in keys}

    @property
    def is_captured(self) -> bool:
        """Whether layers run as CUDA graphs on whole micro-batches."""
        return self.replays_graphs and self.parallel.num_strips <= 1

    @property
    def replays_graphs(self) -> bool:
        """Whether actions run as CUDA graphs, each of which the host launches once."""
        return captures_graphs(self.train, self.machine.has_gpu)

    @property
    def layers(self) -> dict[str, Any]:
        """The settings that determine the layers and their inputs, by key."""
        size = self.parallel.micro_batch_size
        return layer_keys(self.model, self.data, size, self.train.layer_dtype)


def layer_keys(
    model: ModelConfig, data: DataConfig, micro_batch_size: int, dtype: str
) -> dict[str, Any]:
    """Return the settings that determine the layers and their inputs, by key."""
    code = (
        {"code of model.target": source_of(model.target, model.path)}
        if model.target is not None
        else {}
    )
    return {
        **code,
        **{f"model.{key}": value for key, value in asdict(model).items()},
        **{f"data.{key}": side for key, side in data.sides.items()},
        **{f"data.{key}": getattr(data, key) for key in _SEEN},
        "data.task": task_of(data),
        "parallel.micro_batch_size": micro_batch_size,
        "train.dtype": dtype,
    }
