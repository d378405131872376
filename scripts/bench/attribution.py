"""Loss attribution on planted causes: emulated runs of 4 ranks, without and with one cause each, in turns A B A B.

The planted loss is how much longer a step takes with the cause than without; the landed one is how much more the
attribution charges to that cause. Takes Hydra overrides, for every run. Prints a table on stderr and JSON on stdout;
the exit code is 1 if less than 90 % lands, or if the parts miss the gap by more than 0.5 % of it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from statistics import mean

from analysis.attribution.causes import Attribution, attribute
from analysis.cli.collect import collect
from gems.config.compose import compose
from scripts.bench.rig import Table, finished_run, in_turns, machine

MIN_SHARE, MAX_REST = 0.9, 0.005
ROUNDS = 2
SCHEDULES = ("1f1b", "gems_master")
BASE = (
    "machine=emulated", "data=synthetic", "parallel.partitions=4", "parallel.micro_batches=8", "cost.unit_s=0.01",
    "cost.boundary_bytes=1000", "train.steps=8", "train.warmup_steps=2",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Plant:
    """A planted cause: its name, the cause to which the attribution must charge it, and the overrides."""

    name: str
    cause: str
    overrides: tuple[str, ...]


PLANTS = (
    Plant("imbalance", "imbalance", ("cost.times=[8,1,1,8]",)),
    Plant("slow link", "point_to_point", ("cost.boundary_bytes=32000000",)),
    Plant("straggler", "noise", ("machine.slow_rank=1", "machine.slowdown=1.5")),
    Plant("input stall", "input", ("cost.input_load=8",)),
)


def main(overrides: list[str]) -> int:
    """Run all pairs and return 1 if one misses its bound."""
    machine()
    table = Table(
        "schedule:<14", "planted:<14", "lands on:<16", "step ms:>9.1f", "lost ms:>9.1f", "landed ms:>11.1f",
        "landed %:>10.1f", "rest %:>8.3f",
    )  # fmt: skip
    results = []
    for schedule in SCHEDULES:
        base = (*BASE, f"schedule={schedule}")
        ways: dict[str, Callable[[], Attribution]] = {"": partial(attributed, [*base, *overrides])}
        ways |= {plant.name: partial(attributed, [*base, *plant.overrides, *overrides]) for plant in PLANTS}
        runs = in_turns(ways, ROUNDS)
        step_s = {way: mean(each.step_s for each in found) for way, found in runs.items()}
        causes_s = {
            way: {c: mean(each.run_s[c] for each in found) for c in found[0].run_s} for way, found in runs.items()
        }
        for plant in PLANTS:
            grew_s = {cause: time_s - causes_s[""][cause] for cause, time_s in causes_s[plant.name].items()}
            lost_s, landed_s = step_s[plant.name] - step_s[""], grew_s[plant.cause]
            rest = max(map(residual_share, runs[plant.name]))
            results.append({
                "schedule": schedule, "planted": plant.name, "cause": plant.cause, "step_s": step_s[plant.name],
                "lost_s": lost_s, "landed_s": landed_s, "share": landed_s / lost_s, "rest": rest, "grew_s": grew_s,
            })  # fmt: skip
            times_ms = (1e3 * time_s for time_s in (step_s[plant.name], lost_s, landed_s))
            table.row(schedule, plant.name, plant.cause, *times_ms, 100 * landed_s / lost_s, 100 * rest)
    print(json.dumps(results))
    return int(any(found["share"] < MIN_SHARE or found["rest"] > MAX_REST for found in results))


def residual_share(found: Attribution) -> float:
    """Return the share of the gap between step and ideal that the parts miss, of the run or of the worst rank."""
    gap_s = found.step_s - found.ideal_s
    sums = [sum(found.run_s.values()), *map(sum, zip(*found.causes_s.values(), strict=True))]
    return max(abs(total - gap_s) for total in sums) / gap_s


def attributed(overrides: list[str]) -> Attribution:
    """Run emulated ranks and attribute their steps."""
    with finished_run(compose(overrides), timeout_s=300.0) as folder:
        return attribute(collect(folder.path)[0].trace)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
