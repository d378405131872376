"""The largest image that a run trains in strips, which are run again unless the run has another memory policy."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

from gems.config.schema import MemoryConfig, RunSpec
from gems.errors import ConfigError, DoesNotFitError
from gems.partition.max_model_size import RESOLUTION, Axis
from gems.plan.evaluate import evaluate
from gems.plan.strips_choice import KEY

# Thicker strips hold more of one, thinner ones more of what is carried between them: for a
# ResNet-50 of 12 000 to 50 000 px about so many rows take least.
STRIP_ROWS = 256
PRECISION = 0.01  # of the answer


@dataclass(frozen=True, slots=True)
class LargestImage:
    """A square image that trains, in how many strips, and the fullest rank's peak in bytes."""

    side_px: int
    strips: int | list[int]
    memory: str
    peak_bytes: int


def largest_image(spec: RunSpec) -> LargestImage | None:
    """Return the largest square image that a resolved run trains in strips within machine.device_bytes.

    None if a layer needs the whole image, or not even a small one fits.
    """
    memory = MemoryConfig("recompute", recompute="strip") if spec.memory.keeps else spec.memory
    given = spec.parallel
    axis = Axis(replace(spec, memory=memory), RESOLUTION)

    @cache
    def trained(side_px: int) -> LargestImage | None:
        strips = given.strips if given.num_strips > 1 else max(2, side_px // STRIP_ROWS)
        sized = axis.at(side_px)
        try:
            peak = evaluate(replace(sized, parallel=replace(sized.parallel, strips=strips))).peak
        except DoesNotFitError:
            return None
        assert peak is not None
        return LargestImage(side_px, strips, memory.name, peak.device_bytes)

    try:
        side_px = axis.search(lambda value: trained(value) is not None, STRIP_ROWS, PRECISION)
    except ConfigError as error:
        if error.key != KEY:
            raise
        return None
    return trained(side_px) if side_px else None
