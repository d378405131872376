"""The memory plan as a linear program: choices of stages, bytes of ranks, copies and time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from gems.memory.case import MemoryCase
from gems.memory.optimizer.milp import LinearSum, Program
from gems.memory.optimizer.stage import StageBlock, owner_of
from gems.memory.plan import Choice, MemoryPlan, Segment
from gems.memory.storages import Storage, profile_storages
from gems.memory.timeline import Point
from gems.schedule.action import COMPUTE_KINDS, SEND_KINDS, Action, Kind
from gems.schedule.dependencies import dependencies

Weights = tuple[dict[Segment, float], ...]  # of each option, by stage


class PlanModel:
    """The linear program that minimizes the step time under a limit of bytes for every rank.

    Copies are fluid: any part of a micro-batch's moved bytes may leave after the layer that saves
    it, and return before it is needed. The bytes that leave or return during an action are at most
    the rate times its length (the prefix-bandwidth constraints). Real copies, which move one
    segment after the other, cannot do better, so the optimum is a lower bound for all plans of
    these segments. With `is_whole_copies`, a segment occupies its bytes on the device until it has
    left completely, and again from the posting of its copy back; this is exact if a rank has one
    micro-batch. The arrival times of data from other ranks are constraints, too.
    """

    def __init__(
        self,
        case: MemoryCase,
        limit_bytes: int,
        moves_all: bool = True,
        is_whole_copies: bool = False,
    ) -> None:
        self.case = case
        self.limit_bytes = limit_bytes
        self.moves_all = moves_all
        # the bytes held from I to W depend on segments and are not counted
        whole = tuple(
            tuple(
                action._replace(kind=Kind.B) if action.kind is Kind.I else action
                for action in actions
                if action.kind is not Kind.W
            )
            for actions in case.schedule.rank_schedules
        )
        layer_plan = MemoryPlan.by_layer("keep", case.boundaries, {})
        outcome = replace(case, schedule=replace(case.schedule, rank_schedules=whole)).outcome(
            layer_plan
        )
        self.program = Program(max(limit_bytes, 1), max(outcome.step_s, 1e-12))
        self.blocks = []
        for stage, (first, end) in enumerate(pairwise(case.boundaries)):
            directions = range(case.schedule.num_directions)
            is_movable = any(
                case.schedule.placement.is_received(direction, stage) for direction in directions
            )
            given_bytes = case.profile.given_bytes(first) if is_movable else 0
            self.blocks.append(
                StageBlock(self.program, case.profile, first, end, case.least_bytes, given_bytes)
            )
        self.copies = [
            _WholeCopies(self.program, block) for block in self.blocks if is_whole_copies
        ]
        self.ended: dict[Action, int] = {}
        self.starts: list[tuple[Action, int, float]] = []
        self.span = self.program.variable()
        for rank in range(case.schedule.num_ranks):
            _RankRows(self, rank, outcome.ranks[rank].points)
        for action, ended, time in self.starts:
            for need in dependencies(action, case.schedule):
                if need.stage != action.stage:
                    low = self._delay_s(need, action) * self.program.per_s + time
                    self.program.constrain({ended: 1.0, self.ended[need]: -1.0}, low=low)

    def solve(
        self, is_whole: bool, node_limit: int = 0, gap: float = 0.0, copy_share: float = 0.0
    ) -> tuple[Weights, float] | None:
        """Return the weights of the options, if found in time, and a lower bound in seconds.

        Return None if no plan can keep the limit. With `copy_share`, a share of each copy's time is
        added to the objective, more for data that is needed sooner. Among plans of equal time, this
        prefers fewer copies and those with the farthest next use; the bound is then invalid.
        """
        self.program.cost = LinearSum({self.span: 1.0})
        for block in self.blocks if copy_share else ():
            for option, at in block.at.items():
                moved = block.copied_bytes(option)
                if moved:
                    nearness = (option.first - block.first) / (block.end - block.first)
                    copy_s = moved / self.case.d2h_bytes_per_s + moved / self.case.h2d_bytes_per_s
                    self.program.cost[at] = (
                        copy_share * (1.0 + nearness) * (copy_s * self.program.per_s)
                    )
        solution = self.program.solve(is_whole, node_limit, gap)
        if solution is None:
            return None
        values = () if solution.values is None else solution.values
        weights = tuple(
            {option: float(values[at]) for option, at in block.at.items() if values[at] > 1e-6}
            for block in (self.blocks if len(values) else ())
        )
        return weights, max(0.0, solution.bound / self.program.per_s)

    def _delay_s(self, need: Action, action: Action) -> float:
        """Return the seconds of the transfer that an action needs from another stage."""
        here = self.case.schedule.rank_of(need)
        there = self.case.schedule.rank_of(action)
        layer = self.case.profile.layers[self.case.boundaries[max(need.stage, action.stage)] - 1]
        return 0.0 if here == there else self.case.network.delay(here, there, layer.output_bytes)


class _RankRows:
    """The writer of the constraints of one rank, along its schedule, layer by layer.

    For the running action, `out` and `back` are the bytes that leave and return, `lasts` and
    `lasted` its length so far (variables, and a number), `resident` the bytes of other
    micro-batches, and `kept` the same if every layer is kept.
    """

    def __init__(self, model: PlanModel, rank: int, points: Sequence[Point]) -> None:
        self.model = model
        self.program = model.program
        self.case = model.case
        self.during = {point.action: point.during_bytes for point in points}
        self.before = {after.action: point.device_bytes for point, after in pairwise(points)}
        self.messages = _spared_messages(points)
        scale = self.program.per_byte, self.program.per_s
        self.out_rate, self.in_rate = (
            rate * scale[0] / scale[1]
            for rate in (self.case.d2h_bytes_per_s, self.case.h2d_bytes_per_s)
        )
        self.clock = LinearSum()
        self.on_host: dict[tuple[int, int | None, int], LinearSum] = {}
        self.left_of: dict[tuple[int, int | None, int], LinearSum] = {}
        for action in self.case.schedule.rank_schedules[rank]:
            self._act(action)
        self.program.constrain(LinearSum({self.model.span: 1.0}) - self.clock, low=0.0)

    def _act(self, action: Action) -> None:
        """Add the constraints of a whole-stage action, with the copies of all micro-batches."""
        program = self.program
        block = self.model.blocks[action.stage]
        own_key = (action.stage, action.micro_batch, action.direction)
        self.out, self.back, self.lasts, self.resident = (
            LinearSum(),
            LinearSum(),
            LinearSum(),
            LinearSum(),
        )
        self.lasted, self.kept = 0.0, list[float]()
        now_on_host = {key: host for key, host in self.on_host.items() if key != own_key}
        for key, host in list(now_on_host.items()):
            leaving = program.variable()
            arriving = program.variable()
            after = program.variable()
            other = self.model.blocks[key[0]]
            moved = other.moved_before(other.end, True)
            kept_bytes = other.forward_bytes(other.end)
            program.constrain(
                LinearSum({after: 1.0, leaving: -1.0, arriving: 1.0}) - host, low=0.0, high=0.0
            )
            program.constrain(LinearSum({after: 1.0}) - moved, high=0.0)
            self.resident += moved - host
            self.resident += {leaving: -1.0}
            self.resident += kept_bytes
            self.kept.append(other.worth_kept(kept_bytes))
            self.out[leaving], self.back[arriving] = 1.0, 1.0
            self.left_of[key][leaving] = 1.0
            now_on_host[key] = LinearSum({after: 1.0})
        self.left_of.setdefault(own_key, LinearSum())
        layers = range(block.first, block.end)
        if action.kind is Kind.W:
            total = sum(self.case.profile.layers[layer].weight_grad_s for layer in layers)
            self._advance(LinearSum(), total * program.per_s)
        else:
            is_forward = action.kind is Kind.F
            now = LinearSum() if is_forward else self.on_host[own_key]
            for layer in layers if is_forward else reversed(layers):
                now = self._layer(action, layer, now)
            now_on_host[own_key] = now
            if not is_forward:
                del now_on_host[own_key]
                if self.model.moves_all:
                    program.constrain(
                        self.left_of[own_key] - block.moved_before(block.end, is_forward=True),
                        low=0.0,
                    )
        for flows, rate in ((self.out, self.out_rate), (self.back, self.in_rate)):
            if flows:
                program.constrain(flows | self.lasts * -rate, high=rate * self.lasted)
        self.on_host = now_on_host
        self.model.ended[action] = next(iter(self.clock))

    def _advance(self, more: LinearSum, time: float) -> int:
        """Advance the clock by a wait and the length of an action; return the wait."""
        wait = self.program.variable()
        ended = self.program.variable()
        self.program.constrain(
            LinearSum({ended: 1.0, wait: -1.0}) - self.clock - more, low=time, high=time
        )
        self.clock = LinearSum({ended: 1.0})
        self.lasts += {wait: 1.0} | more
        self.lasted += time
        return wait

    def _layer(self, action: Action, layer: int, host: LinearSum) -> LinearSum:
        """Add the constraints of a layer of an action; return the bytes on the host after it."""
        program = self.program
        block = self.model.blocks[action.stage]
        profile = self.case.profile.layers[layer]
        is_forward = action.kind is Kind.F
        seconds = profile.forward_s
        again = LinearSum()
        if not is_forward:
            seconds = profile.input_grad_s + (
                profile.weight_grad_s if action.kind is Kind.B else 0.0
            )
            again = block.again_s(layer)
        time = seconds * program.per_s
        wait = self._advance(again, time)
        if layer == (block.first if is_forward else block.end - 1):
            self.model.starts.append((action, next(iter(self.clock)), time))
        waited_out, waited_back, leaving, arriving, begin, after = (
            program.variable() for _ in range(6)
        )
        program.constrain({waited_out: 1.0, wait: -self.out_rate}, high=0.0)
        program.constrain({waited_back: 1.0, wait: -self.in_rate}, high=0.0)
        program.constrain(
            LinearSum({leaving: 1.0}) + again * -self.out_rate, high=self.out_rate * time
        )
        program.constrain(
            LinearSum({arriving: 1.0}) + again * -self.in_rate, high=self.in_rate * time
        )
        program.constrain(
            LinearSum({begin: 1.0, waited_out: -1.0, waited_back: 1.0}) - host, low=0.0, high=0.0
        )
        program.constrain(
            {after: 1.0, begin: -1.0, leaving: -1.0, arriving: 1.0}, low=0.0, high=0.0
        )
        self.out |= {waited_out: 1.0, leaving: 1.0}
        self.left_of[action.stage, action.micro_batch, action.direction] |= {
            waited_out: 1.0,
            leaving: 1.0,
        }
        self.back |= {waited_back: 1.0, arriving: 1.0}
        before = posted = block.moved_before(layer, is_forward)
        if is_forward:  # what earlier layers have saved
            posted = block.before(layer, block.moved_own, block.moved_saved)
        program.constrain(LinearSum({begin: 1.0}) - posted, high=0.0)
        program.constrain(LinearSum({after: 1.0}) - posted, high=0.0)
        coming = LinearSum({arriving: 1.0})
        under_way = before | {begin: -1.0}
        if self.model.copies:
            under_way = self.model.copies[action.stage].on_device(layer, is_forward, (begin, after))
            coming = LinearSum()
        self._limit_layer(action, layer, under_way, coming)
        return LinearSum({after: 1.0})

    def _limit_layer(
        self, action: Action, layer: int, under_way: dict[int, float], coming: LinearSum
    ) -> None:
        """Limit the bytes that a rank holds while a layer of an action runs.

        `under_way` has the moved bytes that are on the device, `coming` those that arrive.
        """
        block = self.model.blocks[action.stage]
        profile = self.case.profile.layers[layer]
        is_forward = action.kind is Kind.F
        held_bytes = block.forward_bytes(layer) if is_forward else block.backward_bytes(layer)
        kind = Kind.B if action.kind is Kind.I else action.kind
        part = action._replace(kind=kind, segment=layer - self.case.boundaries[action.stage])
        # the most that an action may save over keeping each layer as a segment of its own
        spared = self.messages[part]
        if action.kind is Kind.B:
            spans = profile_storages(self.case.profile).spans
            at = (layer, layer + 1)
            spared += max(
                0, int(spans.backward_peak[at] - (spans.stash[at] + profile.backward_peak_bytes))
            )
        self._limit(block, held_bytes, held_bytes + under_way + coming, self.during[part] - spared)
        if not is_forward:
            # bytes of a recompute that ends with a layer, before the layer's backward
            held_bytes = block.again_bytes(layer)
            self._limit(
                block,
                held_bytes,
                held_bytes + under_way,
                self.before[part] - block.saved_bytes[layer],
            )

    def _limit(
        self, block: StageBlock, held_bytes: LinearSum, terms: LinearSum, kept_bytes: int
    ) -> None:
        """Limit an action's bytes: those of the timeline with everything kept, plus the change."""
        margin = sum([block.worth_kept(held_bytes), *self.kept])
        limit = self.model.limit_bytes * self.program.per_byte
        self.program.constrain(
            terms + self.resident, high=limit - kept_bytes * self.program.per_byte + margin
        )


