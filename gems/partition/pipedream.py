"""PipeDream's optimizer for a straight pipeline: the least time of the slowest stage or message."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

MESSAGES = 2  # activations one way, as many bytes of gradients back


def pipedream(
    times_s: Sequence[float], boundary_bytes: Sequence[int], num_stages: int, link_bytes_per_s: float | None = None
) -> tuple[int, ...]:
    """Return the boundaries of the fastest pipeline of stages without copies.

    (Narayanan et al. 2019, "PipeDream: Generalized Pipeline Parallelism for DNN Training", section 3.1, with one worker
    a stage.) A(j, s), the time between two mini-batches of layers up to j in s stages, is the least over i of the
    largest of A(i, s - 1), the seconds of the messages over boundary i both ways, and those of layers i up to j.
    `times_s` are forward and backward of each layer; without `link_bytes_per_s` messages take no time.

    Raises:
        ValueError: more stages than layers, or none.
    """
    num_layers = len(times_s)
    if not 1 <= num_stages <= num_layers:
        raise ValueError(f"{num_layers} layers make no {num_stages} stages")
    total = np.concatenate(([0.0], np.cumsum(times_s)))
    compute = np.where(np.tri(num_layers + 1, k=0, dtype=bool), np.inf, total[None, :] - total[:, None])
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
