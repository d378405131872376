"""Memory policies on real networks.

The bits of a run that keeps its activations, and the bytes that were predicted.
"""

from __future__ import annotations

import json
import os
from dataclasses import replace
from itertools import cycle, product

import pytest
import torch

from gems.config.schema import DataConfig, MemoryConfig, ModelConfig, RunSpec, ScheduleConfig
from gems.engine.batch_loader import BatchLoader
from gems.engine.rank import Rank
from gems.engine.transport.mpi import allgather, broadcast
from gems.engine.verification.unsplit import collect_values
from gems.errors import DoesNotFitError
from gems.plan.draft import Draft
from gems.plan.evaluate import Plan, evaluate
from gems.schedule.action import Kind
from gems.schedule.lower import lower
from tests.helpers import toys
from tests.helpers.device import DEVICE, ON_GPU
from tests.mpi.conftest import plan_once, sub_world

STEPS = 2
MIB = 2**20
IMAGES = {"name": "synthetic", "num_classes": 3, "train_samples": 64}
NETWORKS = {
    "resnet": {"depth": 20, "version": 2, "width": 4},
    "vgg": {"depth": 16, "width": 8, "norm": "none", "dropout": 0.5},
    "googlenet": {"width": 8, "norm": "none"},
    "amoebanet": {"depth": 3, "width": 8},
    "unet": {"depth": 3, "width": 4},
}
FULL_NETWORKS = {
    "resnet": {"depth": 110, "version": 2},
    "vgg": {"depth": 16, "width": 64, "norm": "none", "dropout": 0.5},
    "googlenet": {"width": 64, "norm": "none"},
    "amoebanet": {"depth": 18, "width": 256},
    "unet": {"depth": 5, "width": 64, "norm": "none"},
}
SIDE_PX = 32
LEARNING_RATE = 0.05
if "GEMS_FULL_NETWORKS" in os.environ:
    # AmoebaNet-D comes to nothing finite from images and steps of the others' size
    NETWORKS = FULL_NETWORKS
    SIDE_PX = 64
    LEARNING_RATE = 1e-4
PLAIN_KINDS = (Kind.F, Kind.I, Kind.W, Kind.B)
SCHEDULES = ("1f1b", "gems_master", "layer_parallel")
POLICIES = {
    "vdnn_all": MemoryConfig("vdnn_all"),
    "vdnn_all asynchronous": MemoryConfig("vdnn_all", asynchronous=True),
    "vdnn_conv": MemoryConfig("vdnn_conv"),
    "vdnn_dyn": MemoryConfig("vdnn_dyn"),
    "lms": MemoryConfig("lms"),
    "lms of given parameters": MemoryConfig("lms", False, 2, 2, 1, 0),
    "lms_limit": MemoryConfig("lms_limit"),
    "recompute of stages": MemoryConfig("recompute", recompute="stage"),
    "recompute": MemoryConfig("recompute"),
    "recompute of stages with offloaded inputs": MemoryConfig(
        "recompute", recompute="stage", offload_inputs=True
    ),
    "recompute with offloaded inputs": MemoryConfig("recompute", offload_inputs=True),
    "selective recomputation": MemoryConfig("recompute", recompute="selective"),
    "plan": MemoryConfig("plan", budget_s=0.5),
}
# each network under each schedule, and each policy at least once; with GEMS_ALL_CASES=1 all three
# together, and with GEMS_FULL_NETWORKS=1 on the published sizes
QUICK = [
    policy for policy in POLICIES if policy != "lms_limit"
]  # it needs larger images, see below
CASES = [
    (*pair, policy)
    for pair, policy in zip(product(NETWORKS, SCHEDULES), cycle(QUICK), strict=False)
]
if "GEMS_ALL_CASES" in os.environ:
    CASES = list(product(NETWORKS, SCHEDULES, POLICIES))


def spec_of(
    network: str, schedule: str, memory: MemoryConfig, partitions: int = 2, replicas: int = 1
) -> RunSpec:
    """Small images, but for a policy that counts in the segments of an allocator, of 2 and 20 MiB."""
    side_px = 320 if memory.name == "lms_limit" else SIDE_PX
    spec = toys.make_spec(
        schedule,
        partitions,
        replicas,
        model=ModelConfig(name=network, **NETWORKS[network]),
        data=DataConfig(height_px=side_px, width_px=side_px, **IMAGES),
        partition__name="even",
        optimizer__lr=LEARNING_RATE,
    )
    return replace(spec, memory=replace(memory, min_offload_bytes=0))


def played(spec: RunSpec, comm, given: Plan) -> tuple[Rank, list[torch.Tensor]]:
    """Run two steps from the same random state, and gives what the rank then has, in the order of its layers."""
    rank = Rank.open(given.for_ranks, comm, DEVICE)
    loader = BatchLoader.open(rank.plan, rank.comm, DEVICE)
    rank.stages.set_training(True)
    torch.manual_seed(comm.rank)
    for step in range(STEPS):
        rank.train.run(step, loader.batch(step))
    loader.close()
    found = [collect_values(rank.stages.named_layers(held)) for held in sorted(rank.stages.modules)]
    return rank, [value for kinds in found for values in kinds for value in values.values()]


_last_kept: dict[str, list[torch.Tensor]] = {}


def played_keeping(spec: RunSpec, comm) -> list[torch.Tensor]:
    """Simulate a run that keeps its activations, once for the policies of one network and schedule that follow."""
    kept = replace(spec, memory=MemoryConfig())
    key = json.dumps(kept.to_dict())
    if key not in _last_kept:  # the same on every rank
        _last_kept.clear()
        _last_kept[key] = played(kept, comm, plan_once(comm, kept))[1]
    return _last_kept[key]


