"""Copies as whole segments in the plan's programme: what is under way takes memory on the device in full."""

from __future__ import annotations

from dataclasses import dataclass

from gems.memory.optimizer.program import Program, Terms
from gems.memory.optimizer.stage import StageBlock
from gems.memory.plan import Choice


@dataclass(frozen=True, slots=True)
class _Part:
    """Bytes that leave together: made by layer `maker`, needed last by layer `saver`; `moved` is the variable of their leaving.

    Where an earlier layer saved them too, they leave with that one if `saver` itself is not offloaded.
    """

    num_bytes: int
    moved: int
    maker: int
    saver: int
    is_of_several: bool


class WholeCopies:
    """For one stage: during which layers' actions an offloaded segment is on the device, all of it or nothing.

    It is gone once the host has it whole, and there in full from the posting of the copy back.
    """

    def __init__(self, program: Program, block: StageBlock) -> None:
        self.program = program
        self._offloaded: dict[int, int] = {}
        self._parts: dict[int, list[_Part]] = {}
        stage = block.stage
        for layer in range(stage.first, stage.end):
            self._offloaded[layer] = next(
                block.at[arc] for arc in block.covering[layer] if arc.choice is Choice.OFFLOAD
            )
            size = stage.own_movable_bytes[layer]
            self._parts[layer] = [_Part(size, self._offloaded[layer], layer, layer, False)] if size else []
        for each, moved in block.moved.items():
            saver = each.savers[-1]
            self._parts[saver].append(_Part(each.total_bytes, moved, each.maker, saver, len(each.savers) > 1))

    def on_device(self, layer: int, is_forward: bool, hosts: tuple[int, int]) -> Terms:
        """Return the bytes on the device of what copies take of earlier layers, during an action of a layer.

        `hosts` are the variables of the bytes on the host when the action begins and when it ends.
        """
        program = self.program
        found: Terms = {}
        away: Terms = {}
        for saver, parts in self._parts.items():
            here = [part for part in parts if part.maker < layer and (is_forward or saver < layer)]
            if not here:
                continue
            is_there = program.variable(0.0, 1.0, is_whole=True)
            for part in here:
                size = program.scaled_bytes(part.num_bytes)
                there = program.variable(0.0, 1.0)
                is_posted = not is_forward or saver < layer or part.is_of_several
                self._tie(part, there, is_there, is_posted)
                found[there] = size
                away[part.moved] = away.get(part.moved, 0.0) + size
                away[there] = -size
        for host in hosts:
            program.row({host: 1.0} | {variable: -factor for variable, factor in away.items()}, low=0.0)
        return found

    def _tie(self, part: _Part, there: int, is_there: int, is_posted: bool) -> None:
        """Holds that a part is there as its segment is, if it leaves at all and with that segment."""
        program = self.program
        program.row({there: 1.0, part.moved: -1.0}, high=0.0)
        if not is_posted:
            program.row({there: 1.0, part.moved: -1.0}, low=0.0)
            return
        bound = {self._offloaded[part.saver]: 1.0} if part.is_of_several else {}
        free = float(part.is_of_several)
        program.row({there: 1.0, is_there: -1.0} | bound, high=free)
        program.row(
            {there: 1.0, part.moved: -1.0, is_there: -1.0} | {variable: -factor for variable, factor in bound.items()},
            low=-1.0 - free,
        )
