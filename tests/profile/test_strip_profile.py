"""What stages keep of strips, found on fake tensors.

`tests/mpi/test_strips.py` compares it with what ranks count.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

import pytest

from gems.config.schema import DataConfig, LossConfig, ModelConfig, RunSpec
from gems.errors import ConfigError
from gems.profile.profilers import strips
from gems.profile.profilers.fake import fake_profile
from gems.profile.profilers.strip_work import take as take_work
from gems.profile.profilers.strips import take
from gems.profile.strip_profile import StripProfile
from gems.profile.subject import Subject
from gems.streaming.strip_stage import StripStage
from tests.helpers.toys import make_spec

OWN = "tests.helpers.own_streams."
CLASSES = {
    "name": "synthetic",
    "num_classes": 3,
    "width_px": 16,
    "train_samples": 8,
    "validation_samples": 4,
}
MASKS = {**CLASSES, "num_classes": 2, "task": "segmentation"}
WHOLE_MAP = LossConfig(target="tests.helpers.own_losses.image_dice")
STRIPS = 7
NETWORKS = {
    "resnet": ({"name": "resnet", "depth": 20, "width": 4, "norm": "none"}, CLASSES, [0, 4, 11]),
    "small resnet": (
        {"name": "resnet", "depth": 8, "width": 4, "norm": "none"},
        CLASSES,
        [0, 2, 5],
    ),
    "standardised": (
        {"target": f"{OWN}Residual", "kwargs": {"num_classes": 3, "is_frozen": False}},
        CLASSES,
        [0, 2, 6],
    ),
    "dilated": ({"target": f"{OWN}Dilated"}, MASKS, [0, 2, 5]),
    "two outputs": ({"target": f"{OWN}Dilated", "kwargs": {"has_class": True}}, MASKS, [0, 2, 5]),
}


def cut_spec(name: str, strips: int, height: int) -> RunSpec:
    model, data, cuts = NETWORKS[name]
    spec = make_spec(
        "1f1b",
        2,
        model=ModelConfig(**model),
        data=DataConfig(**data, height_px=height),
        parallel__strips=strips,
        parallel__min_strip_positions=1,
    )
    return replace(spec, parallel=replace(spec.parallel, boundaries=cuts))


@pytest.mark.parametrize("name", [name for name in NETWORKS if name != "resnet"])
def test_strips_of_equal_shapes_are_run_once_and_are_equal(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = cut_spec(name, STRIPS, 116)
    ran = []
    forward = StripStage.forward

    def count(form: StripStage, strip: int, *given: object) -> object:
        ran.append(strip)
        return forward(form, strip, *given)

    monkeypatch.setattr(StripStage, "forward", count)
    monkeypatch.setattr(strips, "_KNOWN", defaultdict(dict))
    found = take(Subject.of(spec))
    assert len(ran) < 4 * STRIPS
    monkeypatch.setattr(StripStage, "shapes_of", lambda _, strip: strip)
    monkeypatch.setattr(strips, "_KNOWN", defaultdict(dict))
    assert take(Subject.of(spec)) == found
    assert StripProfile.from_json(json.loads(json.dumps(found.to_json()))) == found


def test_blocks_of_a_larger_image_are_known_from_a_smaller_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Only the last block runs again, if it has the loss of the whole map: it takes what all made."""

    def blocks(rows: int, columns: int, loss: LossConfig = WHOLE_MAP) -> RunSpec:
        spec = replace(cut_spec("dilated", 1, 64 * rows), loss=loss)
        parallel = replace(spec.parallel, strips=[rows, columns])
        return replace(spec, data=replace(spec.data, width_px=64 * columns), parallel=parallel)

    ran = []
    measure = strips._Strips._measure

    def count(of_stage: strips._Strips, strip: int, flags: Sequence[bool]) -> object:
        ran.append(strip)
        return measure(of_stage, strip, flags)

    monkeypatch.setattr(strips._Strips, "_measure", count)
    monkeypatch.setattr(strips, "_KNOWN", defaultdict(dict))
    take(Subject.of(blocks(3, 3)))
    assert ran == 2 * [*range(9)], "corners, edges and the middle"
    ran.clear()
    found = take(Subject.of(blocks(4, 5)))
    assert ran == [19]
    ran.clear()
    take(Subject.of(blocks(4, 5, LossConfig())))
    assert len(ran) == 9, "blocks with losses of their own"
    ran.clear()
    take(Subject.of(blocks(5, 6, LossConfig())))
    assert not ran
    monkeypatch.setattr(strips, "_KNOWN", defaultdict(dict))
    assert take(Subject.of(blocks(4, 5))) == found


def test_strips_keep_together_little_more_than_the_whole_image_does() -> None:
    """Beside their inputs, which are copied behind the rows that are left from the strip before."""
    spec = cut_spec("resnet", 4, 1024)
    found = take(Subject.of(spec))
    whole = fake_profile(
        spec.model, spec.data, spec.parallel.micro_batch_size, "float32", spec.machine
    )
    for stage, (first, end) in enumerate(((0, 4), (4, 11))):
        kept = sum(strip.kept for strip in found.stages[stage])
        saved = sum(layer.kept_bytes for layer in whole.layers[first:end]) + whole.given_bytes(
            first
        )
        assert saved <= kept <= 1.02 * saved
        assert sum(strip.given for strip in found.stages[stage]) == whole.given_bytes(first)
    assert sum(strip.handed_on for strip in found.stages[0]) == whole.layers[3].output_bytes
    assert all(strip.left > 0 for strip in found.stages[0][:-1]) and found.stages[0][-1].left == 0


def test_a_head_waits_for_the_last_strip_and_maps_for_the_loss() -> None:
    of_class, of_map, by_strip = (
        take(Subject.of(replace(cut_spec(name, 3, 96), loss=loss))).stages[1]
        for name, loss in (
            ("small resnet", LossConfig()),
            ("dilated", WHOLE_MAP),
            ("dilated", LossConfig()),
        )
    )
    assert [strip.waiting for strip in of_class] == [0, 0, 0] and of_class[-1].saved_by_loss
    assert of_map[0].waiting > 0 and of_map[-1].loss_gradient >= sum(
        strip.waiting for strip in of_map
    )
    assert not any(
        strip.waiting or strip.loss_gradient or strip.saved_by_loss for strip in by_strip
    )
    assert by_strip[1].kept > of_map[1].kept, "what its own loss saves"
    assert by_strip[-1].kept < of_map[-1].kept


def test_a_layer_that_needs_the_whole_image_is_named() -> None:
    spec = cut_spec("resnet", 3, 96)
    with pytest.raises(ConfigError, match=r"layer stem.* needs statistics of the whole image"):
        take(Subject.of(replace(spec, model=replace(spec.model, norm="batch"))))


def test_the_work_of_layers_by_strip() -> None:
    """Deep layers lag behind, and catch up in the last strip; the head is there alone."""
    spec = cut_spec("resnet", 4, 96)
    parallel = [replace(spec.parallel, min_strip_positions=least) for least in (1, 100)]
    fine, coarse = (take_work(Subject.of(replace(spec, parallel=each))).layers for each in parallel)
    for layers in (fine, coarse):
        assert all(sum(layer.shares) == pytest.approx(1) for layer in layers)
        assert [layer.shares[0] for layer in layers] == sorted(
            (layer.shares[0] for layer in layers), reverse=True
        )
        assert layers[-1].shares == (0, 0, 0, 1)
    assert {layer.at_once for layer in fine} == {1} and coarse[0].at_once == 1
    deepest = coarse[9]
    assert deepest.at_once == 4 and deepest.shares == (0, 0, 0, 1)
