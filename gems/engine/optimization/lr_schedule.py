"""The learning rate over the steps: a linear warm-up, then a scheduler of torch or the user."""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import json
import warnings
from dataclasses import asdict
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from gems.config.recipe import LR_SCHEDULERS, LrSchedulerConfig
from gems.config.schema import OptimizerConfig
from gems.errors import ConfigError
from gems.utils.targets import call_target, load_target

CONSTANT = "constant"
STEP = "step"


class LrSchedule:
    """Sets the learning rate of each step; all ranks have the same groups, so nothing is sent.

    During the first `warmup_steps` the scheduler waits, and its first rates are scaled up linearly.
    After that it advances with every step, or with every epoch that begins.
    """

    def __init__(
        self,
        config: LrSchedulerConfig,
        optimizer_config: OptimizerConfig,
        optimizer: torch.optim.Optimizer,
        num_steps: int,
        samples_per_step: int,
        samples_per_epoch: int,
    ) -> None:
        """Build the scheduler, and fill in what it needs to know of the run's length.

        Raises:
            ConfigError: The scheduler cannot be constructed, or it needs a metric.
        """
        self._config = config
        self._optimizer = optimizer
        self._samples_per_step = samples_per_step
        self._samples_per_epoch = samples_per_epoch
        # what the rates depend on
        self._key = [asdict(config), asdict(optimizer_config), num_steps, samples_per_step]
        self._count = 0
        self._scheduler = _build(config, optimizer, self._advances(config.warmup_steps, num_steps))
        self._first = [float(group["lr"]) for group in optimizer.param_groups]
        self._warm_up()

    def step(self) -> None:
        """Set the rates of the next step."""
        before = max(self._count, self._config.warmup_steps)
        self._count += 1
        if self._count <= self._config.warmup_steps:
            self._warm_up()
        elif self._scheduler is not None:
            with warnings.catch_warnings():  # a skipped step is none of the optimizer's
                warnings.filterwarnings(
                    "ignore", message=".*lr_scheduler.step.*before.*optimizer.step.*"
                )
                for _ in range(self._advances(before, self._count)):
                    self._scheduler.step()

    def state(self) -> torch.Tensor:
        """Return the state as JSON in a tensor of bytes; equal states give equal bytes."""
        groups = [
            _plain({key: value for key, value in group.items() if key != "params"})
            for group in self._optimizer.param_groups
        ]
        scheduler = None if self._scheduler is None else _plain(self._scheduler.state_dict())
        state = {
            "key": self._digest(),
            "count": self._count,
            "groups": groups,
            "scheduler": scheduler,
        }
        return torch.frombuffer(
            bytearray(json.dumps(state, sort_keys=True).encode()), dtype=torch.uint8
        )

    def restore(self, step: int, saved: torch.Tensor | None) -> None:
        """Continue before a step from a saved state.

        If the recipe has changed since, the steps are repeated as if it had always been the current
        one.
        """
        state = None if saved is None else json.loads(saved.numpy().tobytes())
        if state is None or state["key"] != self._digest():
            for _ in range(step):
                self.step()
            return
        self._count = int(state["count"])
        for group, values in zip(self._optimizer.param_groups, state["groups"], strict=True):
            group.update(_as_in(group, values))
        if self._scheduler is not None:
            now = self._scheduler.state_dict()
            self._scheduler.load_state_dict({**now, **_as_in(now, state["scheduler"])})

    def _digest(self) -> str:
        return hashlib.sha256(
            json.dumps(self._key, sort_keys=True, default=str).encode()
        ).hexdigest()

    def _warm_up(self) -> None:
        steps = self._config.warmup_steps
        if not steps:
            return
        share = self._config.warmup_start
        factor = share + (1 - share) * self._count / steps if self._count < steps else 1.0
        for group, rate in zip(self._optimizer.param_groups, self._first, strict=True):
            group["lr"] = rate * factor

    def _advances(self, first: int, last: int) -> int:
        """Return how often the scheduler advances between the starts of two steps."""
        if self._config.interval == STEP:
            return max(0, last - first)
        size = self._samples_per_step
        return max(
            0, last * size // self._samples_per_epoch - first * size // self._samples_per_epoch
        )


def _build(
    config: LrSchedulerConfig, optimizer: torch.optim.Optimizer, num_advances: int
) -> LRScheduler | None:
    if config.target is None and config.name == CONSTANT and not config.kwargs:
        return None
    key = "lr_scheduler.target"
    target = config.target or LR_SCHEDULERS[config.name]
    taken = inspect.signature(load_target(key, target, config.path)).parameters
    known: dict[str, Any] = {
        "max_lr": [float(group["lr"]) for group in optimizer.param_groups],
        **dict.fromkeys(("T_max", "total_iters"), max(1, num_advances)),
    }
    if "epochs" not in config.kwargs:  # with which OneCycleLR counts otherwise
        known["total_steps"] = max(1, num_advances)
    kwargs = {name: value for name, value in known.items() if name in taken} | config.kwargs
    built: Any = call_target(key, target, kwargs, config.path, optimizer)
    if not callable(getattr(built, "step", None)) or not callable(
        getattr(built, "state_dict", None)
    ):
        raise ConfigError(
            key, target, f"must give a scheduler as torch's, gives {type(built).__name__}"
        )
    needed = [
        name
        for name, parameter in inspect.signature(built.step).parameters.items()
        if parameter.default is parameter.empty
        and parameter.kind is parameter.POSITIONAL_OR_KEYWORD
    ]
    if needed:
        raise ConfigError(
            key,
            target,
            f"needs {', '.join(needed)} at each step, and a schedule is known before the run",
            "use one that depends on the step or epoch alone",
        )
    scheduler: LRScheduler = built
    return scheduler


def _plain(values: dict[str, Any]) -> dict[str, Any]:
    """Return the values that JSON can hold.

    Other values, such as functions, are no state and come from the configuration.
    """
    plain = {}
    for key, value in values.items():
        with contextlib.suppress(TypeError, ValueError):
            if json.loads(json.dumps(value)) == (
                list(value) if isinstance(value, tuple) else value
            ):
                plain[key] = value
    return plain


def _as_in(now: dict[str, Any], values: dict[str, Any]) -> dict[str, Any]:
    """Return values from JSON with tuples where there are tuples now."""
    return {
        key: tuple(value) if isinstance(now.get(key), tuple) else value
        for key, value in values.items()
    }