def _spared_messages(points: Sequence[Point]) -> dict[Action, int]:
    """Return, for each action, the bytes of messages that a recompute before a backward avoids.

    With a recompute, a receive of that backward is posted an action later, and earlier sends have
    completed.
    """
    spared_bytes: dict[Action, int] = {}
    sent = before = 0
    received: list[tuple[Action, int]] = []
    for point in points:
        action = point.action
        more = point.device_bytes - before
        before = point.device_bytes
        if action.kind in SEND_KINDS:
            sent += more
        elif action.kind is Kind.RECV_B:
            received.append((action, more))
        elif action.kind in COMPUTE_KINDS:
            is_backward = action.kind in (Kind.B, Kind.I)
            spared_bytes[action] = sent * is_backward + sum(
                size for receive, size in received if not is_backward or receive[1:4] != action[1:4]
            )
            sent = 0
            received = []
    return spared_bytes


class _WholeCopies:
    """The constraints that an offloaded segment is on the device completely or not at all.

    It is gone once the host has all of it, and back from the posting of the copy back. `_parts`
    has, by the layer that needs them last, the bytes that leave together: their number, the
    variable of their leaving, the layer that makes them, whether an earlier layer saved them, too
    (they leave with that layer if this one is not offloaded), and the storage if several layers see
    it. A storage that leaves as an input of a recomputed segment may do so at any time.
    """

    def __init__(self, program: Program, block: StageBlock) -> None:
        self.program = program
        self.block = block
        self._offloaded: dict[int, int] = {}
        self._parts: dict[int, list[tuple[int, int, int, bool, Storage | None]]] = {}
        for layer, options in block.covering.items():
            at = next(block.at[option] for option in options if option.choice is Choice.OFFLOAD)
            size = block.own_movable_bytes(layer)
            self._offloaded[layer], self._parts[layer] = (
                at,
                ([(size, at, layer, False, None)] if size else []),
            )
        for storage, moved in block.moved.items():
            self._parts[owner_of(storage)].append(
                (storage.total_bytes, moved, storage.maker, len(storage.savers) > 1, storage)
            )

    def on_device(self, layer: int, is_forward: bool, hosts: tuple[int, int]) -> LinearSum:
        """Return the bytes of earlier layers' copies on the device during an action of a layer.

        `hosts` are the variables of the bytes on the host at the begin and the end of the action.
        """
        program = self.program
        on_device_bytes = LinearSum()
        away = LinearSum()
        for saver, parts in self._parts.items():
            here = [part for part in parts if part[2] < layer and (is_forward or saver < layer)]
            is_there = program.variable(1.0, is_whole=True) if here else 0
            for num_bytes, moved, _, is_of_several, storage in here:
                size = program.per_byte * num_bytes
                there = program.variable(1.0)
                takers = [] if storage is None else self.block.takers[storage]
                taken = LinearSum((self.block.at[option], 1.0) for option in takers)
                leaving = LinearSum({moved: 1.0})
                if storage is not None and not is_forward:
                    leaving -= self.block.returned(storage, layer)
                # on the device as its segment is, if it leaves at all and with that segment
                leaves = LinearSum({there: 1.0}) - leaving
                program.constrain(leaves, high=0.0)
                is_early = (
                    is_forward and saver >= layer and all(option.end > saver for option in takers)
                )
                if is_early and not is_of_several:
                    program.constrain(leaves, low=0.0)
                else:
                    bound = LinearSum({self._offloaded[saver]: 1.0} if is_of_several else {})
                    program.constrain(
                        LinearSum({there: 1.0, is_there: -1.0}) + bound - taken,
                        high=float(is_of_several),
                    )
                    program.constrain(
                        leaves + {is_there: -1.0} - bound + taken, low=-1.0 - is_of_several
                    )
                on_device_bytes[there] = size
                away += leaves * -size
        for host in hosts:
            program.constrain(LinearSum({host: 1.0}) - away, low=0.0)
        return on_device_bytes
