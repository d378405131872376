"""Split backward of convolutions of one to three dimensions, including transposed ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional

from gems.autograd.split_backward.deferred import DeferredGradients, Target, can_wait
from gems.autograd.storages import check_unchanged

_backward = torch.ops.aten.convolution_backward.default
Sizes = tuple[int, ...]


class Geometry(NamedTuple):
    """The arguments of torch.convolution other than tensors."""

    stride: Sizes
    padding: Sizes
    dilation: Sizes
    is_transposed: bool
    output_padding: Sizes
    groups: int


Context = tuple[DeferredGradients, str, Geometry]


class _Conv(Function):
    """A convolution whose backward computes the input gradient only.

    It keeps (x, output gradient) for the weight gradient.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, context: Context
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        # saved-tensor hooks return another object for a saved parameter
        ctx.context = context
        ctx.version = x._version
        ctx.parameters = (weight, bias)
        return torch.convolution(x, weight, bias, *context[2])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        deferred, name, geometry = ctx.context
        check_unchanged(x, ctx.version, name)
        needs_x, needs_weight, needs_bias, _ = ctx.needs_input_grad
        bias = ctx.parameters[1]
        bias_sizes = None if bias is None else list(bias.shape)
        wanted = (False, needs_weight, needs_bias)
        targets = [
            Target(tensor)
            for tensor, needed in zip(ctx.parameters, wanted[1:], strict=True)
            if needed
        ]
        if targets:
            own = ctx.parameters[0]  # keeping `ctx` would keep x alive too

            def compute(x: Tensor, gradient: Tensor) -> list[Tensor]:
                gradients = _backward(gradient, x, own, bias_sizes, *geometry, wanted)
                return [
                    value for value, is_wanted in zip(gradients, wanted, strict=True) if is_wanted
                ]

            deferred.add(name, targets, (x.detach(), gradient), compute)
        if not needs_x:
            return None, None, None, None
        input_gradient = _backward(
            gradient, x, weight, bias_sizes, *geometry, (True, False, False)
        )[0]
        return input_gradient, None, None, None


_apply_conv: Callable[..., Tensor] = _Conv.apply


def convolution(
    deferred: DeferredGradients | None,
    name: str,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    geometry: Geometry,
) -> Tensor:
    """Convolve, and defer the weight gradients if possible.

    They are deferred if `deferred` is given and the weights are parameters without hooks.
    """
    if deferred is None or not can_wait(weight) or not (bias is None or can_wait(bias)):
        return torch.convolution(x, weight, bias, *geometry)
    return _apply_conv(x, weight, bias, (deferred, name, geometry))


def conv(deferred: DeferredGradients, name: str, module: Any, x: Tensor) -> Tensor | None:
    """Run the forward of nn.Conv1d, Conv2d or Conv3d, or return None if it cannot be split."""
    if not _can_split(module, x):
        return None
    padding: Any = module.padding
    if module.padding_mode != "zeros":
        x = functional.pad(x, module._reversed_padding_repeated_twice, mode=module.padding_mode)
        padding = (0,) * len(module.kernel_size)
    elif padding == "valid":
        padding = (0,) * len(module.kernel_size)
    elif padding == "same":
        totals = [d * (k - 1) for d, k in zip(module.dilation, module.kernel_size, strict=True)]
        padding = tuple(total // 2 for total in totals)
        # an even kernel needs one more pixel of padding on the right
        if any(total % 2 for total in totals):
            x = functional.pad(x, [side for total in reversed(totals) for side in (0, total % 2)])
    geometry = Geometry(
        module.stride, padding, module.dilation, False, (0,) * len(padding), module.groups
    )
    return _apply(deferred, name, module, x, geometry)


def conv_transposed(
    deferred: DeferredGradients,
    name: str,
    module: Any,
    x: Tensor,
    output_size: list[int] | None = None,
) -> Tensor | None:
    """Run the forward of nn.ConvTranspose1d, 2d or 3d, or return None if it cannot be split."""
    if not _can_split(module, x) or module.padding_mode != "zeros":
        return None
    sizes: Any = (module.stride, module.padding, module.kernel_size)
    more = tuple(
        module._output_padding(x, output_size, *sizes, len(module.kernel_size), module.dilation)
    )
    geometry = Geometry(module.stride, sizes[1], module.dilation, True, more, module.groups)
    return _apply(deferred, name, module, x, geometry)


def _can_split(module: Any, x: Tensor) -> bool:
    return bool(
        can_wait(module.weight)
        and (module.bias is None or can_wait(module.bias))
        and x.dim() in (module.weight.dim(), module.weight.dim() - 1)
        and not x.is_complex()
    )


def _apply(
    deferred: DeferredGradients, name: str, module: Any, x: Tensor, geometry: Geometry
) -> Tensor:
    is_batched = x.dim() == module.weight.dim()
    batch = x if is_batched else x.unsqueeze(0)
    output = _apply_conv(batch, module.weight, module.bias, (deferred, name, geometry))
    return output if is_batched else output.squeeze(0)
