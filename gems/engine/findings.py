"""Findings: what a run shows of its activations, beside what its schedule predicted."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from gems.engine.pipeline import Pipeline
from gems.schedule.costs import StageCosts
from gems.schedule.ledger import peaks


@dataclass(frozen=True, slots=True)
class Findings:
    """The most activation bytes of each rank of the world, counted and predicted, and the layers that do not split."""

    peak_activation_bytes: tuple[int, ...]
    predicted_activation_bytes: tuple[int, ...]
    unsplit_layers: tuple[str, ...]


def findings_of(pipeline: Pipeline) -> Findings:
    """Gives what the steps so far have shown; collective, after one step at least."""
    return Findings(
        tuple(pipeline.comm.allgather(pipeline.train.activations.peak_bytes)),
        _predicted_bytes(pipeline),
        _unsplit_layers(pipeline),
    )


def _predicted_bytes(pipeline: Pipeline) -> tuple[int, ...]:
    """Gives the most activation bytes of every rank of the world, from the schedule and the stages' measured sizes.

    Sizes are those of the largest copy of a stage; collective, and after the first step.
    """
    sizes: dict[int, tuple[int, int]] = {}
    mine = [
        (held[1], stage.stash_bytes or 0, stage.held_for_weights_bytes or 0)
        for held, stage in pipeline.stages.items()
    ]
    for number, stash, held_for_weights in itertools.chain.from_iterable(pipeline.comm.allgather(mine)):
        before = sizes.get(number, (0, 0))
        sizes[number] = (max(before[0], stash), max(before[1], held_for_weights))
    none = (0.0,) * len(sizes)
    costs = StageCosts(
        none, none, none,
        activation=tuple(float(sizes[number][0]) for number in sorted(sizes)),
        held_for_weights=tuple(float(sizes[number][1]) for number in sorted(sizes)),
    )  # fmt: skip
    of_pipeline = tuple(int(peak) for peak in peaks(pipeline.schedule, costs))
    return of_pipeline * pipeline.spec.parallel.replicas


def _unsplit_layers(pipeline: Pipeline) -> tuple[str, ...]:
    """Gives the layers whose whole backward runs at I because it cannot be split, by name; collective."""
    mine = set()
    if pipeline.schedule.has_split_backward:
        for held, stage in pipeline.stages.items():
            names = [name for name, _ in pipeline.named_layers(held)]
            for inner in stage.split_layers().unsplit:
                index, _, rest = inner.partition(".")
                mine.add(f"{names[int(index)]}.{rest}" if rest else names[int(index)])
    return tuple(sorted(set().union(*pipeline.comm.allgather(mine))))
