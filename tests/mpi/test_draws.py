"""Dropout, stochastic depth and other random layers against one unsplit process, in float64."""

from __future__ import annotations

import pytest

from gems.engine.verification.compare import compare
from tests.helpers.device import DEVICE, ON_GPU
from tests.helpers.toys import make_spec
from tests.mpi.conftest import plan_once, sub_world

OWN = {
    "model__target": "tests.helpers.own_draws.Random",
    "model__name": "Own",
    "data__num_classes": 2,
}
ZOO = {"model__depth": 8, "model__dropout": 0.5}
RUNS = {
    "1f1b": ("1f1b", 3, 1, {}),
    "gems_master": ("gems_master", 3, 1, {}),
    "zb_h1": ("zb_h1", 4, 1, {}),
    "interleaved": ("interleaved_1f1b", 2, 1, {}),
    "replicas": ("1f1b", 2, 2, {}),
    "directions of replicas": ("gems_master", 2, 2, {}),
    "data parallelism": ("layer_parallel", 1, 4, {}),
    "a search": ("capped", 2, 1, {"schedule__activation_cap": 1.5, "schedule__budget_s": 0.2}),
    "a search that recomputes": (
        "capped",
        2,
        1,
        {
            "schedule__activation_cap": 1.0,
            "schedule__budget_s": 0.2,
            "schedule__memory_actions": ["recompute"],
        },
    ),
    "stages recomputed": (
        "1f1b",
        2,
        1,
        {"memory__name": "recompute", "memory__recompute": "stage"},
    ),
    "segments recomputed": ("gems_master", 2, 1, {"memory__name": "recompute"}),
    "selective recomputation": (
        "zb_h1",
        2,
        2,
        {"memory__name": "recompute", "memory__recompute": "selective"},
    ),
    "offload": ("1f1b", 2, 1, {"memory__name": "vdnn_all", "memory__min_offload_bytes": 0}),
}


# the user's own network in each run, that of the zoo where what differs is who draws
CASES = [
    *((run, "own") for run in RUNS if run not in ("zb_h1", "interleaved", "offload")),
    *((run, "zoo") for run in ("gems_master", "zb_h1", "interleaved", "replicas", "offload")),
]


@pytest.mark.parametrize(("run", "network"), CASES)
def test_random_layers_equal_those_of_the_uncut_network(comm, run, network):
    schedule, partitions, replicas, changes = RUNS[run]
    spec = make_spec(
        schedule,
        partitions,
        replicas,
        train__precision="float64",
        schedule__max_stages=5,
        **(ZOO if network == "zoo" else OWN) | changes,
    )
    part = sub_world(comm, spec.world_size)
    if part is None:
        return
    found = compare(plan_once(part, spec).for_ranks, part, DEVICE)
    assert found.max_rel_error <= 1e-12, found
    if ON_GPU:  # whose masks of dropout are of booleans, and of floats in the profile
        pairs = zip(found.peak_activation_bytes, found.predicted_activation_bytes, strict=True)
        assert all(0.5 * predicted <= peak <= predicted for peak, predicted in pairs), found
    else:
        assert found.peak_activation_bytes == found.predicted_activation_bytes, found
