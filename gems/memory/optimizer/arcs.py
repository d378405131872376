"""The arcs of a stage: the segments that the plan's programme may cut it into."""

from __future__ import annotations

from dataclasses import dataclass

from gems.memory.optimizer.storages import StageLayers
from gems.memory.plan import Choice

# how many possible segments a stage may have, about; longer ones are left out where it has more
MAX_ARCS = 1200


@dataclass(frozen=True, slots=True)
class Arc:
    """A possible segment: the layers `first` up to `end`, under one choice."""

    first: int
    end: int
    choice: Choice


def longest_arc(num_layers: int) -> int:
    """Return how many layers of a stage may be run again together, in the programme; the stage as a whole may in any case."""
    return max(2, MAX_ARCS // (2 * num_layers))


def arcs_of(stage: StageLayers) -> list[Arc]:
    """Return the segments that a stage may be cut into: kept and offloaded ones of a layer, others of several.

    Of long stages only those up to some length, and the stage as a whole.
    """
    first, end = stage.first, stage.end
    longest = longest_arc(end - first)
    arcs = []
    for begin in range(first, end):
        arcs += [Arc(begin, begin + 1, choice) for choice in (Choice.KEEP, Choice.OFFLOAD)]
        ends = [stop for stop in range(begin + 1, end + 1) if stop - begin <= longest]
        if begin == first and end - first > longest:
            ends.append(end)
        for stop in ends:
            arcs.append(Arc(begin, stop, Choice.RECOMPUTE))
            if any(layer.cheap_s < layer.recompute_s for layer in stage.layers[begin - first : stop - first]):
                arcs.append(Arc(begin, stop, Choice.CHEAP))
    return arcs
