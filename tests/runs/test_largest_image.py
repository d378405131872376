"""gems.plan.largest_image: the largest square image that trains in strips on a device."""

from __future__ import annotations

from dataclasses import replace

import pytest

import gems.plan.largest_image
from gems.config.schema import RunSpec
from gems.errors import DoesNotFitError
from gems.partition.max_model_size import RESOLUTION, Axis
from gems.plan.evaluate import evaluate
from gems.plan.largest_image import largest_image
from tests.helpers.toys import make_spec

PRECISION = 0.3  # in place of the finer one, for speed
LIMIT = 12_000_000


@pytest.fixture
def spec(monkeypatch: pytest.MonkeyPatch) -> RunSpec:
    monkeypatch.setattr(gems.plan.largest_image, "PRECISION", PRECISION)
    made = make_spec("layer_parallel", 1)
    model = replace(made.model, norm="none", depth=8)
    machine = replace(made.machine, device_bytes=LIMIT)
    return replace(made, model=model, machine=machine)


def in_strips(spec: RunSpec, side_px: int, strips: int) -> RunSpec:
    run = Axis(spec, RESOLUTION).at(side_px)
    memory = replace(run.memory, name="recompute", recompute="strip")
    return replace(run, memory=memory, parallel=replace(run.parallel, strips=strips))


def test_the_largest_fits_and_little_more_does_not(spec: RunSpec) -> None:
    found = largest_image(spec)
    assert found is not None and found.memory == "recompute"
    peak = evaluate(in_strips(spec, found.side_px, found.strips)).peak
    assert peak is not None and peak.device_bytes == found.peak_bytes <= LIMIT
    with pytest.raises(DoesNotFitError):
        evaluate(in_strips(spec, round(found.side_px * (1 + 2 * PRECISION)), found.strips))
    with pytest.raises(DoesNotFitError):
        evaluate(
            Axis(replace(spec, memory=replace(spec.memory, name="recompute")), RESOLUTION).at(
                found.side_px
            )
        )


def test_own_strips_and_policy_are_kept(spec: RunSpec) -> None:
    run = replace(
        spec,
        parallel=replace(spec.parallel, strips=4),
        memory=replace(spec.memory, name="vdnn_all"),
    )
    found = largest_image(run)
    assert found is not None and (found.strips, found.memory) == (4, "vdnn_all")


def test_a_network_that_needs_whole_images_has_none(spec: RunSpec) -> None:
    assert largest_image(replace(spec, model=replace(spec.model, norm="batch"))) is None
