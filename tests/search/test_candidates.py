"""The space: every candidate uses all GPUs for the same images, once, with counts that its schedule serves."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gems.config.compose import compose
from gems.search.candidate import KEEP, Candidate, candidates


@pytest.mark.parametrize(("num_gpus", "batch"), [(1, 3), (4, 8), (6, 12), (8, 16)])
def test_all_use_every_gpu_for_the_same_images(num_gpus: int, batch: int) -> None:
    found = candidates(num_gpus, batch, num_layers=20)
    assert len(found) == len(set(found)) > 0
    for one in found:
        assert one.partitions * one.replicas == num_gpus
        assert one.global_batch == batch
        assert one.num_stages <= 20


def test_every_axis_is_there() -> None:
    found = candidates(8, 16, num_layers=40)
    assert {one.partitions for one in found} == {1, 2, 4, 8}
    assert {"gems_master", "gems_zb", "1f1b", "zb_h1", "zb_v", "interleaved_1f1b", "capped"} <= {
        one.schedule for one in found
    }
    assert {"keep", "recompute", "vdnn_dyn", "plan"} <= {one.memory for one in found}
    assert {one.micro_batch_size for one in found} == {1, 2, 4, 8, 16}
    assert {one.cap for one in found if one.schedule == "1f1b"} == {None, 1.0, 2.0, 3.0, 4.0, 6.0}


def test_a_batch_that_no_replica_divides_leaves_pipelines() -> None:
    assert {one.partitions for one in candidates(4, 7, num_layers=10)} == {4}
    assert candidates(16, 7, num_layers=10) == []


def test_without_policies_all_is_kept() -> None:
    assert {one.memory for one in candidates(4, 8, 10, has_policies=False)} == {KEEP}


def test_overrides_compose_to_the_candidate() -> None:
    one = Candidate(2, 2, "gems_master", 2, 4, parts=2, memory="recompute", how="stage")
    spec = compose([*one.overrides((0, 5, 11)), "data=synthetic"])
    assert spec.parallel.global_batch == one.global_batch == 16
    assert (spec.parallel.partitions, spec.parallel.parts, spec.parallel.boundaries) == (
        2,
        2,
        [0, 5, 11],
    )
    assert (spec.schedule.name, spec.memory.name, spec.memory.recompute) == (
        "gems_master",
        "recompute",
        "stage",
    )
    capped = compose(
        [
            *replace(one, schedule="1f1b", parts=1, cap=3.0, memory=KEEP, how="").overrides(),
            "data=synthetic",
        ]
    )
    assert capped.schedule.activation_cap == 3.0
