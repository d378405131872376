"""A graph of operations and tensors, as large model support sees it: levels, what to swap, and what sets off its return.

TFLMSv2 (Le et al. 2019, "Automatic GPU memory management for large neural models in TensorFlow") measures distance in
levels of the graph: an operation's level is the length of the longest way to it from any source.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

LOOK_BACK_LEVELS = 10


@dataclass(frozen=True, slots=True)
class Tensor:
    """What an operation makes: its size, its maker and the operations that read it, by number.

    Only one that `is_movable` may be swapped; the original leaves out vectors, scalars and variables.
    """

    num_bytes: int
    maker: int
    consumers: tuple[int, ...]
    is_movable: bool = True


@dataclass(frozen=True, slots=True)
class Return:
    """One copy of a swapped tensor that comes back for the operations `consumers`.

    It sets out when the operation `trigger` has run; without one, when the first of the consumers begins, which waits.
    """

    tensor: int
    consumers: tuple[int, ...]
    trigger: int | None


@dataclass(frozen=True, slots=True)
class Swap:
    """A tensor that leaves the device behind `last_near`, the last operation that reads it there, and its returns."""

    tensor: int
    last_near: int
    returns: tuple[Return, ...]


@dataclass(frozen=True)
class Graph:
    """A DAG of `num_ops` operations, numbered so that makers come before readers; they run level by level, by number."""

    num_ops: int
    tensors: tuple[Tensor, ...]

    def __post_init__(self) -> None:
        for tensor in self.tensors:
            if not all(tensor.maker < consumer < self.num_ops for consumer in tensor.consumers):
                raise ValueError(f"{tensor} is read before it is made, or by an operation that is not there")

    @cached_property
    def inputs(self) -> tuple[tuple[int, ...], ...]:
        """The tensors that each operation reads."""
        found: list[list[int]] = [[] for _ in range(self.num_ops)]
        for index, tensor in enumerate(self.tensors):
            for consumer in sorted(set(tensor.consumers)):
                found[consumer].append(index)
        return tuple(map(tuple, found))

    @cached_property
    def outputs(self) -> tuple[tuple[int, ...], ...]:
        """The tensors that each operation makes."""
        found: list[list[int]] = [[] for _ in range(self.num_ops)]
        for index, tensor in enumerate(self.tensors):
            found[tensor.maker].append(index)
        return tuple(map(tuple, found))

    @cached_property
    def levels(self) -> tuple[int, ...]:
        """The level of each operation, 0 for sources."""
        found: list[int] = []
        for inputs in self.inputs:
            found.append(max((found[self.tensors[tensor].maker] + 1 for tensor in inputs), default=0))
        return tuple(found)

    @cached_property
    def by_level(self) -> tuple[tuple[int, ...], ...]:
        """The operations of each level, in the order in which they run."""
        found: list[list[int]] = [[] for _ in range(max(self.levels, default=-1) + 1)]
        for op, level in enumerate(self.levels):
            found[level].append(op)
        return tuple(map(tuple, found))

    @cached_property
    def order(self) -> tuple[int, ...]:
        """All operations in the order in which they run."""
        return tuple(op for ops in self.by_level for op in ops)

    @property
    def num_levels(self) -> int:
        """Number of levels: no distance is larger."""
        return len(self.by_level)

    @cached_property
    def _reached(self) -> tuple[int, ...]:
        """For each operation, the set of those that it leads to, as the bits of a number."""
        found = [0] * self.num_ops
        for op in range(self.num_ops - 1, -1, -1):
            for tensor in self.outputs[op]:
                for consumer in self.tensors[tensor].consumers:
                    found[op] |= found[consumer] | 1 << consumer
        return tuple(found)

    def leads_to(self, op: int, other: int) -> bool:
        """Whether there is a way from an operation to another."""
        return bool(self._reached[op] >> other & 1)

    def far_consumers(self, tensor: Tensor, threshold: int) -> tuple[int, ...]:
        """Return the readers of a tensor that are more than `threshold` levels from its maker, nearest first."""
        from_level = self.levels[tensor.maker]
        far = {op for op in tensor.consumers if self.levels[op] - from_level > threshold}
        return self._by_level(far)

    def groups(self, ops: Sequence[int], groupby: int) -> tuple[tuple[int, ...], ...]:
        """Join operations, nearest first, whose levels lie at most `groupby` from the one before; with 0 none."""
        found: list[list[int]] = []
        for op in ops:
            if groupby > 0 and found and self.levels[op] - self.levels[found[-1][-1]] <= groupby:
                found[-1].append(op)
            else:
                found.append([op])
        return tuple(map(tuple, found))

    def control(self, maker: int, consumer: int, ahead: int) -> int | None:
        """Return the operation behind which a tensor is to come back for `consumer`, None where there is none.

        It is the latest that leads to the consumer, lies more than `ahead` levels before it and behind the maker;
        at most 10 levels are searched, and of one level the first is taken.
        """
        above = self.levels[consumer] - ahead
        lowest = max(above - LOOK_BACK_LEVELS, self.levels[maker] + 1)
        for level in range(above - 1, lowest - 1, -1):
            for op in self.by_level[level]:
                if self.leads_to(op, consumer):
                    return op
        return None

    def swaps(self, threshold: int, ahead: int, groupby: int, is_swapin_sync: bool) -> tuple[Swap, ...]:
        """Return what is swapped under these parameters, and how it comes back."""
        found = []
        for index, tensor in enumerate(self.tensors):
            far = self.far_consumers(tensor, threshold) if tensor.is_movable else ()
            if not far:
                continue
            near = self._by_level(set(tensor.consumers) - set(far))
            returns = tuple(
                Return(index, group, None if is_swapin_sync else self.control(tensor.maker, group[0], ahead))
                for group in self.groups(far, groupby)
            )
            found.append(Swap(index, near[-1] if near else tensor.maker, returns))
        return tuple(found)

    def _by_level(self, ops: Iterable[int]) -> tuple[int, ...]:
        return tuple(sorted(ops, key=lambda op: (self.levels[op], op)))
