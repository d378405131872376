"""What kernels allocate and free within themselves, which no tracker of tensors sees.

On a processor torch computes convolutions with oneDNN, which wants channels in blocks: images, weights and gradients
are copied into blocked layouts and back around each kernel. The sizes here are those of the copies that live at once,
as the allocator's own events show them for oneDNN 3 (within 5 % for 3x3 and 1x1 convolutions of 16 channels or more).
A GPU's workspaces depend on the algorithm that cuDNN picks and are measured, not predicted.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

Workspace = Callable[[Any, tuple[Any, ...]], int]
_FORWARD = torch.ops.aten.convolution.default
_BACKWARD = torch.ops.aten.convolution_backward.default
_NORM_BACKWARD = torch.ops.aten.native_batch_norm_backward.default
_BLOCKED = (torch.float32, torch.bfloat16)
_PLAIN_CHANNELS = 4  # images of fewer channels are read as they are


def workspace_of(device: torch.device) -> Workspace | None:
    """Return the function for an operation's workspace in bytes on a device, or None if it is not known."""
    return processor_workspace_bytes if device.type == "cpu" else None


def processor_workspace_bytes(func: Any, args: tuple[Any, ...]) -> int:
    """Return the bytes that an operation holds at once beyond its operands and results, on a processor."""
    if func is _FORWARD:
        x, weight, _, stride, padding, _, is_transposed = args[:7]
        if not _is_blocked(x, weight, stride, padding):
            return 0
        output = _output_bytes(args, is_transposed)
        if is_transposed and max(stride) > 1:
            gathered = _image(x) // x.shape[0]
            return max(_forward_bytes(x, weight, output, gathered), sum(output))
        gathered = _read(x) // math.prod(stride) if _is_pointwise(weight) else 0
        return _forward_bytes(x, weight, output, gathered)
    if func is _BACKWARD:
        gradient, x, weight, _, stride, padding = args[:6]
        if not _is_blocked(x, weight, stride, padding):
            return 0
        return _backward_bytes(gradient, x, weight, args[10], max(stride) > 1)
    if func is _NORM_BACKWARD:
        return _bytes(args[1]) if args[9][0] else 0  # the input gradient is made twice
    return 0


def _forward_bytes(x: Tensor, weight: Tensor, output: tuple[int, int], gathered_bytes: int) -> int:
    plain, blocked = output
    return max(_read(x) + gathered_bytes + _weights(weight) + blocked - plain, blocked)


def _backward_bytes(gradient: Tensor, x: Tensor, weight: Tensor, wanted: list[bool], is_strided: bool) -> int:
    plain_x, blocked_x = _bytes(x), _image(x)
    blocked_gradient, blocked_weight = _image(gradient), _weights(weight)
    most = kept = 0
    if wanted[0]:
        most = max(blocked_gradient + blocked_weight + blocked_x, blocked_x + (2 if is_strided else 1) * plain_x)
        kept = plain_x
    if wanted[1]:
        images = _read(x) + blocked_gradient
        most = max(most, kept + blocked_weight + max(images, _bytes(weight)))
        kept += _bytes(weight)
    return max(0, most - kept)


def _is_blocked(x: Tensor, weight: Tensor, stride: list[int], padding: list[int]) -> bool:
    """Whether the kernel wants blocked layouts: not a 1x1 convolution of unit stride, which is a matrix product."""
    is_product = _is_pointwise(weight) and set(stride) == {1} and set(padding) <= {0}
    return x.dtype in _BLOCKED and not is_product


def _is_pointwise(weight: Tensor) -> bool:
    return all(size == 1 for size in weight.shape[2:])


def _output_bytes(args: tuple[Any, ...], is_transposed: bool) -> tuple[int, int]:
    """Return the bytes of a convolution's output, as it is and with blocked channels."""
    x, weight, _, stride, padding, dilation, _, output_padding, groups = args[:9]
    sizes = []
    for place, (size, kernel) in enumerate(zip(x.shape[2:], weight.shape[2:], strict=True)):
        step, pad, spread = (values[min(place, len(values) - 1)] for values in (stride, padding, dilation))
        reach = spread * (kernel - 1) + 1
        if is_transposed:
            sizes.append((size - 1) * step - 2 * pad + reach + output_padding[min(place, len(output_padding) - 1)])
        else:
            sizes.append((size + 2 * pad - reach) // step + 1)
    channels = weight.shape[1] * groups if is_transposed else weight.shape[0]
    pixels = x.shape[0] * math.prod(sizes) * x.element_size()
    return channels * pixels, _up(channels) * pixels


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _image(tensor: Tensor) -> int:
    return _bytes(tensor) // tensor.shape[1] * _up(tensor.shape[1])


def _read(x: Tensor) -> int:
    return _image(x) if x.shape[1] >= _PLAIN_CHANNELS else 0


def _weights(weight: Tensor) -> int:
    outer, inner = weight.shape[:2]
    return _bytes(weight) // (outer * inner) * _up(outer) * (_up(inner) if inner >= _PLAIN_CHANNELS else inner)


def _up(channels: int) -> int:
    block = _block()
    return -(-channels // block) * block


@cache
def _block() -> int:
    return 16 if "512" in torch.backends.cpu.get_cpu_capability() else 8
