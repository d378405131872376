"""Toy networks, small runs and numbered images."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor, nn

from gems.config.resolve import resolve
from gems.config.schema import (
    BenchmarkConfig,
    DataConfig,
    MachineConfig,
    ModelConfig,
    ParallelConfig,
    PartitionConfig,
    RunSpec,
    ScheduleConfig,
    TrainConfig,
)
from gems.data.dataset import Dataset
from gems.models import MODELS, Layer, ModelFamily
from gems.plan.evaluate import evaluate
from gems.plan.rank_plan import RankPlan
from gems.schedule.schedule import Schedule
from tests.helpers.device import TRANSPORT

HERE = "tests.helpers.toys"


class Fork(nn.Module):
    """Takes images; gives a feature, an integer tensor without gradient, and a view of the images."""

    def __init__(self, in_features: int, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(in_features, width)

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        flat = images.flatten(1)
        return torch.tanh(self.linear(flat)), flat.argmax(1) % 4, flat


class Pass(nn.Module):
    """Hands everything on, as views of what it got."""

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(tensor.view_as(tensor) for tensor in tensors)


class Mix(nn.Module):
    """Uses all three tensors and hands three on, in another order: the integer one first."""

    def __init__(self, in_features: int, width: int) -> None:
        super().__init__()
        self.rows = nn.Parameter(torch.randn(4, width))
        self.linear = nn.Linear(in_features, width)

    def forward(
        self, feature: Tensor, index: Tensor, flat: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        return index, torch.sin(feature * self.rows[index]) + self.linear(flat), flat


class Join(nn.Module):
    """Logits from what Mix passed on."""

    def __init__(self, in_features: int, width: int, num_classes: int) -> None:
        super().__init__()
        self.head = nn.Linear(width, num_classes)
        self.skip = nn.Linear(in_features, num_classes)

    def forward(self, index: Tensor, feature: Tensor, flat: Tensor) -> Tensor:
        return self.head(feature) + self.skip(flat) * (1 + index.unsqueeze(1))


class Fuse(nn.Module):
    """A layer that hands on what it gets, and from its forward number `at` on nothing but NaN."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.at = at
        self.count = 0

    def forward(self, x: Tensor) -> Tensor:
        self.count += self.training
        return x if self.count <= self.at else x * float("nan")


class Call(nn.Module):
    """Calls a layer on what `spread` makes of the input, with more arguments."""

    def __init__(
        self, layer: nn.Module, spread: Callable[..., object] | None = None, **more: object
    ) -> None:
        super().__init__()
        self.layer = layer
        self.spread = spread
        self.more = more

    def forward(self, *tensors: Tensor) -> object:
        given = tensors if self.spread is None else self.spread(*tensors)
        made = self.layer(*(given if isinstance(given, tuple) else (given,)), **self.more)
        return tuple(t for t in made if t is not None) if isinstance(made, tuple) else made


def _num_values(data: DataConfig) -> int:
    return data.channels * data.height_px * data.width_px


def _toy(name: str, **options: object) -> Layer:
    return Layer(name.lower(), "toy", f"{HERE}:{name}", tuple(options.items()))


def _tuple_layers(model: ModelConfig, data: DataConfig) -> tuple[Layer, ...]:
    size = {"in_features": _num_values(data), "width": model.width}
    first = replace(_toy("Pass"), name="pass1")
    second = replace(_toy("Pass"), name="pass2")
    join = _toy("Join", **size, num_classes=data.num_classes)
    return (_toy("Fork", **size), first, _toy("Mix", **size), second, join)


def _view_layers(model: ModelConfig, data: DataConfig) -> tuple[Layer, ...]:
    """The first layer has no parameter, and two hand on a view of their input."""
    linear = (("in_features", _num_values(data)), ("out_features", data.num_classes))
    return (
        Layer("identity", "toy", "torch.nn:Identity", ()),
        Layer("flatten", "toy", "torch.nn:Flatten", ()),
        Layer("pass", "toy", f"{HERE}:Pass", ()),
        Layer("linear", "toy", "torch.nn:Linear", linear),
    )


def _fuse_layers(model: ModelConfig, data: DataConfig) -> tuple[Layer, ...]:
    """The third layer breaks after `model.width` forwards."""
    conv = (("in_channels", data.channels), ("out_channels", 4), ("kernel_size", 3), ("padding", 1))
    linear = (
        ("in_features", 4 * data.height_px * data.width_px),
        ("out_features", data.num_classes),
    )
    return (
        Layer("conv", "toy", "torch.nn:Conv2d", conv),
        Layer("norm", "toy", "torch.nn:BatchNorm2d", (("num_features", 4),)),
        _toy("Fuse", at=model.width),
        Layer("flatten", "toy", "torch.nn:Flatten", ()),
        Layer("linear", "toy", "torch.nn:Linear", linear),
    )


if "toy_tuples" not in MODELS:
    MODELS.register("toy_fuse", ModelFamily(_fuse_layers, lambda model: 1))
    MODELS.register("toy_tuples", ModelFamily(_tuple_layers, lambda model: 1))
    MODELS.register("toy_views", ModelFamily(_view_layers, lambda model: 1))


def make_spec(
    schedule: str = "gems_master", partitions: int = 1, replicas: int = 1, **changes
) -> RunSpec:
    """A resolved run of a small network; `section__key=value` changes a field.

    Small maps run in each strip.
    """
    spec = RunSpec(
        model=ModelConfig(depth=8, width=4),
        data=DataConfig(
            name="synthetic",
            height_px=12,
            width_px=8,
            num_classes=3,
            train_samples=64,
            validation_samples=8,
        ),
        parallel=ParallelConfig(
            partitions=partitions,
            replicas=replicas,
            micro_batch_size=2,
            micro_batches=4,
            min_strip_positions=1,
        ),
        schedule=ScheduleConfig(schedule),
        partition=PartitionConfig("even"),
        train=TrainConfig(
            steps=2, hang_timeout_s=100, cuda_graphs="GEMS_TEST_CUDA_GRAPHS" in os.environ
        ),
        benchmark=BenchmarkConfig(skip_steps=0),
        machine=MachineConfig(transport=TRANSPORT),
    )
    for name, value in changes.items():
        section, _, key = name.partition("__")
        spec = replace(
            spec,
            **(
                {section: replace(getattr(spec, section), **{key: value})}
                if key
                else {section: value}
            ),
        )
    return resolve(spec)


def plan_of(spec: RunSpec, schedule: Schedule | None = None) -> RankPlan:
    """Plan a run, for a given schedule if there is one."""
    return evaluate(spec).for_ranks if schedule is None else RankPlan(spec, schedule)


class NumberedDataset(Dataset):
    """Image i is one pixel of value i; its class is i modulo the number of classes."""

    def __init__(
        self, num_train: int, num_validation: int, num_classes: int = 3, seed: int = 0
    ) -> None:
        super().__init__((1, 1, 1), num_classes, num_train, num_validation, seed, augment=False)

    def _pixels(self, split: str, index: int) -> np.ndarray:
        return np.full(self.shape, index, dtype=np.float32)

    def _label(self, split: str, index: int) -> int:
        return index % self.num_classes
