"""Costs of a micro-batch: times and activation sizes of each stage, and links between ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache
from itertools import pairwise
from math import ceil
from typing import Any

from gems.schedule.action import COMPUTE_KINDS, RECV_KINDS, SEND_KINDS, Action, Kind
from gems.schedule.placement import Placement

_B = Kind.B
_I = Kind.I


@dataclass(frozen=True, slots=True)
class SegmentCosts:
    """The costs of one micro-batch on one segment of a stage, in the units of `StageCosts`.

    `activation` is the size that its forward keeps (or its second run, if it is recomputed).
    `boundary` is the size that the first run of a recomputed segment keeps. `moved` is the size
    that its copy to host memory carries, and `copy_out` and `copy_in` are the times of the two
    copies. `split` is the extra time of the input gradient if the weight gradient is computed
    separately.
    """

    forward: float
    input_grad: float
    weight_grad: float
    activation: float
    recompute: float = 0.0
    held_for_weights: float = 0.0
    boundary: float = 0.0
    moved: float = 0.0
    copy_out: float = 0.0
    copy_in: float = 0.0
    split: float = 0.0

    def time(self, kind: Kind) -> float:
        """Return the time of an action on its rank or copy engine."""
        if kind is _B:
            return self.input_grad + self.weight_grad
        if kind is _I:
            return self.input_grad + self.split
        return float(getattr(self, _SEGMENT_FIELDS[kind])) if kind in _SEGMENT_FIELDS else 0.0


_SEGMENT_FIELDS = {
    Kind.F: "forward",
    Kind.W: "weight_grad",
    Kind.R: "recompute",
    Kind.OFFLOAD: "copy_out",
    Kind.PREFETCH: "copy_in",
}
_FIELDS = {
    **_SEGMENT_FIELDS,
    Kind.OFFLOAD: "copy",
    Kind.PREFETCH: "copy",
    Kind.START_REDUCE: "reduce",
    Kind.STEP: "step",
}


# the fields of `StageCosts` that each stage has: in units of time, in units of size, and in bytes
STAGE_TIMES = ("forward", "input_grad", "weight_grad", "recompute", "copy", "split")
STAGE_SIZES = ("activation", "movable", "held_for_weights", "boundary")
STAGE_BYTES = ("boundary_bytes", "param_bytes")
STRIP_LOADS = "strip_loads"
_ZERO = ("copy", "boundary", "boundary_bytes", "reduce", "reduce_link", "step", "split")


@dataclass(frozen=True, slots=True)
class StageCosts:
    """The costs of one micro-batch on each of S stages.

    Times share one arbitrary unit, and sizes another; each tuple has S entries. `activation` is the
    size that forward keeps, and `held_for_weights` the part of it that remains between I and W.
    `boundary_bytes[s]` is the message from stage s to stage s + 1 (and the gradient that comes
    back). `movable` is the part of `activation` that a copy to host memory carries, and `copy` its
    time in one direction. `boundary` is the part that a recomputed stage keeps. A whole backward
    takes `input_grad` + `weight_grad`; if the two are separate, the input gradient takes `split`
    more. `reduce` is the time to sum the gradients of a stage (in two directions, of both stages of
    a rank, stored at the lower one). `reduce_link` is the part of that time in which the links
    between nodes are full. `step` is the time of the optimizer step, stored at the lowest stage of
    the rank. `param_bytes` are the bytes of a stage's parameters, empty if unknown. `segments` has
    the parts of each stage that runs in segments. If strips differ, `strip_loads` has, for each
    stage, the time of each strip relative to the mean.
    """

    forward: tuple[float, ...]
    input_grad: tuple[float, ...]
    weight_grad: tuple[float, ...]
    activation: tuple[float, ...]
    recompute: tuple[float, ...] = ()
    copy: tuple[float, ...] = ()
    movable: tuple[float, ...] = ()
    held_for_weights: tuple[float, ...] = ()
    boundary: tuple[float, ...] = ()
    boundary_bytes: tuple[float, ...] = ()
    reduce: tuple[float, ...] = ()
    reduce_link: tuple[float, ...] = ()
    step: tuple[float, ...] = ()
    split: tuple[float, ...] = ()
    segments: tuple[tuple[SegmentCosts, ...], ...] = ()
    strip_loads: tuple[tuple[float, ...], ...] = ()
    param_bytes: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        defaults = dict.fromkeys(_ZERO, (0.0,) * len(self.forward)) | {
            "recompute": self.forward,
            "movable": self.activation,
            "held_for_weights": self.activation,
        }
        for name, default in defaults.items():
            if not getattr(self, name):
                object.__setattr__(self, name, default)

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> StageCosts:
        """Read costs from lists of numbers keyed by field name.

        Segments are mappings, and strip loads are lists by stage.
        """
        values_by_name: dict[str, Any] = {
            name: tuple(map(float, values))
            for name, values in document.items()
            if name not in ("segments", STRIP_LOADS)
        }
        segments = tuple(
            tuple(SegmentCosts(**entry) for entry in stage)
            for stage in document.get("segments", ())
        )
        loads = tuple(tuple(map(float, of_stage)) for of_stage in document.get(STRIP_LOADS, ()))
        return cls(**values_by_name, segments=segments, strip_loads=loads)

    @property
    def num_stages(self) -> int:
        """Number of stages."""
        return len(self.forward)

    @property
    def split_input_grad(self) -> tuple[float, ...]:
        """Time of an input gradient whose weight gradient is computed separately, by stage."""
        return tuple(map(sum, zip(self.input_grad, self.split, strict=True)))

    def in_units(self, time: float, size: float) -> StageCosts:
        """Return these costs in larger units of time and size, each given in the present unit."""
        times = (*STAGE_TIMES, "reduce", "reduce_link", "step")
        units = dict.fromkeys(times, time) | dict.fromkeys(STAGE_SIZES, size)
        parts = {
            name: tuple(value / unit for value in getattr(self, name))
            for name, unit in units.items()
        }
        return replace(self, **parts)

    def in_segments(self, counts: Sequence[int]) -> StageCosts:
        """Return these costs with each stage split into the given number of equal segments."""
        return replace(
            self,
            segments=tuple(
                (self._part(stage, count),) * count for stage, count in enumerate(counts)
            ),
        )

    def _part(self, stage: int, count: int) -> SegmentCosts:
        names = (
            "forward",
            "input_grad",
            "weight_grad",
            "activation",
            "recompute",
            "held_for_weights",
            "split",
        )
        parts = {name: getattr(self, name)[stage] / count for name in names}
        copy = self.copy[stage] / count
        return SegmentCosts(
            **parts, moved=self.activation[stage] / count, copy_out=copy, copy_in=copy
        )

    def time(self, action: Action) -> float:
        """Return the time of an action on its rank or copy engine; transfers take none here."""
        if self.strip_loads and action.kind in COMPUTE_KINDS and action.micro_batch is not None:
            loads = self.strip_loads[action.stage]
            return loads[action.micro_batch % len(loads)] * self._mean_time(action)
        return self._mean_time(action)

    def _mean_time(self, action: Action) -> float:
        kind, stage, _, _, segment = action
        if segment is not None:
            is_transfer = kind in SEND_KINDS or kind in RECV_KINDS
            return 0.0 if is_transfer else self.segments[stage][segment].time(kind)
        if kind is _B:
            return self.input_grad[stage] + self.weight_grad[stage]
        if kind is _I:
            return self.input_grad[stage] + self.split[stage]
        name = _FIELDS.get(kind)
        return 0.0 if name is None else float(getattr(self, name)[stage])

    def held(self, what: str, action: Action) -> float:
        """Return the size called `what` of an action's stage or segment."""
        _, stage, _, _, segment = action
        if segment is not None:
            return float(getattr(self.segments[stage][segment], what))
        return float(getattr(self, what)[stage])

    def moved(self, action: Action) -> float:
        """Return the size that a copy carries."""
        return self.held("movable" if action.segment is None else "moved", action)


