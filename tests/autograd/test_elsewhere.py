"""CUDA's autocast on tensors without memory of the processor, beside the same on those of CUDA."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.nn import functional

from gems.autograd.casts import Autocast, find_casts
from gems.autograd.elsewhere import cuda_elsewhere
from gems.autograd.mixed import Elsewhere
from gems.models.mixed import Precision, compute_in

LOW = torch.bfloat16
BF16 = Precision.of("bf16_mixed")
FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "product": lambda x: x @ x.mT,
    "einsum": lambda x: torch.einsum("bij,bkj->bik", x, x),
    "attention": lambda x: functional.scaled_dot_product_attention(x, x, x),
    "softmax": lambda x: x.softmax(-1),
    "sum": lambda x: x.sum(1),
    "mean": lambda x: x.mean(1),
    "power": lambda x: x.pow(2),
    "norm": lambda x: functional.layer_norm(x, (8,)),
    "group norm": lambda x: functional.group_norm(x, 1),
    "gelu": lambda x: functional.gelu(x),
    "loss": lambda x: functional.mse_loss(x, x),
    "promotion": lambda x: torch.addcmul(x, x.float(), x),
    "made of several": (
        lambda x: functional.cosine_similarity(x, x.flip(1)) + functional.normalize(x).sum(1)
    ),
}


class Apply(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def dtypes_saved(module: nn.Module, x: Tensor) -> list[torch.dtype]:
    """Return the types of the maps that a forward saves, each memory once."""
    saved: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        saved[tensor.untyped_storage()._cdata] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        made = module(x)
    assert made.dtype is LOW
    return [tensor.dtype for tensor in saved.values() if tensor.numel() >= x.numel()]


def image() -> Tensor:
    return torch.empty(2, 4, 8, dtype=LOW, requires_grad=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_results_have_the_types_that_they_have_there(name: str, dtype: torch.dtype) -> None:
    function = FUNCTIONS[name]
    elsewhere = cuda_elsewhere()
    with FakeTensorMode():
        with torch.no_grad(), Autocast("cuda", torch.bfloat16):
            wanted = function(torch.empty(2, 4, 8, dtype=dtype, device="cuda")).dtype
        x = torch.empty(2, 4, 8, dtype=dtype, requires_grad=True)
        with torch.autocast("cpu", torch.bfloat16), elsewhere.casts():
            found = function(x)
    assert found.dtype is wanted and found.device.type == "cpu" and found.requires_grad


@pytest.mark.parametrize(
    ("name", "here", "there"),
    [
        ("norm", [LOW], [torch.float32]),
        ("softmax", [LOW], [torch.float32]),
        ("power", [LOW], [torch.float32]),
        ("gelu", [LOW], [LOW]),
    ],
)
def test_what_is_kept_is_what_is_kept_there(
    name: str, here: list[torch.dtype], there: list[torch.dtype]
) -> None:
    for elsewhere, wanted in ((None, here), (cuda_elsewhere(), there)):
        with FakeTensorMode():
            assert (
                dtypes_saved(compute_in(Apply(FUNCTIONS[name]), BF16, elsewhere), image()) == wanted
            )


def test_a_weight_is_cast_once_in_a_forward() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.empty(8, 8))

        def forward(self, x: Tensor) -> Tensor:
            return x @ self.weight + torch.relu(x) @ self.weight

    with FakeTensorMode():
        kept = dtypes_saved(compute_in(Twice(), BF16, cuda_elsewhere()), image())
    assert kept == [LOW] * 3  # the weight, and what it is multiplied with


@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
def test_a_layer_may_end_autocast_for_a_part(device_type: str) -> None:
    def function(x: Tensor) -> Tensor:
        with torch.autocast(device_type, enabled=False):
            return x.softmax(-1)

    with FakeTensorMode():
        assert dtypes_saved(compute_in(Apply(function), BF16, cuda_elsewhere()), image()) == [LOW]


def test_a_failed_forward_leaves_nothing_behind() -> None:
    elsewhere: Elsewhere = cuda_elsewhere()
    with FakeTensorMode():
        module = compute_in(Apply(lambda x: x @ x), BF16, elsewhere)
        with pytest.raises(RuntimeError):
            module(image())
        assert not torch.is_autocast_enabled("cpu") and not torch.is_autocast_enabled("cuda")
        with torch.autocast("cpu", LOW):
            assert image().softmax(-1).dtype is LOW


def test_a_type_that_autocast_asks_for_is_an_option() -> None:
    """A sum of 16 bits is float32 without a cast of what is summed up."""
    mode = FakeTensorMode()
    with mode:
        x = torch.empty(4, 8, dtype=LOW, device="cuda")
    found = find_casts(mode, [Autocast("cuda", LOW)], torch.ops.aten.sum.dim_IntList, (x, [1]), {})
    assert found is not None and not found.dtypes and found.options == {"dtype": torch.float32}
