"""The plan as a linear program: choices of all stages, bytes of all ranks, their links and the step's time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from gems.memory.case import MemoryCase
from gems.memory.optimizer.milp import Program, Solution, Terms
from gems.memory.optimizer.stage import SegmentOption, StageBlock, stage_layers
from gems.memory.plan import Choice, MemoryPlan
from gems.memory.stage_storages import profile_storages
from gems.memory.timeline import Point
from gems.schedule.action import COMPUTE_KINDS, SEND_KINDS, Action, Kind
from gems.schedule.dependencies import dependencies
from gems.schedule.schedule import Schedule

BACKWARD = (Kind.B, Kind.I)


@dataclass(frozen=True, slots=True)
class Relaxed:
    """A solution: the weight of each option of each stage, and a proven bound below every plan's step, seconds."""

    weights: tuple[dict[SegmentOption, float], ...]
    bound_s: float
    is_whole: bool


class PlanModel:
    """The linear program that minimises the step's time under a limit of bytes for every rank.

    Copies are a fluid: of a micro-batch's moved bytes any part may leave once the layer that saves it has run, and come
    back before it is needed, and what leaves or comes during an action is at most the rate times the action's length
    (the prefix-bandwidth constraints). So real copies, which move one segment after the other, can do no better, and
    the least time of the MILP bounds that of every plan of these segments. With `is_whole_copies` a segment takes its
    bytes on the device until all of it has left and from when its copy back is posted, which is as it is where a rank
    has one micro-batch. Arrival times of data from other ranks are constraints too.
    """

    def __init__(
        self, case: MemoryCase, limit_bytes: int, moves_all: bool = True, is_whole_copies: bool = False
    ) -> None:
        self.case, self.limit_bytes, self.moves_all = case, limit_bytes, moves_all
        layer_plan = MemoryPlan.by_layer("keep", case.boundaries, {})
        kept = replace(case, schedule=with_whole_backward(case.schedule)).outcome(layer_plan)
        self.spans = profile_storages(case.profile).spans
        self.program = Program(max(limit_bytes, 1), max(kept.step_s, 1e-12))
        self.blocks = [
            StageBlock(self.program, stage_layers(case.profile, first, end, case.least_bytes))
            for first, end in pairwise(case.boundaries)
        ]
        self.copies = [WholeCopies(self.program, block) for block in self.blocks if is_whole_copies]
        self.ended: dict[Action, int] = {}
        self.starts: list[tuple[Action, int, float]] = []
        self.span = self.program.variable()
        for rank in range(case.schedule.num_ranks):
            _RankRows(self, rank, kept.ranks[rank].points).write()
        self._write_dependencies()

    def solve(self, is_whole: bool, node_limit: int = 0, gap: float = 0.0, copy_share: float = 0.0) -> Relaxed | None:
        """Solve it; None if no plan can keep the limit.

        With `copy_share` a part of each copy's time counts as if it were exposed, more for what is needed sooner: of
        plans that take the same time, those with fewer copies and the farthest next use come first. The bound is then
        none.
        """
        self.program.minimise({self.span: 1.0} | (self._copies(copy_share) if copy_share else {}))
        found = self.program.solve(is_whole, node_limit, gap)
        return None if found is None else self._read(found, is_whole)

    def _copies(self, share: float) -> Terms:
        costs: Terms = {}
        for block in self.blocks:
            stage = block.stage
            for option, at in block.at.items():
                if option.choice is Choice.OFFLOAD:
                    moved = sum(each.total_bytes for each in stage.storages if option.first in each.savers[-1:])
                    nearness = (option.first - stage.first) / (stage.end - stage.first)
                    copy_s = moved / self.case.d2h_bytes_per_s + moved / self.case.h2d_bytes_per_s
                    costs[at] = share * (1.0 + nearness) * self.program.scaled_s(copy_s)
        return costs

    def _read(self, found: Solution, is_whole: bool) -> Relaxed:
        values = found.values
        weights: tuple[dict[SegmentOption, float], ...] = ()
        if values is not None:
            weights = tuple(
                {option: float(values[at]) for option, at in block.at.items() if values[at] > 1e-6}
                for block in self.blocks
            )
        return Relaxed(weights, max(0.0, self.program.seconds(found.bound)), is_whole)

    def _write_dependencies(self) -> None:
        schedule, network = self.case.schedule, self.case.network
        for action, ended, time in self.starts:
            for need in dependencies(action, schedule):
                if need.stage == action.stage:
                    continue
                delay = 0.0
                here, there = schedule.rank_of(need), schedule.rank_of(action)
                if here != there:
                    layer = self.case.boundaries[max(need.stage, action.stage)] - 1
                    delay = network.delay(here, there, self.case.profile.layers[layer].output_bytes)
                least = self.program.scaled_s(delay) + time
                self.program.row({ended: 1.0, self.ended[need]: -1.0}, low=least)


