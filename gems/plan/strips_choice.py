"""The number of strips of a run that leaves it open (parallel.strips=0).

The one whose simulated step is fastest.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from gems.config.constraints import check_constraints
from gems.config.schema import MAX_FORWARDS, MAX_STRIPS, ParallelConfig, RunSpec
from gems.errors import ConfigError, DoesNotFitError

KEY = "parallel.strips"
GAIN = 0.01  # of the step's time, that twice as many strips must bring
PATIENCE = 2  # slower ones in a row, after which there are no more


def with_fastest_strips(spec: RunSpec, step_s: Callable[[RunSpec], float]) -> RunSpec:
    """Return a resolved run with 1, 2, 4, ... strips, of those that it can have the ones with the shortest step.

    `step_s` plans and simulates a run. More strips nearly always win a little where links are free,
    so each doubling must shorten the step by a part of `GAIN`. The search ends at the first that
    shortens it by less, or where `PATIENCE` in a row are slower.

    Raises:
        ConfigError: the run can have no number of strips, by what the fewest of them is refused
        for. DoesNotFitError: with none of them it fits, by the number that needs least.
    """
    quiet = replace(spec, machine=replace(spec.machine, noise=0.0))
    best: RunSpec | None = None
    faults: list[ConfigError] = []
    too_large: list[DoesNotFitError] = []
    least = math.inf
    num_slower = 0
    rows = spec.data.height_px if spec.cost.from_layers else MAX_STRIPS
    for doublings in range(most_strips(spec.parallel, rows).bit_length()):
        asked = replace(spec.parallel, strips=2**doublings)
        try:
            check_constraints(replace(quiet, parallel=asked))
            found = step_s(replace(quiet, parallel=asked))
        except DoesNotFitError as error:
            # the whole image, which comes first, may be refused for one layer that strips cannot
            # shrink
            is_smaller = (
                len(too_large) < 2 or error.needed_bytes < (1 - GAIN) * too_large[-1].needed_bytes
            )
            too_large.append(error)
            if best is not None or not is_smaller:
                break
            continue
        except ConfigError as error:
            faults.append(error)
            if doublings:  # one that cannot be whole may yet be in strips
                break
            continue
        if best is None or found <= least * (1 - GAIN) ** (
            doublings - best.parallel.num_strips.bit_length() + 1
        ):
            best = replace(spec, parallel=asked)
            least = found
            num_slower = 0
            continue
        num_slower += 1
        if found < least or num_slower == PATIENCE:
            break
    if best is not None:
        return best
    raise min(too_large, key=lambda error: error.needed_bytes) if too_large else faults[0]


def most_strips(parallel: ParallelConfig, rows: int) -> int:
    """Return the most strips that are tried of an image of so many rows, in not too long lists."""
    longest = MAX_FORWARDS // (parallel.partitions * (parallel.micro_batches or 1))
    return max(1, min(MAX_STRIPS, rows, longest))
