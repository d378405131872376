"""Interleaved with a split backward in groups of fewer micro-batches than ranks, so that a cap on memory is kept."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from math import ceil

from gems.errors import ConfigError
from gems.schedule.action import Action, forward, input_gradient
from gems.schedule.families.rows import in_order_of_time
from gems.schedule.families.weight_gradients import place_weight_gradients
from gems.schedule.ledger import TOLERANCE
from gems.schedule.placement import looped
from gems.schedule.registry import Request, Terms, schedule_family, with_sizes
from gems.schedule.schedule import Schedule

PLANNED_CHUNKS = (2, 4)
RIVAL_CHUNKS = (2, 3, 4, 6, 8)
MAX_FORWARDS = (
    1 << 15
)  # of all ranks in a step: more take seconds to build, which a search does not have


def _held(p: int, chunks: int, group: int) -> int:
    """Return the pairs of stage and micro-batch that a rank holds at most, with groups of so many micro-batches."""
    return (chunks - 1) * group + (p if 2 * group >= p else ceil(2 * p / 3) + 2)


def _sizes(p: int, n: int, chunks: int, cap: float | None) -> list[int]:
    """Return the sizes of the groups, the first the largest that keeps the cap, or none if even one is too many.

    A group below P / 2 does not hide the way from chunk to chunk: if there can be none, groups
    differ by one. Smaller ones are even, for pairs.
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
    """Return each number of chunks with groups of P micro-batches and of P / 2."""
    p = request.num_ranks
    for chunks in PLANNED_CHUNKS:
        yield from with_sizes("cap", (None, _held(p, chunks, ceil(p / 2)) / chunks))(
            replace(request, chunks=chunks)
        )


def _rivals(request: Request) -> Iterable[Request]:
    """Return for each number of chunks the cap, also in units of the heaviest stage and of the heaviest rank."""
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
    """Build interleaved 1F1B with a split backward in groups of G <= P micro-batches, v = `chunks` stages a rank.

    After PipeOffload (Wan et al. 2025, arXiv 2503.01328), whose interleaved schedules shorten
    lifetimes by groups of fewer micro-batches than ranks; nothing is offloaded here, and the slots
    are this module's own. G is the largest that keeps the cap, P without one. A rank runs a forward
    and an input gradient in turn and holds ((v - 1) G + P) / v micro-batches of activations. For N
    >= P, 2 G >= P and f = i = w the step takes N (f + i + w) + (P - (1 + (v - 1) G) / v) f: no rank
    idles after its first I, and P micro-batches of memory leave a bubble of (P - 1) f / v. Smaller
    groups go in pairs, so that F and I pass the ranks without a wait; they are slower at both ends,
    and with 3 G < P everywhere.

    Raises:
        ConfigError: fewer than two chunks, or a cap below that of groups of one micro-batch.
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
    """Yield each F and I with its slot, three slots a micro-batch of a chunk.

    From rank to rank F and I take three slots in all, one of them two slots, so that the two never
    meet on a rank. In pairs, two F and two I in turn in six slots, they never meet with a slot
    each.
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
    lengths = [
        max(3 * size, down[last] + 1) for size in sizes
    ]  # at least the way to the next chunk
    lengths = [length + (is_paired and length % 2) for length in lengths]
    turn = (chunks - 1) * lengths[0] + down[last] + 1  # from the first F of a group to its first I
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