def limited(spec: RunSpec, comm) -> Plan:
    """Plan on the first rank, which tells the others, under a limit that a run cannot keep that keeps everything."""
    return broadcast(comm, _limited(spec) if comm.rank == 0 else None)


def _limited(spec: RunSpec) -> Plan:
    vdnn = evaluate(
        replace(spec, memory=MemoryConfig("vdnn_all", asynchronous=True, min_offload_bytes=0))
    )
    assert vdnn.memory is not None
    least = max(vdnn.memory.peak_bytes)
    case = Draft(spec).policy.case(Draft(spec).compute, vdnn.boundaries, Draft(spec).profile)
    most = max(case.kept.peak_bytes)
    limit = most - (most - least) * 2 // 3
    if (
        spec.memory.name == "lms_limit"
    ):  # its allocator takes whole segments, so that it may need more
        limit = max(20 * MIB, most * 6 // 10)
    while limit < 3 * most:
        try:
            return evaluate(replace(spec, memory=replace(spec.memory, limit_bytes=limit)))
        except DoesNotFitError as error:
            limit = max(error.needed_bytes, limit + most // 50)
    raise AssertionError(f"{spec.memory.name} finds no plan between {least} and {most} bytes")


@pytest.mark.parametrize(("network", "schedule", "policy"), CASES)
def test_bits_and_bytes(comm, network, schedule, policy):
    part = sub_world(comm, 2)
    if part is None:
        return
    spec = spec_of(network, schedule, POLICIES[policy])
    made = limited(spec, part)
    wanted = played_keeping(spec, part)
    rank, found = played(spec, part, made)
    assert len(found) == len(wanted) and found
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
    assert all(value.isfinite().all() for value in wanted)
    train = rank.train
    predicted = made.memory.ranks[rank.index].peak_activation_bytes
    if (
        ON_GPU and spec.model.dropout
    ):  # whose masks are of booleans there, and of floats in the profile
        assert 0.8 * predicted < train.activations.peak_bytes <= predicted
    else:
        assert train.activations.peak_bytes == predicted
    if not spec.train.cuda_graphs:  # whose slots stay
        assert train.activations.held_bytes == 0
    if made.schedule.has_copies:
        assert rank.train.store is not None
        counters = rank.train.store.counters
        assert counters.prefetched_bytes <= counters.offloaded_bytes <= counters.saved_bytes


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
@pytest.mark.parametrize("network", ["resnet", "unet"])
def test_what_stages_received_leaves_until_they_are_recomputed(comm, network, schedule):
    """On a rank in the middle, of U-Net several tensors.

    The peak is where all but one micro-batch is away.
    """
    part = sub_world(comm, 3)
    if part is None:
        return
    memory = MemoryConfig("recompute", recompute="stage", offload_inputs=True)
    spec = spec_of(network, schedule, memory, partitions=3)
    made = plan_once(part, spec)
    wanted = played_keeping(spec, part)
    rank, found = played(spec, part, made)
    assert found and all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
    assert rank.train.store is not None
    activations = rank.train.activations
    host = rank.train.store.on_host
    ours = made.memory.ranks[rank.index]
    assert (activations.peak_bytes, host.peak_bytes) == (
        ours.peak_activation_bytes,
        ours.peak_host_bytes,
    )
    assert (host.peak_bytes > 0) == (rank.index == 1) and activations.held_bytes == 0


@pytest.mark.parametrize("policy", ["lms", "lms_limit"])
def test_each_rank_of_data_parallelism_swaps_its_own(comm, policy):
    part = sub_world(comm, 2)
    if part is None:
        return
    spec = spec_of("resnet", "layer_parallel", POLICIES[policy], partitions=1, replicas=2)
    made = limited(spec, part)
    wanted = played_keeping(spec, part)
    rank, found = played(spec, part, made)
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
    assert rank.train.store is not None
    swapped = allgather(part, rank.train.store.counters.offloaded_bytes)
    assert min(swapped) > 0 and swapped[0] == swapped[1]


@pytest.mark.parametrize("actions", [["recompute"], ["offload"], ["offload", "recompute"]])
@pytest.mark.parametrize("network", ["resnet", "unet"])
def test_bits_and_bytes_of_a_list_found_with_its_actions(comm, network, actions):
    """Beside the same list without them; each recomputes or moves something."""
    part = sub_world(comm, 2)
    if part is None:
        return
    schedule = ScheduleConfig(
        "capped", activation_cap=1.0, memory_actions=actions, budget_s=0.3, placements=["v"]
    )
    spec = replace(spec_of(network, "1f1b", MemoryConfig()), schedule=schedule)
    made = plan_once(part, spec)
    assert made.schedule.has_memory_actions
    plain = [
        [action for action in row if action.kind in PLAIN_KINDS]
        for row in made.schedule.rank_schedules
    ]
    rows = tuple(tuple(action._replace(segment=None) for action in row) for row in plain)
    lowered = lower(replace(made.schedule, rank_schedules=rows, passes=()))
    kept = replace(made, memory=made.run_costs.kept(lowered))
    wanted = played(spec, part, kept)[1]
    rank, found = played(spec, part, made)
    assert found and all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
    activations = rank.train.activations
    assert activations.peak_bytes == made.memory.ranks[rank.index].peak_activation_bytes
    if not spec.train.cuda_graphs:  # whose slots stay, and only a cap in bytes has room for them
        assert activations.peak_bytes <= made.costs.activation_bytes and activations.held_bytes == 0
