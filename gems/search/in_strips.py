"""Strips and blocks for the pipelines of a plan.

The same ranks and micro-batches, each image in strips of rows or in blocks.
What ranks hold of strips is found on fake tensors, which takes seconds for each cut. So strips are
tried for the few pipelines that the search found best, or where nothing fits for those with the
most partitions.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

from gems.config.schema import RunSpec
from gems.errors import ConfigError, DoesNotFitError
from gems.plan.evaluate import evaluate
from gems.plan.strips_choice import KEY, divisions
from gems.search.candidate import Candidate
from gems.search.choice import Choice
from gems.search.evaluate import Planner

ROWS = (256, 128, 64)  # of a strip
SCHEDULES = ("1f1b", "zb_h1")
NUM_SHAPES = 3
BUDGET_S = 120.0


def in_strips(
    planner: Planner, best: Sequence[Choice], asked: Sequence[Candidate], budget_s: float = BUDGET_S
) -> list[Choice]:
    """Return configurations in strips that fit, of those judged in `budget_s`.

    None if the model has no strips.
    Strips are kept; where that does not fit, they are run again.

    Raises:
        ConfigError: a profile that cannot be had.
    """
    found: list[Choice] = []
    if planner.spec.model.norm == "ghost_batch":  # with other strips it is another model
        return found
    end = time.perf_counter() + budget_s
    for one in _candidates(best, asked, planner.spec):
        if time.perf_counter() > end:
            break
        for tried in (one, replace(one, memory="recompute", how="strip")):
            try:
                plan = evaluate(planner.run_of(tried))
                found.append(planner.with_noise(planner.choice(tried, plan)))
                break
            except DoesNotFitError:
                continue
            except ConfigError as error:
                if error.key == KEY:
                    return found
                break  # counts that the schedule does not serve
    return found


def _candidates(
    best: Sequence[Choice], asked: Sequence[Candidate], spec: RunSpec
) -> Iterator[Candidate]:
    """Yield shapes of pipelines with each schedule, in strips and in about as many blocks."""
    shapes: dict[tuple[int, int, int, int], Candidate] = {}
    ordered = [choice.candidate for choice in best] or sorted(
        asked, key=lambda one: (-one.partitions, one.micro_batch_size)
    )
    for one in ordered:
        shapes.setdefault(
            (one.partitions, one.replicas, one.micro_batch_size, one.micro_batches), one
        )
    height_px = spec.data.height_px
    numbers = sorted({height_px // rows for rows in ROWS if height_px // rows > 1})
    powers = sorted({2 ** round(math.log2(number)) for number in numbers})
    tried: list[int | tuple[int, ...]] = [*numbers]
    divided = [division for power in powers for division in divisions(spec, power)]
    tried += [tuple(each) for each in divided if isinstance(each, list)]
    for one in list(shapes.values())[:NUM_SHAPES]:
        for schedule in SCHEDULES if one.partitions > 1 else SCHEDULES[:1]:
            for strips in tried:
                yield Candidate(
                    one.partitions,
                    one.replicas,
                    schedule,
                    one.micro_batch_size,
                    one.micro_batches,
                    strips=strips,
                )
