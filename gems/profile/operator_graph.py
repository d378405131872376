"""The operator graph of a model: the cost of each operator, and the readers of its output."""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from graphlib import CycleError, TopologicalSorter
from typing import Any

from gems.errors import ConfigError

SCHEMA = "gems.operators/1"


@dataclass(frozen=True, slots=True)
class Op:
    """One operator on one micro-batch.

    `backward_s` is its whole backward, on the same device as its forward. The output, of
    `output_bytes`, is sent once to each other device that reads it, and each reader there returns a
    gradient of the same size. `held_bytes` stay on the device from forward to backward; they
    include `state_bytes`, which always stay: parameters, gradients and optimizer state.
    """

    name: str
    forward_s: float
    backward_s: float = 0.0
    output_bytes: int = 0
    held_bytes: int = 0
    state_bytes: int = 0

    @property
    def time_s(self) -> float:
        """Forward and backward in seconds."""
        return self.forward_s + self.backward_s


@dataclass(frozen=True, slots=True)
class OpGraph:
    """An acyclic graph of operators, with edges (predecessor, reader) by number.

    `predecessors[v]` and `successors[v]` are ascending; `order` is the topological order in which
    the lowest ready number comes first.

    Raises:
        ConfigError: an edge is invalid, duplicate or part of a cycle, or a time or size is negative
            or not finite.
    """

    ops: tuple[Op, ...]
    edges: tuple[tuple[int, int], ...]
    predecessors: tuple[tuple[int, ...], ...] = field(init=False, repr=False, compare=False)
    successors: tuple[tuple[int, ...], ...] = field(init=False, repr=False, compare=False)
    order: tuple[int, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        num = len(self.ops)
        if not num:
            raise ConfigError("operators", "none", "a graph has at least one operator")
        for op in self.ops:
            for key in ("forward_s", "backward_s", "output_bytes", "held_bytes", "state_bytes"):
                value = getattr(op, key)
                if (
                    isinstance(value, bool)
                    or not isinstance(value, int | float)
                    or not 0 <= value < math.inf
                ):
                    raise ConfigError(f"{op.name}.{key}", value, "must be 0 or more and finite")
        predecessors: list[list[int]] = [[] for _ in self.ops]
        successors: list[list[int]] = [[] for _ in self.ops]
        for source, target in self.edges:
            if not (0 <= source < num and 0 <= target < num):
                raise ConfigError("edges", (source, target), f"operators run from 0 to {num - 1}")
            if target in successors[source]:
                raise ConfigError("edges", (source, target), "stands in the graph twice")
            successors[source].append(target)
            predecessors[target].append(source)
        object.__setattr__(
            self, "predecessors", tuple(tuple(sorted(numbers)) for numbers in predecessors)
        )
        object.__setattr__(
            self, "successors", tuple(tuple(sorted(numbers)) for numbers in successors)
        )
        object.__setattr__(self, "order", self._sorted())

    @property
    def num_ops(self) -> int:
        """Number of operators."""
        return len(self.ops)

    @property
    def time_s(self) -> float:
        """All operators one after the other: a step on one device, in seconds."""
        return math.fsum(op.time_s for op in self.ops)

    @property
    def held_bytes(self) -> int:
        """The bytes that all operators hold together."""
        return sum(op.held_bytes for op in self.ops)

    @property
    def critical_s(self) -> float:
        """The seconds of forward and backward on the longest path, without transfers."""
        return self._longest("forward_s") + self._longest("backward_s")

    def to_json(self) -> dict[str, Any]:
        """Return the dictionary of schema gems.operators/1."""
        return {
            "schema": SCHEMA,
            "ops": [asdict(op) for op in self.ops],
            "edges": [list(edge) for edge in self.edges],
        }

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> OpGraph:
        """Read a document of `to_json`.

        Raises:
            ConfigError: the schema is another one, a field is malformed, or the graph is invalid.
        """
        schema = document.get("schema") if isinstance(document, Mapping) else None
        if schema != SCHEMA:
            raise ConfigError("schema", schema, f"allowed: {SCHEMA}")
        names = {entry.name for entry in fields(Op)}
        try:
            ops = tuple(Op(**{key: op[key] for key in names & op.keys()}) for op in document["ops"])
            edges = tuple((int(source), int(target)) for source, target in document["edges"])
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ConfigError("operators", "json", f"not of schema {SCHEMA} ({error!r})") from error
        return cls(ops, edges)

    def _longest(self, what: str) -> float:
        ends = [0.0] * self.num_ops
        for v in self.order:
            begin = max((ends[u] for u in self.predecessors[v]), default=0.0)
            ends[v] = begin + float(getattr(self.ops[v], what))
        return max(ends)

    def _sorted(self) -> tuple[int, ...]:
        sorter = TopologicalSorter(dict(enumerate(self.predecessors)))
        try:
            sorter.prepare()
        except CycleError as error:
            name = self.ops[min(error.args[1])].name
            raise ConfigError("edges", name, "waits for itself: the graph has a cycle") from error
        ready: list[int] = []
        order: list[int] = []
        while sorter.is_active():
            for v in sorter.get_ready():
                heapq.heappush(ready, v)
            order.append(heapq.heappop(ready))
            sorter.done(order[-1])
        return tuple(order)
