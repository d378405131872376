"""The recipe of a training: loss, optimizer, learning-rate scheduler and metrics, by name or as targets of the user's.

A name stands for a class of torch or of this toolkit. `target` names one of the user's own instead,
as Hydra's `_target_`: package.module.Class, found in `path` or on Python's path, called with
`kwargs`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gems.config.fields import choice, flag, number, text

MAX_STEPS = 10**12
AUTO = "auto"  # the loss of the task
TASKS = ("classification", "multi_label", "segmentation", "regression")
LOSSES = {
    "cross_entropy": "torch.nn.CrossEntropyLoss",
    "bce_with_logits": "torch.nn.BCEWithLogitsLoss",
    "mse": "torch.nn.MSELoss",
    "l1": "torch.nn.L1Loss",
    "smooth_l1": "torch.nn.SmoothL1Loss",
}
LOSS_OF_TASK = {
    "classification": "cross_entropy",
    "multi_label": "bce_with_logits",
    "segmentation": "cross_entropy",
    "regression": "mse",
}
OPTIMIZERS = {
    "sgd": "torch.optim.SGD",
    "adam": "torch.optim.Adam",
    "adamw": "torch.optim.AdamW",
    "lamb": "gems.engine.optimization.lamb.Lamb",
}
LR_SCHEDULERS = {
    "constant": "torch.optim.lr_scheduler.ConstantLR",
    "cosine": "torch.optim.lr_scheduler.CosineAnnealingLR",
    "exponential": "torch.optim.lr_scheduler.ExponentialLR",
    "linear": "torch.optim.lr_scheduler.LinearLR",
    "multi_step": "torch.optim.lr_scheduler.MultiStepLR",
    "one_cycle": "torch.optim.lr_scheduler.OneCycleLR",
    "polynomial": "torch.optim.lr_scheduler.PolynomialLR",
    "step": "torch.optim.lr_scheduler.StepLR",
}
_OF_CLASSES = ("classification", "segmentation")
# metrics in addition to those of the task, with the tasks that support them
METRICS = {
    "auc": ("classification", "multi_label"),
    "balanced_accuracy": _OF_CLASSES,
    "confusion_matrix": _OF_CLASSES,
    "r2": ("regression",),
}
# figures of validation without additional metrics
FIGURES_OF_TASK = {
    "classification": ("loss", "accuracy", "majority"),
    "multi_label": ("loss", "accuracy", "majority"),
    "segmentation": ("loss", "accuracy", "majority", "dice", "dice_constant"),
    "regression": ("loss", "mean_absolute_error", "mean_absolute_error_constant"),
}
TABLES = ("confusion_matrix",)  # metrics that are no number
INTERVALS = ("step", "epoch")
LOGGERS = ("tensorboard", "wandb", "mlflow")


@dataclass(slots=True)
class LossConfig:
    """The loss of a micro-batch.

    A mean is taken over everything in the step, whatever the micro-batches are.
    """

    name: str = choice(AUTO, (AUTO, *LOSSES), "loss; auto: that of data.task")
    target: str | None = text(None, "a loss of your own, as package.module.Class or a function")
    kwargs: dict[str, Any] = text(
        {}, "keyword arguments of the loss, such as label_smoothing or weight"
    )
    path: str | None = text(None, "folder that holds the package of loss.target")
    output: str | None = text(
        None,
        "part of the model's output that the loss takes, a key or an index; null: all of it, or its"
        " only tensor",
    )


@dataclass(slots=True)
class OptimizerConfig:
    """The optimizer and its parameter groups."""

    name: str = choice("sgd", OPTIMIZERS, "optimizer")
    lr: float = number(0.05, "learning rate", above=0)
    momentum: float = number(0.9, "momentum of sgd")
    weight_decay: float = number(0.0, "weight decay")
    target: str | None = text(None, "an optimizer of your own, as package.module.Class")
    kwargs: dict[str, Any] = text({}, "more keyword arguments of the optimizer, such as betas")
    path: str | None = text(None, "folder that holds the package of optimizer.target")
    decay_norms_and_biases: bool = flag(True, "decay the weights of norms and biases too")
    layer_decay: float = number(
        1.0, "factor of the learning rate from each layer to the one before it", above=0, max=1
    )
    frozen: list[str] = text(
        [], "layers or parameters that are not trained, by patterns as in layer1.* or *.bias"
    )

    @property
    def num_states(self) -> int:
        """Copies of the parameters that the optimizer keeps: 2 of one of the user's own, as Adam."""
        return int(self.momentum > 0) if self.name == "sgd" and self.target is None else 2


@dataclass(slots=True)
class LrSchedulerConfig:
    """How the learning rate changes, after a linear warm-up."""

    name: str = choice("constant", LR_SCHEDULERS, "scheduler of the learning rate")
    target: str | None = text(
        None, "a scheduler of your own, as package.module.Class, called with the optimizer"
    )
    kwargs: dict[str, Any] = text(
        {}, "keyword arguments of the scheduler; what is left out and known is filled in"
    )
    path: str | None = text(None, "folder that holds the package of lr_scheduler.target")
    interval: str = choice(
        "step", INTERVALS, "when the scheduler advances: after each step or each epoch"
    )
    warmup_steps: int = number(
        0, "first steps, in which the learning rate rises linearly", max=MAX_STEPS
    )
    warmup_start: float = number(
        0.01, "share of the learning rate at which the warm-up begins", above=0, max=1
    )


@dataclass(slots=True)
class BenchmarkConfig:
    """What figures of speed count."""

    skip_steps: int = number(2, "first steps, which no figure counts", max=MAX_STEPS)
