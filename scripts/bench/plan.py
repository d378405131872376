"""The plan's simulated step over each named policy's at that policy's own peak, and its gap to the bound.

Every CNN of conf/model at 512 x 512 and 2048 x 2048 px, one image a micro-batch, on one rank (a
chain: one micro-batch) and on four (1f1b, eight micro-batches); fake profiles on the machine given.
For each rival the limit is the rival's own peak, and the ratio the plan's step over the rival's:
never above 1. A rival that no memory can serve, or that is the plan that keeps all, is left out.
Chains are those of one rank; `gap` is the plan's step over the proven bound, less 1. Each plan
takes `--budget` seconds; a chain above 5 % of its bound gets `--long` seconds more, if these are
longer.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any

from gems.config.overrides import CONF
from gems.errors import DoesNotFitError
from gems.memory.case import MemoryCase
from gems.memory.optimizer.optimal import plan
from gems.memory.plan import Choice, MemoryPlan
from gems.memory.policies.lms.distance import lms
from gems.memory.policies.recompute import recompute
from gems.memory.policies.vdnn import vdnn_dyn
from gems.partition.even import even
from gems.profile.store import profile_of
from gems.schedule.families.one_f_one_b import one_f_one_b
from gems.schedule.registry import Request
from scripts.bench.rig import Table, answered, composed, machine, options, spread, square

SIDES_PX = (512, 2048)
SHAPES = ((1, 1), (4, 8))
# Sequences, and models that are as the shallower ones of their family and take ten times the time.
LEFT_OUT = ("gnmt", "biglstm", "1001", "216", "316", "416")
LIMITED = 0.6  # of what comes and goes, what vDNN's dyn and LMS are allowed
CHAIN_GAP = 0.05


def _cases(only: str, machine: str) -> Iterator[tuple[dict[str, Any], MemoryCase]]:
    models = sorted(path.stem for path in (CONF / "model").glob("*.yaml") if only in path.stem)
    models = [model for model in models if not any(word in model for word in LEFT_OUT)]
    for model, side_px in product(models, SIDES_PX):
        spec = composed(
            f"model={model} data=synthetic {square(side_px)} data.num_classes=10 machine={machine}",
            "schedule=1f1b parallel.partitions=1 parallel.micro_batches=1",
        )
        profile = profile_of(spec)
        for ranks, micro_batches in SHAPES:
            if profile.num_layers >= 2 * ranks:
                case = MemoryCase(
                    profile,
                    one_f_one_b(Request(ranks, micro_batches)),
                    tuple(even(profile.num_layers, ranks)),
                    d2h_bytes_per_s=spec.machine.d2h_bytes_per_s,
                    h2d_bytes_per_s=spec.machine.h2d_bytes_per_s,
                    least_bytes=spec.memory.min_offload_bytes,
                )
                yield (
                    {
                        "model": model,
                        "side_px": side_px,
                        "ranks": ranks,
                        "micro_batches": micro_batches,
                    },
                    case,
                )


def rivals(case: MemoryCase) -> Iterator[tuple[str, MemoryPlan]]:
    """Yield the plans of the named policies.

    Those that plan under a limit get one that asks something of them.
    """
    kept = max(case.kept.peak_bytes)
    static = max(min(point.device_bytes for point in rank.points) for rank in case.kept.ranks)
    limited = replace(case, limit_bytes=int(static + LIMITED * (kept - static)))
    policies = {
        "vdnn_dyn": lambda: vdnn_dyn(limited),
        "vdnn_dyn_async": lambda: vdnn_dyn(limited, asynchronous=True),
        "lms": lambda: lms(limited),
        "recompute": lambda: recompute(case),
        "selective": lambda: recompute(case, "selective"),
    }
    for name, policy in policies.items():
        try:
            found = policy()
        except DoesNotFitError:
            continue
        if any(segment.choice is not Choice.KEEP for stage in found.stages for segment in stage):
            yield name, found


def _compared(case: MemoryCase, other: MemoryPlan, budget_s: float) -> dict[str, Any]:
    kept = case.kept
    theirs = case.outcome(other)
    limit = max(theirs.peak_bytes)
    found = plan(case, limit, budget_s, [other])
    plan_s = found.outcome.step_s
    return {
        "limit_bytes": limit,
        "kept_bytes": max(kept.peak_bytes),
        "kept_s": kept.step_s,
        "rival_s": theirs.step_s,
        "plan_s": plan_s,
        "ratio": plan_s / theirs.step_s,
        "bound_s": found.bound_s,
        "gap": found.gap,
        "method": found.method,
    }


def _summary(found: list[dict[str, Any]]) -> dict[str, Any]:
    answer: dict[str, Any] = {
        rival: spread([row["ratio"] for row in found if row["rival"] == rival])
        for rival in sorted({row["rival"] for row in found})
    }
    gaps = [row["gap"] for row in found if row["ranks"] == 1]
    if gaps:
        answer["chains"] = {
            "median_gap": statistics.median(gaps),
            "most_gap": max(gaps),
            "within_5_percent": sum(gap <= CHAIN_GAP for gap in gaps),
            "cases": len(gaps),
        }
    return answer


def main(argv: list[str]) -> int:
    """Run the comparison and return 1 if a rival is faster at its own peak."""
    given = options(__doc__, argv, json=False, only="", machine="h200", budget=10.0, long=0.0)
    machine()
    table = Table(
        "model:<15",
        "px=side_px:>5",
        "P=ranks:>3",
        "rival:>16",
        "of kept=of_kept:>9.3f",
        "rival/kept=rival_kept:>12.3f",
        "plan/kept=plan_kept:>11.3f",
        "ratio:>8.3f",
        "gap %=gap:>8.2f",
    )
    found = []
    for named, case in _cases(given.only, given.machine):
        for rival, other in rivals(case):
            row = {**named, "rival": rival, **_compared(case, other, given.budget)}
            if given.long > given.budget and named["ranks"] == 1 and row["gap"] > CHAIN_GAP:
                row |= _compared(case, other, given.long) | {"short_gap": row["gap"]}
            found.append(row)
            shares = {
                "of_kept": row["limit_bytes"] / row["kept_bytes"],
                "rival_kept": row["rival_s"] / row["kept_s"],
                "plan_kept": row["plan_s"] / row["kept_s"],
            }
            table.row(row | shares, row["method"])
    answer = {
        "source": "simulated",
        "machine": given.machine,
        "rows": found,
        "summary": _summary(found),
    }
    for name, figures in {} if given.json else answer["summary"].items():
        print(f"{name:<16}" + "  ".join(f"{key} {value:.4g}" for key, value in figures.items()))
    return answered(answer, any(row["ratio"] > 1 + 1e-9 for row in found), given.json)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
