"""Compare the methods on one case: peaks, predicted step time and time to solve."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from gems.partition.exact import solve
from gems.partition.methods import METHODS, PartitionCase, partition_by
from gems.partition.problem import Partition

PLAIN = "exact_plain"


@dataclass(frozen=True, slots=True)
class EvaluatedPartition:
    """A partition with the peak of each rank in bytes and the predicted seconds of a step."""

    partition: Partition
    peak_bytes: tuple[int, ...]
    step_s: float

    @property
    def layers_per_stage(self) -> tuple[int, ...]:
        """The number of layers of each stage."""
        return tuple(end - first for first, end in pairwise(self.partition.boundaries))


def evaluate(case: PartitionCase, partition: Partition) -> EvaluatedPartition:
    """Predict the peaks of a partition, and the seconds of a step."""
    boundaries = partition.boundaries
    return EvaluatedPartition(partition, case.peak_bytes(boundaries), case.step_s(boundaries))


def plain_pipeline(case: PartitionCase, budget_s: float) -> Partition:
    """Return the partition with the least peak of a plain pipeline.

    It shows the loss if the stages of a rank are not considered together.
    """
    begin = time.perf_counter()
    boundaries = solve(case.plain.problem("peak_bytes"), budget_s).boundaries
    cost = case.problem("peak_bytes").cost(boundaries)
    return Partition(PLAIN, boundaries, cost, 0.0, False, time.perf_counter() - begin)


def compare(case: PartitionCase, objective: str, budget_s: float) -> list[EvaluatedPartition]:
    """Partition with every method and evaluate each partition, the exact method first.

    The exact method also considers the other partitions as candidates, so it is never worse than
    any of them, even if it is not proven optimal.
    """
    others = [partition_by(name, case, objective) for name in METHODS if name != "exact"]
    if objective == "peak_bytes" and any(len(costs.stages) > 1 for costs in case.memory):
        others.append(plain_pipeline(case, budget_s))
    exact = at_most(partition_by("exact", case, objective, budget_s), others)
    return [evaluate(case, partition) for partition in (exact, *others)]


def at_most(exact: Partition, others: Sequence[Partition]) -> Partition:
    """Return our partition, or the boundaries of a cheaper one of the others."""
    best = min(others, key=lambda partition: partition.cost, default=exact)
    if best.cost >= exact.cost:
        return exact
    return replace(
        exact,
        boundaries=best.boundaries,
        cost=best.cost,
        facts={**exact.facts, "from": best.method},
    )
