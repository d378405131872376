"""Layer kinds: the input gradient at I and the weight gradient at W, bit-equal to a full backward."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from tests.helpers.split_rig import batches_of, check, make_stage
from tests.helpers.toys import Call

SHAPES = {1: (2, 4, 9), 2: (2, 4, 6, 7), 3: (2, 4, 4, 5, 3)}
CONVS = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
TRANSPOSED = {1: nn.ConvTranspose1d, 2: nn.ConvTranspose2d, 3: nn.ConvTranspose3d}
DTYPES = [torch.float32, torch.float64, torch.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.parametrize(
    "options",
    [
        {"kernel_size": 3, "padding": 1},
        {"kernel_size": 1, "bias": False},
        {"kernel_size": 3, "stride": 2, "groups": 2},
        {"kernel_size": 2, "dilation": 2, "groups": 4},
        {"kernel_size": 3, "padding": 1, "padding_mode": "circular"},
        {"kernel_size": 2, "padding": "same"},
        {"kernel_size": 3, "padding": "valid"},
    ],
    ids=str,
)
def test_convolutions(dims, options, dtype):
    torch.manual_seed(0)
    check([CONVS[dims](4, 8, **options).to(dtype)], batches_of(SHAPES[dims], dtype=dtype))


@settings(max_examples=40, deadline=None)
@given(
    dims=st.integers(1, 3),
    kernel=st.integers(1, 3),
    stride=st.integers(1, 2),
    dilation=st.integers(1, 2),
    groups=st.sampled_from([1, 2, 4]),
    padding=st.sampled_from([0, 1, "same", "valid"]),
    bias=st.booleans(),
    mode=st.sampled_from(["zeros", "reflect", "replicate", "circular"]),
    is_first=st.booleans(),
    dtype=st.sampled_from(DTYPES),
    transposed=st.booleans(),
    batched=st.booleans(),
)
def test_any_convolution(
    dims,
    kernel,
    stride,
    dilation,
    groups,
    padding,
    bias,
    mode,
    is_first,
    dtype,
    transposed,
    batched,
):
    torch.manual_seed(0)
    options = {"stride": stride, "dilation": dilation, "groups": groups, "bias": bias}
    if transposed:
        layer = TRANSPOSED[dims](4, 8, kernel, padding=int(padding == 1), **options)
    else:
        if padding == "same":
            options["stride"] = 1
        layer = CONVS[dims](4, 8, kernel, padding=padding, padding_mode=mode, **options)
    shape = tuple(max(size, 6) for size in SHAPES[dims][2:])
    shape = (2, 4, *shape) if batched else (4, *shape)
    check([layer.to(dtype)], batches_of(shape, dtype=dtype, num=2), is_first)


def test_a_transposed_convolution_of_a_given_size():
    layer = nn.ConvTranspose2d(4, 3, 3, stride=2, padding=1)
    check([Call(layer, output_size=[12, 14])], batches_of((2, 4, 6, 7)))


def test_memory_order_of_channels_last():
    torch.manual_seed(0)
    batches = [(x.to(memory_format=torch.channels_last),) for (x,) in batches_of((2, 4, 8, 8))]
    layers = [nn.Conv2d(4, 8, 3), nn.Conv2d(8, 4, 1).to(memory_format=torch.channels_last)]
    check(layers, batches)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    "shape", [(5, 6), (1, 6), (2, 3, 6), (1, 1, 6), (2, 1, 3, 6), (2, 2, 2, 2, 6)], ids=str
)
@pytest.mark.parametrize("order", ["plain", "transposed", "strided", "expanded"])
def test_linear_maps(shape, bias, dtype, order):
    torch.manual_seed(0)
    arrange = {
        "plain": nn.Identity(),
        "transposed": Call(
            nn.Identity(), lambda x: x.transpose(-1, -2).contiguous().transpose(-1, -2)
        ),
        "strided": Call(nn.Identity(), lambda x: torch.cat([x, x], -2)[..., ::2, :]),
        "expanded": Call(nn.Identity(), lambda x: x[:1].expand(4, *x.shape[1:])),
    }[order]
    check([arrange, nn.Linear(6, 4, bias=bias).to(dtype)], batches_of(shape, dtype=dtype))


@pytest.mark.parametrize(("features", "out"), [(1, 1), (1, 5), (5, 1), (7, 9)])
def test_linear_maps_of_one_feature(features, out):
    check([nn.Linear(features, out)], batches_of((3, features)))
    check([nn.Linear(features, out)], batches_of((1, features)))
    check([nn.Linear(features, out)], batches_of((2, 3, features)))


def test_a_linear_map_of_a_single_vector_is_whole_at_i():
    check([nn.Linear(6, 4)], batches_of((6,)), unsplit=["0"])


@pytest.mark.parametrize(
    "options", [{}, {"padding_idx": 0}, {"padding_idx": -1}, {"scale_grad_by_freq": True}], ids=str
)
def test_embeddings(options):
    torch.manual_seed(0)
    batches = [(torch.randint(0, 5, (3, 4)),) for _ in range(3)]
    check([nn.Embedding(5, 6, **options), nn.Linear(6, 2)], batches, is_first=True)


@pytest.mark.parametrize("options", [{"sparse": True}, {"max_norm": 0.5}], ids=str)
def test_embeddings_that_cannot_be_split(options):
    torch.manual_seed(0)
    layers = [nn.Embedding(5, 6, **options), nn.Linear(6, 2)]
    stage = make_stage(layers, True)
    stage.forward(0, (torch.randint(0, 5, (3, 4)),), None, True)
    assert stage.split_layers().unsplit == ("0",)
    stage.backward_input(0, (torch.ones(3, 4, 2),))
    assert layers[0].weight.grad is not None and layers[1].weight.grad is None
    stage.backward_weight(0)
    assert layers[1].weight.grad is not None


NORMS = {
    "batch": (lambda: nn.BatchNorm2d(4), (3, 4, 5, 5)),
    "group": (lambda: nn.GroupNorm(2, 4), (3, 4, 5, 5)),
    "layer": (lambda: nn.LayerNorm(5), (3, 4, 5, 5)),
    "rms": (lambda: nn.RMSNorm(5), (3, 4, 5, 5)),
    "instance": (lambda: nn.InstanceNorm2d(4, affine=True), (3, 4, 5, 5)),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", NORMS)
def test_norms_are_whole_at_i_between_layers_that_are_split(name, dtype):
    torch.manual_seed(0)
    make, shape = NORMS[name]
    layers = [nn.Conv2d(4, 4, 1), make(), nn.ReLU(), nn.Conv2d(4, 4, 1)]
    check([layer.to(dtype) for layer in layers], batches_of(shape, dtype=dtype))


ATTENTION = [
    {},
    {"bias": False},
    {"batch_first": True},
    {"add_bias_kv": True, "add_zero_attn": True},
    {"dropout": 0.5},
    {"kdim": 6, "vdim": 10},
]


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("options", ATTENTION, ids=str)
@pytest.mark.parametrize("kind", ["self", "cross", "three"])
def test_attention(kind, options, need_weights):
    torch.manual_seed(0)
    widths = (options.get("kdim", 8), options.get("vdim", 8))
    if kind == "self" and widths != (8, 8):
        widths = (8, 8)
        options = {}
    if kind == "cross" and widths[0] != widths[1]:
        options = {"kdim": 6, "vdim": 6}
        widths = (6, 6)
    shapes = {
        "self": [(5, 3, 8)],
        "cross": (
            [(5, 3, 8), (4, 3, widths[0])]
            if not options.get("batch_first")
            else [(3, 5, 8), (3, 4, 8)]
        ),
        "three": (
            [(5, 3, 8), (4, 3, widths[0]), (4, 3, widths[1])]
            if not options.get("batch_first")
            else [(3, 5, 8), (3, 4, 8), (3, 4, 8)]
        ),
    }[kind]
    attention = nn.MultiheadAttention(8, 2, **options)
    spread = {
        "self": lambda q: (q, q, q),
        "cross": lambda q, k: (q, k, k),
        "three": lambda q, k, v: (q, k, v),
    }
    layer = Call(attention, spread[kind], need_weights=need_weights)
    check([layer], batches_of(*shapes))


def test_the_projections_of_attention_wait():
    """Should torch's code no longer call `linear` by that name, bits stay equal and nothing would wait."""
    torch.manual_seed(0)
    layer = nn.MultiheadAttention(8, 2)
    stage = make_stage([Call(layer, lambda x: (x, x, x))])
    stage.forward(0, (torch.randn(5, 3, 8),), None, True)
    stage.backward_input(0, (torch.ones(5, 3, 8), torch.ones(3, 5, 5)))
    assert all(parameter.grad is None for parameter in layer.parameters())
    stage.backward_weight(0)
    assert all(parameter.grad is not None for parameter in layer.parameters())


def test_a_transformer_layer():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1)
    check([layer], batches_of((5, 3, 8)))


def test_a_transformer_layer_that_attends_to_two_sequences():
    torch.manual_seed(0)
    check([nn.TransformerDecoderLayer(8, 2, 16, dropout=0.1)], batches_of((5, 3, 8), (4, 3, 8)))
