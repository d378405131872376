"""Live bytes: the current and peak memory of tensors made since a moment, and kernels' workspaces.

`torch.distributed._tools.mem_tracker.MemTracker` counts the same storages and returns a whole
model's peak (`fake.py` uses it). For one layer's forward and backward it is too coarse: it has one
peak for its lifetime, registers hooks on the parameters, and counts a gradient that autograd adds
in place as a second tensor. The reason for the last is that autograd's engine adds two gradients of
one tensor out of place if any dispatch mode is active, and always for fake tensors. Here such a sum
replaces the gradient that only the engine holds, as it does in a run.

No tracker of tensors sees the memory that kernels allocate and free internally. On a processor
torch computes convolutions with oneDNN, which requires channels in blocks: images, weights and
gradients are copied into blocked layouts and back around each kernel. The sizes here are those of
the copies that are alive at once, as the allocator's events show for oneDNN 3 (within 5 % for 3x3
and 1x1 convolutions of 16 channels or more). The workspaces of a GPU depend on the algorithm that
cuDNN selects; they are measured instead of predicted.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any, Self

import torch
from torch import Tensor

from gems.autograd.convolutions import ConvolutionWatch
from gems.autograd.outputs import tensors_in
from gems.autograd.torch_internals import (
    TorchDispatchMode,
    current_autograd_node,
    disable_current_modes,
    use_counts,
)

Workspace = Callable[[Any, tuple[Any, ...], Any], int]
_FORWARD = torch.ops.aten.convolution.default
_BACKWARD = torch.ops.aten.convolution_backward.default
_NORM_BACKWARD = torch.ops.aten.native_batch_norm_backward.default
_BLOCKED = (torch.float32, torch.bfloat16)
_PLAIN_CHANNELS = 4  # images with fewer channels are read without conversion


def device_workspace(device: torch.device) -> Workspace | None:
    """Return the function for an operation's workspace in bytes on a device, or None if unknown."""
    return processor_workspace_bytes if device.type == "cpu" else None


def processor_workspace_bytes(func: Any, args: tuple[Any, ...], result: Any) -> int:
    """Return the bytes that an operation on a CPU holds at once beyond operands and results."""
    if func is _FORWARD:
        x, weight, _, stride, padding, _, is_transposed = args[:7]
        if not _is_blocked(x, weight, stride, padding):
            return 0
        plain = result.nbytes
        blocked = _image(result)
        if is_transposed and max(stride) > 1:
            gathered = _image(x) // x.shape[0]
            least = plain + blocked
        else:
            gathered = _read(x) // math.prod(stride) if _is_pointwise(weight) else 0
            least = blocked
        return int(max(_read(x) + gathered + _weights(weight) + blocked - plain, least))
    if func is _BACKWARD:
        gradient, x, weight, _, stride, padding = args[:6]
        if not _is_blocked(x, weight, stride, padding):
            return 0
        return _backward_bytes(gradient, x, weight, args[10], max(stride) > 1)
    if func is _NORM_BACKWARD:
        return args[1].nbytes if args[9][0] else 0  # the input gradient is made twice
    return 0


def _backward_bytes(
    gradient: Tensor, x: Tensor, weight: Tensor, wanted: list[bool], is_strided: bool
) -> int:
    plain_x = x.nbytes
    blocked_x = _image(x)
    blocked_gradient = _image(gradient)
    blocked_weight = _weights(weight)
    most = result_bytes = 0
    if wanted[0]:
        most = max(
            blocked_gradient + blocked_weight + blocked_x,
            blocked_x + (2 if is_strided else 1) * plain_x,
        )
        result_bytes = plain_x
    if wanted[1]:
        images = _read(x) + blocked_gradient
        most = max(most, result_bytes + blocked_weight + max(images, weight.nbytes))
        result_bytes += weight.nbytes
    return max(0, most - result_bytes)


def _is_blocked(x: Tensor, weight: Tensor, stride: list[int], padding: list[int]) -> bool:
    """Return whether the kernel needs blocked layouts.

    A 1x1 convolution of unit stride does not, because it is a matrix product.
    """
    is_product = _is_pointwise(weight) and set(stride) == {1} and set(padding) <= {0}
    return x.dtype in _BLOCKED and not is_product


def _is_pointwise(weight: Tensor) -> bool:
    return all(size == 1 for size in weight.shape[2:])


def _image(tensor: Tensor) -> int:
    return tensor.nbytes // tensor.shape[1] * _up(tensor.shape[1])


def _read(x: Tensor) -> int:
    return _image(x) if x.shape[1] >= _PLAIN_CHANNELS else 0


def _weights(weight: Tensor) -> int:
    outer, inner = weight.shape[:2]
    return (
        weight.nbytes
        // (outer * inner)
        * _up(outer)
        * (_up(inner) if inner >= _PLAIN_CHANNELS else inner)
    )


