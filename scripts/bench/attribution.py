"""Loss attribution on planted causes.

Emulated runs of 4 ranks, without and with one cause each, in turns A B A B.
The planted loss is how much longer a step takes with the cause than without; the landed one is how
much more the attribution charges to that cause. Takes Hydra overrides, for every run. Prints a
table on stderr and JSON on stdout; the exit code is 1 if less than 90 % lands, or if the parts miss
the gap by more than 0.5 % of it.
"""

from __future__ import annotations

import sys
from functools import partial
from statistics import mean

from analysis.attribution.causes import Attribution, attribute
from analysis.io.load import load_parts
from scripts.bench.rig import Table, answered, composed, finished_run, in_turns, machine

MIN_SHARE = 0.9
MAX_REST = 0.005
ROUNDS = 2
SCHEDULES = ("1f1b", "gems_master")
BASE = (
    "machine=emulated data=synthetic parallel.partitions=4 parallel.micro_batches=8"
    " cost.unit_s=0.01 cost.boundary_bytes=1000 train.steps=8 benchmark.skip_steps=2"
)
PLANTS = (  # name, the cause to which the attribution must charge it, overrides
    ("imbalance", "imbalance", "cost.times=[8,1,1,8]"),
    ("slow link", "point_to_point", "cost.boundary_bytes=32000000"),
    ("straggler", "noise", "machine.slow_rank=1 machine.slowdown=1.5"),
    ("input stall", "input", "cost.input_load=8"),
)


def main(overrides: list[str]) -> int:
    """Run all pairs and return 1 if one misses its bound."""
    machine()
    table = Table(
        "schedule:<14",
        "planted:<14",
        "lands on=cause:<16",
        "step ms=step_s:>9.1f",
        "lost ms=lost_s:>9.1f",
        "landed ms=landed_s:>11.1f",
        "landed %=share:>10.1f",
        "rest %=rest:>8.3f",
    )
    results = []
    for schedule in SCHEDULES:
        ways = {
            name: partial(_attributed, BASE, f"schedule={schedule}", words, overrides)
            for name, _, words in (("", "", ""), *PLANTS)
        }
        runs = in_turns(ways, ROUNDS)
        step_s = {way: mean(each.step_s for each in found) for way, found in runs.items()}
        causes_s = {
            way: {c: mean(each.run_s[c] for each in found) for c in found[0].run_s}
            for way, found in runs.items()
        }
        for name, cause, _ in PLANTS:
            grew_s = {each: time_s - causes_s[""][each] for each, time_s in causes_s[name].items()}
            lost_s = step_s[name] - step_s[""]
            row = {
                "schedule": schedule,
                "planted": name,
                "cause": cause,
                "step_s": step_s[name],
                "lost_s": lost_s,
                "landed_s": grew_s[cause],
                "share": grew_s[cause] / lost_s,
                "rest": max(map(residual_share, runs[name])),
                "grew_s": grew_s,
            }
            results.append(row)
            table.row(row)
    return answered(
        results, any(row["share"] < MIN_SHARE or row["rest"] > MAX_REST for row in results)
    )


def residual_share(found: Attribution) -> float:
    """Return the share of the gap between step and ideal that the parts miss, of the run or of the worst rank."""
    gap_s = found.step_s - found.ideal_s
    sums = [sum(found.run_s.values()), *map(sum, zip(*found.causes_s.values(), strict=True))]
    return max(abs(total - gap_s) for total in sums) / gap_s


def _attributed(*words: str | list[str]) -> Attribution:
    with finished_run(composed(*words)) as folder:
        return attribute(load_parts(folder.path).trace)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
