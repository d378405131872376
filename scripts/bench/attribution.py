"""Loss attribution on planted causes: emulated runs of 4 ranks, without and with one cause each, in turns A B A B.

The planted loss is how much longer a step takes with the cause than without; what lands is how much more the attribution
gives to that cause. Takes Hydra overrides, for every run. Prints a table on stderr and JSON on stdout, and gives 1 where
less than 90 % lands, or the parts miss the gap by more than 0.5 % of it.
"""

from __future__ import annotations

import json
import sys
import tempfile
from dataclasses import dataclass, replace
from statistics import mean
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from analysis.attribution import Attribution

MIN_SHARE, MAX_REST = 0.9, 0.005
ROUNDS = 2
SCHEDULES = ("1f1b", "gems_master")
BASE = (
    "machine=emulated", "data=synthetic", "parallel.partitions=4", "parallel.micro_batches=8", "cost.unit_s=0.01",
    "cost.boundary_bytes=1000", "train.steps=8", "train.warmup_steps=2",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Plant:
    """A planted cause: its name, where the attribution must show it, and what plants it."""

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
    """Run all pairs and gives 1 where one misses its bound."""
    print(
        f"{'schedule':<14}{'planted':<14}{'lands on':<16}{'step ms':>9}{'lost ms':>9}{'landed ms':>11}{'landed %':>10}"
        f"{'rest %':>8}",
        file=sys.stderr,
    )  # fmt: skip
    results = []
    for schedule in SCHEDULES:
        base = (*BASE, f"schedule={schedule}")
        without: list[Attribution] = []
        with_: dict[str, list[Attribution]] = {plant.name: [] for plant in PLANTS}
        for _ in range(ROUNDS):
            without.append(attributed([*base, *overrides]))
            for plant in PLANTS:
                with_[plant.name].append(attributed([*base, *plant.overrides, *overrides]))
        for plant in PLANTS:
            found = with_[plant.name]
            lost_s = mean(each.step_s for each in found) - mean(each.step_s for each in without)
            landed_s = mean(e.run_s[plant.cause] for e in found) - mean(e.run_s[plant.cause] for e in without)
            rest = max(rest_of(each) for each in found)
            results.append({
                "schedule": schedule, "planted": plant.name, "cause": plant.cause,
                "step_s": mean(each.step_s for each in found), "lost_s": lost_s, "landed_s": landed_s,
                "share": landed_s / lost_s, "rest": rest,
                "grew_s": {
                    cause: mean(e.run_s[cause] for e in found) - mean(e.run_s[cause] for e in without)
                    for cause in found[0].run_s
                },
            })  # fmt: skip
            print(
                f"{schedule:<14}{plant.name:<14}{plant.cause:<16}{results[-1]['step_s'] * 1e3:>9.1f}{lost_s * 1e3:>9.1f}"
                f"{landed_s * 1e3:>11.1f}{100 * landed_s / lost_s:>10.1f}{100 * rest:>8.3f}",
                file=sys.stderr,
            )
    print(json.dumps(results))
    return int(any(found["share"] < MIN_SHARE or found["rest"] > MAX_REST for found in results))


def rest_of(found: Attribution) -> float:
    """Return what the parts miss of the gap between the step and the ideal, of the run or of the worst rank, as a share."""
    gap_s = found.step_s - found.ideal_s
    sums = [sum(found.run_s.values()), *map(sum, zip(*found.causes_s.values(), strict=True))]
    return max(abs(total - gap_s) for total in sums) / gap_s


def attributed(overrides: list[str]) -> Attribution:
    """Run emulated ranks and attributes their steps."""
    from analysis.attribution import attribution_of
    from analysis.cli.collect import collect
    from gems.config.compose import compose
    from gems.launch.local_launcher import mpiexec_argv, rank_environment, run_ranks
    from gems.runs.prepare import prepare

    spec = compose(overrides)
    with tempfile.TemporaryDirectory() as scratch:
        folder = prepare(replace(spec, runs_dir=scratch))
        argv = mpiexec_argv(spec.world_size, [sys.executable, "-m", "gems.engine.run", str(folder.path)])
        ended = run_ranks(argv, rank_environment(1), folder.logs / "ranks.log", timeout_s=300.0, echo=False)
        if ended.returncode:
            raise SystemExit("\n".join(ended.tail))
        return attribution_of(collect(folder.path).loaded.trace)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
