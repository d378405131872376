"""Policies by name: from the configuration of a run's memory to the plan that its policy makes."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial

from gems.config.schema import MemoryConfig
from gems.errors import DoesNotFitError
from gems.memory import RECOMPUTES
from gems.memory.case import MemoryCase
from gems.memory.optimizer.optimal import plan, target_limit_bytes
from gems.memory.plan import MemoryPlan
from gems.memory.policies.lms.distance import lms
from gems.memory.policies.lms.limit import lms_limit
from gems.memory.policies.recompute import keep_last, recompute, run_again
from gems.memory.policies.vdnn import vdnn_all, vdnn_conv, vdnn_dyn

Maker = Callable[[MemoryConfig, MemoryCase], MemoryPlan]


def plan_of(memory: MemoryConfig, case: MemoryCase) -> MemoryPlan:
    """Return the plan of the configured policy.

    Raises:
        ConfigError: a policy that needs a limit and has none.
        DoesNotFitError: nothing that the policy can do keeps the limit.
    """
    return MAKERS[memory.name](memory, case)


def plan_within(memory: MemoryConfig, case: MemoryCase) -> MemoryPlan:
    """Return the plan of the configured policy; where that runs segments again, no work is put in one that misses the limit.

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
        partial(vdnn_dyn, case), partial(vdnn_dyn, case, asynchronous=True), partial(lms, case), partial(lms_limit, case),
        *(partial(recompute, case, how) for how in RECOMPUTES),
    ]  # fmt: skip
    plans = []
    for make in makers:
        with suppress(DoesNotFitError):
            plans.append(make())
    return plans


def _plan(memory: MemoryConfig, case: MemoryCase) -> MemoryPlan:
    """Return the optimal plan under the limit, or under that of the saving, whichever is less."""
    limit = memory.limit_bytes or case.limit_bytes or sys.maxsize
    if memory.target_reduction is not None:
        limit = min(limit, target_limit_bytes(case, memory.target_reduction))
    limited = replace(case, limit_bytes=limit)
    found = plan(limited, limit, memory.budget_s, published_plans(limited))
    counters = {"limit_bytes": limit, "bound_s": found.bound_s, "gap": found.gap, "method": found.method}
    return replace(found.plan, policy="plan", counters=counters)


def _lms(memory: MemoryConfig, case: MemoryCase) -> MemoryPlan:
    return lms(
        case, memory.swapout_threshold, memory.swapin_ahead, memory.swapin_groupby, memory.sync_mode, memory.ratio
    )


MAKERS: dict[str, Maker] = {
    "keep": lambda memory, case: MemoryPlan.keeping(case.boundaries),
    "vdnn_all": lambda memory, case: vdnn_all(case, memory.asynchronous),
    "vdnn_conv": lambda memory, case: vdnn_conv(case, memory.asynchronous),
    "vdnn_dyn": lambda memory, case: vdnn_dyn(case, memory.asynchronous),
    "lms": _lms,
    "lms_limit": lambda memory, case: lms_limit(case, memory.limit_bytes, memory.reclaim),
    "recompute": lambda memory, case: recompute(case, memory.recompute, memory.segments),
    "plan": _plan,
}  # fmt: skip
