"""The largest model that fits a device, by depth, resolution or micro-batch, for each method."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, lru_cache

from gems.config.schema import RunSpec
from gems.errors import ConfigError
from gems.memory.model import OPTIMIZERS
from gems.models import check_image, layers_of, stride_of
from gems.models.families.resnet import block_of
from gems.partition.methods import PartitionCase, partition_by
from gems.utils.units import with_sides

RESOLUTION = "resolution"
MAX_VALUES = {"depth": 100_000, RESOLUTION: 1 << 20, "micro_batch": 1 << 20}
# range above a number within which the next existing depth is searched
DEPTH_REACH = 2000
PROBES_ABOVE = 2
# bytes of a parameter
ITEM_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "bf16_mixed": 4, "fp16_mixed": 4}


@dataclass(frozen=True, slots=True)
class MaxModelSize:
    """The largest value that a method can train, its number of parameters and its peak in bytes."""

    method: str
    value: int
    num_parameters: int
    peak_bytes: int


def max_model_sizes(
    axis: Axis, methods: tuple[str, ...], build_case: Callable[[int], PartitionCase]
) -> list[MaxModelSize]:
    """Return, for each method, the largest value of an axis for which every rank fits its device.

    The value is doubled, then the interval is bisected. A heuristic's peak may decrease as the
    model grows, so the next values above the result are tried as well. The value is 0 if not even
    the smallest model trains. `build_case` returns the case for a value of the axis.

    Raises:
        ConfigError: machine.device_bytes is not set, or the model has no such axis.
    """
    spec = axis.spec
    limit = spec.machine.device_bytes
    if limit is None:
        raise ConfigError(
            "machine.device_bytes",
            "null",
            "must be given for --largest",
            "machine.device_bytes=16GB, or machine=v100",
        )
    case = lru_cache(maxsize=1)(build_case)  # the tables of a deep model are large

    @cache
    def peak(method: str, value: int) -> int:
        least = least_bytes(case(value))
        if least > limit:
            return least
        partition = partition_by(method, case(value), "peak_bytes", spec.partition.budget_s)
        return max(case(value).peak_bytes(partition.boundaries))

    answers = []
    for method in methods:
        value = axis.search(lambda value, method=method: peak(method, value) <= limit)  # type: ignore[misc]
        if not value:
            answers.append(MaxModelSize(method, 0, 0, 0))
            continue
        profile = case(value).profile
        num_bytes = sum(layer.param_bytes for layer in profile.layers)
        answers.append(
            MaxModelSize(method, value, num_bytes // ITEM_BYTES[profile.dtype], peak(method, value))
        )
    return answers


def least_bytes(case: PartitionCase) -> int:
    """Return a lower bound of the peak: an equal share of all states and one stash of each layer.

    It needs no table, so a model that is far too large is rejected at once.
    """
    optimizer = OPTIMIZERS[case.optimizer]
    layers = case.profile.layers
    total: int = sum(
        optimizer.static_bytes(layer.param_bytes, layer.buffer_bytes) + layer.stash_bytes
        for layer in layers
    )
    return total // case.schedule.num_ranks


@dataclass(frozen=True)
class Axis:
    """A size of a run that can grow: its depth, its resolution (all sides) or its micro-batch."""

    spec: RunSpec
    name: str

    def at(self, value: int) -> RunSpec:
        """Return the run with another value."""
        spec = self.spec
        if self.name == "depth":
            model = spec.model
            if model.target is None and model.name == "resnet":
                # block=auto would change from one depth to another
                model = replace(model, block=block_of(model))
            return replace(spec, model=replace(model, depth=value))
        if self.name == RESOLUTION:
            return replace(spec, data=with_sides(spec.data, [value] * len(spec.data.sides)))
        return replace(spec, parallel=replace(spec.parallel, micro_batch_size=value))

    def search(self, fits: Callable[[int], bool], first: int = 1, tolerance: float = 0.0) -> int:
        """Return the largest value found that fits, starting at `first`; 0 if none does.

        The result is accurate to the relative `tolerance`.
        """
        most = MAX_VALUES[self.name]
        good = 0
        bad = most + 1
        step = max(first, stride_of(self.spec.model) if self.name == RESOLUTION else 1)
        while step < bad:
            value = self._at_least(step)
            if value is None or value >= bad:
                break
            if fits(value):
                good = value
                step = 2 * value
            else:
                bad = value
        while True:
            middle = self._at_least(good + (bad - good) // 2)
            if middle is None or not good < middle < bad:
                middle = self._at_least(good + 1)
            if middle is None or not good < middle < bad:
                break
            good, bad = (middle, bad) if fits(middle) else (good, middle)
            if bad - good <= tolerance * good:
                return good
        value = bad
        for _ in range(PROBES_ABOVE):
            if value <= most and fits(value):
                good = value
            above = self._at_least(value + 1)
            if above is None:
                break
            value = above
        return good

    def _at_least(self, value: int) -> int | None:
        """Return the smallest value from `value` on that the model can have, or None."""
        spec = self.spec
        if self.name == RESOLUTION:
            stride = stride_of(spec.model)
            return -(-value // stride) * stride
        if self.name == "micro_batch":
            return max(1, value)
        partitions = spec.parallel.partitions
        num_stages = spec.schedule.num_stages(partitions) or partitions
        for depth in range(max(1, value), value + DEPTH_REACH):
            changed = self.at(depth)
            try:
                layers = layers_of(changed.model, changed.data)
                check_image(changed.model, changed.data)
            except ConfigError as error:
                if error.key != "model.depth":
                    raise
                continue
            if len(layers) >= num_stages:
                return depth
        return None