@dataclass(frozen=True, slots=True)
class Network:
    """The cost of messages between ranks: `latency` + bytes x `per_byte`.

    Other values can be given for messages within a node. If messages are copied on their way,
    `copies` has the time per byte of each copy. Such messages travel in pieces of `piece_bytes`:
    the slowest of the link and the copies sets the pace, and the first piece passes through all of
    them one after the other.

    With `has_contention`, a rank's outgoing messages pass one at a time, and so do its incoming
    ones. Between nodes this holds for all messages out of a node and for all messages into it,
    together with the all-reduces of its ranks. `first_rank` is the world rank of the pipeline's
    rank 0, which determines how its ranks are distributed over the nodes.
    """

    latency: float = 0.0
    per_byte: float = 0.0
    ranks_per_node: int | None = None
    node_latency: float = 0.0
    node_per_byte: float = 0.0
    has_contention: bool = False
    first_rank: int = 0
    copies: tuple[float, ...] = ()
    piece_bytes: float = 0.0

    def in_units(self, time: float) -> Network:
        """Return these links in a larger unit of time, given in the present unit."""
        names = ("latency", "per_byte", "node_latency", "node_per_byte")
        parts: dict[str, Any] = {name: getattr(self, name) / time for name in names}
        return replace(self, **parts, copies=tuple(copy / time for copy in self.copies))

    def node_of(self, rank: int) -> int:
        """Return the node of a rank of the pipeline.

        If `ranks_per_node` is not given, each rank has a node of its own.
        """
        return (self.first_rank + rank) // (self.ranks_per_node or 1)

    def parts(self, sender: int, receiver: int, num_bytes: float) -> tuple[float, float]:
        """Return latency and transmission time of a message from one rank to another."""
        latency = self.latency
        per_byte = self.per_byte
        if self.ranks_per_node and self.node_of(sender) == self.node_of(receiver):
            latency = self.node_latency
            per_byte = self.node_per_byte
        if self.copies:
            slowest = max(per_byte, *self.copies)
            first = min(num_bytes, self.piece_bytes)
            latency += (
                first * (per_byte + sum(self.copies))
                + (num_bytes - first) * slowest
                - num_bytes * per_byte
            )
        return latency, num_bytes * per_byte

    def lanes(self, sender: int, receiver: int) -> tuple[int, int]:
        """Return the outgoing and the incoming lane for which a message competes.

        Within a node these are the two ranks. Between nodes they are shared by all ranks of a node.
        """
        if self.ranks_per_node and self.node_of(sender) == self.node_of(receiver):
            return sender, receiver
        return self.outer_lane(sender), self.outer_lane(receiver)

    def outer_lane(self, rank: int) -> int:
        """Return the lane from a rank to other nodes.

        It is -1 - node, or the rank itself if nodes are not distinguished.
        """
        return -1 - self.node_of(rank) if self.ranks_per_node else rank

    def delay(self, sender: int, receiver: int, num_bytes: float) -> float:
        """Return the time from posting to arrival, without contention."""
        latency, transmission = self.parts(sender, receiver, num_bytes)
        return latency + transmission

    def hops(self, ranks: Sequence[int], sizes: Sequence[float]) -> list[float]:
        """Return the time from each stage to the next one, given their ranks and message sizes."""
        return [
            0.0 if here == there else self.delay(here, there, size)
            for (here, there), size in zip(pairwise(ranks), sizes, strict=False)
        ]

    def takes_time(self, sizes: Sequence[float]) -> bool:
        """Return whether a message of any of these sizes, in bytes, takes time on any link."""
        per_byte = self.per_byte or self.node_per_byte or any(self.copies)
        return bool(self.latency or self.node_latency or (per_byte and any(sizes)))


