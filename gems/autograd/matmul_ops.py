"""Products: the operations whose results a cheap second run keeps from the first, convolutions and matrix products."""

from __future__ import annotations

from typing import Any

import torch

_aten = torch.ops.aten
PRODUCTS = frozenset(
    {
        _aten.convolution, _aten.addmm, _aten.mm, _aten.bmm, _aten.baddbmm, _aten.addmv, _aten.mv, _aten.dot,
        _aten._scaled_dot_product_flash_attention, _aten._scaled_dot_product_flash_attention_for_cpu,
        _aten._scaled_dot_product_efficient_attention, _aten._scaled_dot_product_cudnn_attention,
    }
)  # fmt: skip


def is_product(func: Any) -> bool:
    """Whether an operation, as a dispatch mode sees it, is a convolution or a matrix product."""
    return func._overloadpacket in PRODUCTS
