"""DualPipeV: DualPipe cut in half, one copy of the weights with two chunks a rank placed as a V."""

from __future__ import annotations

from collections import deque
from itertools import count

from gems.errors import ConfigError
from gems.schedule.action import Action, backward, forward, input_gradient, weight_gradient
from gems.schedule.placement import v
from gems.schedule.registry import Terms, schedule_family
from gems.schedule.request import Request
from gems.schedule.schedule import Schedule


def _step_units(s: Terms) -> float | None:
    return s.work + (s.p - 1) * s.f / 2 if s.n >= 2 * s.p and s.is_even else None


@schedule_family("dualpipe_v", step_units=_step_units, peak_units=lambda s: s.p + 0.5, placement=v, stages_per_rank=2)
def dualpipe_v(request: Request) -> Schedule:
    """Build DualPipeV (DeepSeek-AI 2025, the "cut in half" form of DualPipe; Sea AI Lab).

    In its steady part a rank runs a forward of one chunk and a backward of the other in turn; the authors overlap
    these two, here they follow each other. The backward is split where ranks would wait for it: while they warm up and
    while they drain. Holds P + 1/2 micro-batches of activations on every rank.

    Raises:
        ConfigError: fewer micro-batches than 2 P.
    """
    num_ranks, num_micro_batches = request.num_ranks, request.num_micro_batches
    if num_micro_batches < 2 * num_ranks:
        raise ConfigError(
            "parallel.micro_batches", num_micro_batches,
            f"must be {2 * num_ranks} or more for dualpipe_v, twice parallel.partitions={num_ranks}",
            "use more micro-batches, or schedule=zb_v",
        )  # fmt: skip
    rows = tuple(_row(rank, num_ranks, num_micro_batches) for rank in range(num_ranks))
    return Schedule("dualpipe_v", num_micro_batches, v(num_ranks), rows)


def _row(rank: int, num_ranks: int, num_micro_batches: int) -> tuple[Action, ...]:
    """Spell a rank's phases: f b i of the chunk on the way down, F B I of the one on the way up, w of either."""
    below, above = num_ranks - 1 - rank, rank + 1
    steady = num_micro_batches - num_ranks - below
    ends = "".join(("Bb" if k < above else "Ii")[k % 2] for k in range(2 * above))
    words = (
        "f" * (2 * below) + "fF" * above + "IwF" * below + "fBFb" * steady + "BFb" * below
        + ends + "wi" * below + "w" * above
    )  # fmt: skip
    make = {"f": forward, "b": backward, "i": input_gradient}
    next_of = {(letter, is_up): count() for letter in "fb" for is_up in (False, True)}
    owed: deque[Action] = deque()
    row = []
    for word in words:
        if word == "w":
            row.append(owed.popleft())
            continue
        kind, is_up = word.lower(), word.isupper()
        stage = 2 * num_ranks - 1 - rank if is_up else rank
        m = next(next_of["b" if kind == "i" else kind, is_up])
        row.append(make[kind](stage, m))
        if kind == "i":
            owed.append(weight_gradient(stage, m))
    return tuple(row)
