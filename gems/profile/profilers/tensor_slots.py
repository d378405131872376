"""Tensors between layers: the memory of each, and which of them share it."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Output:
    """One tensor that a layer passes on, by its shape, strides and dtype.

    `number` tells its tensors apart: a tensor that it passes on twice has one. `same_as` is the input that it is
    itself, `given` the input whose memory it lies in; with None the layer made that memory, which `made` numbers.
    `storage_bytes` is the size of that memory, and the tensor begins `offset` elements into it. `is_saved` says that
    the layer itself saves it, `is_product` that a convolution or a matrix product gave it.
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    requires_grad: bool
    number: int
    same_as: int | None
    given: int | None
    made: int | None
    storage_bytes: int
    is_saved: bool
    is_product: bool = False

    @property
    def num_bytes(self) -> int:
        """Size of the tensor's data in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def grad_bytes(self) -> int:
        """Size of its gradient in bytes, 0 for a tensor of integers."""
        return self.num_bytes if self.dtype.is_floating_point else 0


@dataclass(frozen=True, slots=True)
class Gradient:
    """The layout of a gradient in its memory; gradients of the same `storage` share it.

    `is_given` says that the stage was given that memory and hold it until its backward ends; other memory is freed
    when it was read. `is_untouched` says that it is the very tensor that was given.
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    storage: int
    storage_bytes: int
    is_given: bool
    is_untouched: bool

    @property
    def num_bytes(self) -> int:
        """Size of the gradient's data in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def is_whole(self) -> bool:
        """Whether it is contiguous and fills its memory."""
        return self.strides == _contiguous(self.shape) and self.storage_bytes == self.dtype.itemsize * math.prod(
            self.shape
        )

    @classmethod
    def of(cls, tensor: Tensor) -> Gradient:
        """Describe a gradient that is there."""
        memory = tensor.untyped_storage().nbytes()
        offset = int(tensor.storage_offset())
        return cls(tuple(tensor.shape), tuple(tensor.stride()), offset, tensor.dtype, 0, memory, False, False)

    @classmethod
    def like(cls, output: Tensor | Output, storage: int, is_given: bool) -> Gradient:
        """Describe a contiguous gradient in memory of its own."""
        shape = tuple(output.shape)
        num_bytes = math.prod(shape) * output.dtype.itemsize
        return cls(shape, _contiguous(shape), 0, output.dtype, storage, num_bytes, is_given, is_given)

    def renamed(self, storage: int, is_given: bool) -> Gradient:
        """Return the same in memory of another name."""
        return replace(self, storage=storage, is_given=is_given)

    def untouched(self) -> Gradient:
        """Return the same as the very tensor that was given."""
        return replace(self, is_untouched=True)


def _contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(math.prod(shape[place + 1 :]) for place in range(len(shape)))
