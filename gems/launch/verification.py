"""Verification: compare a short run in ranks of this machine with one unsplit process."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from gems.config.schema import RunSpec
from gems.launch.scratch_run import run_program

STEPS = 2
# Only one step is compared: a different order of summation changes the last digits, and weights
# with different last digits may round to different bfloat16 values.
MIXED_STEPS = {"bf16_mixed": 1}
TOLERANCES = {
    "float64": 1e-12,
    "float32": 1e-3,
    "bfloat16": 1.0,
    "bf16_mixed": 0.02,
    "fp16_mixed": 0.02,
}
# In strips, 16 bits also round the gradients of rows that two strips read, and of data that all
# strips read.
IN_STRIPS = {"bf16_mixed": 0.2, "fp16_mixed": 0.05}
# On a GPU, kernels save other tensors than on a CPU; the prediction is based on the CPU.
BYTES_TOLERANCE = 0.05
# a multiple of the change that the last digit of the images causes
ROUNDINGS = 10.0
COMPARE = "gems.engine.verification.compare:compare_run"


@dataclass(frozen=True, slots=True)
class Verification:
    """The difference between a configured run and one unsplit process.

    It covers all steps, ranks, directions and replicas. Both compute in `dtype`. Errors are
    relative. `worst` is the tensor with the largest error, with its rank and step. Bytes are the
    peaks of activations on each rank, as counted and as predicted from the schedule.
    `unsplit_layers` lists the layers whose backward cannot be split, in a schedule that splits it.
    Norms by strip enlarge rounding. For them, `rounding_error` is the change that the last digit of
    the images causes in the unsplit process.
    """

    dtype: str
    max_rel_error: float
    parameter_error: float
    gradient_error: float
    statistics_error: float
    worst: str
    peak_activation_bytes: tuple[int, ...]
    predicted_activation_bytes: tuple[int, ...] | None
    unsplit_layers: tuple[str, ...]
    is_in_strips: bool = False
    rounding_error: float = 0.0
    is_on_gpu: bool = False

    @property
    def is_equal(self) -> bool:
        """Whether the largest error is within the tolerance of the dtype or of rounding.

        The tolerance is 1e-12 for float64.
        """
        tolerances = {**TOLERANCES, **IN_STRIPS} if self.is_in_strips else TOLERANCES
        return self.max_rel_error <= max(tolerances[self.dtype], ROUNDINGS * self.rounding_error)

    @property
    def has_predicted_bytes(self) -> bool:
        """Whether every rank held the predicted bytes of activations, if there is a prediction.

        On a GPU they may differ by BYTES_TOLERANCE.
        """
        tolerance = BYTES_TOLERANCE if self.is_on_gpu else 0.0
        predicted = self.predicted_activation_bytes or self.peak_activation_bytes
        pairs = zip(self.peak_activation_bytes, predicted, strict=True)
        return all(abs(counted - expected) <= tolerance * expected for counted, expected in pairs)


def steps_of(precision: str) -> int:
    """Return the number of steps that a verification compares."""
    return MIXED_STEPS.get(precision, STEPS)


def verify(spec: RunSpec) -> Verification:
    """Compare the first steps of a resolved run in local ranks with one unsplit process.

    The comparison covers every parameter, gradient and running statistic of every copy on every
    rank. Both compute in float64, or in train.precision if that is not the default.

    Raises:
        ConfigError: The configuration cannot be run here.
        DoesNotFitError: A rank would hold more than its device.
        RankFailedError: A rank ended before the comparison was done.
    """
    precision = "float64" if spec.train.precision == "float32" else spec.train.precision
    train = replace(spec.train, precision=precision, steps=steps_of(precision))
    result = run_program(replace(spec, train=train), COMPARE, "verify")
    values: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in result.items()
    }
    return Verification(**values)
