"""Two chunks a rank placed as a V: V-Min, V-Half, ZB-V and DualPipeV."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from itertools import product

from gems.errors import ConfigError
from gems.schedule.action import Action, backward, forward, input_gradient, weight_gradient
from gems.schedule.families.timed import in_order_of_time
from gems.schedule.families.weight_gradients import place_weight_gradients
from gems.schedule.placement import v
from gems.schedule.registry import Request, schedule_family
from gems.schedule.schedule import Schedule

_PERIOD = 6  # F, I and W of two chunks


def _half_peak(p: int) -> int:
    return (p + 2) // 2


def _min_peak(p: int) -> int:
    return (p + 4) // 3


@schedule_family(
    "v_half", placement=v, stages_per_rank=2, siblings="v", peak_units=lambda s: min(s.n, _half_peak(s.p)),
    step_units=lambda s: s.work + (3 * s.p - 4) * s.f / 2 if s.n >= s.p >= 3 and s.is_even else None,
)  # fmt: skip
def v_half(request: Request) -> Schedule:
    """Build V-Half (Qi et al. 2024, "Pipeline Parallelism with Controllable Memory").

    The passes up the ranks take two slots a rank: at most (P + 2) div 2 micro-batches of activations, and for
    N >= P >= 3 a bubble of 3 (P - 1) / 2 - 1/2 at f = i = w = 1, half of 1F1B's.
    """
    wait = 0 if request.num_ranks % 2 else 3
    return _repeat("v_half", request, (1, 2, 1, 2), (0, 0, wait), _half_peak(request.num_ranks))


@schedule_family(
    "v_min", placement=v, stages_per_rank=2, siblings="v", peak_units=lambda s: min(s.n, _min_peak(s.p)),
    step_units=lambda s: s.work + (4 * s.p - 5) * s.f / 2 if s.p >= 2 and s.is_even else None,
)  # fmt: skip
def v_min(request: Request) -> Schedule:
    """Build V-Min (Qi et al. 2024, "Pipeline Parallelism with Controllable Memory").

    Every pass goes on to the next rank at once, so that a micro-batch's life is as short as it can be: at most
    (P + 4) div 3 micro-batches of activations, and a bubble of 2 (P - 1) - 1/2 at f = i = w = 1, two thirds of 1F1B's.
    If 3 divides P the first and the last chunk of a rank would meet: two waits of two slots part them.
    """
    wait = 0 if request.num_ranks % 3 else 2
    return _repeat("v_min", request, (1, 1, 1, 1), (wait, 0, wait), _min_peak(request.num_ranks))


def _repeat(
    name: str, request: Request, steps: tuple[int, int, int, int], waits: tuple[int, int, int], peak: int
) -> Schedule:
    """Repeat a building block every six slots and squeeze: ranks keep the order of F and I, W fill the gaps."""
    block = list(_block(request.num_ranks, steps, waits))
    micro_batches = range(request.num_micro_batches)
    timed = ((slot + _PERIOD * m, make(stage, m)) for m in micro_batches for slot, stage, make in block)
    order = in_order_of_time(name, request.num_micro_batches, v(request.num_ranks), timed)
    return place_weight_gradients(order, request.costs.stages(2 * request.num_ranks), 2 * peak)


def _block(
    num_ranks: int, steps: tuple[int, int, int, int], waits: tuple[int, int, int]
) -> Iterator[tuple[int, int, Callable[[int, int], Action]]]:
    """Yield slot, stage and builder of each F and I of a micro-batch.

    `steps` are slots from a rank to the next for F down, F up, I down and I up, `waits` more slots between these.
    """
    down, up = range(num_ranks), range(num_ranks, 2 * num_ranks)
    passes = [(down, forward), (up, forward), (up[::-1], input_gradient), (down[::-1], input_gradient)]
    slot = 0
    for (stages, make), step, wait in zip(passes, steps, (*waits, 0), strict=True):
        for stage in stages:
            yield slot, stage, make
            slot += step
        slot += 1 - step + wait


@schedule_family(
    "zb_v", placement=v, stages_per_rank=2, siblings="v", peak_units=lambda s: min(s.n, s.p),
    step_units=lambda s: s.work + (s.p - 1) * s.f / 2 if s.n >= s.p and s.is_even else None,
)  # fmt: skip
def zb_v(request: Request) -> Schedule:
    """Build ZB-V (Qi et al. 2023, "Zero Bubble Pipeline Parallelism"; V-ZB in Qi et al. 2024).

    Holds P micro-batches of activations at most, as 1F1B; W fill what is left. With f = i = w no rank idles between its
    first and its last action for N >= 2 P - 1, and the step takes N (f + i + w) + (P - 1) f / 2 for N >= P.
    """
    num_ranks, num_micro_batches = request.num_ranks, request.num_micro_batches
    rows = []
    for rank in range(num_ranks):
        below = num_ranks - rank
        # forwards down until the first comes up, both until its gradient comes down, then the chunk at the tip of the V
        # until its gradient is back, then all in turn
        letters = "f" * (2 * below - 1) + "Ff" * rank + "FI" * below + "fiFI" * num_micro_batches
        rows.append(_spell(letters, rank, num_ranks, num_micro_batches))
    order = Schedule("zb_v", num_micro_batches, v(num_ranks), tuple(rows))
    return place_weight_gradients(order, request.costs.stages(2 * num_ranks), 2 * num_ranks)


@schedule_family(
    "dualpipe_v", placement=v, stages_per_rank=2, peak_units=lambda s: s.p + 0.5,
    step_units=lambda s: s.work + (s.p - 1) * s.f / 2 if s.n >= 2 * s.p and s.is_even else None,
)  # fmt: skip
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
    rows = []
    for rank in range(num_ranks):
        below, above = num_ranks - 1 - rank, rank + 1
        steady = num_micro_batches - num_ranks - below
        ends = "".join(("Bb" if k < above else "Ii")[k % 2] for k in range(2 * above))
        letters = "f" * (2 * below) + "fF" * above + "IwF" * below + "fBFb" * steady + "BFb" * below
        rows.append(_spell(letters + ends + "wi" * below + "w" * above, rank, num_ranks, num_micro_batches))
    return Schedule("dualpipe_v", num_micro_batches, v(num_ranks), tuple(rows))


def _spell(letters: str, rank: int, num_ranks: int, num_micro_batches: int) -> tuple[Action, ...]:
    """Return a rank's actions: f b i of the chunk on the way down, F B I of the one on the way up, w of either.

    Micro-batches past the last are left out; b and i count together, and w is the oldest weight gradient owed.
    """
    make = {"f": forward, "b": backward, "i": input_gradient}
    next_of = dict.fromkeys(product((False, True), repeat=2), 0)
    owed: deque[Action] = deque()
    row = []
    for letter in letters:
        if letter == "w":
            row.append(owed.popleft())
            continue
        kind, is_up = letter.lower(), letter.isupper()
        m = next_of[kind == "f", is_up]
        if m < num_micro_batches:
            next_of[kind == "f", is_up] += 1
            stage = 2 * num_ranks - 1 - rank if is_up else rank
            row.append(make[kind](stage, m))
            if kind == "i":
                owed.append(weight_gradient(stage, m))
    return tuple(row)
