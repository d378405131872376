"""ZB-V: two chunks per rank on a V with a split backward, in the memory of 1F1B."""

from __future__ import annotations

from gems.schedule.families.shared import from_letters
from gems.schedule.families.weight_gradients import place_weight_gradients
from gems.schedule.placement import v
from gems.schedule.registry import Request, schedule_family
from gems.schedule.schedule import Schedule


@schedule_family(
    "zb_v",
    placement=v,
    stages_per_rank=2,
    siblings="v",
    peak_units=lambda s: min(s.n, s.p),
    step_units=lambda s: s.work + (s.p - 1) * s.f / 2 if s.n >= s.p and s.is_even else None,
)
def zb_v(request: Request) -> Schedule:
    """Build ZB-V (Qi et al. 2023, "Zero Bubble Pipeline Parallelism"; V-ZB in Qi et al. 2024).

    It holds at most P micro-batches of activations, like 1F1B; W fill the remaining time. With f =
    i = w no rank idles between its first and its last action for N >= 2 P - 1, and the step takes N
    (f + i + w) + (P - 1) f / 2 for N >= P.
    """
    num_ranks = request.num_ranks
    num_micro_batches = request.num_micro_batches
    rank_schedules = []
    for rank in range(num_ranks):
        below = num_ranks - rank
        # forwards down until the first one comes up; then both until its gradient comes down; then
        # the chunk at the tip of the V until its gradient is back; then all in turn
        letters = "f" * (2 * below - 1) + "Ff" * rank + "FI" * below + "fiFI" * num_micro_batches
        rank_schedules.append(from_letters(letters, rank, num_ranks, num_micro_batches))
    order = Schedule("zb_v", num_micro_batches, v(num_ranks), tuple(rank_schedules))
    return place_weight_gradients(order, request.costs.of(order.placement), 2 * num_ranks)
