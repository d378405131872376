"""Emulated against simulated: the step time of real MPI ranks with timed waits for compute, beside the event simulation.

The link of the simulation is the hop that the ranks themselves measured at the start of the run: a message of the same
size between neighbours, with what a rank takes to wake up. Takes Hydra overrides, for every case: with
`machine.link_latency_s` or `machine.link_bytes_per_s` those count instead. Prints a table on stderr and JSON on stdout.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from dataclasses import dataclass, replace
from typing import Any

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
            f"parallel.micro_batches={self.micro_batches}", f"train.steps={self.steps + WARMUP_STEPS}",
            *cap,
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
    """Run all cases and gives 1 where one differs by more than its limit."""
    from gems.schedule import FAMILIES

    print(
        f"{'schedule':<14}{'ranks':>6}{'N':>5}{'hop ms':>8}{'simulated ms':>14}{'emulated ms':>13}{'error %':>9}{'limit %':>9}",
        file=sys.stderr,
    )
    results = []
    for case in CASES:
        head = f"{case.name:<14}{case.ranks:>6}{case.micro_batches:>5}"
        if case.schedule not in FAMILIES:
            print(f"{head}  missing: no such schedule here", file=sys.stderr)
            results.append({"schedule": case.name, "ranks": case.ranks, "missing": True})
            continue
        found = run_case(case, overrides)
        results.append(found)
        print(
            f"{head}{found['hop_s'] * 1e3:>8.3f}{found['simulated_s'] * 1e3:>14.1f}{found['emulated_s'] * 1e3:>13.1f}"
            f"{found['error'] * 100:>+9.2f}{case.limit * 100:>9.0f}",
            file=sys.stderr,
        )
    print(json.dumps(results))
    return int(any(abs(found.get("error", 0.0)) > found.get("limit", 1.0) for found in results))


def run_case(case: Case, overrides: list[str]) -> dict[str, Any]:
    """Run one case on this machine and simulates the very list that its ranks ran."""
    from analysis.io.load import load_parts
    from analysis.metrics.run_metrics import step_times_s
    from gems.config.compose import compose
    from gems.launch.local_launcher import mpiexec_argv, rank_environment, run_ranks
    from gems.runs.prepare import prepare
    from gems.schedule.simulate import simulate
    from gems.simulation.costs import activation_cap, network_in_units, schedule_costs
    from gems.utils.atomic_io import read_json

    spec = compose([*DEFAULTS, *case.overrides(), *overrides])
    with tempfile.TemporaryDirectory() as scratch:
        folder = prepare(replace(spec, runs_dir=scratch))
        argv = mpiexec_argv(spec.world_size, [sys.executable, "-m", "gems.engine.run", str(folder.path)])
        ended = run_ranks(argv, rank_environment(1), folder.logs / "ranks.log", timeout_s=550.0, echo=False)
        if ended.returncode:
            raise SystemExit("\n".join(ended.tail))
        steps = load_parts(folder.path).trace.steps
        schedule, hop_s = folder.read_schedule(), float(read_json(folder.result_json)["hop_s"])
    unit_s = spec.cost.unit_s
    network = network_in_units(spec)
    if not any(word.startswith(LINK_KEYS) for word in overrides):
        network = replace(network, latency=hop_s / unit_s)
    simulated_s = (
        simulate(schedule, schedule_costs(spec, schedule.placement), network, activation_cap(spec)).span * unit_s
    )
    times_s = step_times_s(steps)[steps["is_warmup"] == 0]
    emulated_s = statistics.median(map(float, times_s))
    return {
        "schedule": case.name, "ranks": case.ranks, "micro_batches": case.micro_batches, "hop_s": hop_s,
        "simulated_s": simulated_s, "emulated_s": emulated_s, "error": emulated_s / simulated_s - 1,
        "limit": case.limit, "times_s": [float(time_s) for time_s in times_s],
    }  # fmt: skip


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
