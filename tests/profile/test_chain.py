"""gems.profile.profilers.chain.

The tables over a chain's layers equal the run of every stage in one piece.
"""

from __future__ import annotations

import json
from dataclasses import astuple, replace
from itertools import pairwise

import pytest

from gems.config.schema import DataConfig, ModelConfig
from gems.models import Layer, layers_of
from gems.profile import LayerProfile, ModelProfile
from gems.profile.model_profile import Saved
from gems.profile.spans import Spans
from tests.helpers.profiled import (
    celled,
    fake_chain,
    layer,
    saved_by_parts,
    skipping,
    viewed,
    whole_stage,
)

CHAINS = {
    "skips": skipping(),
    "views": viewed(),
    "resnet_v2": layers_of(ModelConfig(depth=8, version=2, block="basic"), DataConfig()),
    "resnet_v1": layers_of(ModelConfig(depth=8, version=1), DataConfig()),
}


def stages(layers: tuple[Layer, ...]) -> list[tuple[int, int]]:
    return [
        (first, end) for first in range(len(layers)) for end in range(first + 1, len(layers) + 1)
    ]


@pytest.mark.parametrize("name", CHAINS)
def test_every_stage_holds_what_the_tables_say(name: str) -> None:
    layers = CHAINS[name]
    spans = Spans(fake_chain(layers))
    for first, end in stages(layers):
        truth = whole_stage(layers, first, end)
        told = tuple(
            round(table[first, end])
            for table in (
                spans.stash,
                spans.forward_peak,
                spans.backward_peak,
                spans.held_for_weights,
            )
        )
        if (
            layers[first].name == "flat"
        ):  # what is a view of the stage's own input or gradient is counted once more
            assert all(one >= other for one, other in zip(told, astuple(truth), strict=True))
            continue
        assert told == astuple(truth), (first, end)


def test_cells_of_two_inputs_are_told_within_one_tensor_and_never_too_low() -> None:
    """What an earlier layer made and this one saves first is counted until its backward ends, and may go before."""
    layers = celled()
    spans = Spans(fake_chain(layers))
    tensor_bytes = 2 * 8 * 32 * 32 * 4
    for first, end in stages(layers):
        truth = whole_stage(layers, first, end)
        assert spans.stash[first, end] == truth.stash_bytes
        assert spans.forward_peak[first, end] == truth.forward_peak_bytes
        assert spans.held_for_weights[first, end] == truth.held_for_weights_bytes
        above = spans.backward_peak[first, end] - truth.backward_peak_bytes
        assert 0 <= above <= tensor_bytes, (first, end)


def test_a_storage_is_counted_where_it_was_made_and_by_who_saves_it_first() -> None:
    down1, down2, middle1, *_, up1, _ = fake_chain(skipping()).layers
    skip = 2 * 8 * 32 * 32 * 4
    assert skip not in [size for _, size in down1.saved_later], "joining saves nothing of it"
    assert dict(up1.unsaved_from) == {5: skip}, (
        "it was carried here, and is among the inputs of a stage cut between"
    )
    assert dict(down1.saved_later) == {1: skip // 4}, "the next convolution saves the half"
    half = 2 * 16 * 8 * 8 * 4
    assert middle1.unsaved_input_bytes == half + skip, (
        "down2's half, and the raw skip; down2's own its ReLU saves"
    )
    assert down2.output_bytes == half + skip + 2 * 16 * 16 * 16 * 4


@pytest.mark.parametrize("name", [*CHAINS, "cells"])
def test_parts_of_a_model_save_and_hand_on_the_storages_that_it_lists(name: str) -> None:
    layers = celled() if name == "cells" else CHAINS[name]
    profile = fake_chain(layers)
    for cuts in (
        (0, len(layers)),
        (0, 1, len(layers)),
        (0, 1, 2, len(layers)),
        tuple(range(len(layers) + 1)),
    ):
        part_of = [
            part for part, (first, end) in enumerate(pairwise(cuts)) for _ in range(first, end)
        ]
        told: dict[tuple[tuple[int, ...], tuple[int, ...]], int] = {}
        for maker, one in enumerate(profile.layers):
            for storage in (*one.saved, *one.passing):
                savers = tuple(sorted({part_of[maker + ahead] for ahead in storage.savers}))
                hands = tuple(range(part_of[maker], part_of[maker + storage.last_use]))
                if savers or hands:
                    told[savers, hands] = told.get((savers, hands), 0) + storage.total_bytes
        assert told == saved_by_parts(layers, cuts), cuts


def test_storages_add_up_to_the_sums() -> None:
    for one in fake_chain(skipping()).layers:
        with pytest.raises(ValueError, match=f"layer {one.name}: stash_bytes"):
            replace(one, stash_bytes=one.stash_bytes + 1)
    plain = LayerProfile("a", "x", stash_bytes=7, saved_later=((2, 5),), cheap_bytes=3)
    assert plain.saved == (Saved(3, is_product=True), Saved(4), Saved(5, (2,), 2))


def test_equal_layers_are_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.helpers import profiled

    built: list[str] = []
    plain = profiled.on_meta

    def counting(one: Layer, dtype: object) -> object:
        built.append(one.name)
        return plain(one, dtype)

    monkeypatch.setattr(profiled, "on_meta", counting)
    many = (
        layer("ConvRelu", "stem", i=3, o=8),
        *(layer("ConvRelu", f"c{n}", i=8, o=8) for n in range(50)),
    )
    profile = fake_chain((*many, layer("Head", i=8, classes=3)))
    assert profile.num_layers == 52 and len(set(built)) <= 5 and len(built) <= 12
    assert len({one.forward_peak_bytes for one in profile.layers[1:51]}) == 1


def test_an_error_names_the_layer_and_what_it_took() -> None:
    with pytest.raises(RuntimeError) as error:
        fake_chain((layer("ConvRelu", "wrong", i=4, o=8), layer("Head", i=8, classes=3)))
    assert error.value.__notes__ == ["layer wrong took (2, 3, 32, 32)"]


def test_json_keeps_every_field() -> None:
    profile = fake_chain(skipping())
    document = json.loads(json.dumps(profile.to_json()))
    assert ModelProfile.from_json(document) == profile


def test_an_older_document_is_read_and_its_storages_are_those_that_its_sums_allow() -> None:
    profile = fake_chain(skipping())
    document = profile.to_json()
    for entry in document["layers"]:
        for name in ("saved", "passing", "cheap_bytes", "cheap_s"):
            del entry[name]
    for old, new in zip(ModelProfile.from_json(document).layers, profile.layers, strict=True):
        assert (old.stash_bytes, old.saved_later) == (new.stash_bytes, new.saved_later)
        assert sum(one.total_bytes for one in old.saved) == new.kept_bytes
        assert (old.cheap_bytes, old.passing) == (0, ())
