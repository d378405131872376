"""GNMT and BIG LSTM: parameters by hand, tensors between the layers, their wiring, and cuts that change no bit."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from gems.autograd.outputs import as_tuple
from gems.config.resolve import resolve
from gems.config.schema import DataConfig, ModelConfig, RunSpec
from gems.data import sample_shape
from gems.errors import ConfigError
from gems.models import check_image, layers_of, stride_of
from gems.models.build import boundary_shapes, build_layer, build_layers, input_spec
from scripts.reproduce import language
from scripts.reproduce.sequences import Attention, Recurrent
from tests.helpers.cutting import assert_cut_equals_whole

TOKENS = DataConfig(name="tokens", num_classes=11, length=5)
PAIRS = DataConfig(name="token_pairs", num_classes=11, length=5)
BIGLSTM = ModelConfig(name="biglstm", depth=2, width=6, vocabulary=11)
GNMT = ModelConfig(name="gnmt", depth=3, width=6, vocabulary=11)


def lstm(inputs: int, cells: int, outputs: int | None = None) -> int:
    """Four gates with weights of input and output, and two biases (torch keeps both).

    A projection where asked.
    """
    back = outputs or cells
    return 4 * cells * (inputs + back + 2) + (cells * outputs if outputs else 0)


def gnmt_by_hand(depth: int, width: int, vocabulary: int) -> int:
    encoder = 2 * lstm(width, width) + lstm(2 * width, width) + (depth - 2) * lstm(width, width)
    attention = width * width + (width * width + width) + width
    decoder = lstm(width, width) + (depth - 1) * lstm(2 * width, width)
    return 2 * vocabulary * width + encoder + attention + decoder + (width + 1) * vocabulary


def biglstm_by_hand(depth: int, width: int, vocabulary: int) -> int:
    return vocabulary * width + depth * lstm(width, 8 * width, width) + (width + 1) * vocabulary


def test_the_published_sizes_have_their_parameters(capsys: pytest.CaptureFixture[str]) -> None:
    """BIG LSTM is published with 1.8 billion."""
    language.main()
    _, gnmt, biglstm = capsys.readouterr().out.splitlines()
    assert gnmt.split() == ["GNMT", "20", f"{gnmt_by_hand(8, 1024, 32_000):,d}"]
    assert biglstm.split()[2:] == ["4", f"{biglstm_by_hand(2, 1024, 793_470):,d}"]
    assert biglstm.split()[3] == "1,776,946,046"


def test_names_and_tensors_of_gnmt() -> None:
    layers = layers_of(GNMT, PAIRS)
    given = input_spec(PAIRS, 2, torch.float64)
    assert (given.name, given.shape, given.dtype) == ("tokens", (2, 2, 5), torch.int64)
    shapes = boundary_shapes(layers, given.shape, torch.float64, given.dtype)
    found = [[(spec.name, spec.shape, spec.dtype) for spec in specs] for specs in shapes]
    state = ((5, 2, 6), torch.float64)
    words = ((2, 5), torch.int64)
    assert found == [
        [("source.main", *state), ("source.target", *words)],
        [("encoder1.main", (5, 2, 12), torch.float64), ("encoder1.target", *words)],
        [("encoder2.main", *state), ("encoder2.target", *words)],
        [("encoder3.main", *state), ("encoder3.target", *words)],
        [("target.main", *state), ("target.memory", *state)],
        [("decoder1.main", *state), ("decoder1.memory", *state)],
        [("attention.main", *state), ("attention.context", *state)],
        [("decoder2.main", *state), ("decoder2.context", *state)],
        [("decoder3", *state)],
        [("head", (2, 11, 5), torch.float64)],
    ]


def test_names_and_tensors_of_big_lstm() -> None:
    layers = layers_of(BIGLSTM, TOKENS)
    given = input_spec(TOKENS, 3)
    shapes = boundary_shapes(layers, given.shape, torch.float32, given.dtype)
    assert [[(spec.name, spec.shape) for spec in specs] for specs in shapes] == [
        [("words", (5, 3, 6))],
        [("lstm1", (5, 3, 6))],
        [("lstm2", (5, 3, 6))],
        [("head", (3, 11, 5))],
    ]


def test_residuals_begin_at_the_third_layer_of_encoder_and_decoder() -> None:
    layers = layers_of(ModelConfig(name="gnmt", depth=5, width=4, vocabulary=11), PAIRS)
    residual = {layer.name for layer in layers if dict(layer.options).get("is_residual")}
    assert residual == {"encoder3", "encoder4", "encoder5", "decoder3", "decoder4", "decoder5"}
    layer = next(layer for layer in layers if layer.name == "encoder3")
    module = build_layer(layer, 4, 0)
    x = torch.randn(3, 2, 4)
    target = torch.zeros(2, 3, dtype=torch.int64)
    out, carried = module(x, target)
    assert torch.equal(out, x + module.lstm(x)[0]) and carried is target


def test_the_first_encoder_layer_reads_both_ways() -> None:
    layer = next(layer for layer in layers_of(GNMT, PAIRS) if layer.name == "encoder1")
    module = build_layer(layer, 1, 0)
    x = torch.randn(4, 1, 6)
    target = torch.zeros(1, 4, dtype=torch.int64)
    later = x.clone()
    later[-1] += 1
    with torch.no_grad():
        forward, backward = (module(later, target)[0] - module(x, target)[0])[0, 0].split(6)
    assert not forward.any() and backward.all()


def test_logits_know_the_past_alone() -> None:
    """A token changes the logits from its own place on, and none before.

    Of the source every place knows all.
    """
    for model, data in ((BIGLSTM, TOKENS), (GNMT, PAIRS)):
        tokens = tokens_of(data, 1)
        other = tokens.clone()
        other.view(-1, 5)[-1, 2] = (other.view(-1, 5)[-1, 2] + 1) % 11
        changed = (logits(model, data, other) - logits(model, data, tokens)).abs().amax(
            dim=(0, 1)
        ) > 0
        assert changed.tolist() == [False, False, True, True, True]
    source = tokens_of(PAIRS, 1)
    other = source.clone()
    other[0, 0, 4] = (other[0, 0, 4] + 1) % 11
    assert (logits(GNMT, PAIRS, other) != logits(GNMT, PAIRS, source)).any(dim=1).all()


def test_attention_weighs_the_memory_by_the_place_before() -> None:
    torch.manual_seed(0)
    module = Attention(4)
    state = torch.randn(3, 2, 4)
    memory = torch.randn(5, 2, 4)
    same, context = module(state, memory)
    assert same is state and context.is_contiguous()
    for t, n in ((0, 0), (1, 1), (2, 0)):
        query = module.query(state[t - 1, n] if t else torch.zeros(4))
        scores = torch.stack(
            [module.score(torch.tanh(query + module.key(memory[s, n])))[0] for s in range(5)]
        )
        torch.testing.assert_close(context[t, n], scores.softmax(0) @ memory[:, n])


def test_a_projected_layer_gives_the_projection() -> None:
    module = Recurrent(6, 6, num_cells=48)
    assert module.lstm.weight_hr_l0.shape == (6, 48)
    assert module(torch.randn(5, 2, 6)).shape == (5, 2, 6)


@pytest.mark.parametrize("is_split", [False, True])
@pytest.mark.parametrize(
    ("model", "data"), [(BIGLSTM, TOKENS), (GNMT, PAIRS)], ids=["biglstm", "gnmt"]
)
def test_a_cut_changes_no_bit(model: ModelConfig, data: DataConfig, is_split: bool) -> None:
    labels = torch.randint(11, (2, 5), generator=torch.Generator().manual_seed(3))
    for parts in (2, 4):
        assert_cut_equals_whole(
            model, data, parts=parts, inputs=tokens_of(data, 2), labels=labels, is_split=is_split
        )


def test_every_layer_a_stage_of_its_own() -> None:
    labels = torch.randint(11, (2, 5), generator=torch.Generator().manual_seed(4))
    assert_cut_equals_whole(GNMT, PAIRS, parts=10, inputs=tokens_of(PAIRS, 2), labels=labels)


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"vocabulary": 10}, "model.vocabulary"),
        ({"width": 0}, "model.width"),
        ({"depth": 0}, "model.depth"),
    ],
)
@pytest.mark.parametrize("name", ["gnmt", "biglstm"])
def test_networks_that_do_not_exist_are_refused(name: str, changes: dict, key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        layers_of(
            ModelConfig(**{"name": name, "depth": 2, "width": 4, "vocabulary": 11, **changes}),
            TOKENS,
        )
    assert caught.value.key == key


def test_the_size_of_an_image_means_nothing_to_them() -> None:
    check_image(GNMT, DataConfig(name="token_pairs", height_px=1, width_px=1), micro_batch_size=1)
    assert stride_of(BIGLSTM) == 1


@pytest.mark.parametrize(
    ("model", "source", "advice"),
    [
        ("resnet", "tokens", "data=folder"),
        ("gnmt", "tokens", "data=token_pairs"),
        ("gnmt", "synthetic", "data=token_pairs"),
        ("biglstm", "token_pairs", "data=tokens"),
    ],
)
def test_a_model_that_cannot_read_the_data_is_refused_in_one_line(
    model: str, source: str, advice: str
) -> None:
    spec = RunSpec(model=ModelConfig(name=model), data=DataConfig(name=source))
    with pytest.raises(ConfigError) as caught:
        resolve(spec)
    assert (
        caught.value.key == "data" and advice in str(caught.value) and "\n" not in str(caught.value)
    )


def tokens_of(data: DataConfig, size: int) -> Tensor:
    return torch.randint(
        11, (size, *sample_shape(data)), generator=torch.Generator().manual_seed(2)
    )


def logits(model: ModelConfig, data: DataConfig, tokens: Tensor) -> Tensor:
    layers = layers_of(model, data)
    values: tuple[Tensor, ...] = (tokens,)
    with torch.no_grad():
        for module in build_layers(layers, 0, len(layers), 0, torch.float64):
            values = as_tuple(module(*values))
    return values[0]
