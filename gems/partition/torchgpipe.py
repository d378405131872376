"""torchgpipe's balance: blocks of a sequence whose sums differ little, not the least highest one."""

from __future__ import annotations

from collections.abc import Sequence


def block_partition(costs: Sequence[float], num_stages: int) -> tuple[int, ...]:
    """Return the boundaries that torchgpipe's balance_by_time or balance_by_size would take for these costs.

    (Kim et al. 2020, "torchgpipe: On-the-fly Pipeline Parallelism for Training Giant Models".) Costs are mapped onto
    0 to 1, the cheapest layer to 0 and the dearest to 1. Then, after Barany and Grinberg 2015, "Block partitions of
    sequences", the smallest block takes layers from the side of the largest one, again and again, until the two differ
    by 1 at most, which is always reached. That is no promise about the highest sum, of the mapped costs or of the true.

    Raises:
        ValueError: more stages than layers, or none.
    """
    if not 1 <= num_stages <= len(costs):
        raise ValueError(f"{len(costs)} layers make no {num_stages} stages")
    least, spread = min(costs), max(costs) - min(costs)
    sizes = [(cost - least) / spread if spread else 0.0 for cost in costs]
    each = len(sizes) // num_stages
    ends = [*(each * block for block in range(1, num_stages)), len(sizes)]

    def total(block: int) -> float:
        return sum(sizes[ends[block - 1] if block else 0 : ends[block]])

    while True:
        largest = max(range(num_stages), key=total)
        giver = -1
        while giver != largest:
            sums = [total(block) for block in range(num_stages)]
            smallest = min(range(num_stages), key=lambda block: (sums[block], abs(block - largest)))
            if sums[largest] <= sums[smallest] + 1:
                return (0, *ends)
            if largest < smallest:
                giver = smallest - 1
                ends[giver] -= 1
            else:
                giver = smallest + 1
                ends[smallest] += 1
