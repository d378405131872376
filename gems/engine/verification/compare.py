"""Comparison of a run with a reference, value by value: what the ranks of `gems verify` do.

The reference is the same training in one process, unsplit, with plain autograd.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from gems.autograd.outputs import as_tuple, map_tensors, tensors_in
from gems.autograd.random_draws import RandomDraws
from gems.config.resolve import global_batch
from gems.config.schema import RunSpec
from gems.data import Dataset, open_dataset, task_of
from gems.data.dataset import batch_indices, micro_batch_slice
from gems.engine.batch_loader import BatchLoader
from gems.engine.device import DTYPES
from gems.engine.loss import Loss, open_loss
from gems.engine.optimization.gradients import running_statistics
from gems.engine.optimization.loss_scale import LossScale
from gems.engine.optimization.lr_schedule import LrSchedule
from gems.engine.optimization.optimizer import build_optimizer
from gems.engine.optimization.parameter_groups import NumberedLayer, trained
from gems.engine.pipeline import build_pipeline
from gems.engine.supervision.memory_report import memory_report
from gems.engine.transport.mpi import MEET_SLEEP_S, Comm, allgather, broadcast
from gems.errors import ConfigError
from gems.launch.verification import Verification
from gems.memory.plan import MemoryPlan
from gems.models import layers_of
from gems.models.build import build_layers, freeze, layer_seed
from gems.models.imported.parts import whole_with_parts
from gems.models.layer import Layer
from gems.models.mixed import Precision
from gems.runs.folder import RunFolder
from gems.schedule.schedule import Schedule
from gems.streaming.ghost_norm import set_row_ends

# of the largest value of its kind, with which smaller tensors are compared; in 16 bits their
# spacing
FLOOR = 1e-9
FLOOR_ABOVE = 1e-4
Values = dict[str, Tensor]  # "<layer>.<parameter>" -> tensor on the host


def named_values(name: str, module: nn.Module) -> tuple[Values, Values, Values]:
    """Return copies of a layer's parameters, gradients and running statistics, by full name."""

    def copies(tensors: Iterable[tuple[str, Tensor | None]]) -> Values:
        return {
            f"{name}.{key}": value.detach().cpu().clone()
            for key, value in tensors
            if value is not None
        }

    parameters = list(module.named_parameters())
    statistics = (entry for entry in module.named_buffers() if entry[1].is_floating_point())
    return (
        copies(parameters),
        copies((key, value.grad) for key, value in parameters),
        copies(statistics),
    )