FREE = Network()


@dataclass(frozen=True, slots=True)
class DepthCosts:
    """The costs of a whole model over its depth, which can be cut into any number of equal stages.

    `forward`, `input_grad`, `weight_grad`, `recompute` and `copy` are the times of one of
    `num_ranks` equal parts of the model, so a stage of S = 2P costs half. `times` and `activations`
    weigh equal pieces of the depth against each other, from the first layer to the last. Times are
    scaled to a mean of 1; activations are scaled so that the largest of P stages holds 1 unit (the
    unit of a cap). `given` are the costs of one cut, used for placements with that number of
    stages.
    """

    num_ranks: int
    forward: float = 1.0
    input_grad: float = 1.0
    weight_grad: float = 1.0
    recompute: float | None = None
    copy: float = 0.0
    boundary: float = 0.0
    boundary_bytes: float = 0.0
    times: tuple[float, ...] = (1.0,)
    activations: tuple[float, ...] = (1.0,)
    given: StageCosts | None = None

    def of(self, placement: Placement) -> StageCosts:
        """Return the costs of the stages of a placement."""
        if self.given is not None and self.given.num_stages == placement.num_stages:
            return self.given
        return _stages(self, placement.num_stages)

    def stages(self, num_stages: int) -> StageCosts:
        """Return the costs of the model cut into `num_stages` stages of equal depth.

        `boundary` and `boundary_bytes` describe one tensor between stages, at any cut.
        """
        share = self.num_ranks * len(self.times) / sum(map(Fraction, self.times))
        times = [share * part for part in _cut(self.times, num_stages)]
        largest = max(_cut(self.activations, self.num_ranks))
        sizes = tuple(float(part / largest) for part in _cut(self.activations, num_stages))

        def scaled(cost: float) -> tuple[float, ...]:
            return tuple(float(Fraction(cost) * time) for time in times)

        recompute = self.forward if self.recompute is None else self.recompute
        return StageCosts(
            forward=scaled(self.forward),
            input_grad=scaled(self.input_grad),
            weight_grad=scaled(self.weight_grad),
            activation=sizes,
            recompute=scaled(recompute),
            copy=tuple(self.copy * size for size in sizes),
            boundary=(self.boundary,) * num_stages,
            boundary_bytes=(self.boundary_bytes,) * num_stages,
        )


@lru_cache(maxsize=32)
def _stages(costs: DepthCosts, num_stages: int) -> StageCosts:
    return costs.stages(num_stages)


def _cut(density: Sequence[float], num_stages: int) -> list[Fraction]:
    """Integrate a step function over [0, 1], given as equal pieces, over equal parts, exactly."""
    pieces = len(density)
    parts = []
    for stage in range(num_stages):
        low = Fraction(stage * pieces, num_stages)
        high = Fraction((stage + 1) * pieces, num_stages)
        first = int(low)
        last = min(pieces, ceil(high))
        overlaps = (
            (density[i], min(high, Fraction(i + 1)) - max(low, Fraction(i)))
            for i in range(first, last)
        )
        parts.append(
            sum((Fraction(value) * width for value, width in overlaps), Fraction()) / pieces
        )
    return parts


def uniform(
    num_ranks: int,
    num_stages: int,
    forward: float = 1.0,
    input_grad: float = 1.0,
    weight_grad: float = 1.0,
) -> StageCosts:
    """Return equal costs for every stage.

    Times are those of a rank's whole work; activations are 1 for a rank's part of the model.
    """
    return DepthCosts(num_ranks, forward, input_grad, weight_grad).stages(num_stages)
