"""The reference of `gems verify`: the same training in one process, unsplit, with plain autograd."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
import torch
import torch.nn.functional as functional
from torch import Tensor, nn

from gems.config.resolve import global_batch
from gems.config.schema import RunSpec
from gems.data import Dataset, labels_per_step, open_dataset
from gems.data.dataset import batch_indices, micro_batch_slice
from gems.engine.device import DTYPES
from gems.engine.gradients import running_statistics
from gems.engine.optimizer import build_optimizer
from gems.models import layers_of
from gems.models.build import as_tuple, build_layers
from gems.schedule.schedule import Schedule

Values = dict[str, Tensor]  # "<layer>.<parameter>" -> tensor on the host


def named_values(name: str, module: nn.Module) -> tuple[Values, Values, Values]:
    """Return copies of a layer's parameters, their gradients and its running statistics, by full name."""
    parameters = {f"{name}.{key}": value.detach().cpu().clone() for key, value in module.named_parameters()}
    gradients = {
        f"{name}.{key}": value.grad.detach().cpu().clone()
        for key, value in module.named_parameters()
        if value.grad is not None
    }
    statistics = {
        f"{name}.{key}": value.detach().cpu().clone()
        for key, value in module.named_buffers()
        if value.is_floating_point()
    }
    return parameters, gradients, statistics


def train_unsplit(spec: RunSpec, schedule: Schedule, device: torch.device) -> Iterator[tuple[Values, Values, Values]]:
    """Train the whole model on the run's micro-batches; yield (parameters, gradients, statistics) after each step.

    A copy of the model is a direction of a replica. Running statistics start each step equal in all copies, advance
    with each copy's micro-batches, and end as the mean over copies.
    """
    dtype = DTYPES[spec.train.dtype]
    layers = layers_of(spec.model, spec.data)
    modules = build_layers(layers, 0, len(layers), spec.seed, dtype, device)
    model = nn.ModuleList(modules)
    optimizer = build_optimizer(spec.train, model.parameters())
    statistics = running_statistics(model)
    dataset = open_dataset(spec.data, spec.seed)
    for step in range(spec.train.steps):
        optimizer.zero_grad(set_to_none=True)
        start = [buffer.clone() for buffer in statistics]
        mean = [torch.zeros_like(buffer) for buffer in statistics]
        total = [torch.zeros_like(parameter) for parameter in model.parameters()]
        copies = list(_copier(spec, schedule))
        for samples in copies:
            for buffer, value in zip(statistics, start, strict=True):
                buffer.copy_(value)
            # Summed over a copy first and then over copies: in a deep network another order shows at 1e-12 a step
            # later.
            for images, labels in _micro_batches(spec, dataset, step, samples, dtype, device):
                values: tuple[Tensor, ...] = (images,)
                for module in modules:
                    values = as_tuple(module(*values))
                loss = functional.cross_entropy(values[0], labels, reduction="sum") / labels_per_step(spec)
                torch.autograd.backward(loss)
            for sum_of_copies, buffer in zip(mean, statistics, strict=True):
                sum_of_copies += buffer / len(copies)
            for sum_of_copies, parameter in zip(total, model.parameters(), strict=True):
                if parameter.grad is not None:
                    sum_of_copies += parameter.grad
                parameter.grad = None
        for buffer, value in zip(statistics, mean, strict=True):
            buffer.copy_(value)
        for parameter, gradient in zip(model.parameters(), total, strict=True):
            parameter.grad = gradient
        optimizer.step()
        yield collect_values(zip((layer.name for layer in layers), modules, strict=True))


def collect_values(layers: Iterable[tuple[str, nn.Module]]) -> tuple[Values, Values, Values]:
    """Return copies of the parameters, gradients and running statistics of named layers."""
    collected: tuple[Values, Values, Values] = ({}, {}, {})
    for name, module in layers:
        for whole, some in zip(collected, named_values(name, module), strict=True):
            whole.update(some)
    return collected


def _copier(spec: RunSpec, schedule: Schedule) -> Iterator[list[slice]]:
    """Yield the slices of the global batch of each copy's micro-batches."""
    parallel, directions = spec.parallel, schedule.directions()
    for replica in range(parallel.replicas):
        for direction in range(schedule.num_directions):
            yield [
                micro_batch_slice(replica, m, schedule.num_micro_batches, parallel.micro_batch_size)
                for m in sorted(directions)
                if directions[m] == direction
            ]


def _micro_batches(
    spec: RunSpec, dataset: Dataset, step: int, slices: list[slice], dtype: torch.dtype, device: torch.device
) -> Iterator[tuple[Tensor, Tensor]]:
    samples = batch_indices(dataset.num_train, spec.seed, step, global_batch(spec))
    for of_micro_batch in slices:
        chosen = [(int(index), int(draw)) for index, draw in samples[of_micro_batch]]
        given = torch.stack([torch.from_numpy(dataset.image("train", index, draw)) for index, draw in chosen])
        labels = torch.from_numpy(np.stack([np.asarray(dataset.label("train", index)) for index, _ in chosen]))
        yield given.to(device, dtype if given.is_floating_point() else given.dtype), labels.to(device)
