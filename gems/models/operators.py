"""Operators: the finest parts of a model's layers, with who reads whom. No torch here.

A layer whose steps fork is taken apart into its steps, each branch's among them, and the joins of its forks; any other
layer is one operator. So a model is a chain of layers, with branches inside of some.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from gems.models.layer import Layer
from gems.models.steps import Fork, Step, is_chain


@dataclass(frozen=True, slots=True)
class Operator:
    """A part of a layer.

    `path` is where the module of a step stands in that of its layer, "" for a whole layer, None for a join, which puts
    what it reads together along the channels. `feeders` are the operators that it reads, in order; none for the first
    of all.
    """

    name: str
    layer: int
    path: str | None
    feeders: tuple[int, ...]

    @property
    def is_join(self) -> bool:
        """Whether it joins branches."""
        return self.path is None


def operators_of(layers: Sequence[Layer]) -> tuple[Operator, ...]:
    """Return the operators of a model, each behind those that it reads."""
    found: list[Operator] = []
    for index, layer in enumerate(layers):
        last = len(found) - 1
        options = dict(layer.options)
        steps = options["steps"] if is_chain(layer) and not options.get("carried") else ()
        if not any(isinstance(step, Fork) for step in steps):
            found.append(Operator(layer.name, index, "", (last,) if last >= 0 else ()))
            continue
        _add_steps(found, layer.name, index, steps, "steps", last)
    return tuple(found)


def num_branching(operators: Sequence[Operator]) -> int:
    """Return how many layers fork."""
    return sum(any(each.is_join for each in some) for _, some in groupby(operators, lambda each: each.layer))


def _add_steps(found: list[Operator], name: str, layer: int, steps: Sequence[Step], path: str, last: int) -> int:
    """Add steps that run one after the other, behind operator `last`, and gives the number of the last of them."""
    for number, step in enumerate(steps):
        here = f"{path}.{number}"
        if not isinstance(step, Fork):
            found.append(Operator(f"{name}.{here.removeprefix('steps.')}", layer, here, (last,) if last >= 0 else ()))
            last = len(found) - 1
            continue
        ends = tuple(
            _add_steps(found, name, layer, branch, f"{here}.branches.{which}", last)
            for which, branch in enumerate(step.branches)
        )
        found.append(Operator(f"{name}.{here.removeprefix('steps.')}.join", layer, None, ends))
        last = len(found) - 1
    return last