def _up(channels: int) -> int:
    block = _block()
    return -(-channels // block) * block


@cache
def _block() -> int:
    return 16 if "512" in torch.backends.cpu.get_cpu_capability() else 8


_ADD = torch.ops.aten.add.Tensor
Uses = tuple[int, int]


def storage_of(tensor: Tensor) -> int:
    """Return an ID of a tensor's memory, fake or real, valid while the memory is in use."""
    return int(tensor.untyped_storage()._cdata)


def unique_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of tensors; a shared storage counts once."""
    return sum(
        {storage_of(tensor): tensor.untyped_storage().nbytes() for tensor in tensors}.values()
    )


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A counter of the storages that operations create inside a `with` block, until they are freed.

    The memory of `given` is not counted. Memory that a kernel allocates and frees internally is not
    seen; `workspace` returns these bytes, if they are known.
    """

    def __init__(self, given: Iterable[Tensor] = (), workspace: Workspace | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._uses_of_engine = _uses_of_engine()
        self.live_bytes = 0
        self.peak_bytes = 0
        self._workspace = workspace
        self._given = {storage_of(tensor) for tensor in given}
        self._counted: dict[int, int] = {}
        self._references: dict[int, weakref.ref[Any]] = {}

    def restart(self) -> int:
        """Start a new peak from the live bytes, and return these."""
        self.peak_bytes = self.live_bytes
        return self.live_bytes

    def references(self, keys: Iterable[int]) -> dict[int, weakref.ref[Any]]:
        """Return weak references to storages that have been counted, by their IDs."""
        return {key: self._references[key] for key in keys if key in self._references}

    def count(self, tensor: Tensor) -> None:
        """Count the memory of a tensor that was not created by an observed operation."""
        storage = tensor.untyped_storage()
        key = int(storage._cdata)
        if key in self._given:
            return
        num_bytes = int(storage.nbytes())
        if key not in self._counted:
            self._references[key] = weakref.ref(storage, lambda _: self._free(key))
        self.live_bytes += num_bytes - self._counted.get(key, 0)
        self._counted[key] = num_bytes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is _ADD and isinstance(args[0], Tensor) and self._is_replaced(args[0], result):
            key = storage_of(args[0])
            self.live_bytes -= self._counted.get(key, 0)
            if key in self._counted:
                self._counted[key] = 0
        for tensor in tensors_in(result):
            self.count(tensor)
        within = self._workspace(func, args, result) if self._workspace is not None else 0
        self.peak_bytes = max(self.peak_bytes, self.live_bytes + within)
        return result

    def _is_replaced(self, first: Tensor, result: Tensor) -> bool:
        """Return whether autograd's engine would add to `first` in place.

        It does if it alone holds the tensor and the tensor has no gaps.
        """
        dims = sorted(
            (stride, size)
            for stride, size in zip(first.stride(), first.shape, strict=True)
            if size != 1
        )
        return (
            current_autograd_node() is not None
            and not torch.is_grad_enabled()
            and use_counts(first) == self._uses_of_engine
            and first.shape == result.shape
            and all(
                stride == math.prod(size for _, size in dims[:place])
                for place, (stride, _) in enumerate(dims)
            )
        )

    def _free(self, key: int) -> None:
        self.live_bytes -= self._counted.pop(key, 0)
        self._references.pop(key, None)


class SavedStorages(torch.autograd.graph.saved_tensors_hooks):
    """A recorder of the bytes of storages that autograd saves inside a `with` block, by their IDs.

    With a watch on convolutions, `by_convolutions` are the storages that are saved while one runs.
    """

    def __init__(self, watch: ConvolutionWatch | None = None) -> None:
        self.num_bytes: dict[int, int] = {}
        self.by_convolutions: set[int] = set()
        self._watch = watch
        super().__init__(self._pack, lambda tensor: tensor)

    def _pack(self, tensor: Tensor) -> Tensor:
        if tensor._is_zerotensor():
            return tensor
        name = storage_of(tensor)
        self.num_bytes[name] = tensor.untyped_storage().nbytes()
        if self._watch is not None and self._watch.is_running:
            self.by_convolutions.add(name)
        return tensor

    def __enter__(self) -> Self:  # type: ignore[override]
        super().__enter__()
        return self


class AllocatedBytes:
    """The current and peak bytes that the GPU's allocator provides inside a `with` block."""

    def __enter__(self) -> AllocatedBytes:
        self._before = 0
        self._before = self.restart()
        return self

    def __exit__(self, *_: object) -> None:
        pass

    @property
    def peak_bytes(self) -> int:
        """The peak so far."""
        return torch.cuda.max_memory_allocated() - self._before

    def restart(self) -> int:
        """Start a new peak from the allocated bytes, and return these."""
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated() - self._before


class _UsesInSum(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A mode that records how often the first operand of a sum is referenced."""

    found: Uses = (0, 0)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is _ADD:
            self.found = use_counts(args[0])
        return result


@cache
def _uses_of_engine() -> Uses:
    """Return the reference counts of a gradient that only the engine holds, as seen in a mode."""
    with disable_current_modes(), torch.enable_grad():
        x = torch.zeros(1, requires_grad=True).view(1)
        y = torch.sin(x) + torch.cos(x)
        uses = _UsesInSum()  # type: ignore[no-untyped-call]
        with uses:
            torch.autograd.backward([y], [torch.zeros(1)])
    return uses.found