class _RankRows:
    """The constraints of one rank: along its schedule, layer by layer."""

    def __init__(self, model: PlanModel, rank: int, points: Sequence[Point]) -> None:
        self.model, self.program, self.case = model, model.program, model.case
        self.row = self.case.schedule.rows[rank]
        self.during = {point.action: point.during_bytes for point in points}
        self.before = {after.action: point.device_bytes for point, after in pairwise(points)}
        self.messages = spared_messages(points)
        self.out_rate = self.program.rate(self.case.d2h_bytes_per_s)
        self.in_rate = self.program.rate(self.case.h2d_bytes_per_s)
        self.limit = self.program.scaled_bytes(model.limit_bytes)
        self.clock: Terms = {}
        self.on_host: dict[tuple[int, int | None, int], Terms] = {}
        self.left_of: dict[tuple[int, int | None, int], Terms] = {}

    def write(self) -> None:
        for action in self.row:
            self._act(action)
        self.program.row({self.model.span: 1.0} | _minus(self.clock), low=0.0)

    def _act(self, action: Action) -> None:
        """Add the constraints of a whole-stage action: layers, its micro-batch's copies, and those of others."""
        program, block = self.program, self.model.blocks[action.stage]
        mine = (action.stage, action.micro_batch, action.direction)
        others = {key: host for key, host in self.on_host.items() if key != mine}
        out: Terms = {}
        back: Terms = {}
        now_on_host = dict(others)
        resident: Terms = {}
        for key, host in others.items():
            left, came, after = program.variable(), program.variable(), program.variable()
            moved = self.model.blocks[key[0]].moved_all()
            program.row({after: 1.0, left: -1.0, came: 1.0} | _minus(host), low=0.0, high=0.0)
            program.row({after: 1.0} | _minus(moved), high=0.0)
            _add(resident, moved | _minus(host))
            _add(resident, {left: -1.0})
            _add(resident, self.model.blocks[key[0]].kept_all())
            out[left], back[came] = 1.0, 1.0
            self.left_of[key][left] = 1.0
            now_on_host[key] = {after: 1.0}
        self.left_of.setdefault(mine, {})
        lasts: Terms = {}
        layers = range(block.stage.first, block.stage.end)
        if action.kind is Kind.W:
            total = sum(self.case.profile.layers[layer].weight_grad_s for layer in layers)
            self._advance({}, program.scaled_s(total), lasts)
        elif action.kind is Kind.F:
            now: Terms = {}
            for layer in layers:
                now = self._layer(action, layer, now, resident, out, back, lasts)
            now_on_host[mine] = now
        else:
            now = self.on_host[mine]
            for layer in reversed(layers):
                now = self._layer(action, layer, now, resident, out, back, lasts)
            now_on_host.pop(mine, None)
            if self.model.moves_all:
                program.row(self.left_of[mine] | _minus(block.moved_all()), low=0.0)
        for flows, rate in ((out, self.out_rate), (back, self.in_rate)):
            if flows:
                program.row(
                    dict(flows) | {key: -rate * factor for key, factor in lasts.items() if key >= 0},
                    high=rate * lasts.get(-1, 0.0),
                )
        self.on_host = now_on_host
        self.model.ended[action] = next(iter(self.clock))

    def _advance(self, more: Terms, time: float, lasts: Terms) -> tuple[int, Terms]:
        """Advance the clock by a wait and the length of an action, and add both to the time for copies."""
        wait, ended = self.program.variable(), self.program.variable()
        self.program.row({ended: 1.0, wait: -1.0} | _minus(self.clock) | _minus(more), low=time, high=time)
        self.clock = {ended: 1.0}
        _add(lasts, {wait: 1.0} | more | {-1: time})
        return wait, more

    def _layer(
        self, action: Action, layer: int, host: Terms, resident: Terms, out: Terms, back: Terms, lasts: Terms
    ) -> Terms:
        """Add the constraints of a layer of an action, and return what its micro-batch has on the host after it."""
        program, block = self.program, self.model.blocks[action.stage]
        is_forward = action.kind is Kind.F
        profile = self.case.profile.layers[layer]
        if is_forward:
            time, again = profile.forward_s, {}
        else:
            time = profile.input_grad_s + (profile.weight_grad_s if action.kind is Kind.B else 0.0)
            again = block.again_s(layer)
        is_first = layer == (block.stage.first if is_forward else block.stage.end - 1)
        time = program.scaled_s(time)
        wait, _ = self._advance(again, time, lasts)
        if is_first:
            self.model.starts.append((action, next(iter(self.clock)), time))
        waited_out, waited_back, left, came = (program.variable() for _ in range(4))
        begin, after = program.variable(), program.variable()
        program.row({waited_out: 1.0, wait: -self.out_rate}, high=0.0)
        program.row({waited_back: 1.0, wait: -self.in_rate}, high=0.0)
        program.row({left: 1.0} | _times(again, -self.out_rate), high=self.out_rate * time)
        program.row({came: 1.0} | _times(again, -self.in_rate), high=self.in_rate * time)
        program.row({begin: 1.0, waited_out: -1.0, waited_back: 1.0} | _minus(host), low=0.0, high=0.0)
        program.row({after: 1.0, begin: -1.0, left: -1.0, came: 1.0}, low=0.0, high=0.0)
        out.update({waited_out: 1.0, left: 1.0})
        self.left_of[action.stage, action.micro_batch, action.direction].update({waited_out: 1.0, left: 1.0})
        back.update({waited_back: 1.0, came: 1.0})
        before = block.moved_before(layer, is_forward)
        posted = block.posted_before(layer) if is_forward else before
        program.row({begin: 1.0} | _minus(posted), high=0.0)
        program.row({after: 1.0} | _minus(posted), high=0.0)
        held = block.forward_bytes(layer) if is_forward else block.backward_bytes(layer)
        kept = sum(b.worth_kept(terms) for b, terms in self._kept_terms(action, held))
        under_way: Terms = before | {begin: -1.0}
        if self.model.copies:
            under_way = self.model.copies[action.stage].on_device(layer, is_forward, (begin, after))
        terms: Terms = dict(held)
        _add(terms, under_way)
        if not self.model.copies:
            _add(terms, {came: 1.0})
        _add(terms, resident)
        during = program.scaled_bytes(self.during[self._part(action, layer)] - self._spared(action, layer))
        program.row(terms, high=self.limit - during + kept)
        if not is_forward:
            self._again(action, layer, under_way, resident)
        return {after: 1.0}

    def _again(self, action: Action, layer: int, under_way: Terms, resident: Terms) -> None:
        """Limit what a recompute needs that ends with a layer, before the layer's backward."""
        block = self.model.blocks[action.stage]
        held = block.again_bytes(layer)
        kept = sum(each.worth_kept(terms) for each, terms in self._kept_terms(action, held))
        terms = dict(held)
        _add(terms, under_way)
        _add(terms, resident)
        before = self.before[self._part(action, layer)] - block.stage.full_bytes[layer]
        self.program.row(terms, high=self.limit - self.program.scaled_bytes(before) + kept)

    def _kept_terms(self, action: Action, held: Terms) -> list[tuple[StageBlock, Terms]]:
        """Return what was counted in the timeline of kept layers, so that only the difference to it counts here."""
        found = [(self.model.blocks[action.stage], held)]
        mine = (action.stage, action.micro_batch, action.direction)
        for key in self.on_host:
            if key != mine:
                block = self.model.blocks[key[0]]
                found.append((block, block.kept_all()))
        return found

    def _spared(self, action: Action, layer: int) -> int:
        """Return by how much an action may need less than if each layer is kept as a segment of its own."""
        messages = self.messages[self._part(action, layer)]
        if action.kind is not Kind.B:
            return messages
        spans = self.model.spans
        alone = spans.backward_peak[layer, layer + 1]
        within = spans.stash[layer, layer + 1] + self.case.profile.layers[layer].backward_peak_bytes
        return messages + max(0, int(alone - within))

    def _part(self, action: Action, layer: int) -> Action:
        kind = Kind.B if action.kind is Kind.I else action.kind
        return action._replace(kind=kind, segment=layer - self.case.boundaries[action.stage])


