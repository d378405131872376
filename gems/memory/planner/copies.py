"""Copies as whole segments in the plan's programme: what is under way takes memory on the device in full."""

from __future__ import annotations

from dataclasses import dataclass

from gems.memory.plan import Choice
from gems.memory.planner.program import Program, Terms
from gems.memory.planner.stage import StageBlock


@dataclass(frozen=True, slots=True)
class _Part:
    """Bytes that leave together: made by layer `maker`, given last to layer `last_use`; `moved` is the variable of their leaving.

    They leave no sooner than with the first of `savers` that is offloaded, and are back for the last one.
    """

    num_bytes: int
    moved: int
    maker: int
    savers: tuple[int, ...]
    last_use: int


class WholeCopies:
    """For one stage: during which layers' actions an offloaded segment is on the device, all of it or nothing.

    It is gone once the host has it whole, and there in full from the posting of the copy back.
    """

    def __init__(self, program: Program, block: StageBlock) -> None:
        self.program = program
        self._offloaded: dict[int, int] = {}
        self._parts: list[_Part] = []
        stage = block.stage
        self._layers = range(stage.first, stage.end)
        for layer in self._layers:
            self._offloaded[layer] = next(
                block.at[arc] for arc in block.covering[layer] if arc.choice is Choice.OFFLOAD
            )
            size = stage.own_movable_bytes[layer]
            if size:
                self._parts.append(_Part(size, self._offloaded[layer], layer, (layer,), layer))
        for each, moved in block.moved.items():
            self._parts.append(_Part(each.total_bytes, moved, each.maker, each.savers, each.last_use))

    def on_device(self, layer: int, is_forward: bool, hosts: tuple[int, int]) -> Terms:
        """Gives the bytes on the device of what copies take of earlier layers, during an action of a layer.

        `hosts` are the variables of the bytes on the host when the action begins and when it ends.
        """
        program = self.program
        found: Terms = {}
        away: Terms = {}
        is_there = {
            saver: program.variable(0.0, 1.0, is_whole=True) for saver in range(self._layers.start, layer)
        }
        for part in self._parts:
            if part.maker >= layer or not (is_forward or part.savers[-1] < layer):
                continue
            size = program.scaled_bytes(part.num_bytes)
            there = program.variable(0.0, 1.0)
            if is_forward and layer <= part.last_use:
                program.row({there: 1.0, part.moved: -1.0}, low=0.0, high=0.0)
            else:
                self._tie(part, there, is_there)
            found[there] = size
            away[part.moved] = away.get(part.moved, 0.0) + size
            away[there] = -size
        for host in hosts:
            program.row({host: 1.0} | {variable: -factor for variable, factor in away.items()}, low=0.0)
        return found

    def _tie(self, part: _Part, there: int, is_there: dict[int, int]) -> None:
        """Holds that a part is there as the segments are that it leaves and comes back with, if it leaves at all.

        While one of several has not run yet, it may be gone with an earlier one that is offloaded.
        """
        program = self.program
        program.row({there: 1.0, part.moved: -1.0}, high=0.0)
        run = [saver for saver in part.savers if saver in is_there]
        for saver in run:
            others = {self._offloaded[other]: -1.0 for other in part.savers if other != saver}
            program.row({there: 1.0, is_there[saver]: -1.0} | others, high=0.0)
        if len(run) == len(part.savers) > 1:
            program.row({there: 1.0} | {is_there[saver]: -1.0 for saver in run}, high=0.0)
        if len(run) < len(part.savers):
            program.row(
                {there: 1.0, part.moved: -1.0} | {self._offloaded[saver]: 1.0 for saver in run}, low=0.0
            )
        least = {there: 1.0, part.moved: -1.0} | {is_there[saver]: -1.0 for saver in run}
        program.row(least, low=-float(len(run)))
