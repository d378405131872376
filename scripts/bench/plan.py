"""The plan's simulated step over each named policy's at that policy's own peak, and its gap to the bound.

Every CNN of conf/model at 512 x 512 and 2048 x 2048 px, one image a micro-batch, on one rank (a chain: one micro-batch)
and on four (1f1b, eight micro-batches); fake profiles on the machine given. For each rival the limit is the rival's own
peak, and the ratio the plan's step over the rival's: never above 1. A rival that no memory can serve, or that is the
plan that keeps all, is left out. Chains are those of one rank; `gap` is the plan's step over the proven bound, less 1.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from gems.config.compose import compose
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
from scripts.bench.rig import Table, machine, parser, spread

SIDES_PX = (512, 2048)
SHAPES = ((1, 1), (4, 8))
SEQUENCES = ("gnmt", "biglstm")
DEEP = ("1001", "216", "316", "416")  # as the shallower ones of their family, and ten times the time
NUM_CLASSES = 10
LIMITED = 0.6  # of what comes and goes, what vDNN's dyn and LMS are allowed
CHAIN_GAP = 0.05


def cases(only: str, machine: str) -> Iterator[tuple[dict[str, Any], MemoryCase]]:
    """Yield the cases with what names them."""
    for model in sorted(path.stem for path in (CONF / "model").glob("*.yaml")):
        if only not in model or model in SEQUENCES or any(word in model for word in DEEP):
            continue
        for side_px in SIDES_PX:
            spec = compose([
                f"model={model}", "data=synthetic", f"data.height_px={side_px}", f"data.width_px={side_px}",
                f"data.num_classes={NUM_CLASSES}", f"machine={machine}", "schedule=1f1b", "parallel.partitions=1",
                "parallel.micro_batches=1",
            ])  # fmt: skip
            profile = profile_of(spec)
            for ranks, micro_batches in SHAPES:
                if profile.num_layers < 2 * ranks:
                    continue
                yield (
                    {"model": model, "side_px": side_px, "ranks": ranks, "micro_batches": micro_batches},
                    MemoryCase(
                        profile, one_f_one_b(Request(ranks, micro_batches)), tuple(even(profile.num_layers, ranks)),
                        d2h_bytes_per_s=spec.machine.d2h_bytes_per_s, h2d_bytes_per_s=spec.machine.h2d_bytes_per_s,
                        least_bytes=spec.memory.min_offload_bytes,
                    ),
                )  # fmt: skip


def rivals(case: MemoryCase) -> Iterator[tuple[str, MemoryPlan]]:
    """Yield the plans of the named policies; those that plan under a limit get one that asks something of them."""
    kept = max(case.kept.peak_bytes)
    static = max(min(point.device_bytes for point in rank.points) for rank in case.kept.ranks)
    limited = replace(case, limit_bytes=int(static + LIMITED * (kept - static)))
    for name, policy in (
        ("vdnn_dyn", lambda: vdnn_dyn(limited)), ("vdnn_dyn_async", lambda: vdnn_dyn(limited, asynchronous=True)),
        ("lms", lambda: lms(limited)), ("recompute", lambda: recompute(case)),
        ("selective", lambda: recompute(case, "selective")),
    ):  # fmt: skip
        try:
            found = policy()
        except DoesNotFitError:
            continue
        if any(segment.choice is not Choice.KEEP for stage in found.stages for segment in stage):
            yield name, found


def compared(
    table: Table, named: dict[str, Any], case: MemoryCase, rival: str, other: MemoryPlan, budget_s: float
) -> dict[str, Any]:
    """Compare the plan with one rival at the rival's peak, and print the row."""
    theirs = case.outcome(other)
    limit = max(theirs.peak_bytes)
    found = plan(case, limit, budget_s, [other])
    row = {
        **named, "rival": rival, "limit_bytes": limit, "kept_bytes": max(case.kept.peak_bytes),
        "kept_s": case.kept.step_s,
        "rival_s": theirs.step_s, "plan_s": found.outcome.step_s, "ratio": found.outcome.step_s / theirs.step_s,
        "bound_s": found.bound_s, "gap": found.gap, "method": found.method,
    }  # fmt: skip
    shares = limit / row["kept_bytes"], row["rival_s"] / row["kept_s"], row["plan_s"] / row["kept_s"]
    table.row(
        row["model"], row["side_px"], row["ranks"], rival, *shares, row["ratio"], 100 * found.gap, note=found.method
    )
    return row


def summary(found: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the ratios by rival, and the gaps of the chains."""
    answer: dict[str, Any] = {}
    for rival in sorted({row["rival"] for row in found}):
        ratios = [row["ratio"] for row in found if row["rival"] == rival]
        answer[rival] = spread(ratios)
    gaps = [row["gap"] for row in found if row["ranks"] == 1]
    if gaps:
        within = sum(gap <= CHAIN_GAP for gap in gaps)
        answer["chains"] = {
            "median_gap": statistics.median(gaps), "most_gap": max(gaps), "within_5_percent": within,
            "cases": len(gaps),
        }  # fmt: skip
    return answer


def main() -> int:
    """Run the comparison and return 1 if a rival is faster at its own peak."""
    options = parser(__doc__, "json", "only")
    options.add_argument("--machine", default="h200")
    options.add_argument("--budget", type=float, default=10.0, metavar="S", help="of each plan")
    options.add_argument(
        "--long", type=float, default=0.0, metavar="S", help="second budget of a chain above 5 %% of its bound"
    )
    given = options.parse_args()
    machine()
    table = Table(
        "model:<15", "px:>5", "P:>3", "rival:>16", "of kept:>9.3f", "rival/kept:>12.3f", "plan/kept:>11.3f",
        "ratio:>8.3f",
        "gap %:>8.2f",
    )  # fmt: skip
    found = []
    for named, case in cases(given.only, given.machine):
        for rival, other in rivals(case):
            row = compared(table, named, case, rival, other, given.budget)
            if given.long > given.budget and named["ranks"] == 1 and row["gap"] > CHAIN_GAP:
                row = compared(table, named, case, rival, other, given.long) | {"short_gap": row["gap"]}
            found.append(row)
    answer = {"source": "simulated", "machine": given.machine, "rows": found, "summary": summary(found)}
    if given.json:
        json.dump(answer, sys.stdout)
    else:
        for name, figures in answer["summary"].items():
            print(f"{name:<16}" + "  ".join(f"{key} {value:.4g}" for key, value in figures.items()))
    return int(any(row["ratio"] > 1 + 1e-9 for row in found))


if __name__ == "__main__":
    sys.exit(main())
