"""Compare the emulated step time with the simulated one.

Emulated steps are of real MPI ranks with timed waits for compute; simulated ones are of the event simulation.

The link of the simulation is the hop that the ranks measured at the start of the run: a message of the same size
between neighbours, with the time that a rank takes to wake up. Takes Hydra overrides, for every case: with
`machine.link_latency_s` or `machine.link_bytes_per_s` those count instead. Prints a table on stderr and JSON on stdout;
the exit code is 1 if a case differs by more than its limit.
"""

from __future__ import annotations

import json
import statistics
import sys
from dataclasses import dataclass, replace
from typing import Any

from gems.config.compose import compose
from gems.schedule import FAMILIES
from gems.schedule.simulate import simulate
from gems.simulation.costs import activation_cap, network_in_units, schedule_costs
from gems.utils.atomic_io import read_json
from scripts.bench.rig import Table, counted_steps_s, finished_run, machine

F_MS = 10
BOUNDARY_BYTES = 1_000_000
STEPS, WARMUP_STEPS = 6, 1
DEFAULTS = [
    "machine=emulated", "data=synthetic", "cost=uniform", f"cost.forward={F_MS}", f"cost.input_grad={F_MS}",
    f"cost.weight_grad={F_MS}", "cost.unit_s=0.001", f"cost.boundary_bytes={BOUNDARY_BYTES}",
    "cost.activation_bytes=1000000", f"train.warmup_steps={WARMUP_STEPS}",
]  # fmt: skip
LINK_KEYS = ("machine.link_latency_s", "machine.link_bytes_per_s")


@dataclass(frozen=True, slots=True)
class Case:
    """A schedule at a size, and the most that emulation may differ from simulation."""

    schedule: str
    ranks: int
    micro_batches: int
    limit: float
    cap: float | None = None
    steps: int = STEPS

    @property
    def name(self) -> str:
        """The schedule with its cap."""
        return self.schedule if self.cap is None else f"{self.schedule} K={self.cap:g}"

    def overrides(self) -> list[str]:
        """Return the case's configuration."""
        cap = [] if self.cap is None else [f"schedule.activation_cap={self.cap}"]
        return [
            f"schedule={self.schedule}", f"parallel.partitions={self.ranks}",
            f"parallel.micro_batches={self.micro_batches}", f"train.steps={self.steps + WARMUP_STEPS}", *cap,
        ]  # fmt: skip


CASES = (
    Case("gems_master", 8, 32, 0.05, steps=3),
    Case("1f1b", 8, 32, 0.05),
    Case("zb_v", 8, 32, 0.05),
    Case("capped", 8, 32, 0.05, cap=1.0, steps=3),
    Case("capped", 8, 32, 0.05, cap=2.0),
    Case("1f1b", 64, 64, 0.10, steps=2),
)


def main(overrides: list[str]) -> int:
    """Run all cases and return 1 if one differs by more than its limit."""
    machine()
    table = Table(
        "schedule:<14", "ranks:>6", "N:>5", "hop ms:>8.3f", "simulated ms:>14.1f", "emulated ms:>13.1f",
        "error %:>+9.2f", "limit %:>9.0f",
    )  # fmt: skip
    results = []
    for case in CASES:
        if case.schedule not in FAMILIES:
            table.row(case.name, case.ranks, case.micro_batches, note="missing: no such schedule here")
            results.append({"schedule": case.name, "ranks": case.ranks, "missing": True})
            continue
        found = run_case(case, overrides)
        results.append(found)
        times_ms = (1e3 * found[name] for name in ("hop_s", "simulated_s", "emulated_s"))
        table.row(case.name, case.ranks, case.micro_batches, *times_ms, 100 * found["error"], 100 * case.limit)
    print(json.dumps(results))
    return int(any(abs(found.get("error", 0.0)) > found.get("limit", 1.0) for found in results))


def run_case(case: Case, overrides: list[str]) -> dict[str, Any]:
    """Run one case on this machine and simulate the very schedule that its ranks ran."""
    spec = compose([*DEFAULTS, *case.overrides(), *overrides])
    with finished_run(spec) as folder:
        times_s = counted_steps_s(folder).tolist()
        schedule, hop_s = folder.read_schedule(), float(read_json(folder.result_json)["hop_s"])
    unit_s = spec.cost.unit_s
    network = network_in_units(spec)
    if not any(word.startswith(LINK_KEYS) for word in overrides):
        network = replace(network, latency=hop_s / unit_s)
    simulated_s = (
        simulate(schedule, schedule_costs(spec, schedule.placement), network, activation_cap(spec)).span * unit_s
    )
    emulated_s = statistics.median(times_s)
    return {
        "schedule": case.name, "ranks": case.ranks, "micro_batches": case.micro_batches, "hop_s": hop_s,
        "simulated_s": simulated_s, "emulated_s": emulated_s, "error": emulated_s / simulated_s - 1,
        "limit": case.limit, "times_s": times_s,
    }  # fmt: skip


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
