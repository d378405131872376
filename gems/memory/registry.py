"""Policies by name: from the configuration of a run's memory to the plan that its policy makes."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from gems.config import registries
from gems.config.schema import RECOMPUTES, MemoryConfig
from gems.errors import DoesNotFitError
from gems.memory.case import MemoryCase
from gems.memory.optimizer.optimal import plan, target_limit_bytes
from gems.memory.plan import MemoryPlan
from gems.memory.policies.lms.distance import lms
from gems.memory.policies.lms.limit import lms_limit
from gems.memory.policies.recompute import keep_last, recompute, run_again
from gems.memory.policies.vdnn import vdnn_all, vdnn_conv, vdnn_dyn
from gems.utils.registry import Registry

Maker = Callable[[MemoryConfig, MemoryCase], MemoryPlan]


@dataclass(frozen=True, slots=True)
class MemoryPolicy:
    """A policy and what is known of it.

    Attributes:
        make: Makes the plan of a case; raises DoesNotFitError if nothing that the policy can do keeps the limit.
        needs_limit: Whether it must know how much a device has.
        takes_target: Whether memory.target_reduction may stand in for the limit.
        quick_ways, slow_ways: Values of memory.recompute with which `gems plan` tries it, by what one evaluation takes;
        ""
            for a policy that does not read it.
    """

    make: Maker
    needs_limit: bool = False
    takes_target: bool = False
    quick_ways: tuple[str, ...] = ()
    slow_ways: tuple[str, ...] = ("",)


POLICIES: Registry[MemoryPolicy] = registries.POLICIES


def memory_policy(name: str, **known: Any) -> Callable[[Maker], Maker]:
    """Register the function below as memory=`name`; `known` are the other fields of `MemoryPolicy`."""

    def register(make: Maker) -> Maker:
        POLICIES.register(name, MemoryPolicy(make, **known))
        return make

    return register


def plan_of(memory: MemoryConfig, case: MemoryCase) -> MemoryPlan:
    """Return the plan of the configured policy.

    Raises:
        ConfigError: a policy that needs a limit and has none.
        DoesNotFitError: nothing that the policy can do keeps the limit.
    """
    return POLICIES[memory.name].make(memory, case)


def plan_within(memory: MemoryConfig, case: MemoryCase) -> MemoryPlan:
    """Return the plan of the configured policy, stopping early if recomputed segments miss the limit.

    Raises:
        ConfigError: as `plan_of`.
        DoesNotFitError: the plan does not keep the case's limit, or nothing that the policy can do does.
    """
    limit = case.limit_bytes
    if limit is None or (memory.name, memory.recompute) != ("recompute", "segment"):
        return plan_of(memory, case)
    plan, peaks = run_again(case, memory.segments), list[int]()
    for rank, peak in enumerate(case.peak_bytes(plan)):
        if peak > limit:
            raise DoesNotFitError(
                f"rank {rank} under memory=recompute", peak, limit, "use memory=plan, or more partitions"
            )
        peaks.append(peak)
    return keep_last(case, plan, peaks)


def published_plans(case: MemoryCase) -> list[MemoryPlan]:
    """Return the plans of the published policies that can be had under the case's limit."""
    makers: list[Callable[[], MemoryPlan]] = [
        partial(vdnn_dyn, case), partial(vdnn_dyn, case, asynchronous=True), partial(lms, case),
        partial(lms_limit, case),
        *(partial(recompute, case, how) for how in RECOMPUTES),
    ]  # fmt: skip
    plans = []
    for make in makers:
        with suppress(DoesNotFitError):
            plans.append(make())
    return plans


@memory_policy("keep", quick_ways=("",), slow_ways=())
def _keep(memory: MemoryConfig, case: MemoryCase) -> MemoryPlan:
    return MemoryPlan.keeping(case.boundaries)


@memory_policy("vdnn_all", slow_ways=())
def _vdnn_all(memory: MemoryConfig, case: MemoryCase) -> MemoryPlan:
    return vdnn_all(case, memory.asynchronous)


@memory_policy("vdnn_conv", slow_ways=())
def _vdnn_conv(memory: MemoryConfig, case: MemoryCase) -> MemoryPlan:
    return vdnn_conv(case, memory.asynchronous)


@memory_policy("vdnn_dyn", needs_limit=True)
def _vdnn_dyn(memory: MemoryConfig, case: MemoryCase) -> MemoryPlan:
    return vdnn_dyn(case, memory.asynchronous)


@memory_policy("lms", needs_limit=True, slow_ways=())
def _lms(memory: MemoryConfig, case: MemoryCase) -> MemoryPlan:
    return lms(
        case, memory.swapout_threshold, memory.swapin_ahead, memory.swapin_groupby, memory.sync_mode, memory.ratio
    )


@memory_policy("lms_limit", needs_limit=True, slow_ways=())
def _lms_limit(memory: MemoryConfig, case: MemoryCase) -> MemoryPlan:
    return lms_limit(case, memory.limit_bytes, memory.reclaim)


@memory_policy("recompute", quick_ways=("stage",), slow_ways=("selective", "segment"))
def _recompute(memory: MemoryConfig, case: MemoryCase) -> MemoryPlan:
    return recompute(case, memory.recompute, memory.segments)


@memory_policy("plan", needs_limit=True, takes_target=True)
def _plan(memory: MemoryConfig, case: MemoryCase) -> MemoryPlan:
    """Return the optimal plan under the limit, or under that of memory.target_reduction if it is less."""
    limit = memory.limit_bytes or case.limit_bytes or sys.maxsize
    if memory.target_reduction is not None:
        limit = min(limit, target_limit_bytes(case, memory.target_reduction))
    limited = replace(case, limit_bytes=limit)
    found = plan(limited, limit, memory.budget_s, published_plans(limited))
    counters = {"limit_bytes": limit, "bound_s": found.bound_s, "gap": found.gap, "method": found.method}
    return replace(found.plan, policy="plan", counters=counters)