def _add(terms: Terms, more: Terms) -> None:
    for variable, factor in more.items():
        terms[variable] = terms.get(variable, 0.0) + factor


def _minus(terms: Terms) -> Terms:
    return _times(terms, -1.0)


def _times(terms: Terms, factor: float) -> Terms:
    return {variable: factor * value for variable, value in terms.items()}


def with_whole_backward(schedule: Schedule) -> Schedule:
    """Return a schedule with whole backwards.

    What a split backward keeps from I to W depends on segments and is not counted.
    """
    if all(action.kind is not Kind.W for row in schedule.rows for action in row):
        return schedule
    rows = tuple(
        tuple(
            action._replace(kind=Kind.B) if action.kind is Kind.I else action
            for action in row
            if action.kind is not Kind.W
        )
        for row in schedule.rows
    )
    return replace(schedule, rows=rows)


def spared_messages(points: Sequence[Point]) -> dict[Action, int]:
    """Return for each action the bytes of messages that a recompute before a backward would spare.

    Then a receive of that backward is posted an action later, and what was sent before it is gone by then.
    """
    found: dict[Action, int] = {}
    sent = before = 0
    received: list[tuple[int, int | None, int, int]] = []
    for point in points:
        action, more = point.action, point.device_bytes - before
        before = point.device_bytes
        if action.kind in SEND_KINDS:
            sent += more
        elif action.kind is Kind.RECV_B:
            received.append((action.stage, action.micro_batch, action.direction, more))
        elif action.kind in COMPUTE_KINDS:
            is_backward = action.kind in BACKWARD
            others = [
                size for *place, size in received
                if not is_backward or tuple(place) != (action.stage, action.micro_batch, action.direction)
            ]  # fmt: skip
            found[action] = sum(others) + (sent if is_backward else 0)
            sent, received = 0, []
    return found


@dataclass(frozen=True, slots=True)
class _Part:
    """Bytes that leave together, made by layer `maker` and needed last by layer `saver`.

    `moved` is the variable of their leaving.

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
                block.at[option] for option in block.covering[layer] if option.choice is Choice.OFFLOAD
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
        """Constrain a part to be on the device as its segment is, if it leaves at all and with that segment."""
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
