"""ZB-V: two chunks a rank placed as a V, no bubble with the memory of 1F1B."""

from __future__ import annotations

from gems.schedule.action import Action, forward, input_gradient
from gems.schedule.families.weight_gradients import place_weight_gradients
from gems.schedule.placement import v
from gems.schedule.registry import Terms, schedule_family
from gems.schedule.request import Request
from gems.schedule.schedule import Schedule


def _step_units(s: Terms) -> float | None:
    return s.work + (s.p - 1) * s.f / 2 if s.n >= s.p and s.is_even else None


@schedule_family(
    "zb_v", step_units=_step_units, peak_units=lambda s: min(s.n, s.p), placement=v, stages_per_rank=2, siblings="v"
)
def zb_v(request: Request) -> Schedule:
    """Build ZB-V (Qi et al. 2023, "Zero Bubble Pipeline Parallelism"; V-ZB in Qi et al. 2024).

    Holds P micro-batches of activations at most, as 1F1B; W fill what is left. With f = i = w no rank idles between its
    first and its last action for N >= 2 P - 1, and the step takes N (f + i + w) + (P - 1) f / 2 for N >= P.
    """
    num_ranks, num_micro_batches = request.num_ranks, request.num_micro_batches
    rows = tuple(_row(rank, num_ranks, num_micro_batches) for rank in range(num_ranks))
    order = Schedule("zb_v", num_micro_batches, v(num_ranks), rows)
    return place_weight_gradients(order, request.costs.stages(2 * num_ranks), 2 * num_ranks)


def _row(rank: int, num_ranks: int, num_micro_batches: int) -> tuple[Action, ...]:
    """Spell a rank's phases: f i of the chunk on the way down, F I of the one on the way up.

    Forwards down until the first comes up, both until its gradient comes down, then the chunk at the tip of the V until
    its gradient is back, then all in turn; micro-batches past the last are left out.
    """
    below = num_ranks - rank
    words = "f" * (2 * below - 1) + "Ff" * rank + "FI" * below + "fiFI" * num_micro_batches
    make = {"f": forward, "F": forward, "i": input_gradient, "I": input_gradient}
    done = dict.fromkeys(make, 0)
    row = []
    for word in words:
        if done[word] < num_micro_batches:
            stage = 2 * num_ranks - 1 - rank if word.isupper() else rank
            row.append(make[word](stage, done[word]))
            done[word] += 1
    return tuple(row)
