"""The end of a step: gradients are reduced, ranks agree whether they are finite, weights change."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor

from gems.autograd.torch_internals import copy_all
from gems.config.schema import DataConfig, TrainConfig
from gems.data import find_source, open_dataset
from gems.engine.device import DTYPES
from gems.engine.evaluation.metrics import LossSums
from gems.engine.optimization.clipping import GlobalNorm, clip_factor
from gems.engine.optimization.ema import WeightAverage
from gems.engine.optimization.gradients import Gradients
from gems.engine.optimization.loss_scale import LossScale
from gems.engine.optimization.lr_schedule import LrSchedule
from gems.engine.optimization.optimizer import build_optimizer, state_bytes
from gems.engine.optimization.parameter_groups import trained
from gems.engine.rank_stages import Stages
from gems.engine.transport.connections import Connections
from gems.engine.transport.mpi import Comm, broadcast
from gems.plan.rank_plan import RankPlan
from gems.schedule.action import Kind

STOP = "stop"
SKIP = "skip"
IGNORE = "ignore"
EPOCH = "epoch"


class Update:
    """Changes the weights of a rank once a step, in the same way on all ranks.

    One small message tells every rank of the run the norm of the gradient, and whether all losses
    are finite, so all copies of a stage scale, skip or stop alike. In float16, a gradient that
    overflows skips the step and halves the loss scale. It
    is no failure until the scale is 1.

    Attributes:
        grad_norm: Norm of the gradient over all stages in the last step, before clipping; NaN if no
            message was needed.
        learning_rate: The largest learning rate of the groups in the last step.
        has_failed: The last step was not finite, and the weights are those before it.
        scale: The loss scale of float16, None in other precisions.
    """

    def __init__(
        self,
        train: TrainConfig,
        buffers: Iterable[Tensor],
        gradients: Gradients,
        optimizer: torch.optim.Optimizer,
        schedule: LrSchedule,
        norms: GlobalNorm,
        average: WeightAverage | None = None,
    ) -> None:
        """Take the parts of a rank's update; a skipped step restores the `buffers` of its layers."""
        self.gradients = gradients
        self.optimizer = optimizer
        self.schedule = schedule
        self.average = average
        self.grad_norm = self.learning_rate = math.nan
        self.has_failed = False
        self._on_nonfinite = train.on_nonfinite
        self._max_norm = train.max_grad_norm
        self.scale = LossScale.for_precision(train.precision)
        self._has_overflowed = False
        self._needs_message = (
            self._on_nonfinite != IGNORE or self._max_norm is not None or self.scale is not None
        )
        self._norms = norms
        self._buffers: dict[torch.dtype, list[Tensor]] = {}
        for buffer in buffers:
            self._buffers.setdefault(buffer.dtype, []).append(buffer)
        self._before: dict[torch.dtype, list[Tensor]] = {}
        self._is_repeated = False

    @classmethod
    def open(cls, plan: RankPlan, stages: Stages, connections: Connections) -> Update:
        """Open the gradients, optimizer, learning rate and averages of a rank; collective.

        Raises:
            ConfigError: The optimizer or the scheduler of learning rates cannot be constructed.
        """
        spec = plan.spec
        control = connections.control
        _, index = plan.position(control.rank)
        started = [
            action.stage
            for action in plan.schedule.rank_schedules[index]
            if action.kind is Kind.START_REDUCE
        ]
        gradients = Gradients(
            stages.modules, connections.sums, DTYPES[spec.train.dtype], stages.device, started
        )
        optimizer = build_optimizer(spec.optimizer, stages.layers, len(stages.of_model.layers))
        average = None
        if spec.train.ema_decay is not None:
            parameters = (p for layer in stages.layers for p in layer.module.parameters())
            average = WeightAverage(trained(parameters), spec.train.ema_decay)
        return cls(
            spec.train,
            (buffer for module in stages.modules.values() for buffer in module.buffers()),
            gradients,
            optimizer,
            LrSchedule(
                spec.lr_scheduler,
                spec.optimizer,
                optimizer,
                spec.train.steps,
                spec.parallel.global_batch,
                _samples_per_epoch(spec.data, spec.seed, spec.lr_scheduler.interval, control.comm),
            ),
            GlobalNorm(control, spec.parallel.partitions),
            average,
        )

    def begin(self) -> None:
        """Clear the gradients, and save what a skipped step must leave unchanged."""
        self.gradients.zero()
        if self.average is not None:
            self.average.values()
        if self._on_nonfinite == SKIP or self.scale is not None:
            for dtype, buffers in self._buffers.items():
                if dtype not in self._before:
                    self._before[dtype] = [torch.empty_like(buffer) for buffer in buffers]
                copy_all(self._before[dtype], buffers)

    def reduce(self, losses: LossSums) -> None:
        """Sum gradients over all copies and agree on their norm; collective.

        The host waits once, for the norm and the losses of this rank together.
        """
        self.gradients.reduce()
        self.gradients.scale(1 / self.loss_scale)
        if not self._needs_message or self._is_repeated:
            return
        norm = [self.gradients.squared_norm()] if self._norms.counts_mine else []
        squared_norm = sum(losses.read_with(*norm))
        is_lost = not math.isfinite(losses.read())
        self.grad_norm, is_lost = self._norms.agree(squared_norm, is_lost)
        is_finite = math.isfinite(self.grad_norm)
        self._has_overflowed = (
            self.scale is not None and self.scale.can_shrink and not is_lost and not is_finite
        )
        self.has_failed = (is_lost or not is_finite) and not self._has_overflowed

    def step(self) -> None:
        """Change the weights, their average and the learning rate, unless the step has failed."""
        if self._is_repeated:
            return
        self.learning_rate = max(float(group["lr"]) for group in self.optimizer.param_groups)
        if self._has_overflowed or (self.has_failed and self._on_nonfinite == SKIP):
            for dtype, buffers in self._buffers.items():
                copy_all(buffers, self._before[dtype])
        elif not self.has_failed or self._on_nonfinite == IGNORE:
            if self._max_norm is not None:
                self.gradients.scale(clip_factor(self.grad_norm, self._max_norm))
            self.optimizer.step()
            if self.average is not None:
                self.average.update()
        if self.scale is not None:
            self.scale.update(not self._has_overflowed)
        self.schedule.step()

    @property
    def loss_scale(self) -> float:
        """Return the factor of the loss whose gradients are added up; 1 without a loss scale."""
        return 1.0 if self.scale is None else self.scale.value

    @property
    def stops(self) -> bool:
        """Return whether the run must stop because the last step was not finite."""
        return self.has_failed and self._on_nonfinite == STOP

    @contextmanager
    def repeated(self) -> Iterator[None]:
        """Leave the weights unchanged, for a step that is repeated to find what went wrong."""
        self._is_repeated = True
        try:
            yield
        finally:
            self._is_repeated = False

    @contextmanager
    def averaged(self) -> Iterator[bool]:
        """Replace the weights by the averaged weights inside the block, if the run has them.

        Yield whether it has them.
        """
        with nullcontext() if self.average is None else self.average.applied():
            yield self.average is not None

    def state_bytes(self) -> int:
        """Return the bytes of the optimizer's state and the averaged weights."""
        return state_bytes(self.optimizer) + (0 if self.average is None else self.average.num_bytes)


def _samples_per_epoch(data: DataConfig, seed: int, interval: str, comm: Comm) -> int:
    """Return the number of training samples; collective if the source must be asked for it."""
    if interval != EPOCH or not find_source(data).counts_itself:
        return data.train_samples
    count = open_dataset(data, seed).num_train if comm.rank == 0 else None
    return int(broadcast(comm, count))
