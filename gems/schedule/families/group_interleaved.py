"""Interleaved schedule with a split backward, in groups of micro-batches that keep a memory cap.

A group may have fewer micro-batches than there are ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from math import ceil

from gems.errors import ConfigError
from gems.schedule.action import Action, forward, input_gradient
from gems.schedule.families.shared import in_order_of_time
from gems.schedule.families.weight_gradients import place_weight_gradients
from gems.schedule.ledger import TOLERANCE
from gems.schedule.placement import looped
from gems.schedule.registry import Request, Terms, schedule_family, with_sizes
from gems.schedule.schedule import Schedule

PLANNED_CHUNKS = (2, 4)
RIVAL_CHUNKS = (2, 3, 4, 6, 8)
# forwards of all ranks in a step; larger schedules take seconds to build, too long for a search
MAX_FORWARDS = 1 << 15


def _held(p: int, chunks: int, group: int) -> int:
    """Return the most pairs of stage and micro-batch that a rank holds with groups of `group`."""
    return (chunks - 1) * group + (p if 2 * group >= p else ceil(2 * p / 3) + 2)


def _sizes(p: int, n: int, chunks: int, cap: float | None) -> list[int]:
    """Return the sizes of the groups, or none if even groups of one micro-batch exceed the cap.

    The first group is the largest that keeps the cap. A group below P / 2 does not hide the path
    from chunk to chunk. If such groups can be avoided, group sizes differ by at most one. Smaller
    groups are even, so that they form pairs.
    """
    limit = float("inf") if cap is None else chunks * (cap + TOLERANCE)
    fitting = [group for group in range(p, 0, -1) if _held(p, chunks, group) <= limit]
    for group in fitting:
        more = ceil(n / group) - 1
        if 2 * group >= p and (not more or 2 * ((n - group) // more) >= p):
            return [group, *((n - group + more - 1 - i) // more for i in range(more))]
    largest = max(
        (group for group in fitting if 2 * group >= p or group % 2 == 0 or group == 1), default=n
    )
    return (
        [largest, *(min(largest, n - first) for first in range(largest, n, largest))]
        if fitting
        else []
    )


def _step_units(s: Terms) -> float | None:
    sizes = _sizes(s.p, s.n, s.chunks, s.cap)
    if not s.is_even or not sizes or 2 * min(sizes) < s.p or s.n < s.p:
        return None
    return s.work + (s.p - (1 + (s.chunks - 1) * sizes[0]) / s.chunks) * s.f


def _peak_units(s: Terms) -> float:
    return min(
        s.n, _held(s.p, s.chunks, max(_sizes(s.p, s.n, s.chunks, s.cap), default=1)) / s.chunks
    )


def _planned(request: Request) -> Iterable[Request]:
    """Yield each number of chunks with groups of P and of P / 2 micro-batches."""
    p = request.num_ranks
    for chunks in PLANNED_CHUNKS:
        yield from with_sizes("cap", (None, _held(p, chunks, ceil(p / 2)) / chunks))(
            replace(request, chunks=chunks)
        )


def _rivals(request: Request) -> Iterable[Request]:
    """Yield each number of chunks with the cap, also in units of the heaviest stage and rank."""
    p = request.num_ranks
    for chunks in RIVAL_CHUNKS:
        if p * request.num_micro_batches * chunks > MAX_FORWARDS:
            break
        if not request.allows(p * chunks):
            continue
        if request.cap is None:
            yield replace(request, chunks=chunks)
            continue
        sizes = request.costs.of(looped(p, chunks)).activation
        units = {1.0, chunks * max(sizes), max(sum(sizes[rank::p]) for rank in range(p))}
        yield from with_sizes("cap", sorted(request.cap / unit for unit in units if unit))(
            replace(request, chunks=chunks)
        )


@schedule_family(
    "group_interleaved",
    step_units=_step_units,
    peak_units=_peak_units,
    placement=looped,
    stages_per_rank=None,
    planned=_planned,
    rival=_rivals,
)
def group_interleaved(request: Request) -> Schedule:
    """Build interleaved 1F1B with a split backward in groups of G <= P micro-batches.

    There are v = `chunks` stages per rank. It follows PipeOffload (Wan et al. 2025, arXiv
    2503.01328), whose interleaved schedules shorten lifetimes by groups of fewer micro-batches than
    ranks; nothing is offloaded here, and the slots are those of this module. G is the largest group
    that keeps the cap, or P without a cap. A rank alternates a forward and an input gradient and
    holds ((v - 1) G + P) / v micro-batches of activations. For N >= P, 2 G >= P and f = i = w the
    step takes N (f + i + w) + (P - (1 + (v - 1) G) / v) f: no rank idles after its first I, and P
    micro-batches of memory leave a bubble of (P - 1) f / v. Smaller groups run in pairs, so that F
    and I pass the ranks without a wait; they are slower at both ends, and with 3 G < P everywhere.

    Raises:
        ConfigError: There are fewer than two chunks, or the cap is below that of groups of one
            micro-batch.
    """
    num_ranks = request.num_ranks
    chunks = request.chunks
    if chunks < 2:
        raise ConfigError(
            "schedule.chunks",
            chunks,
            "must be 2 or more for group_interleaved",
            "one chunk a rank is schedule=zb_h1",
        )
    sizes = _sizes(num_ranks, request.num_micro_batches, chunks, request.cap)
    if not sizes:
        raise ConfigError(
            "schedule.activation_cap",
            request.cap,
            f"must be {_held(num_ranks, chunks, 1) / chunks:g} or more for group_interleaved with "
            f"{chunks} chunks on {num_ranks} ranks",
            "raise it, or use schedule=capped",
        )
    timed = _timed(num_ranks, request.num_micro_batches, chunks, sizes)
    placement = looped(num_ranks, chunks)
    order = in_order_of_time("group_interleaved", request.num_micro_batches, placement, timed)
    costs = request.costs.of(placement)
    return place_weight_gradients(order, costs, _held(num_ranks, chunks, sizes[0]))


def _timed(
    num_ranks: int, num_micro_batches: int, chunks: int, sizes: Sequence[int]
) -> Iterator[tuple[float, Action]]:
    """Yield each F and I with its slot, with three slots per micro-batch of a chunk.

    From rank to rank, F and I together take three slots, one of them two slots, so they never
    collide on a rank. In pairs, two F and two I alternate within six slots; with one slot each,
    they never collide.
    """
    last = num_ranks - 1
    ranks = range(num_ranks)
    group = sizes[0]
    is_paired = 2 * group < num_ranks
    down = [rank if is_paired else 3 * rank // 2 for rank in ranks]
    up = [
        last - rank if is_paired else (3 * last + 1) // 2 - 3 * rank + down[rank] for rank in ranks
    ]
    slots = [6 * (j // 2) + 2 * (j % 2) if is_paired else 3 * j for j in range(group)]
    # at least the path to the next chunk
    lengths = [max(3 * size, down[last] + 1) for size in sizes]
    lengths = [length + (is_paired and length % 2) for length in lengths]
    # from the first F of a group to its first I
    turn = (chunks - 1) * lengths[0] + down[last] + 1
    begin = m = 0
    for size, length in zip(sizes, lengths, strict=True):
        for slot in slots[: min(size, num_micro_batches - m)]:
            for stage in range(chunks * num_ranks):
                chunk, rank = divmod(stage, num_ranks)
                yield begin + chunk * length + slot + down[rank], forward(stage, m)
                yield (
                    begin + turn + (chunks - 1 - chunk) * length + slot + up[rank],
                    input_gradient(stage, m),
                )
            m += 1
        begin += chunks * length
