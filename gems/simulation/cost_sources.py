"""Registry of cost sources, which provide the times of a step (cost=NAME)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from gems.config import registries
from gems.config.schema import CostConfig
from gems.profile import ModelProfile
from gems.utils.registry import Registry

LayerTimes = Callable[[ModelProfile, CostConfig], ModelProfile]


@dataclass(frozen=True, slots=True)
class CostSource:
    """A source of costs.

    `times` returns the profile of the layers with the times of a step, from the configured profile
    and `cost.*`. Without it, costs are the values of `cost.*`, for equal parts of a model.
    """

    times: LayerTimes | None = None


COSTS: Registry[CostSource] = registries.COSTS
COSTS.register("uniform", CostSource())


def cost_source(name: str) -> Callable[[LayerTimes], LayerTimes]:
    """Register the decorated function as cost=`name`."""

    def register(times: LayerTimes) -> LayerTimes:
        COSTS.register(name, CostSource(times))
        return times

    return register


@cost_source("profile")
def _as_profiled(profile: ModelProfile, cost: CostConfig) -> ModelProfile:
    return profile