def train_unsplit(
    spec: RunSpec,
    schedule: Schedule,
    device: torch.device,
    norm_ends: Mapping[str, tuple[int, ...]],
    is_nudged: bool = False,
) -> Iterator[tuple[Values, Values, Values]]:
    """Train the whole model on the run's micro-batches.

    Yield (parameters, gradients, statistics) after each step.
    Norms by strip take whole images in the strips of rows that `norm_ends` has for them. Images may
    be `nudged` by the spacing of their type, to see what rounding alone does. A copy of the model
    is a direction of a replica. Running statistics start each step equal in all copies, advance
    with each copy's micro-batches, and end as the mean over copies.
    """
    dtype = DTYPES[spec.train.compute_dtype]
    precision = Precision.of(spec.train.precision)
    layers = layers_of(spec.model, spec.data)
    names = [layer.name for layer in layers]
    whole, modules = _build_reference(layers, spec.seed, precision, device)
    model = nn.ModuleList(modules)
    for name, module in zip(names, modules, strict=True):
        set_row_ends(name, module, norm_ends)
    draws = RandomDraws(spec.seed, spec.model.target is not None)
    for name, module in zip(names, modules, strict=True):
        draws.watch(name, module)
    numbered = list(map(NumberedLayer, range(len(layers)), names, modules))
    freeze(zip(names, modules, strict=True), spec.optimizer.frozen)
    optimizer = build_optimizer(spec.optimizer, numbered, len(layers))
    dataset = open_dataset(spec.data, spec.seed)
    parameters = list(trained(model.parameters()))
    schedule_of_rates = LrSchedule(spec, optimizer, dataset.num_train)
    averages = [parameter.detach().clone() for parameter in parameters]
    scale = LossScale.for_precision(spec.train.precision)
    statistics = running_statistics(model)
    loss_dtype = dtype if dtype is torch.float64 else torch.float32
    loss = open_loss(spec.loss, task_of(spec.data), loss_dtype, device)

    def forward(images: Tensor, step: int, number: int) -> Any:
        draws.at(step, number)
        images = (
            images.clone()
        )  # a network may change its input in place, and each batch is run more than once
        if whole is not None:
            return whole(images)
        output: Any = (images,)
        for module in modules:
            output = module(*as_tuple(output))
        return output

    for step in range(spec.train.steps):
        optimizer.zero_grad(set_to_none=True)
        start = [buffer.clone() for buffer in statistics]
        mean = [torch.zeros_like(buffer) for buffer in statistics]
        total = [torch.zeros_like(parameter) for parameter in parameters]
        slices = list(_copier(spec, schedule))
        copies = [list(_micro_batches(spec, dataset, step, each, dtype, device)) for each in slices]
        if is_nudged:
            copies = [[(_nudged(images), labels) for images, labels in copy] for copy in copies]
        size = spec.parallel.micro_batch_size
        runs = [
            [partial(forward, step=step, number=each.start // size) for each in copy]
            for copy in slices
        ]
        if step == 0:
            _check_draws(spec, model, partial(runs[0][0], copies[0][0][0]))
        gradients = iter(
            _loss_gradients(
                loss,
                model,
                [run for copy in runs for run in copy],
                [each for copy in copies for each in copy],
                loss_dtype,
                1.0 if scale is None else scale.value,
            )
        )
        for batches, forwards in zip(copies, runs, strict=True):
            for buffer, value in zip(statistics, start, strict=True):
                buffer.copy_(value)
            # Summed over a copy first and then over copies: in a deep network another order shows
            # at 1e-12 a step later.
            for (images, _), run in zip(batches, forwards, strict=True):
                pairs = zip(tensors_in(run(images)), next(gradients), strict=True)
                used = [
                    (tensor, gradient)
                    for tensor, gradient in pairs
                    if tensor.requires_grad and gradient is not None
                ]
                torch.autograd.backward(
                    [tensor for tensor, _ in used], [gradient for _, gradient in used]
                )
            for sum_of_copies, buffer in zip(mean, statistics, strict=True):
                sum_of_copies += buffer / len(copies)
            for sum_of_copies, parameter in zip(total, parameters, strict=True):
                if parameter.grad is not None:
                    sum_of_copies += parameter.grad
                parameter.grad = None
        for buffer, value in zip(statistics, mean, strict=True):
            buffer.copy_(value)
        for parameter, gradient in zip(parameters, total, strict=True):
            parameter.grad = gradient if scale is None else gradient / scale.value
        has_overflowed = scale is not None and not all(
            bool(gradient.isfinite().all()) for gradient in total
        )
        if scale is not None:
            scale.update(not has_overflowed)
        decay = spec.train.ema_decay
        if has_overflowed:
            for buffer, value in zip(statistics, start, strict=True):
                buffer.copy_(value)
        else:
            if spec.train.max_grad_norm is not None:
                _clip(parameters, spec.train.max_grad_norm)
            optimizer.step()
            if decay is not None:
                averages = [
                    decay * mean + (1 - decay) * parameter.detach()
                    for mean, parameter in zip(averages, parameters, strict=True)
                ]
        schedule_of_rates.step()
        found = collect_values(zip(names, modules, strict=True))
        if has_overflowed:
            found[1].clear()  # gradients that nobody uses
        if decay is not None:
            found[0].update(
                _averages(
                    zip(names, modules, strict=True), dict(zip(parameters, averages, strict=True))
                )
            )
        yield found


def _build_reference(
    layers: Sequence[Layer], seed: int, precision: Precision, device: torch.device
) -> tuple[nn.Module | None, list[nn.Module]]:
    """Return the user's own network uncut, with its layers, which share its tensors.

    Of other networks only layers.
    In mixed precision the layers stand for the network, since messages between them are of the low
    type.
    """
    if not layers[0].is_part or precision.is_mixed:
        return None, build_layers(layers, 0, len(layers), seed, precision, device)
    text = str(dict(layers[0].options)["text"])
    whole, parts = whole_with_parts(text, layer_seed(seed, 0), precision.parameters, device)
    whole.train()
    return whole, list(parts)


def _check_draws(spec: RunSpec, model: nn.Module, run: Callable[[], Any]) -> None:
    """Check that a network draws random numbers in its modules alone; it is left as it was.

    Raises:
        ConfigError: two forwards of one micro-batch differ, so that two trainings would, split or
        not.
    """
    kept = [buffer.clone() for buffer in model.buffers()]
    outputs = []
    with torch.no_grad(), torch.random.fork_rng():
        for seed in (1, 2):
            torch.manual_seed(seed)
            outputs.append(list(tensors_in(run())))
            for buffer, value in zip(model.buffers(), kept, strict=True):
                buffer.copy_(value)
    if not all(torch.equal(one, other) for one, other in zip(*outputs, strict=True)):
        raise ConfigError(
            "model.target",
            spec.model.target or spec.model.name,
            "draws random numbers outside of its modules, "
            "so that no two of its trainings are alike",
            "use nn.Dropout in place of F.dropout, or set its rate to 0",
        )


def _nudged(images: Tensor) -> Tensor:
    """Return images whose values are each the next one below or above, or the same."""
    signs = torch.randint(-1, 2, images.shape, generator=torch.Generator().manual_seed(0)).to(
        images
    )
    return images * (1 + torch.finfo(images.dtype).eps * signs)


def _loss_gradients(
    loss: Loss,
    model: nn.Module,
    forwards: Sequence[Callable[[Tensor], Any]],
    batches: Sequence[tuple[Tensor, Tensor]],
    dtype: torch.dtype,
    scale: float,
) -> list[list[Tensor | None]]:
    """Return the gradients of one loss, times `scale`, over all micro-batches together.

    By output and its tensors.
    The loss is called once, as its class would be. The model, which runs without a graph, is left
    as it was.
    """
    kept = [buffer.clone() for buffer in model.buffers()]
    device = batches[0][0].device
    with torch.no_grad(), torch.random.fork_rng(devices=[] if device.type == "cpu" else [device]):
        outputs = [run(images) for run, (images, _) in zip(forwards, batches, strict=True)]
        for buffer, value in zip(model.buffers(), kept, strict=True):
            buffer.copy_(value)
    leaves = [
        [each.detach().requires_grad_(each.is_floating_point()) for each in tensors_in(one)]
        for one in outputs
    ]
    joined = (torch.cat(same) for same in zip(*leaves, strict=True))
    whole = map_tensors(lambda _: _wide(next(joined)), outputs[0])
    labels = torch.cat([each for _, each in batches])
    value = loss(whole, labels.to(dtype) if labels.is_floating_point() else labels)
    torch.autograd.backward(value * scale)
    return [[leaf.grad for leaf in of_one] for of_one in leaves]


def _clip(parameters: Iterable[nn.Parameter], max_norm: float) -> None:
    """Clip as torch's clip_grad_norm_, with a norm in float64.

    In 16 bits the last digits of weights would show.
    """
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    norm = math.sqrt(sum(float(gradient.double().square().sum()) for gradient in gradients))
    for gradient in gradients:
        gradient.mul_(min(1.0, max_norm / (norm + 1e-6)))


def _wide(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor


def collect_values(layers: Iterable[tuple[str, nn.Module]]) -> tuple[Values, Values, Values]:
    """Return copies of the parameters, gradients and running statistics of named layers."""
    collected: tuple[Values, Values, Values] = ({}, {}, {})
    for name, module in layers:
        for whole, some in zip(collected, named_values(name, module), strict=True):
            whole.update(some)
    return collected


def _averages(
    layers: Iterable[tuple[str, nn.Module]], averages: Mapping[nn.Parameter, Tensor]
) -> Values:
    """Return copies of the averaged parameters of named layers."""
    return {
        f"{name}.{key} (average)": averages[parameter].cpu().clone()
        for name, module in layers
        for key, parameter in module.named_parameters()
        if parameter in averages
    }


def _copier(spec: RunSpec, schedule: Schedule) -> Iterator[list[slice]]:
    """Yield the slices of the global batch of each copy's micro-batches."""
    parallel = spec.parallel
    directions = schedule.whole_directions()
    for replica in range(parallel.replicas):
        for direction in range(schedule.num_directions):
            yield [
                micro_batch_slice(replica, m, schedule.num_whole, parallel.micro_batch_size)
                for m in sorted(directions)
                if directions[m] == direction
            ]


def _micro_batches(
    spec: RunSpec,
    dataset: Dataset,
    step: int,
    slices: list[slice],
    dtype: torch.dtype,
    device: torch.device,
) -> Iterator[tuple[Tensor, Tensor]]:
    samples = batch_indices(dataset.num_train, spec.seed, step, global_batch(spec))
    for of_micro_batch in slices:
        chosen = [(int(index), int(draw)) for index, draw in samples[of_micro_batch]]
        given = torch.stack(
            [torch.from_numpy(dataset.image("train", index, draw)) for index, draw in chosen]
        )
        labels = torch.from_numpy(
            np.stack([np.asarray(dataset.label("train", index, draw)) for index, draw in chosen])
        )
        yield (
            given.to(device, dtype if given.is_floating_point() else given.dtype),
            labels.to(device),
        )


def relative_error(
    ours: Mapping[str, Tensor], reference: Mapping[str, Tensor], floor: float = FLOOR
) -> tuple[float, str]:
    """Return the largest of max |a - b| / max |b| over tensors of `ours`, and the tensor's name.

    A tensor that is zero except for rounding, such as a bias before a normalisation, is compared
    with `floor` times the largest value in all of `reference`.
    """
    if not ours:
        return 0.0, ""
    least = floor * max(float(value.abs().max()) for value in reference.values())
    errors = {
        name: (
            float((value - reference[name]).abs().max())
            / max(float(reference[name].abs().max()), least, 1e-300)
        )
        for name, value in ours.items()
    }
    worst = max(
        errors, key=lambda name: float("inf") if errors[name] != errors[name] else errors[name]
    )
    return errors[worst], worst


def compare(
    spec: RunSpec,
    comm: Comm,
    device: torch.device,
    schedule: Schedule | None = None,
    boundaries: tuple[int, ...] | None = None,
    plan: MemoryPlan | None = None,
) -> Verification:
    """Run the schedule and compare each copy of each tensor after every step; collective."""
    pipeline = build_pipeline(
        spec, comm, device, schedule=schedule, boundaries=boundaries, plan=plan
    )
    reads = bool(pipeline.image_micro_batches or pipeline.label_micro_batches)
    loader = BatchLoader(
        spec,
        open_dataset(spec.data, spec.seed) if reads else None,
        pipeline.replica,
        pipeline.image_micro_batches,
        pipeline.label_micro_batches,
        DTYPES[spec.train.compute_dtype],
        device,
        0,
        pipeline.strip_order,
    )
    pipeline.set_training(True)
    train_one = partial(train_unsplit, spec, pipeline.schedule, device, pipeline.norm_ends)
    reference = train_one() if comm.rank == 0 else None
    nudged = train_one(is_nudged=True) if comm.rank == 0 and pipeline.norm_ends else None
    worst = [(0.0, "")] * 3
    rounding = 0.0
    spacing = torch.finfo(DTYPES[spec.train.compute_dtype]).eps
    floor = spacing if spacing > FLOOR_ABOVE else FLOOR
    for step in range(spec.train.steps):
        pipeline.train.run(step, loader.batch(step))
        found = None if reference is None else next(reference)
        if found is not None and nudged is not None:
            pairs = zip(next(nudged), found, strict=True)
            rounding = max(
                rounding,
                *(relative_error(*pair, floor)[0] for pair in pairs if pair[0] and pair[1]),
            )
        pipeline.control.barrier(MEET_SLEEP_S)
        expected = _broadcast(comm, found)
        average = pipeline.update.average
        for key in pipeline.modules:
            mine = collect_values(pipeline.named_layers(key))
            if average is not None:
                mine[0].update(_averages(pipeline.named_layers(key), average.by_parameter()))
            for kind, values in enumerate(mine):
                if kind == 1 and not expected[kind]:
                    continue
                error, name = relative_error(values, expected[kind], floor)
                where = f"{name} at rank {comm.rank}, step {step}"
                worst[kind] = max(worst[kind], (error, where), key=_by_error)
    loader.close()
    pipeline.control.barrier(MEET_SLEEP_S)
    everyone = allgather(comm, worst)
    rounding = broadcast(comm, rounding)
    parameter, gradient, statistics = (
        max((errors[kind] for errors in everyone), key=_by_error) for kind in range(3)
    )
    largest = max((parameter, gradient, statistics), key=_by_error)
    pipeline.close()
    return Verification(
        spec.train.layer_dtype,
        largest[0],
        parameter[0],
        gradient[0],
        statistics[0],
        largest[1],
        is_in_strips=pipeline.schedule.num_strips > 1,
        rounding_error=rounding,
        is_on_gpu=device.type == "cuda",
        **memory_report(pipeline),
    )


def _broadcast(comm: Comm, found: Sequence[Values] | None) -> list[Values]:
    """Give all ranks the values of rank 0, in float64.

    As arrays, for each tensor is pickled by a `torch.save`.
    """
    arrays = broadcast(
        comm,
        (
            None
            if found is None
            else [{name: each.double().numpy() for name, each in kind.items()} for kind in found]
        ),
    )
    return [{name: torch.from_numpy(each) for name, each in kind.items()} for kind in arrays]


def _by_error(found: tuple[float, str]) -> float:
    return float("inf") if found[0] != found[0] else found[0]


def compare_run(folder: RunFolder, comm: Comm, device: torch.device) -> dict[str, Any]:
    """Compare a prepared run; collective."""
    read = (folder.read_schedule(), folder.read_boundaries(), folder.read_memory_plan())
    return asdict(compare(folder.read_spec(), comm, device, *read))
