"""The choice for parallel.strips=0: the strips or blocks that fit with the fastest step."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import product
from operator import floordiv

from gems.config.constraints import check_constraints
from gems.config.schema import (
    MAX_FORWARDS,
    MAX_STRIPS,
    DataConfig,
    ModelConfig,
    ParallelConfig,
    RunSpec,
)
from gems.errors import ConfigError, DoesNotFitError
from gems.models import stride_of
from gems.profile import ModelProfile
from gems.profile.strip_profile import STRIPS_OVER_WHOLE

KEY = "parallel.strips"
GAIN = 0.01  # share of the step time that doubling the strips must save
SAVING = 0.05  # share of the bytes that doubling the strips must save if nothing fits
PATIENCE = 2  # slower divisions in a row that end the search
MOST_SLOWER = 2.0  # times the whole image, above which launches take longer than the work
Division = int | list[int]  # strips, or blocks along several axes


def with_fastest_strips(spec: RunSpec, step_s: Callable[[RunSpec], float]) -> RunSpec:
    """Return a resolved run in the number of parts (1, 2, 4, ...) with the shortest step.

    `step_s` plans and simulates a run. On free links more strips nearly always win a little, so
    each doubling must shorten the step by a share of `GAIN`. The search ends at the first doubling
    that gains less, or after `PATIENCE` slower ones in a row. If nothing fits, it ends at the first
    doubling that saves less than a share of `SAVING` of the bytes.

    Raises:
        ConfigError: no number of strips is valid; the error is that of the fewest strips.
        DoesNotFitError: no division fits; the error is that of the division that needs least.
    """
    quiet = replace(spec, machine=replace(spec.machine, noise=0.0))

    def divided_step_s(division: Division) -> float:
        divided = _divided(quiet, division)
        check_constraints(divided)
        return step_s(divided)

    has_blocks = spec.machine.is_real or spec.cost.from_layers
    best: RunSpec | None = None
    faults: list[ConfigError] = []
    too_large: list[tuple[Division, DoesNotFitError]] = []
    least = math.inf
    num_slower = fewest = 0
    rows = spec.data.sides_px[0] if spec.cost.from_layers else MAX_STRIPS
    for doublings in range(most_strips(spec.parallel, rows).bit_length()):
        if 2**doublings < fewest:
            continue
        divisions = [
            2**doublings,
            *(blocks(2**doublings, spec.data, spec.model) if has_blocks else ()),
        ]
        division, outcome = _fastest(divisions, divided_step_s)
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
            best = _divided(spec, division)
            least = outcome
            num_slower = 0
            continue
        num_slower += 1
        if outcome < least or num_slower == PATIENCE:
            break
    if best is not None:
        return best
    raise _of_least(too_large) if too_large else faults[0]


def _divided(spec: RunSpec, division: Division) -> RunSpec:
    return replace(spec, parallel=replace(spec.parallel, strips=division))


def _fastest(
    divisions: Iterable[Division], step_s: Callable[[Division], float]
) -> tuple[Division, float | ConfigError | DoesNotFitError]:
    """Return the fastest division with its step, or else the leanest one or a fault.

    Blocks, which follow strips, must be faster by a share of `GAIN`.
    """
    best: tuple[Division, float] | None = None
    too_large: list[tuple[Division, DoesNotFitError]] = []
    faults: list[tuple[Division, ConfigError]] = []
    for division in divisions:
        try:
            seconds = step_s(division)
        except DoesNotFitError as error:
            too_large.append((division, error))
        except ConfigError as error:
            faults.append((division, error))
        else:
            if best is None or seconds < (1 - GAIN) * best[1]:
                best = division, seconds
    return best or (_leanest(too_large) if too_large else faults[0])


def blocks(number: int, data: DataConfig, model: ModelConfig) -> list[list[int]]:
    """Return the grid of the squarest blocks of an image or volume, `number` in all, if any.

    `number` is a power of two. A square image has no more columns than rows. No block is thinner
    than the model's stride.
    """
    sides = data.sides_px
    powers = [1 << power for power in range(number.bit_length())]
    fitting = [
        list(grid)
        for grid in product(powers, repeat=len(sides))
        if math.prod(grid) == number
        and max(grid) < number
        and min(map(floordiv, sides, grid)) >= stride_of(model)
    ]

    def rank(grid: list[int]) -> tuple[float, list[int]]:
        block = [side / parts for side, parts in zip(sides, grid, strict=True)]
        return max(block) / min(block), [-parts for parts in grid]

    return sorted(fitting, key=rank)[:1]


def _leanest(too_large: list[tuple[Division, DoesNotFitError]]) -> tuple[Division, DoesNotFitError]:
    return min(too_large, key=lambda refusal: refusal[1].needed_bytes)


def _is_capped(too_large: list[tuple[Division, DoesNotFitError]]) -> bool:
    """Return whether the last doubling of the parts saved too little.

    The whole image does not count: it may be refused for one layer that strips cannot shrink.
    """
    needed = [error.needed_bytes for _, error in too_large[1:]]
    return len(needed) > 1 and needed[-1] > (1 - SAVING) * needed[-2]


def _of_least(too_large: list[tuple[Division, DoesNotFitError]]) -> DoesNotFitError:
    """Return the error of the leanest division, with the reason why there are no more parts."""
    division, error = _leanest(too_large)
    advice = f"no division needs less than {KEY}={shown(division)}"
    if _is_capped(too_large):
        advice += f", and twice as many parts save less than {100 * SAVING:g} %"
    advice = f"{advice}; {error.advice}"
    return DoesNotFitError(error.where, error.needed_bytes, error.limit_bytes, advice, error.key)


def shown(division: Division | Sequence[int]) -> str:
    """Format a division as the value of a configuration key."""
    return json.dumps(division, separators=(",", ":"))


def in_words(division: Division | Sequence[int]) -> str:
    """Describe a division in words."""
    if isinstance(division, int):
        return f"{division} strips"
    return f"{' x '.join(map(str, division))} blocks"


def thin_parts(
    parallel: ParallelConfig, data: DataConfig, launch_s: float | None, profile: ModelProfile
) -> str | None:
    """Return a warning if parts are so thin that launching kernels takes most of the time."""
    slower = profile.facts.get(STRIPS_OVER_WHOLE, 1.0)
    if not launch_s or slower < MOST_SLOWER:
        return None
    sides = data.sides_px
    grid = parallel.full_grid(len(sides))
    part = " x ".join(str(side // parts) for side, parts in zip(sides, grid, strict=True))
    return (
        f"{KEY}={shown(parallel.strips)}: parts of {part} px take {slower:.1f} times as long as the"
        f" whole image,"
        f" for the launches of their kernels (machine.launch_s={launch_s:g}); use"
        " fewer parts or a larger parallel.micro_batch_size"
    )


def most_strips(parallel: ParallelConfig, rows: int) -> int:
    """Return the most strips to try for an image of `rows` rows, which keep schedules short."""
    longest = MAX_FORWARDS // (parallel.partitions * (parallel.micro_batches or 1))
    return max(1, min(MAX_STRIPS, rows, longest))
