"""The largest image that a run trains in parts, which are recomputed without a memory policy."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial

from gems.config.schema import MAX_STRIPS, MemoryConfig, RunSpec
from gems.errors import ConfigError, DoesNotFitError
from gems.models import stride_of
from gems.partition.max_model_size import MAX_VALUES, RESOLUTION, Axis
from gems.plan.evaluate import evaluate
from gems.plan.strips_choice import KEY, Division

STRIP_ROWS = 256  # for networks that support strips of rows only
BLOCK_PX = 1024  # side of the first blocks to try
UNIT_PX = 32  # sides of blocks are multiples of this and of the model's stride
PRECISION = 0.01  # relative, of the side


@dataclass(frozen=True, slots=True)
class LargestImage:
    """A square or cubic image that trains, with its division, step time and peak of the fullest rank."""

    side_px: int
    strips: Division
    memory: str
    peak_bytes: int
    step_s: float


def largest_image(spec: RunSpec) -> LargestImage | None:
    """Return the largest square or cubic image that a resolved run trains in parts on its devices.

    The parts are as configured, or else square blocks, or strips of rows if the network does not
    support blocks. Return None if a layer needs the whole image, or if not even a small one fits.
    """
    memory = MemoryConfig("recompute", recompute="strip") if spec.memory.keeps else spec.memory
    axis = Axis(replace(spec, memory=memory), RESOLUTION)

    @cache
    def trained(side_px: int, *grid: int) -> LargestImage | None:
        print(".", end="", file=sys.stderr, flush=True)
        strips: Division = list(grid) if max(grid[1:], default=1) > 1 else grid[0]
        sized = axis.at(side_px)
        try:
            plan = evaluate(replace(sized, parallel=replace(sized.parallel, strips=strips)))
        except DoesNotFitError:
            return None
        assert plan.peak is not None
        return LargestImage(side_px, strips, memory.name, plan.peak.device_bytes, plan.step_s)

    def divided(grid_of: Callable[[int], tuple[int, ...]]) -> LargestImage | None:
        def at(side_px: int) -> LargestImage | None:
            return trained(side_px, *grid_of(side_px))

        side_px = axis.search(lambda value: at(value) is not None, STRIP_ROWS, PRECISION)
        return at(side_px) if side_px else None

    if spec.parallel.num_strips > 1:
        return _unless_refused(lambda: divided(lambda _: spec.parallel.grid))
    unit_px = math.lcm(UNIT_PX, stride_of(spec.model))
    axes = len(spec.data.sides)
    most_blocks = round(MAX_STRIPS ** (1 / axes))
    return _unless_refused(
        lambda: _in_blocks(lambda side, count: trained(side, *[count] * axes), unit_px, most_blocks)
    ) or _unless_refused(lambda: divided(lambda side_px: (max(2, side_px // STRIP_ROWS),)))


def _unless_refused(search: Callable[[], LargestImage | None]) -> LargestImage | None:
    try:
        return search()
    except ConfigError as error:
        if error.key != KEY:
            raise
        return None


def _in_blocks(
    trained: Callable[[int, int], LargestImage | None], unit_px: int, most_blocks: int
) -> LargestImage | None:
    """Return the largest image in square blocks; `trained` takes a side and the blocks along it.

    There are at most `most_blocks` along an axis.

    Larger blocks need more memory for a block, smaller ones more for the carries between blocks.
    Blocks are halved, starting from the largest of which 2 x 2 fit, as long as a larger image fits.
    Images of equal blocks share profiles; only the last steps, which enlarge the blocks of the best
    image, need new ones.
    """

    def fits(block_px: int, count: int) -> bool:
        return count <= most_blocks and trained(block_px * count, count) is not None

    block_px = max(unit_px, BLOCK_PX // unit_px * unit_px)
    while not fits(block_px, 2):
        if block_px < 2 * unit_px:
            return None
        block_px = block_px // 2 // unit_px * unit_px
    while 4 * block_px <= MAX_VALUES[RESOLUTION] and fits(2 * block_px, 2):
        block_px *= 2
    count = _most(partial(fits, block_px), 2)
    smaller_px = block_px
    while smaller_px >= 2 * unit_px:
        smaller_px = smaller_px // 2 // unit_px * unit_px
        first = block_px * count // smaller_px + 1
        if not fits(smaller_px, first):
            break
        block_px, count = smaller_px, _most(partial(fits, smaller_px), first)
    too_large_px = block_px + -(-block_px // count)
    while too_large_px - block_px > max(unit_px, PRECISION * block_px):
        middle_px = (block_px + too_large_px) // 2 // unit_px * unit_px
        if middle_px == block_px:
            break
        if fits(middle_px, count):
            block_px = middle_px
        else:
            too_large_px = middle_px
    return trained(block_px * count, count)


def _most(fits: Callable[[int], bool], number: int) -> int:
    """Return the largest number that fits, starting at one that does."""
    step = 1
    while fits(number + step):
        number += step
        step *= 2
    while step > 1:
        step //= 2
        number += step * fits(number + step)
    return number
