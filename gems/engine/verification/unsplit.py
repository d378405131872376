"""The reference of a verification: the same training in one process, unsplit."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from gems.autograd.outputs import as_tuple, map_tensors, tensors_in
from gems.autograd.random_draws import RandomDraws
from gems.data import open_dataset, task_of
from gems.data.dataset import batch_indices, micro_batch_slice
from gems.engine.device import DTYPES
from gems.engine.optimization.gradients import running_statistics
from gems.engine.optimization.loss_scale import LossScale
from gems.engine.optimization.lr_schedule import LrSchedule
from gems.engine.optimization.optimizer import build_optimizer
from gems.engine.optimization.parameter_groups import NumberedLayer, trained
from gems.errors import ConfigError
from gems.losses.summed import open_loss
from gems.models import layers_of
from gems.models.build import build_layers, freeze, layer_seed
from gems.models.imported.parts import whole_with_parts
from gems.models.layer import Layer
from gems.models.mixed import Precision
from gems.plan.rank_plan import RankPlan
from gems.streaming.ghost_norm import set_row_ends

Values = dict[str, Tensor]  # "<layer>.<parameter>" -> tensor on the host


class MicroBatch(NamedTuple):
    """A micro-batch, with its number in the global batch."""

    number: int
    images: Tensor
    labels: Tensor


class UnsplitTraining:
    """The training of the whole model on the run's micro-batches, with plain autograd.

    A copy of the model is a direction of a replica. Running statistics start each step equal in all
    copies, advance with each copy's micro-batches, and end as the mean over copies.
    """

    def __init__(
        self,
        plan: RankPlan,
        device: torch.device,
        norm_ends: Mapping[str, tuple[int, ...]],
        is_nudged: bool = False,
    ) -> None:
        """Build the model and all that trains it.

        Norms by strip take whole images in the strips of rows that `norm_ends` has for them. If
        `is_nudged`, images are changed by the spacing of their type, to see what rounding alone
        does.
        """
        spec = plan.spec
        layers = layers_of(spec.model, spec.data)
        precision = Precision.of(spec.train.precision)
        self._plan = plan
        self._device = device
        self._is_nudged = is_nudged
        self._whole, modules = _build_reference(layers, spec.seed, precision, device)
        self._model = nn.ModuleList(modules)
        self._named = list(zip((layer.name for layer in layers), modules, strict=True))
        self._draws = RandomDraws(spec.seed, spec.model.target is not None)
        for name, module in self._named:
            set_row_ends(name, module, norm_ends)
            self._draws.watch(name, module)
        numbered = [NumberedLayer(place, *layer) for place, layer in enumerate(self._named)]
        freeze(self._named, spec.optimizer.frozen)
        self._optimizer = build_optimizer(spec.optimizer, numbered, len(layers))
        self._dataset = open_dataset(spec.data, spec.seed)
        self._parameters = list(trained(self._model.parameters()))
        self._rates = LrSchedule(
            spec.lr_scheduler,
            spec.optimizer,
            self._optimizer,
            spec.train.steps,
            spec.parallel.global_batch,
            self._dataset.num_train,
        )
        self._averages = [parameter.detach().clone() for parameter in self._parameters]
        self._scale = LossScale.for_precision(spec.train.precision)
        self._statistics = running_statistics(self._model)
        self._dtype = DTYPES[spec.train.compute_dtype]
        self._loss_dtype = self._dtype if self._dtype is torch.float64 else torch.float32
        self._loss = open_loss(spec.loss, task_of(spec.data), self._loss_dtype, device)

    def step(self, step: int) -> tuple[Values, Values, Values]:
        """Run one step; return the parameters, gradients and running statistics after it."""
        train = self._plan.spec.train
        copies = list(self._copies(step))
        if step == 0:
            self._check_draws(copies[0][0])
        start = [buffer.clone() for buffer in self._statistics]
        total = self._sum_gradients(step, copies, start)
        for parameter, gradient in zip(self._parameters, total, strict=True):
            parameter.grad = gradient if self._scale is None else gradient / self._scale.value
        scale = self._scale
        is_finite = all(bool(gradient.isfinite().all()) for gradient in total)
        has_overflowed = scale is not None and not is_finite
        if scale is not None:
            scale.update(is_finite)
        if has_overflowed:
            _copy(start, self._statistics)
        else:
            if train.max_grad_norm is not None:
                _clip(self._parameters, train.max_grad_norm)
            self._optimizer.step()
            if train.ema_decay is not None:
                self._average(train.ema_decay)
        self._rates.step()
        values = collect_values(self._named)
        if has_overflowed:
            values[1].clear()  # gradients that nobody uses
        if train.ema_decay is not None:
            averages = dict(zip(self._parameters, self._averages, strict=True))
            values[0].update(averaged_values(self._named, averages))
        return values

    def _copies(self, step: int) -> Iterator[list[MicroBatch]]:
        """Yield the micro-batches of each copy of the model."""
        spec = self._plan.spec
        schedule = self._plan.schedule
        size = spec.parallel.micro_batch_size
        directions = sorted(schedule.whole_directions().items())
        samples = batch_indices(
            self._dataset.num_train, spec.seed, step, spec.parallel.global_batch
        )
        for replica in range(spec.parallel.replicas):
            for direction in range(schedule.num_directions):
                own = (
                    micro_batch_slice(replica, m, schedule.num_whole, size)
                    for m, way in directions
                    if way == direction
                )
                yield [MicroBatch(span.start // size, *self._read(samples[span])) for span in own]

    def _read(self, samples: np.ndarray) -> tuple[Tensor, Tensor]:
        chosen = [(int(index), int(draw)) for index, draw in samples]
        read = self._dataset
        images = torch.stack([torch.from_numpy(read.image("train", *one)) for one in chosen])
        labels = np.stack([np.asarray(read.label("train", *one)) for one in chosen])
        dtype = self._dtype if images.is_floating_point() else images.dtype
        images = images.to(self._device, dtype)
        images = _nudged(images) if self._is_nudged else images
        return images, torch.from_numpy(labels).to(self._device)

    def _forward(self, step: int, batch: MicroBatch) -> Any:
        self._draws.at(step, batch.number)
        # a network may change its input in place, and each batch is run more than once
        images = batch.images.clone()
        if self._whole is not None:
            return self._whole(images)
        output: Any = (images,)
        for module in self._model:
            output = module(*as_tuple(output))
        return output

    def _sum_gradients(
        self, step: int, copies: Sequence[Sequence[MicroBatch]], start: Sequence[Tensor]
    ) -> list[Tensor]:
        """Return the gradients summed over all copies; average the statistics that begin at `start`.

        They are summed over a copy first and then over copies: in a deep network another order
        shows at 1e-12 a step later.
        """
        gradients = iter(
            self._loss_gradients(step, [micro_batch for copy in copies for micro_batch in copy])
        )
        mean = [torch.zeros_like(buffer) for buffer in self._statistics]
        total = [torch.zeros_like(parameter) for parameter in self._parameters]
        self._optimizer.zero_grad(set_to_none=True)
        for batches in copies:
            _copy(start, self._statistics)
            for batch in batches:
                outputs = tensors_in(self._forward(step, batch))
                used = [
                    (tensor, gradient)
                    for tensor, gradient in zip(outputs, next(gradients), strict=True)
                    if tensor.requires_grad and gradient is not None
                ]
                torch.autograd.backward(
                    [tensor for tensor, _ in used], [gradient for _, gradient in used]
                )
            for sum_of_copies, buffer in zip(mean, self._statistics, strict=True):
                sum_of_copies += buffer / len(copies)
            for sum_of_copies, parameter in zip(total, self._parameters, strict=True):
                if parameter.grad is not None:
                    sum_of_copies += parameter.grad
                parameter.grad = None
        _copy(mean, self._statistics)
        return total

    def _loss_gradients(
        self, step: int, batches: Sequence[MicroBatch]
    ) -> list[list[Tensor | None]]:
        """Return the gradients of one scaled loss over all micro-batches together.

        By output and its tensors. The loss is called once, as its class would be. The model, which
        runs without a graph, is left as it was.
        """
        saved = [buffer.clone() for buffer in self._model.buffers()]
        devices = [] if self._device.type == "cpu" else [self._device]
        with torch.no_grad(), torch.random.fork_rng(devices=devices):
            outputs = [self._forward(step, batch) for batch in batches]
            _copy(saved, self._model.buffers())
        leaves = [
            [
                tensor.detach().requires_grad_(tensor.is_floating_point())
                for tensor in tensors_in(one)
            ]
            for one in outputs
        ]
        joined = (torch.cat(same) for same in zip(*leaves, strict=True))
        whole = map_tensors(lambda _: _wide(next(joined)), outputs[0])
        labels = torch.cat([batch.labels for batch in batches])
        value = self._loss(
            whole, labels.to(self._loss_dtype) if labels.is_floating_point() else labels
        )
        torch.autograd.backward(value * (1.0 if self._scale is None else self._scale.value))
        return [[leaf.grad for leaf in of_one] for of_one in leaves]

    def _average(self, decay: float) -> None:
        self._averages = [
            decay * mean + (1 - decay) * parameter.detach()
            for mean, parameter in zip(self._averages, self._parameters, strict=True)
        ]

    def _check_draws(self, batch: MicroBatch) -> None:
        """Check that a network draws random numbers in its modules alone; it is left as it was.

        Raises:
            ConfigError: two forwards of one micro-batch differ, so that two trainings would, split
                or not.
        """
        model = self._plan.spec.model
        saved = [buffer.clone() for buffer in self._model.buffers()]
        outputs = []
        with torch.no_grad(), torch.random.fork_rng():
            for seed in (1, 2):
                torch.manual_seed(seed)
                outputs.append(list(tensors_in(self._forward(0, batch))))
                _copy(saved, self._model.buffers())
        if not all(torch.equal(one, other) for one, other in zip(*outputs, strict=True)):
            raise ConfigError(
                "model.target",
                model.target or model.name,
                "draws random numbers outside of its modules, "
                "so that no two of its trainings are alike",
                "use nn.Dropout in place of F.dropout, or set its rate to 0",
            )


def _copy(values: Iterable[Tensor], into: Iterable[Tensor]) -> None:
    for buffer, value in zip(into, values, strict=True):
        buffer.copy_(value)


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


def _nudged(images: Tensor) -> Tensor:
    """Return images whose values are each the next one below or above, or the same."""
    signs = torch.randint(-1, 2, images.shape, generator=torch.Generator().manual_seed(0)).to(
        images
    )
    return images * (1 + torch.finfo(images.dtype).eps * signs)


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


def collect_values(layers: Iterable[tuple[str, nn.Module]]) -> tuple[Values, Values, Values]:
    """Return copies of the parameters, gradients and running statistics of named layers."""
    collected: tuple[Values, Values, Values] = ({}, {}, {})
    for name, module in layers:
        for whole, some in zip(collected, named_values(name, module), strict=True):
            whole.update(some)
    return collected


def averaged_values(
    layers: Iterable[tuple[str, nn.Module]], averages: Mapping[nn.Parameter, Tensor]
) -> Values:
    """Return copies of the averaged parameters of named layers."""
    return {
        f"{name}.{key} (average)": averages[parameter].cpu().clone()
        for name, module in layers
        for key, parameter in module.named_parameters()
        if parameter in averages
    }
