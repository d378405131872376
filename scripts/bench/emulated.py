"""Compare the emulated step time with the simulated one.

Emulated steps are of real MPI ranks with timed waits for compute; simulated ones are of the event
simulation.

The link of the simulation is the hop that the ranks measured at the start of the run: a message of
the same size between neighbours, with the time that a rank takes to wake up. Takes Hydra overrides,
for every case: with `machine.link_latency_s` or `machine.link_bytes_per_s` those count instead.
Prints a table on stderr and JSON on stdout; the exit code is 1 if a case differs by more than its
limit.
"""

from __future__ import annotations

import statistics
import sys
from dataclasses import replace
from typing import Any

from gems.schedule.simulate import simulate
from gems.simulation.costs import RunCosts
from gems.utils.atomic_io import read_json
from scripts.bench.rig import Table, answered, composed, counted_steps_s, finished_run, machine

DEFAULTS = (
    "machine=emulated data=synthetic cost=uniform cost.forward=10 cost.input_grad=10"
    " cost.weight_grad=10 "
    "cost.unit_s=0.001 cost.boundary_bytes=1000000 cost.activation_bytes=1000000"
    " benchmark.skip_steps=1 "
    "cost.offload=20 schedule.budget_s=10 "
    # which the search counts with: on free links its chunks are as short as a message
    "machine.link_latency_s=0.0003"
)
LINK_KEYS = ("machine.link_latency_s", "machine.link_bytes_per_s")
STRIPS = (  # of longer actions, since a strip is a sixteenth of one
    "parallel.strips=16 cost.unit_s=0.004"
)
Case = tuple[str, float | None, str, int, int, int, float]
# schedule, activation cap, further keys, ranks, micro-batches, counted steps, the most that
# emulation may differ
CASES: tuple[Case, ...] = (
    ("gems_master", None, "", 8, 32, 3, 0.05),
    ("1f1b", None, "", 8, 32, 6, 0.05),
    ("zb_v", None, "", 8, 32, 6, 0.05),
    ("capped", 1.0, "", 8, 32, 3, 0.05),
    ("capped", 1.0, "schedule.memory_actions=[recompute]", 8, 32, 6, 0.05),
    ("capped", 1.0, "schedule.memory_actions=[offload]", 8, 32, 6, 0.05),
    ("capped", 1.0, "schedule.memory_actions=[offload,recompute]", 8, 32, 6, 0.05),
    ("capped", 2.0, "", 8, 32, 6, 0.05),
    ("gems_master", None, "cost.unit_s=0.004", 8, 32, 2, 0.05),
    ("capped", 1.0, "cost.unit_s=0.004", 8, 32, 2, 0.05),
    ("gems_master", None, STRIPS, 8, 32, 2, 0.05),
    ("capped", 1.0, STRIPS, 8, 32, 3, 0.05),
    ("capped", 1.5, STRIPS, 8, 32, 3, 0.05),
    ("1f1b", None, "", 64, 64, 2, 0.10),
)


def main(overrides: list[str]) -> int:
    """Run all cases and return 1 if one differs by more than its limit."""
    machine()
    table = Table(
        "schedule:<14",
        "more:<40",
        "ranks:>6",
        "N=micro_batches:>5",
        "hop ms=hop_s:>8.3f",
        "simulated ms=simulated_s:>14.1f",
        "emulated ms=emulated_s:>13.1f",
        "error %=error:>+9.2f",
        "limit %=limit:>9.0f",
        "useful %=useful:>10.1f",
    )
    results = table.rows(run_case(case, overrides) for case in CASES)
    return answered(results, any(abs(row["error"]) > row["limit"] for row in results))


def run_case(case: Case, overrides: list[str]) -> dict[str, Any]:
    """Run one case on this machine and simulate the very schedule that its ranks ran.

    `useful` is the share of ranks x emulated step in which a rank computes, recomputation not among
    it.
    """
    schedule, cap, more, ranks, micro_batches, steps, limit = case
    words = (
        f"schedule={schedule} parallel.partitions={ranks} parallel.micro_batches={micro_batches}"
    )
    words += f" {more}" if cap is None else f" schedule.activation_cap={cap} {more}"
    spec = composed(DEFAULTS, words, f"train.steps={steps + 1}", overrides)
    with finished_run(spec) as folder:
        times_s = counted_steps_s(folder).tolist()
        made = folder.read_schedule()
        hop_s = float(read_json(folder.result_json)["hop_s"])
    costs = RunCosts.of(spec)
    network = costs.network
    if not any(word.startswith(LINK_KEYS) for word in overrides):
        network = replace(network, latency=hop_s)
    step = simulate(made, costs.stages(made.placement), network, costs.cap)
    simulated_s = step.span
    emulated_s = statistics.median(times_s)
    return {
        "schedule": schedule if cap is None else f"{schedule} K={cap:g}",
        "ranks": ranks,
        "more": more,
        "strips": spec.parallel.strips,
        "micro_batches": micro_batches,
        "hop_s": hop_s,
        "simulated_s": simulated_s,
        "emulated_s": emulated_s,
        "error": emulated_s / simulated_s - 1,
        "limit": limit,
        "times_s": times_s,
        "useful": step.efficiency * simulated_s / emulated_s,
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
