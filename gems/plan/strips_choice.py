"""The division of the images of a run that leaves it open (parallel.strips=0).

Strips of rows or blocks: the one with the fastest simulated step of those that fit.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from gems.config.constraints import check_constraints
from gems.config.schema import MAX_FORWARDS, MAX_STRIPS, ParallelConfig, RunSpec
from gems.errors import ConfigError, DoesNotFitError
from gems.models import stride_of
from gems.profile import ModelProfile
from gems.profile.strip_profile import STRIPS_OVER_WHOLE

KEY = "parallel.strips"
GAIN = 0.01  # of the step's time, that twice as many strips must bring
SAVING = 0.05  # of the bytes, that twice as many strips must save where none fits
PATIENCE = 2  # slower ones in a row, after which there are no more
MOST_SLOWER = 2.0  # times the whole image: from there on launches take more than the work
Division = int | list[int]  # strips of rows, or rows and columns of blocks


def with_fastest_strips(spec: RunSpec, step_s: Callable[[RunSpec], float]) -> RunSpec:
    """Return a resolved run in 1, 2, 4, ... parts, of those that it can have the ones with the shortest step.

    `step_s` plans and simulates a run. More strips nearly always win a little where links are free,
    so each doubling must shorten the step by a part of `GAIN`. The search ends at the first that
    shortens it by less, or where `PATIENCE` in a row are slower. Where none fits, it ends at the
    first that saves less than a part of `SAVING` of the bytes.

    Raises:
        ConfigError: the run can have no number of strips, by what the fewest of them is refused
        for. DoesNotFitError: with none of them it fits, by the division that needs least.
    """
    quiet = replace(spec, machine=replace(spec.machine, noise=0.0))
    best: RunSpec | None = None
    faults: list[ConfigError] = []
    too_large: list[tuple[Division, DoesNotFitError]] = []
    least = math.inf
    num_slower = fewest = 0
    rows = spec.data.height_px if spec.cost.from_layers else MAX_STRIPS
    for doublings in range(most_strips(spec.parallel, rows).bit_length()):
        if 2**doublings < fewest:
            continue
        division, outcome = _fastest(quiet, 2**doublings, step_s)
        if isinstance(outcome, DoesNotFitError):
            too_large.append((division, outcome))
            if best is not None or _is_capped(too_large):
                break
            # n times as many parts hold no less than a part of n; twice as much, to be safe
            fewest = 2**doublings * outcome.needed_bytes // (2 * outcome.limit_bytes)
            continue
        if isinstance(outcome, ConfigError):
            faults.append(outcome)
            if doublings:  # one that cannot be whole may yet be in strips
                break
            continue
        if best is None or outcome <= least * (1 - GAIN) ** (
            doublings - best.parallel.num_strips.bit_length() + 1
        ):
            best = replace(spec, parallel=replace(spec.parallel, strips=division))
            least = outcome
            num_slower = 0
            continue
        num_slower += 1
        if outcome < least or num_slower == PATIENCE:
            break
    if best is not None:
        return best
    raise _of_least(too_large) if too_large else faults[0]


def _fastest(
    spec: RunSpec, number: int, step_s: Callable[[RunSpec], float]
) -> tuple[Division, float | ConfigError | DoesNotFitError]:
    """Return the fastest division into `number` parts and its step, or why none of them can be.

    Blocks must be faster than strips by a part of `GAIN`. If all are too large, the division is
    that which needs least.
    """
    steps: list[tuple[Division, float]] = []
    too_large: list[tuple[Division, DoesNotFitError]] = []
    faults: list[tuple[Division, ConfigError]] = []
    for division in divisions(spec, number):
        divided = replace(spec, parallel=replace(spec.parallel, strips=division))
        try:
            check_constraints(divided)
            found = step_s(divided)
        except DoesNotFitError as error:
            too_large.append((division, error))
        except ConfigError as error:
            faults.append((division, error))
        else:
            if not steps or found < (1 - GAIN) * steps[0][1]:
                steps.insert(0, (division, found))
    if steps:
        return steps[0]
    if too_large:
        return min(too_large, key=lambda each: each[1].needed_bytes)
    return faults[0]


def divisions(spec: RunSpec, number: int) -> Iterator[Division]:
    """Yield the divisions of a run's images into `number` parts, a power of two: strips and blocks.

    Blocks are as square as can be, with no more columns than rows in a square image, and not
    thinner than what the model shrinks to one pixel. Only runs whose costs follow from their images
    have them.
    """
    yield number
    if number < 4 or not (spec.machine.is_real or spec.cost.from_layers):
        return
    sides = spec.data.height_px, spec.data.width_px
    by_ratio = sorted(
        (abs(math.log2(sides[0] * columns / (sides[1] * rows))), -rows, columns)
        for columns in (2**power for power in range(1, number.bit_length() - 1))
        for rows in (number // columns,)
        if min(sides[0] // rows, sides[1] // columns) >= stride_of(spec.model)
    )
    yield from ([-rows, columns] for _, rows, columns in by_ratio[:1])


def _is_capped(too_large: list[tuple[Division, DoesNotFitError]]) -> bool:
    """Return whether the last division saves too little over the one before.

    The whole image, which comes first, may be refused for one layer that strips cannot shrink.
    """
    needed = [error.needed_bytes for _, error in too_large[1:]]
    return len(needed) > 1 and needed[-1] > (1 - SAVING) * needed[-2]


def _of_least(too_large: list[tuple[Division, DoesNotFitError]]) -> DoesNotFitError:
    """Return the error of the division that needs least; it says why there are no more parts."""
    division, error = min(too_large, key=lambda each: each[1].needed_bytes)
    advice = f"no division needs less than {KEY}={shown(division)}"
    if _is_capped(too_large):
        advice += f", and twice as many parts save less than {100 * SAVING:g} %"
    advice = f"{advice}; {error.advice}"
    return DoesNotFitError(error.where, error.needed_bytes, error.limit_bytes, advice, error.key)


def shown(division: Division | Sequence[int]) -> str:
    """Return a division as the value of a key."""
    return json.dumps(division, separators=(",", ":"))


def in_words(division: Division | Sequence[int]) -> str:
    """Return a division in words."""
    if isinstance(division, int):
        return f"{division} strips"
    return f"{' x '.join(map(str, division))} blocks"


def thin_parts(spec: RunSpec, profile: ModelProfile) -> str | None:
    """Return a warning if the parts of images are so thin that launching kernels takes most time."""
    slower = profile.facts.get(STRIPS_OVER_WHOLE, 1.0)
    if not spec.machine.launch_s or slower < MOST_SLOWER:
        return None
    rows, columns = (*spec.parallel.grid, 1)[:2]
    return (
        f"{KEY}={shown(spec.parallel.strips)}: parts of {spec.data.height_px // rows} x"
        f" {spec.data.width_px // columns} px take {slower:.1f} times as long as the whole image,"
        f" for the launches of their kernels (machine.launch_s={spec.machine.launch_s:g}); use"
        " fewer parts or a larger parallel.micro_batch_size"
    )


def most_strips(parallel: ParallelConfig, rows: int) -> int:
    """Return the most strips that are tried of an image of so many rows, in not too long lists."""
    longest = MAX_FORWARDS // (parallel.partitions * (parallel.micro_batches or 1))
    return max(1, min(MAX_STRIPS, rows, longest))
