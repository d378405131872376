"""Verification: a short run in ranks of this machine, compared with one unsplit process."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from gems.config.schema import RunSpec
from gems.launch.scratch_run import run_program

STEPS = 2
# In bfloat16 weights whose last digits differ, as sums in another order do, may round to others:
# one step is compared.
MIXED_STEPS = {"bf16_mixed": 1}
TOLERANCES = {
    "float64": 1e-12,
    "float32": 1e-3,
    "bfloat16": 1.0,
    "bf16_mixed": 0.02,
    "fp16_mixed": 0.02,
}
# In strips 16 bits also round the gradients of rows that two strips read, and of what all strips
# read.
IN_STRIPS = {"bf16_mixed": 0.2, "fp16_mixed": 0.05}
# on a GPU: its kernels save other tensors than a processor's, which the prediction follows
BYTES_TOLERANCE = 0.05
ROUNDINGS = 10.0  # times what the last digit of the images changes
COMPARE = "gems.engine.verification.compare:compare_run"


@dataclass(frozen=True, slots=True)
class Verification:
    """How far a configured run is from one unsplit process, over all steps, ranks, directions and replicas.

    Both computed in `dtype`. Errors are relative, and `worst` is the tensor of the largest, with
    its rank and step. Bytes are the peaks of activations on each rank, as counted and as predicted
    from the schedule. The backward of `unsplit_layers` cannot be split, in a schedule that splits
    it. With norms by strip, which enlarge rounding, `rounding_error` is what the last digit of the
    images changes in the unsplit process.
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
        """Whether the largest error is within the tolerance of the dtype, 1e-12 for float64, or of rounding."""
        tolerances = {**TOLERANCES, **IN_STRIPS} if self.is_in_strips else TOLERANCES
        return self.max_rel_error <= max(tolerances[self.dtype], ROUNDINGS * self.rounding_error)

    @property
    def has_predicted_bytes(self) -> bool:
        """Whether every rank held the bytes of activations that were predicted, if they were.

        On a GPU nearly so.
        """
        tolerance = BYTES_TOLERANCE if self.is_on_gpu else 0.0
        predicted = self.predicted_activation_bytes or self.peak_activation_bytes
        pairs = zip(self.peak_activation_bytes, predicted, strict=True)
        return all(abs(held - expected) <= tolerance * expected for held, expected in pairs)


def steps_of(precision: str) -> int:
    """Return the steps that a verification compares."""
    return MIXED_STEPS.get(precision, STEPS)


def verify(spec: RunSpec) -> Verification:
    """Run the first steps of a resolved run in ranks of this machine and compare them with one unsplit process.

    Compared are every parameter, gradient and running statistic of every copy on every rank. Both
    compute in float64, or in train.precision if that is not the default.

    Raises:
        ConfigError: a configuration that cannot be run here.
        DoesNotFitError: a rank would hold more than its device.
        RankFailedError: a rank ended before the comparison was done.
    """
    precision = "float64" if spec.train.precision == "float32" else spec.train.precision
    train = replace(spec.train, precision=precision, steps=steps_of(precision))
    found = run_program(replace(spec, train=train), COMPARE, "verify")
    values: dict[str, Any] = {
        name: tuple(v) if isinstance(v, list) else v for name, v in found.items()
    }
    return Verification(**values)
