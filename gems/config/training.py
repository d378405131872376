"""The training loop: how long, in which precision, with which validations, checkpoints and log."""

from __future__ import annotations

from dataclasses import dataclass

from gems.config.fields import AUTO, choice, flag, number, switch, text
from gems.config.recipe import LOGGERS, MAX_STEPS
from gems.config.registries import STAGE_WRAPPERS

# What parameters are kept in, and what layers compute in, by train.precision.
PRECISIONS = {
    "float32": ("float32", "float32"),
    "float64": ("float64", "float64"),
    "bf16_pure": ("bfloat16", "bfloat16"),
    "bf16_mixed": ("float32", "bfloat16"),
    "fp16_mixed": ("float32", "float16"),
}
ON_NONFINITE = ("stop", "skip", "ignore")
LOG_LEVELS = ("debug", "info", "warning", "error")
RESUME_AUTO = "auto"
RESUME_NEVER = "never"
RESUME_FORCE = "force"


@dataclass(slots=True)
class TrainConfig:
    """The training loop, its checkpoints and its log."""

    steps: int = number(100, "optimizer steps of the run", min=1, max=MAX_STEPS)
    epochs: float | None = number(
        None,
        "epochs of the run, before train.steps: as many whole steps as they have samples",
        above=0,
    )
    precision: str = choice(
        "float32",
        PRECISIONS,
        "types of parameters and activations; mixed: float32 parameters and optimizer, layers "
        "under autocast, messages in the low type",
    )
    compile: bool = flag(
        False,
        "run each layer through torch.compile, whose kernels keep other tensors than predictions"
        " count; for schedules with a whole backward, without memory policy, strips and 16 bits",
    )
    cuda_graphs: bool | str = switch(
        False,
        "capture forward and backward of each stage as CUDA graphs, and replay these; what cannot be"
        " captured runs eagerly; auto: if the device is a GPU",
    )
    evaluate: bool = flag(True, "measure the metrics on the validation split at the end")
    validate_steps: int | None = number(
        None, "steps between validations; null: only at the end", min=1
    )
    validate_epochs: int | None = number(None, "epochs between validations", min=1)
    monitor: str | None = text(
        None,
        "validation metric whose best weights are kept, such as accuracy or loss (lower is better);"
        " null: none",
    )
    min_improvement: float = number(
        0.0, "by how much train.monitor must improve to count as better"
    )
    patience: int | None = number(
        None,
        "validations in a row without a better train.monitor after which training ends; null: none",
        min=1,
    )
    hang_timeout_s: float = number(
        600.0, "seconds after which an action, or a wait without progress, is a hang", above=0
    )
    sample_interval_s: float = number(0.5, "seconds between samples of memory and power", above=0)
    initial_checkpoint: str | None = text(
        None,
        "weights to start from: a state dict (.pt, .pth, .safetensors), or the folder of a run or"
        " of weights",
    )
    initial_prefix: str | None = text(
        None,
        "prefix of the names in train.initial_checkpoint that the model's lack, such as module.;"
        " null: found",
    )
    initial_strict: bool = flag(
        True, "refuse weights that lack a tensor of the model, or have others"
    )
    initial_new: list[str] = text(
        [],
        "parameters drawn anew, whatever train.initial_checkpoint has: patterns, such as fc.* for a"
        " new head",
    )
    checkpoint_steps: int | None = number(
        None, "steps between whole checkpoints; null: none", min=1, in_run_id=False
    )
    checkpoint_s: float | None = number(
        None,
        "seconds between checkpoints; null with checkpoint_steps=null: only when the run is asked"
        " to stop",
        above=0,
        in_run_id=False,
    )
    keep_checkpoints: int = number(
        2,
        "newest checkpoints that stay; one where the disk has no room for more",
        min=1,
        in_run_id=False,
    )
    max_failed_saves: int = number(
        5,
        "tries in a row to save a checkpoint, 30 s apart and without a step between them, after"
        " which the run stops",
        min=1,
        in_run_id=False,
    )
    max_grad_norm: float | None = number(
        None,
        "norm of the gradients of all stages to which larger ones are scaled; null: none",
        above=0,
    )
    ema_decay: float | None = number(
        None,
        "decay of a moving average of the weights, which evaluation uses; null: none",
        above=0,
        max=1,
    )
    on_nonfinite: str = choice(
        "stop",
        ON_NONFINITE,
        "what a loss or gradient that is not finite does: stop the run (exit code 4), skip the "
        "optimizer's step, or nothing",
    )
    resume: str = text(
        RESUME_AUTO,
        "where the run begins: at the newest complete checkpoint of its folder (force: also if your"
        " code has changed), at the first step, or at the newest checkpoint of another folder",
        accepts=lambda word: word and word.isprintable(),
        form="must be auto, force, never, or the folder of a run or a checkpoint",
    )
    loggers: list[str] = choice(
        [],
        LOGGERS,
        "trackers that get the figures of each step, beside metrics.csv",
        in_run_id=False,
    )
    stage_wrappers: list[str] = choice(
        [], STAGE_WRAPPERS, "wrappers of stages that plugins register, the first innermost"
    )
    log_level: str = choice(
        "info", LOG_LEVELS, "least level of the messages on stderr", in_run_id=False
    )

    def __post_init__(self) -> None:
        """Take the texts true and false, as quotes make them, for what they say."""
        words = {"true": True, "false": False}
        self.cuda_graphs = words.get(str(self.cuda_graphs).lower(), self.cuda_graphs)

    @property
    def dtype(self) -> str:
        """Type of the parameters, and of activations unless layers run under autocast."""
        return PRECISIONS[self.precision][0]

    @property
    def compute_dtype(self) -> str:
        """Type in which layers compute, and of the messages between stages."""
        return PRECISIONS[self.precision][1]

    @property
    def layer_dtype(self) -> str:
        """The one type of parameters and computation, or the name of a mixed precision.

        What a profile is of.
        """
        return self.dtype if self.dtype == self.compute_dtype else self.precision


def captures_graphs(train: TrainConfig, has_gpu: bool) -> bool:
    """Return whether stages run as CUDA graphs, if nothing but the device stands against it.

    For predictions, `has_gpu` is that of `MachineConfig`.
    """
    is_on = train.cuda_graphs is True or (train.cuda_graphs == AUTO and not train.compile)
    return has_gpu and is_on
