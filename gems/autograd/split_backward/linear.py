"""Split backward of linear maps, attention and embeddings.

Only the projections of attention, which are linear maps, have weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import FunctionType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn import functional
from torch.nn.modules import activation

from gems.autograd.split_backward.deferred import DeferredGradients, Target, can_wait
from gems.autograd.storages import check_unchanged

_ATTENTION_HELPERS = ("multi_head_attention_forward", "_in_projection_packed", "_in_projection")


class _Linear(Function):
    """A linear map x W^T + b whose backward computes the input gradient only.

    It keeps (x, output gradient) for the weight gradients.
    """

    # The kernels are torch's own and depend on the layout of x. If x is contiguous, the bias is
    # part of one matrix product; otherwise it is added to the product of a copy of x.

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        context: tuple[DeferredGradients, str, Sequence[Target]],
    ) -> Tensor:
        is_fused = x.dim() == 2 or x.is_contiguous()
        flat = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
        ctx.save_for_backward(flat, weight)
        ctx.context = context
        ctx.shape = x.shape
        ctx.version = flat._version
        ctx.is_fused = is_fused
        if is_fused:
            output = functional.linear(x, weight, bias)
        else:
            output = functional.linear(flat, weight).view(*x.shape[:-1], weight.shape[0])
            output = output if bias is None else output.add_(bias)
        return output.data  # the next layer could not change a view in place

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        deferred, name, targets = ctx.context
        check_unchanged(x, ctx.version, name)
        needs_x, needs_weight, needs_bias, _ = ctx.needs_input_grad
        if needs_weight or needs_bias:
            is_fused = ctx.is_fused

            def compute(x: Tensor, gradient: Tensor) -> list[Tensor]:
                gradients = [_flat(gradient).t().mm(x)] if needs_weight else []
                if needs_bias:
                    added = _flat(gradient) if is_fused else gradient
                    gradients.append(added.sum(tuple(range(added.dim() - 1))))
                return gradients

            deferred.add(name, targets, (x.detach(), gradient), compute)
        if not needs_x:
            return None, None, None, None
        flat = _flat(gradient)
        is_column_major = x.stride() == (1, x.shape[0])
        input_gradient = weight.t().mm(flat.t()).t() if is_column_major else flat.mm(weight)
        return (
            input_gradient if input_gradient.shape == ctx.shape else input_gradient.view(ctx.shape),
            None,
            None,
            None,
        )


_apply_linear: Callable[..., Tensor] = _Linear.apply


def _flat(tensor: Tensor) -> Tensor:
    return tensor if tensor.dim() == 2 else tensor.reshape(-1, tensor.shape[-1])


def linear_map(
    deferred: DeferredGradients, name: str, x: Tensor, weight: Tensor, bias: Tensor | None
) -> Tensor | None:
    """Return x W^T + b over the last dimension of x, or None if its backward cannot be split.

    `weight` (out_features, in_features) and `bias` are parameters, or rows of parameters.
    """
    parameters = [weight] if bias is None else [weight, bias]
    all_targets = [Target.from_tensor(parameter) for parameter in parameters]
    is_plain = weight.is_contiguous() and weight.dim() == 2 and x.dim() >= 2 and x.numel() > 0
    if None in all_targets or not is_plain or x.is_complex():
        return None
    trained = [
        target
        for target, parameter in zip(all_targets, parameters, strict=True)
        if target and parameter.requires_grad
    ]
    return _apply_linear(x, weight, bias, (deferred, name, trained))


def linear(deferred: DeferredGradients, name: str, module: Any, x: Tensor) -> Tensor | None:
    """Run the forward of nn.Linear; return None if its backward cannot be split."""
    return linear_map(deferred, name, x, module.weight, module.bias)


class _Embedding(Function):
    """An embedding that keeps (indices, output gradient) for the weights.

    There is no input gradient.
    """

    @staticmethod
    def forward(
        ctx: Any,
        deferred: DeferredGradients,
        name: str,
        weight: Tensor,
        indices: Tensor,
        padding: int,
        is_scaled: bool,
    ) -> Tensor:
        ctx.save_for_backward(indices)
        ctx.deferred = deferred
        ctx.name = name
        ctx.weight = weight
        ctx.version = indices._version
        ctx.options = (weight.shape[0], padding, is_scaled)
        return torch.embedding(weight, indices, padding, is_scaled)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (indices,) = ctx.saved_tensors
        check_unchanged(indices, ctx.version, ctx.name)
        num, padding, is_scaled = ctx.options

        def compute(indices: Tensor, gradient: Tensor) -> list[Tensor]:
            return [
                torch.ops.aten.embedding_dense_backward.default(
                    gradient, indices, num, padding, is_scaled
                )
            ]

        ctx.deferred.add(ctx.name, [Target(ctx.weight)], (indices, gradient), compute)
        return (None,) * 6


_apply_embedding: Callable[..., Tensor] = _Embedding.apply


def embedding(
    deferred: DeferredGradients, name: str, module: Any, indices: Tensor
) -> Tensor | None:
    """Run the forward of nn.Embedding.

    Return None if its backward cannot be split (if it is sparse, or has max_norm).
    """
    weight = module.weight
    if (
        module.sparse
        or module.max_norm is not None
        or not can_wait(weight)
        or not weight.requires_grad
    ):
        return None
    padding = -1 if module.padding_idx is None else module.padding_idx
    return _apply_embedding(deferred, name, weight, indices, padding, module.scale_grad_by_freq)


def attention(
    deferred: DeferredGradients, name: str, module: Any, *args: Any, **kwargs: Any
) -> Any:
    """Run torch's own forward of nn.MultiheadAttention with split linear maps.

    The result is bit-equal to torch's. A projection that cannot be split has a full backward.
    """

    def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        output = linear_map(deferred, f"{name}.projection", x, weight, bias)
        return functional.linear(x, weight, bias) if output is None else output

    names: dict[str, Any] = {**vars(functional), "linear": linear}
    names |= {helper: _with_globals(names[helper], names) for helper in _ATTENTION_HELPERS}
    outer = {**vars(activation), "F": SimpleNamespace(**names)}
    return _with_globals(nn.MultiheadAttention.forward, outer)(module, *args, **kwargs)


def _with_globals(function: Any, names: dict[str, Any]) -> Any:
    """Return a function with the same code and other globals."""
    copy = FunctionType(
        function.__code__, names, function.__name__, function.__defaults__, function.__closure__
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy
