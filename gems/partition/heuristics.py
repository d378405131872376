"""Published heuristics: PipeDream's fastest slowest stage, and torchgpipe's even blocks.

PipeDream's cost is the time of the slowest stage or message.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

MESSAGES = 2  # activations in one direction, and as many bytes of gradients back


def pipedream(
    times_s: Sequence[float],
    boundary_bytes: Sequence[int],
    num_stages: int,
    link_bytes_per_s: float | None = None,
) -> tuple[int, ...]:
    """Return the boundaries of the fastest pipeline of stages without copies.

    Source: Narayanan et al. 2019, "PipeDream: Generalized Pipeline Parallelism for DNN Training",
    section 3.1, with one worker per stage. A(j, s) is the time between two mini-batches for the
    layers up to j in s stages. It is the minimum over i of the maximum of A(i, s - 1), the seconds
    of the messages over boundary i in both directions, and the seconds of layers i up to j.
    `times_s` is forward plus backward of each layer; without `link_bytes_per_s` messages take no
    time.

    Raises:
        ValueError: There are more stages than layers, or no stages.
    """
    num_layers = len(times_s)
    if not 1 <= num_stages <= num_layers:
        raise ValueError(f"{num_layers} layers make no {num_stages} stages")
    total = np.concatenate(([0.0], np.cumsum(times_s)))
    compute = np.where(
        np.tri(num_layers + 1, k=0, dtype=bool), np.inf, total[None, :] - total[:, None]
    )
    messages = np.zeros(num_layers + 1)
    if link_bytes_per_s is not None:
        messages[1:-1] = MESSAGES * np.asarray(boundary_bytes, dtype=float) / link_bytes_per_s
    slowest = np.where(np.arange(num_layers + 1) > 0, compute[0], np.inf)
    begins = []
    for _ in range(num_stages - 1):
        ways = np.maximum(compute, np.maximum(slowest, messages)[:, None])
        begins.append(np.argmin(ways, axis=0))
        slowest = ways.min(axis=0)
    boundaries = [num_layers]
    for begin in begins[::-1]:
        boundaries.append(int(begin[boundaries[-1]]))
    return (0, *boundaries[::-1])


def block_partition(costs: Sequence[float], num_stages: int) -> tuple[int, ...]:
    """Return the boundaries of torchgpipe's balance_by_time or balance_by_size for these costs.

    Source: Kim et al. 2020, "torchgpipe: On-the-fly Pipeline Parallelism for Training Giant
    Models". Costs are mapped onto 0 to 1, the cheapest layer to 0 and the most expensive to 1.
    Then, after Barany and Grinberg 2015, "Block partitions of sequences", the smallest block
    repeatedly takes layers from the side of the largest one, until the two differ by at most 1,
    which is always reached. This does not guarantee anything about the highest sum, of either the
    mapped or the true costs.

    Raises:
        ValueError: There are more stages than layers, or no stages.
    """
    if not 1 <= num_stages <= len(costs):
        raise ValueError(f"{len(costs)} layers make no {num_stages} stages")
    least = min(costs)
    spread = max(costs) - min(costs)
    sizes = [(cost - least) / spread if spread else 0.0 for cost in costs]
    block_size = len(sizes) // num_stages
    ends = [*(block_size * block for block in range(1, num_stages)), len(sizes)]

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
