"""DualPipeV: two chunks per rank on a V; a forward of one and a backward of the other alternate."""

from __future__ import annotations

from gems.errors import ConfigError
from gems.schedule.families.shared import from_letters
from gems.schedule.placement import v
from gems.schedule.registry import Request, schedule_family
from gems.schedule.schedule import Schedule


@schedule_family(
    "dualpipe_v",
    placement=v,
    stages_per_rank=2,
    peak_units=lambda s: s.p + 0.5,
    step_units=lambda s: s.work + (s.p - 1) * s.f / 2 if s.n >= 2 * s.p and s.is_even else None,
)
def dualpipe_v(request: Request) -> Schedule:
    """Build DualPipeV (DeepSeek-AI 2025, the "cut in half" form of DualPipe; Sea AI Lab).

    In its steady part, a rank alternates a forward of one chunk and a backward of the other; the
    authors overlap the two, here they run one after the other. The backward is split if ranks would
    wait for it, that is, in warm-up and drain. Every rank holds P + 1/2 micro-batches of
    activations. Between its first and last action, a rank idles (P - 1 - rank) / 2 for f = i = w =
    1.

    Raises:
        ConfigError: There are fewer than 2 P micro-batches.
    """
    num_ranks = request.num_ranks
    num_micro_batches = request.num_micro_batches
    if num_micro_batches < 2 * num_ranks:
        raise ConfigError(
            "parallel.micro_batches",
            num_micro_batches,
            f"must be {2 * num_ranks} or more for dualpipe_v, twice"
            f" parallel.partitions={num_ranks}",
            "use more micro-batches, or schedule=zb_v",
        )
    rank_schedules = []
    for rank in range(num_ranks):
        below = num_ranks - 1 - rank
        above = rank + 1
        steady = num_micro_batches - num_ranks - below
        ends = "".join(("Bb" if k < above else "Ii")[k % 2] for k in range(2 * above))
        letters = "f" * (2 * below) + "fF" * above + "IwF" * below + "fBFb" * steady + "BFb" * below
        rank_schedules.append(
            from_letters(
                letters + ends + "wi" * below + "w" * above, rank, num_ranks, num_micro_batches
            )
        )
    return Schedule("dualpipe_v", num_micro_batches, v(num_ranks), tuple(rank_schedules))
