"""gems.plan.largest_image: the largest square image that trains in parts on a device."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest

import gems.plan.largest_image
from gems.config.schema import RunSpec
from gems.errors import ConfigError, DoesNotFitError
from gems.partition.max_model_size import RESOLUTION, Axis
from gems.plan.evaluate import Peak, evaluate
from gems.plan.largest_image import LargestImage, _in_blocks, largest_image
from gems.plan.strips_choice import Division
from gems.profile.store import take_in_this_process
from tests.helpers.toys import make_spec

LIMIT = 12_000_000
MOST_BLOCKS = 64


@pytest.fixture(scope="module", autouse=True)
def _profiles_in_this_process() -> None:
    take_in_this_process()


@pytest.fixture
def spec(monkeypatch: pytest.MonkeyPatch) -> RunSpec:
    monkeypatch.setattr(gems.plan.largest_image, "BLOCK_PX", 128)
    monkeypatch.setattr(gems.plan.largest_image, "UNIT_PX", 128)  # for fewer profiles
    monkeypatch.setattr(gems.plan.largest_image, "PRECISION", 0.3)  # of the search by strips
    made = make_spec("layer_parallel", 1)
    model = replace(made.model, norm="none", depth=8)
    machine = replace(made.machine, device_bytes=LIMIT)
    return replace(made, model=model, machine=machine)


def divided(spec: RunSpec, side_px: int, strips: Division) -> RunSpec:
    run = Axis(spec, RESOLUTION).at(side_px)
    memory = replace(run.memory, name="recompute", recompute="strip")
    return replace(run, memory=memory, parallel=replace(run.parallel, strips=strips))


def test_the_largest_fits_and_little_more_does_not(spec: RunSpec) -> None:
    found = largest_image(spec)
    assert found is not None and found.memory == "recompute"
    assert isinstance(found.strips, list)
    plan = evaluate(divided(spec, found.side_px, found.strips))
    assert plan.peak is not None and plan.peak.device_bytes == found.peak_bytes <= LIMIT
    assert plan.step_s == found.step_s
    count, _ = found.strips
    with pytest.raises(DoesNotFitError):
        evaluate(divided(spec, found.side_px + found.side_px // count, [count + 1] * 2))


@pytest.mark.parametrize("carried", [1, 7, 40])
@pytest.mark.parametrize("limit", [2 * 10**5, 3 * 10**6, 10**8])
def test_no_image_of_whole_blocks_is_larger(carried: int, limit: int) -> None:
    """Of one block, and what is carried over all boundaries."""

    def trained(side_px: int, count: int) -> LargestImage | None:
        held = (side_px // count) ** 2 + carried * 2 * (count - 1) * side_px
        tried.append((side_px, count))
        return LargestImage(side_px, [count, count], "", held, 0.0) if held <= limit else None

    tried: list[tuple[int, int]] = []
    found = _in_blocks(trained, 32, MOST_BLOCKS)
    assert found is not None
    assert len(tried) < 60
    sides = [32 * 2**power for power in range(10)]
    best = max(
        block * count
        for block in sides
        for count in range(2, MOST_BLOCKS + 1)
        if trained(block * count, count)
    )
    assert best <= found.side_px < 1.5 * best


def test_a_device_for_no_image_has_none() -> None:
    assert _in_blocks(lambda *_: None, 32, MOST_BLOCKS) is None


def of_pixels(run: RunSpec) -> SimpleNamespace:
    """Predict 100 bytes a pixel of a part."""
    needed = 100 * run.data.height_px * run.data.width_px // run.parallel.num_strips
    if needed > LIMIT:
        raise DoesNotFitError("rank 0", needed, LIMIT, "use less")
    return SimpleNamespace(peak=Peak(0, needed, 0), step_s=1.0)


def test_a_network_without_blocks_is_tried_in_strips_of_rows(
    spec: RunSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    def rows_only(run: RunSpec) -> SimpleNamespace:
        if isinstance(run.parallel.strips, list):
            raise ConfigError("parallel.strips", run.parallel.strips, "divide rows only")
        return of_pixels(run)

    monkeypatch.setattr(gems.plan.largest_image, "evaluate", rows_only)
    found = largest_image(spec)
    assert found is not None and found.strips == 2
    assert 0.7 * LIMIT < found.peak_bytes <= LIMIT


@pytest.mark.parametrize("strips", [4, [2, 3]])
def test_own_division_and_policy_are_kept(
    spec: RunSpec, monkeypatch: pytest.MonkeyPatch, strips: Division
) -> None:
    monkeypatch.setattr(gems.plan.largest_image, "evaluate", of_pixels)
    run = replace(
        spec,
        parallel=replace(spec.parallel, strips=strips),
        memory=replace(spec.memory, name="vdnn_all"),
    )
    found = largest_image(run)
    assert found is not None and (found.strips, found.memory) == (strips, "vdnn_all")


def test_a_network_that_needs_whole_images_has_none(spec: RunSpec) -> None:
    assert largest_image(replace(spec, model=replace(spec.model, norm="batch"))) is None
