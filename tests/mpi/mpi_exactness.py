"""Every schedule against one unsplit process, in float64, on worlds of one to four ranks."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

from gems.config import RunSpec
from gems.engine.compare import compare
from gems.schedule import FAMILIES
from tests.engine import toys
from tests.mpi.conftest import sub_world

TOLERANCE = 1e-12


def make_spec(schedule: str, partitions: int, replicas: int = 1, **changes) -> RunSpec:
    return toys.make_spec(schedule, partitions, replicas, **{"train__dtype": "float64", **changes})


def check(comm, spec: RunSpec) -> None:
    part = sub_world(comm, spec.world_size)
    if part is None:
        return
    difference = compare(spec, part, torch.device("cpu"))
    assert difference.max_rel_error <= TOLERANCE, difference


WORLDS = [(p, r) for p, r in itertools.product((1, 2, 3, 4), (1, 2)) if p * r <= 4]


@pytest.mark.parametrize(("partitions", "replicas"), WORLDS)
@pytest.mark.parametrize("schedule", FAMILIES)
def test_equals_one_unsplit_process(comm, schedule, partitions, replicas):
    """MPI4DL #4: its layer, pipeline and GEMS modes break under data parallelism; here each runs with replicas."""
    check(comm, make_spec(schedule, partitions, replicas))


@pytest.mark.parametrize("micro_batches", [1, 2, 3, 7])
@pytest.mark.parametrize("schedule", ["layer_parallel", "gpipe", "1f1b"])
def test_gradient_is_the_mean_whatever_the_micro_batches(comm, schedule, micro_batches):
    """MPI4DL #5: its gradient is `parts` times too large."""
    check(comm, make_spec(schedule, 3, parallel__micro_batches=micro_batches))


@pytest.mark.parametrize(("replications", "parts"), [(2, 1), (2, 3), (4, 1), (6, 2), (8, 1)])
def test_gradient_is_the_mean_whatever_the_replications_and_parts(comm, replications, parts):
    """MPI4DL #2 and #6: it trains two of eta batches, and divides by 2R for any eta."""
    spec = make_spec(
        "gems_master",
        4,
        parallel__micro_batches=None,
        parallel__replications=replications,
        parallel__parts=parts,
    )
    assert spec.parallel.micro_batches == replications * parts
    check(comm, spec)


def test_default_of_gems_runs(comm):
    """MPI4DL #1: its default of one replication leaves the second direction without a batch and crashes."""
    spec = make_spec("gems_master", 2, parallel__micro_batches=None)
    assert spec.parallel.replications == 2
    check(comm, spec)


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_optimizers_of_both_directions_stay_equal(comm, optimizer):
    spec = make_spec(
        "gems_master", 3, train__optimizer=optimizer, train__weight_decay=1e-3, train__learning_rate=1e-3
    )
    check(comm, replace(spec, train=replace(spec.train, steps=4)))


@pytest.mark.parametrize("schedule", ["1f1b", "gems_master"])
@pytest.mark.parametrize("version", [1, 2])
def test_unequal_cuts(comm, schedule, version):
    depth = {1: 8, 2: 11}[version]
    check(
        comm,
        make_spec(schedule, 3, model__version=version, model__depth=depth, parallel__boundaries=[0, 1, 2, 5]),
    )


def test_group_norm_and_one_sample_micro_batches(comm):
    check(comm, make_spec("gems_master", 4, model__norm="group", parallel__micro_batch_size=1))


@pytest.mark.parametrize("replicas", [1, 2])
def test_number_of_classes_and_cut_reach_both_directions(comm, replicas):
    """MPI4DL #9: its second GEMS model ignores num_classes and the balance."""
    check(comm, make_spec("gems_mast", 2, replicas, data__num_classes=7, parallel__boundaries=[0, 2, 5]))


def test_comparison_sees_a_wrong_gradient(comm, monkeypatch):
    from gems.engine.executor import Executor

    scale = Executor._scale
    monkeypatch.setattr(Executor, "_scale", lambda self: scale(self) * (1 + 1e-9))
    spec = make_spec("gems_master", 2)
    part = sub_world(comm, spec.world_size)
    if part is not None:
        assert compare(spec, part, torch.device("cpu")).max_rel_error > 1e-10
