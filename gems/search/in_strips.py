"""Strips for the pipelines of a plan.

The same ranks and micro-batches, each image as a row of strips.
What ranks hold of strips is found on fake tensors, which takes seconds for each cut. So strips are
tried for the few pipelines that the search found best, or where nothing fits for those with the
most partitions.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

from gems.errors import ConfigError, DoesNotFitError
from gems.plan.evaluate import evaluate
from gems.plan.strips_choice import KEY
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
    for one in _candidates(best, asked, planner.spec.data.height_px):
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
                    return []
                break  # counts that the schedule does not serve
    return found


def _candidates(
    best: Sequence[Choice], asked: Sequence[Candidate], height_px: int
) -> Iterator[Candidate]:
    """Yield shapes of pipelines with each number of strips and each schedule."""
    shapes: dict[tuple[int, int, int, int], Candidate] = {}
    ordered = [choice.candidate for choice in best] or sorted(
        asked, key=lambda one: (-one.partitions, one.micro_batch_size)
    )
    for one in ordered:
        shapes.setdefault(
            (one.partitions, one.replicas, one.micro_batch_size, one.micro_batches), one
        )
    numbers = sorted({height_px // rows for rows in ROWS if height_px // rows > 1})
    for one in list(shapes.values())[:NUM_SHAPES]:
        for schedule in SCHEDULES if one.partitions > 1 else SCHEDULES[:1]:
            for strips in numbers:
                yield Candidate(
                    one.partitions,
                    one.replicas,
                    schedule,
                    one.micro_batch_size,
                    one.micro_batches,
                    strips=strips,
                )
