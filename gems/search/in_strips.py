"""Strips and blocks for the best pipelines of a search, with the same ranks and micro-batches.

Each cut is profiled in strips on fake tensors, which takes seconds. So strips are tried only for
the few best pipelines, or, if nothing fits, for those with the most partitions.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

from gems.config.schema import DataConfig, ModelConfig
from gems.errors import ConfigError, DoesNotFitError
from gems.plan.evaluate import evaluate
from gems.plan.strips_choice import KEY, blocks
from gems.search.candidate import Candidate
from gems.search.choice import Choice
from gems.search.evaluate import Planner

ROWS = (256, 128, 64)  # of a strip
SCHEDULES = ("1f1b", "zb_h1")
NUM_SHAPES = 3
BUDGET_S = 120.0


def in_strips(
    planner: Planner,
    best: Sequence[Choice],
    configurations: Sequence[Candidate],
    budget_s: float = BUDGET_S,
) -> list[Choice]:
    """Return the configurations in strips that fit, as far as they can be judged in `budget_s`.

    Activations are kept, or, if they do not fit, recomputed strip by strip. The list is empty if
    the model does not support strips.

    Raises:
        ConfigError: a profile is not available.
    """
    choices: list[Choice] = []
    spec = planner.spec
    if spec.model.norm == "ghost_batch":  # with other strips it is another model
        return choices
    end = time.perf_counter() + budget_s
    has_blocks = spec.machine.is_real or spec.cost.from_layers
    divisions = divisions_of(spec.data, spec.model, has_blocks)
    for candidate in _candidates(best, configurations, divisions):
        if time.perf_counter() > end:
            break
        for tried in (candidate, replace(candidate, memory="recompute", how="strip")):
            try:
                plan = evaluate(planner.run_of(tried))
                choices.append(planner.with_noise(planner.choice(tried, plan)))
                break
            except DoesNotFitError:
                continue
            except ConfigError as error:
                if error.key == KEY:
                    return choices
                break  # counts that the schedule does not serve
    return choices


def divisions_of(
    data: DataConfig, model: ModelConfig, has_blocks: bool
) -> list[int | tuple[int, ...]]:
    """Return the numbers of strips and, if it `has_blocks`, the blocks that a search tries."""
    side_px = data.sides_px[0]
    numbers = sorted({side_px // rows for rows in ROWS if side_px // rows > 1})
    powers = sorted({2 ** round(math.log2(number)) for number in numbers})
    grids = [tuple(grid) for power in powers if has_blocks for grid in blocks(power, data, model)]
    return [*numbers, *grids]


def _candidates(
    best: Sequence[Choice],
    configurations: Sequence[Candidate],
    divisions: Sequence[int | tuple[int, ...]],
) -> Iterator[Candidate]:
    """Yield the most promising shapes of pipelines with each schedule and division."""
    shapes: dict[tuple[int, int, int, int], Candidate] = {}
    ordered = [choice.candidate for choice in best] or sorted(
        configurations, key=lambda candidate: (-candidate.partitions, candidate.micro_batch_size)
    )
    for candidate in ordered:
        shapes.setdefault(
            (
                candidate.partitions,
                candidate.replicas,
                candidate.micro_batch_size,
                candidate.micro_batches,
            ),
            candidate,
        )
    for candidate in list(shapes.values())[:NUM_SHAPES]:
        for schedule in SCHEDULES if candidate.partitions > 1 else SCHEDULES[:1]:
            for strips in divisions:
                yield Candidate(
                    candidate.partitions,
                    candidate.replicas,
                    schedule,
                    candidate.micro_batch_size,
                    candidate.micro_batches,
                    strips=strips,
                )
