"""Registry of memory policies: from a run's memory configuration to the plan of its policy."""

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
from gems.memory.plan import Choice, MemoryPlan
from gems.memory.policies.lms.distance import lms
from gems.memory.policies.lms.limit import lms_limit
from gems.memory.policies.recompute import keep_last, recompute, run_again
from gems.memory.policies.strips import plan_in_strips
from gems.memory.policies.vdnn import vdnn_all, vdnn_conv, vdnn_dyn
from gems.utils.registry import Registry

Maker = Callable[[MemoryConfig, MemoryCase], MemoryPlan]


@dataclass(frozen=True, slots=True)
class MemoryPolicy:
    """A policy and its properties.

    `make` makes the plan of a case, or raises DoesNotFitError if the policy cannot keep the limit.
    A policy that `needs_limit` needs the size of the device, or, if it `takes_target`,
    memory.target_reduction. `quick_ways` and `slow_ways` are the values of memory.recompute that
    `gems plan` tries, by the effort of an evaluation ("" if the policy does not read it). A policy
    that supports strips (`in_strips`) then chooses by stage. A policy that `recomputes` reads
    memory.recompute.
    """

    make: Maker
    needs_limit: bool = False
    takes_target: bool = False
    quick_ways: tuple[str, ...] = ()
    slow_ways: tuple[str, ...] = ("",)
    in_strips: bool = False
    recomputes: bool = False


POLICIES: Registry[MemoryPolicy] = registries.POLICIES


def memory_policy(name: str, **known: Any) -> Callable[[Maker], Maker]:
    """Register the decorated function as memory=`name`; `known` has other `MemoryPolicy` fields."""

    def register(make: Maker) -> Maker:
        POLICIES.register(name, MemoryPolicy(make, **known))
        return make

    return register


def plan_of(memory: MemoryConfig, case: MemoryCase) -> MemoryPlan:
    """Return the plan of the configured policy.

    Raises:
        DoesNotFitError: the policy cannot keep the limit.
    """
    try:
        return POLICIES[memory.name].make(memory, case)
    except DoesNotFitError as error:
        raise _with_key(error, memory, case) from error


def _with_key(error: DoesNotFitError, memory: MemoryConfig, case: MemoryCase) -> DoesNotFitError:
    """Return the error with the key that sets the limit, if it is not the device's size."""
    where = error.where
    target = memory.target_reduction
    if target is not None and error.limit_bytes < (case.limit_bytes or sys.maxsize):
        where = f"{where} with memory.target_reduction={target:g}"
        key = "its limit"
        advice = "lower the target; "
    elif memory.limit_bytes is not None:
        key = "memory.limit_bytes"
        advice = ""
    else:
        return error
    return DoesNotFitError(where, error.needed_bytes, error.limit_bytes, advice + error.advice, key)


def plan_within(memory: MemoryConfig, case: MemoryCase) -> MemoryPlan:
    """Return the plan of the configured policy; stop at the first rank that misses the limit.

    Raises:
        DoesNotFitError: the plan does not keep the case's limit, or the policy cannot keep it.
    """
    is_by_segments = memory.policy.recomputes and memory.recompute == "segment"
    if case.limit_bytes is None or not is_by_segments or case.strips is not None:
        plan = plan_of(memory, case)
        _peaks_within(case, plan)
        return plan
    choice = Choice.OFFLOAD_INPUTS if memory.offload_inputs else Choice.RECOMPUTE
    plan = run_again(case, memory.segments, choice)
    plan = replace(plan, except_last=memory.except_last)
    return keep_last(case, plan, _peaks_within(case, plan))


def _peaks_within(case: MemoryCase, plan: MemoryPlan) -> list[int]:
    peaks = list[int]()
    for rank, peak in enumerate(case.peak_bytes(plan) if case.limit_bytes is not None else ()):
        if peak > (case.limit_bytes or 0):
            raise DoesNotFitError(
                f"rank {rank} under memory={plan.policy}",
                peak,
                case.limit_bytes or 0,
                "use memory=plan, or more partitions",
            )
        peaks.append(peak)
    return peaks


memory_policy("keep", quick_ways=("",), slow_ways=(), in_strips=True)(
    lambda memory, case: MemoryPlan.keeping(case.boundaries)
)
memory_policy("vdnn_all", slow_ways=(), in_strips=True)(
    lambda memory, case: vdnn_all(case, memory.asynchronous)
)
memory_policy("vdnn_conv", slow_ways=())(lambda memory, case: vdnn_conv(case, memory.asynchronous))
memory_policy("vdnn_dyn", needs_limit=True)(
    lambda memory, case: vdnn_dyn(case, memory.asynchronous)
)
memory_policy("lms", needs_limit=True, slow_ways=())(
    lambda memory, case: lms(
        case,
        memory.swapout_threshold,
        memory.swapin_ahead,
        memory.swapin_groupby,
        memory.sync_mode,
        memory.ratio,
    )
)
memory_policy("lms_limit", needs_limit=True, slow_ways=())(
    lambda memory, case: lms_limit(case, memory.limit_bytes, memory.reclaim)
)
memory_policy(
    "recompute",
    quick_ways=("stage",),
    slow_ways=("selective", "segment"),
    in_strips=True,
    recomputes=True,
)(
    lambda memory, case: recompute(
        case, memory.recompute, memory.segments, memory.offload_inputs, memory.except_last
    )
)


@memory_policy("plan", needs_limit=True, takes_target=True, in_strips=True)
def _plan(memory: MemoryConfig, case: MemoryCase) -> MemoryPlan:
    """Return the optimal plan under the limit, or under memory.target_reduction if that is less.

    The plans of the published policies under that limit are its rivals.
    """
    limit = memory.limit_bytes or case.limit_bytes or sys.maxsize
    if memory.target_reduction is not None:
        limit = min(limit, target_limit_bytes(case, memory.target_reduction))
    if case.strips is not None:
        return plan_in_strips(case, limit, memory.budget_s)
    limited = replace(case, limit_bytes=limit)
    makers: list[Callable[[MemoryCase], MemoryPlan]]
    makers = [vdnn_dyn, partial(vdnn_dyn, asynchronous=True), lms, lms_limit]
    makers += [partial(recompute, how=how) for how in RECOMPUTES if how != "strip"]
    makers += [partial(recompute, how=how, offload_inputs=True) for how in ("stage", "segment")]
    rivals = []
    for make in makers:
        with suppress(DoesNotFitError):
            rivals.append(make(limited))
    planned = plan(limited, limit, memory.budget_s, rivals)
    counters = {
        "limit_bytes": limit,
        "bound_s": planned.bound_s,
        "gap": planned.gap,
        "method": planned.method,
    }
    return replace(planned.plan, policy="plan", counters=counters)
