"""gems plan --strips: pipelines that the search found, and those that do not fit whole, in strips."""

from __future__ import annotations

from dataclasses import replace

import pytest

import gems.search.in_strips
from gems.config.compose import compose
from gems.config.schema import RunSpec
from gems.errors import DoesNotFitError
from gems.plan.evaluate import evaluate, simulate
from gems.search.candidate import Candidate
from gems.search.evaluate import Planner
from gems.search.fastest import fastest
from gems.search.in_strips import _candidates, divisions_of, in_strips

WORDS = (
    "model=resnet20_v1 model.norm=none model.depth=8 data=synthetic data.height_px=128"
    " data.width_px=256 parallel.gpus=2 parallel.micro_batch_size=1"
)


@pytest.fixture
def spec(monkeypatch: pytest.MonkeyPatch) -> RunSpec:
    monkeypatch.setattr(gems.search.in_strips, "NUM_SHAPES", 1)
    return compose(WORDS.split())


def test_strips_are_among_the_best(spec: RunSpec) -> None:
    """One image on two ranks: they overlap in strips alone."""
    answer, found = fastest(Planner(spec, None), [1], 20, 2.0, in_strips)
    first = found.best[0]
    assert first.candidate.strips != 1 and first.candidate.partitions == 2
    whole = min(one.step_s for one in found.best if one.candidate.strips == 1)
    assert first.step_s < 0.9 * whole
    chosen = answer["choices"][0]
    assert f"parallel.strips={chosen['strips']}" in chosen["overrides"]
    run = compose([*WORDS.replace("parallel.gpus=2", "").split(), *chosen["overrides"]])
    peak = evaluate(run).peak
    assert peak is not None and peak.device_bytes == first.most_bytes
    assert simulate(run).step_s == pytest.approx(first.step_s, rel=1e-9)
    assert sum(first.parts_s.values()) == pytest.approx(first.step_s)


def test_strips_fit_where_nothing_does(spec: RunSpec) -> None:
    limit = 14_000_000
    tall = replace(spec, data=replace(spec.data, height_px=256))
    with pytest.raises(DoesNotFitError):
        fastest(Planner(tall, limit), [1], 5, 1.0)
    _, found = fastest(Planner(tall, limit), [1], 5, 1.0, in_strips)
    assert found.best and all(
        one.most_bytes <= limit and one.candidate.strips != 1 for one in found.best
    )


def test_blocks_are_tried_beside_strips(spec: RunSpec) -> None:
    square = replace(spec, data=replace(spec.data, height_px=1024, width_px=1024))
    shape = Candidate(2, 1, "1f1b", 1, 1)
    divisions = divisions_of(square.data, square.model, has_blocks=True)
    assert divisions == [4, 8, 16, (2, 2), (4, 2), (4, 4)]
    candidates = [
        candidate
        for candidate in _candidates([], [shape], divisions)
        if candidate.schedule == "1f1b"
    ]
    assert [candidate.strips for candidate in candidates] == divisions
    largest = candidates[-1]
    assert largest.label == "1f1b, 4 x 4 blocks"
    assert "parallel.strips=[4,4]" in largest.overrides()
    assert Planner(square, None).run_of(largest).parallel.strips == [4, 4]


def test_a_network_that_needs_whole_images_has_no_strips(spec: RunSpec) -> None:
    normed = replace(spec, model=replace(spec.model, norm="batch"))
    _, found = fastest(Planner(normed, None), [1], 20, 2.0, in_strips)
    assert found.best and all(one.candidate.strips == 1 for one in found.best)
