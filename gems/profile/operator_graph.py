"""The operator graph of a model: the cost of each operator, and who reads its output."""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from gems.errors import ConfigError

SCHEMA = "gems.operators/1"


@dataclass(frozen=True, slots=True)
class Op:
    """One operator on one micro-batch.

    `backward_s` is its whole backward, which runs on the device of its forward. `output_bytes` go
    once to each other device that reads the output, and as many come back from each reader there as
    its gradient. `held_bytes` stay on its device from forward to backward; of them `state_bytes`
    all the time, parameters with gradients and optimizer's state.
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
    """Operators and their edges (predecessor, reader), by their numbers; no circles.

    `predecessors[v]` and `successors[v]` are ascending, and `order` is a topological order: by
    depth first come, lowest number first.

    Raises:
        ConfigError: an edge to nowhere, twice or in a circle, or a time or size that is negative or
        not finite.
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
            self, "predecessors", tuple(tuple(sorted(some)) for some in predecessors)
        )
        object.__setattr__(self, "successors", tuple(tuple(sorted(some)) for some in successors))
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
        """What all operators hold together, in bytes."""
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
        """Read what `to_json` wrote.

        Raises ConfigError for another schema, a malformed field or a wrong graph.
        """
        found = document.get("schema") if isinstance(document, Mapping) else None
        if found != SCHEMA:
            raise ConfigError("schema", found, f"allowed: {SCHEMA}")
        names = {each.name for each in fields(Op)}
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
        missing = [len(some) for some in self.predecessors]
        ready = [v for v, count in enumerate(missing) if not count]
        found: list[int] = []
        while ready:
            found.append(heapq.heappop(ready))
            for user in self.successors[found[-1]]:
                missing[user] -= 1
                if not missing[user]:
                    heapq.heappush(ready, user)
        if len(found) < self.num_ops:
            stuck = next(v for v, count in enumerate(missing) if count)
            raise ConfigError(
                "edges", self.ops[stuck].name, "waits for itself: the graph has a circle"
            )
        return tuple(found)
