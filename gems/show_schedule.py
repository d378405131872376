"""`gems schedule`: prints the configured schedule as a grid, or as JSON."""

from __future__ import annotations

from gems.cli import Options, print_json
from gems.config import RunSpec
from gems.schedule import generate
from gems.schedule.grid import grid
from gems.schedule.lower import lower
from gems.schedule.replay import replay, uniform_cost
from gems.schedule.schedule_json import to_json
from gems.schedule.validate import validate

LOWERED = "level=lowered"


def show_schedule(spec: RunSpec, options: Options) -> int:
    """Prints the schedule of a resolved run: compute actions, or with level=lowered the list that ranks run."""
    parallel, cost = spec.parallel, spec.cost
    made = generate(spec.schedule.name, parallel.partitions, parallel.micro_batches or 1, parallel.parts or 1)
    lowered = validate(lower(made))
    backward = cost.input_grad + cost.weight_grad
    if options.json:
        print_json(to_json(lowered if LOWERED in options.flags else made))
        return 0
    if LOWERED in options.flags:
        for rank, row in enumerate(lowered.rows):
            print(f"rank {rank:>4} | " + " ".join(map(str, row)))
        return 0
    played = replay(made, uniform_cost(cost.forward, backward), cost.link)
    print(grid(made, played, unit=min(cost.forward, backward)))
    print(
        f"{made.name}: {made.num_ranks} ranks x {parallel.replicas} replicas, {made.num_micro_batches} micro-batches, "
        f"step {played.span:g} units (forward {cost.forward:g}, backward {backward:g}), "
        f"efficiency {played.efficiency:.3f}, peak {max(played.peak_units)} micro-batches of activations"
    )
    return 0
