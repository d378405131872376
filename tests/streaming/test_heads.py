"""Heads over all positions of a map: what adds up block by block, and what comes after a cut."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

from gems.config.schema import ModelConfig
from gems.streaming import StreamingError, stream
from gems.streaming.axis_rules import even_ends
from tests.helpers.strips_rig import DTYPE, TOLERANCE, Function, cut_stages, error, zoo
from tests.streaming.test_blocks import Ends, check, grids
from tests.streaming.test_layers import CHANNELS, strips
from tests.streaming.test_streamed import results

quick = settings(max_examples=20, deadline=None)
Head = Callable[[Tensor], Any]
any_ends = st.one_of(grids(), strips().map(lambda ends: (ends, (7,))))


@quick
@given(any_ends, st.data())
def test_reductions_of_maps(ends: Ends, data: st.DataObject) -> None:
    over = [0, 1][: data.draw(st.integers(0, 2))] + list(range(2, 2 + len(ends)))
    is_kept = data.draw(st.booleans())
    name = data.draw(st.sampled_from(["amax", "amin", "sum", "mean", "logsumexp"]))
    check(Function(lambda self, x: getattr(x, name)(over, keepdim=is_kept)), ends)


@quick
@given(any_ends, st.data())
def test_equal_values_share_the_gradient(ends: Ends, data: st.DataObject) -> None:
    """As torch does: all of them by amax, the first one by max and adaptive pooling."""
    pool = {2: functional.adaptive_max_pool2d, 3: functional.adaptive_max_pool3d}[len(ends)]
    heads: list[Head] = [
        lambda x: x.amax(tuple(range(2, x.dim()))),
        lambda x: x.flatten(2).max(-1).values,
        lambda x: x.flatten(2).transpose(1, 2).min(1, keepdim=True)[0],
        lambda x: pool(x, 1),
        lambda x: x.max() - x.min(),
    ]
    head = data.draw(st.sampled_from(heads))

    def tied(x: Tensor) -> Tensor:
        return torch.sign(x.detach() - 0.3) + (x - x.detach())

    check(Function(lambda self, x: head(tied(x))), ends)


def positions_in(ends: Ends) -> int:
    return torch.Size(each[-1] for each in ends).numel()


@quick
@given(any_ends, st.data())
def test_the_largest_scores(ends: Ends, data: st.DataObject) -> None:
    k = data.draw(st.integers(1, min(positions_in(ends), 12)))
    is_largest = data.draw(st.booleans())
    heads: list[Head] = [
        lambda x: x.flatten(2).topk(k, largest=is_largest)[0].mean(-1),
        lambda x: x.flatten(2).transpose(1, 2).topk(k, 1, is_largest)[0],
        lambda x: x.flatten(1).topk(k, 1, is_largest)[0],
    ]
    head = data.draw(st.sampled_from(heads))
    check(Function(lambda self, x: head(x)), ends)


def tokens_of(x: Tensor) -> Tensor:
    return x.flatten(2).transpose(1, 2)


class Gated(nn.Module):
    """Gated attention of multiple-instance learning (Ilse et al. 2018), as networks write it."""

    def __init__(self, way: str, classes: int = 2, width: int = CHANNELS) -> None:
        super().__init__()
        self.way = way
        self.norm = nn.LayerNorm(width)
        self.value, self.gate = nn.Linear(width, 3), nn.Linear(width, 3)
        # a bias of scores has no gradient: a softmax does not depend on it
        self.score, self.head = nn.Linear(3, classes, bias=False), nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Any:
        tokens = self.norm(tokens_of(x))
        if self.way == "mm":  # one bag: all positions of all samples
            tokens = x.permute(0, *range(2, x.dim()), 1).reshape(-1, x.shape[1])
        scores = self.score(torch.tanh(self.value(tokens)) * torch.sigmoid(self.gate(tokens)))
        return self.head(self.pool(scores, tokens))

    def pool(self, scores: Tensor, tokens: Tensor) -> Tensor:
        if self.way == "mm":
            return torch.mm(functional.softmax(torch.transpose(scores, 1, 0), dim=1), tokens)
        if self.way == "einsum":
            return torch.einsum("bnk,bnc->bkc", scores.softmax(1), tokens)
        if self.way == "bmm":
            return torch.bmm(scores.transpose(1, 2).softmax(-1), tokens)
        if self.way == "matmul":
            return (tokens.transpose(1, 2) @ torch.softmax(scores, 1)).transpose(1, 2)
        if self.way == "unsqueezed":
            return (scores.softmax(1).unsqueeze(-1) * tokens.unsqueeze(2)).sum(1)
        return (scores[..., :1].softmax(dim=1) * tokens).sum(1, keepdim=True)


WAYS = ("mm", "einsum", "bmm", "matmul", "unsqueezed", "sum")


@quick
@given(any_ends, st.sampled_from(WAYS))
def test_attention_pooling(ends: Ends, way: str) -> None:
    assume(all(each[-1] > 1 for each in ends))
    check(Gated(way), ends)


@quick
@given(any_ends, st.integers(0, 2))
def test_attention_pooling_of_maps(ends: Ends, way: int) -> None:
    """Scores of a convolution, as a map again."""
    assume(all(each[-1] > 1 for each in ends))
    conv = {2: nn.Conv2d, 3: nn.Conv3d}[len(ends)](CHANNELS, 1, 1, bias=False)
    over = tuple(range(2, 2 + len(ends)))

    def run(self: Any, x: Tensor) -> Tensor:
        scores = self.scores(x) * 3  # so that the maximum rises
        flat = scores.flatten(2).softmax(-1)
        if way == 0:
            return (flat.view_as(scores) * x).sum(over)
        if way == 1:
            return (x * flat.reshape(scores.shape)).sum(over, keepdim=True)
        return (scores.view(len(x), -1).softmax(1).view(scores.shape) * x).sum(over)

    check(Function(run, scores=conv), ends)


@quick
@given(any_ends)
def test_generalized_mean_pooling(ends: Ends) -> None:
    pool = {2: functional.avg_pool2d, 3: functional.avg_pool3d}[len(ends)]

    def run(self: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        powers = x.clamp(min=1e-6).pow(3.0)
        return pool(powers, x.shape[2:]).pow(1 / 3.0), powers.flatten(2).mean(-1).pow(1 / 3.0)

    check(Function(run), ends)


def without_gradients(x: Tensor) -> Tensor:
    with torch.no_grad():
        weights, fixed = tokens_of(x).softmax(1), tokens_of(x)
    return (weights * tokens_of(x)).sum(1) + fixed.amax(1)


TOKENS: dict[str, Head] = {
    "to_a_map": lambda x: functional.gelu(tokens_of(x)).transpose(1, 2).reshape(x.shape) * x,
    "normalized": lambda x: functional.layer_norm(tokens_of(x), (x.shape[1],)).softmax(-1).sum(1),
    "halves": lambda x: torch.cat([*tokens_of(x).chunk(2, 2), tokens_of(x)], 2)[:, :, 1:].amax(1),
    "selected": lambda x: tokens_of(x).select(2, 1).mean(1) + x.flatten(2).unbind(1)[0].amax(1),
    "heads": lambda x: tokens_of(x).unflatten(2, (2, 2)).permute(0, 2, 1, 3).mean(2),
    "over_channels": lambda x: (tokens_of(x) - tokens_of(x).mean(-1, keepdim=True)).amax(1),
    "weights_too": lambda x: ((w := tokens_of(x).softmax(1)), (w * tokens_of(x)).sum(1)),
    "without_gradients": without_gradients,
    "waiting": lambda x: tokens_of(x).sort(1)[0][:, :3],
    "its_own_product": lambda x: (tokens_of(x).softmax(1) * tokens_of(x).softmax(1)).sum(1),
    "attended": lambda x: functional.scaled_dot_product_attention(*[tokens_of(x)] * 3).mean(1),
    "gram": lambda x: x.flatten(2) @ tokens_of(x),
    "batch_norm": lambda x: (
        functional.batch_norm(x.flatten(2), None, None, training=True) * x.flatten(2)
    ),
    "positions": lambda x: (tokens_of(x) + torch.ones(1, x[0, 0].numel(), 1).to(x)).amax(1),
}


@pytest.mark.parametrize("name", TOKENS)
def test_tokens(name: str) -> None:
    """What cannot run on blocks takes the whole tokens."""
    head = Function(lambda self, x: TOKENS[name](x))
    check(head, ((2, 5, 9), (3, 4, 7)))
    check(head, ((1, 4), (2, 3), (1, 2)))
    layers = [("conv", nn.Conv2d(3, CHANNELS, 3, bias=False).to(DTYPE)), ("head", head)]
    assert error(layers, torch.randn(2, 3, 11, 7, dtype=DTYPE), [((3, 4, 11), 1)]) <= TOLERANCE


HEADS: dict[str, Callable[[int], nn.Module]] = {
    "abmil": lambda width: Gated("bmm", 1, width),
    "gem": lambda width: Function(
        lambda self, x: self.head(x.clamp(min=1e-6).pow(3).mean((2, 3)).pow(1 / 3)),
        head=nn.Linear(width, 2),
    ),
    "topk": lambda width: Function(
        lambda self, x: self.scores(x).flatten(2).topk(3)[0].mean(-1), scores=nn.Conv2d(width, 2, 1)
    ),
    "max": lambda width: nn.Sequential(nn.AdaptiveMaxPool2d(1), nn.Flatten(), nn.Linear(width, 2)),
}


@pytest.mark.parametrize("name", HEADS)
def test_resnet_with_a_head(name: str) -> None:
    torch.manual_seed(0)
    image = torch.randn(1, 3, 97, 66, dtype=DTYPE)
    model = ModelConfig(name="resnet_imagenet", depth=18, width=4, norm="batch")
    trunk = [each for each in zoo(model, 97, 66) if not each[0].startswith("head")]
    width = 32
    layers = [*trunk, ("head", HEADS[name](width).to(DTYPE))]
    cases = [
        (even_ends(97, 4), 1),
        ((even_ends(97, 2), even_ends(66, 2)), 2),
        ((even_ends(97, 5), even_ends(66, 3)), 1),
    ]
    assert error(layers, image, cases) <= TOLERANCE


def kept(module: nn.Module, image: Tensor, ends: Any) -> int:
    """Return the elements that the last strip is given."""
    (stage,) = cut_stages([("net", module)], image, ends)
    taken = [stage.carries(source)[place] for source, place in stage.given(stage.strips - 1)]
    return sum(torch.Size(shape).numel() for shape, _ in taken)


def test_no_map_is_kept_for_attention_pooling() -> None:
    """Beside the sums, a strip is given rows for the convolution only."""
    image = torch.empty(1, 3, 64, 32)
    conv = nn.Conv2d(3, CHANNELS, 3, padding=1)
    for head in (Gated("bmm", 1), Function(lambda self, x: x.flatten(2).topk(2)[0])):
        assert kept(nn.Sequential(conv, head), image, even_ends(64, 8)) <= 2 * 3 * 32 + 20


class SqueezeExcite(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Conv2d(8, 8, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(self.gate(x.mean((2, 3), keepdim=True)))


class Attention(nn.Module):
    """Attention over pixels, which gives a map again."""

    def __init__(self) -> None:
        super().__init__()
        self.attend = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        tokens = tokens_of(x)
        out: Tensor = self.attend(tokens, tokens, tokens)[0]
        return out.transpose(1, 2).view_as(x)


INSIDE: dict[str, Callable[[], nn.Module]] = {
    "squeeze_excite": SqueezeExcite,
    "group_norm": lambda: nn.GroupNorm(2, 8),
    "batch_norm": lambda: nn.BatchNorm2d(8),
    "instance_norm": lambda: nn.InstanceNorm2d(8, affine=True),
    "attention": Attention,
}


def trunk(layer: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 8, 3, 2, 1), nn.ReLU(), layer, nn.Conv2d(8, 4, 3, padding=1)]
    return nn.Sequential(*layers).to(DTYPE)


@pytest.mark.parametrize("name", INSIDE)
@pytest.mark.parametrize("divisions", [4, [2, 3]])
def test_whole_maps_after_a_layer(name: str, divisions: int | list[int]) -> None:
    """`stream` compares outputs, gradients and buffers before it returns."""
    image = torch.randn(2, 3, 22, 18, dtype=DTYPE)
    net = trunk(INSIDE[name]())
    with pytest.raises(StreamingError, match=r"layer Sequential\.2.*pass until=<a layer before"):
        stream(net, image, divisions)
    streamed = stream(net, image, divisions, until="1")
    for found, wanted in zip(results(streamed, [image]), results(net, [image]), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-10)


def test_an_unknown_layer_to_stream_until() -> None:
    with pytest.raises(StreamingError, match=r"until=Sequential\.9 is no layer; give one of Seq"):
        stream(trunk(nn.ReLU()), torch.empty(1, 3, 22, 18, dtype=DTYPE), 2, until="9")
