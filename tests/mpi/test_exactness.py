"""Every schedule against one unsplit process, in float64, on worlds of one to four ranks."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from gems.config.schema import MemoryConfig, RunSpec
from gems.engine.optimization.update import Update
from gems.engine.transport.memory_format import ChannelsLast
from gems.engine.transport.mpi import allgather, broadcast
from gems.engine.transport.p2p_channels import P2PChannels
from gems.engine.verification import compare as comparing
from gems.engine.verification.compare import compare
from gems.errors import ConfigError
from gems.launch.verification import Verification
from gems.plan.draft import Draft
from gems.schedule import FAMILIES, generate, published
from gems.schedule.lower import compute_only, lower
from gems.schedule.validate import validate
from tests.helpers import toys
from tests.helpers.device import DEVICE, ON_GPU
from tests.helpers.halves import halved
from tests.helpers.toys import plan_of
from tests.mpi.conftest import plan_once, sub_world

TOLERANCE = 1e-12


def make_spec(schedule: str, partitions: int, replicas: int = 1, **changes) -> RunSpec:
    return toys.make_spec(
        schedule, partitions, replicas, **{"train__precision": "float64", **changes}
    )


def check(comm, spec: RunSpec, schedule=None) -> Verification | None:
    part = sub_world(comm, spec.world_size)
    if part is None:
        return None
    difference = compare(plan_of(spec, schedule), part, DEVICE)
    assert difference.max_rel_error <= TOLERANCE, difference
    assert difference.peak_activation_bytes == difference.predicted_activation_bytes, difference
    assert (
        len(difference.peak_activation_bytes) == spec.world_size
        and max(difference.peak_activation_bytes) > 0
    )
    return difference


WORLDS = [(2, 2), (4, 1)]
# one of each kind of placement: a stage a rank, both directions, a V, and several stages a rank
MORE_WORLDS = {
    name: [(1, 2), (3, 1)] for name in ("layer_parallel", "gems_master", "zb_v", "interleaved_1f1b")
}


def size_of(partitions: int) -> int:
    return max(4, 2 * partitions)


def can_run(family: str, partitions: int) -> bool:
    try:
        generate(family, partitions, size_of(partitions))
    except ConfigError:
        return False
    return True


CASES = [
    (name, *world)
    for name in published()
    for world in [*WORLDS, *MORE_WORLDS.get(name, [])]
    if can_run(name, world[0])
]


def test_every_schedule_runs_on_four_ranks_and_with_replicas():
    assert {name for name, *world in CASES if world == [4, 1]} == {*published()}
    assert {name for name, *world in CASES if world == [2, 2]} == {*published()}
    assert {name for name, partitions, _ in CASES if partitions in (1, 3)} == {*MORE_WORLDS}


@pytest.mark.parametrize(("schedule", "partitions", "replicas"), CASES)
def test_equals_one_unsplit_process(comm, schedule, partitions, replicas):
    """MPI4DL #4: its layer, pipeline and GEMS modes break under data parallelism.

    Here each runs with replicas.
    """
    depth = 8 if FAMILIES[schedule].stages(2) == 1 else 14
    difference = check(
        comm,
        make_spec(
            schedule,
            partitions,
            replicas,
            model__depth=depth,
            parallel__micro_batches=size_of(partitions),
        ),
    )
    assert difference is None or difference.unsplit_layers == ()


CHANNELS_LAST = {
    "1f1b": {},
    "gems_master": {},
    "zb_v": {},
    "interleaved_1f1b": {},
    "unet": {
        "model__name": "unet",
        "model__norm": "none",
        "data__task": "segmentation",
        "data__height_px": 16,
        "data__width_px": 16,
        "model__depth": 2,
    },
    "offload": {"memory": MemoryConfig("vdnn_all", min_offload_bytes=0)},
    "recompute": {"memory": MemoryConfig("recompute", recompute="stage")},
    "strips": {"model__norm": "none", "parallel__strips": 2},
}


@pytest.mark.parametrize("case", CHANNELS_LAST)
def test_channels_last_is_exact_and_travels_without_a_conversion(comm, case, monkeypatch):
    """Also what comes back, and what was in host memory or run again meanwhile."""
    schedule = case if case in FAMILIES else "1f1b"
    depth = (
        {}
        if "model__name" in CHANNELS_LAST[case] or FAMILIES[schedule].stages(2) == 1
        else {"model__depth": 14}
    )
    changes = {**depth, **CHANNELS_LAST[case]}
    spec = make_spec(schedule, 3, machine__channels_last=True, **changes, parallel__micro_batches=6)
    part = sub_world(comm, spec.world_size)
    if part is None:
        return
    given: list[bool] = []
    sent: list[bool] = []
    convert = ChannelsLast.post_send
    post_send = P2PChannels.post_send

    def spy_on_stage(channels, action, tensors):
        last = torch.channels_last
        given.extend(
            tensor.is_contiguous(memory_format=last) for tensor in tensors if tensor.dim() == 4
        )
        convert(channels, action, tensors)

    def spy_on_message(channels, action, tensors):
        sent.extend(tensor.is_contiguous() for tensor in tensors if tensor.dim() == 4)
        post_send(channels, action, tensors)

    monkeypatch.setattr(ChannelsLast, "post_send", spy_on_stage)
    monkeypatch.setattr(P2PChannels, "post_send", spy_on_message)
    difference = compare(plan_once(part, spec).for_ranks, part, DEVICE)
    assert difference.max_rel_error <= TOLERANCE, difference
    assert difference.peak_activation_bytes == difference.predicted_activation_bytes, difference
    assert sent and all(sent)
    if not ON_GPU:  # whose convolutions choose their own format
        assert all(given) or case == "strips", (
            "rows of strips are joined in another order of memory"
        )


@pytest.mark.parametrize("cap", [1.0, 1.5])
def test_a_schedule_found_under_a_cap(comm, cap):
    """Found on one rank alone: a search that ends by the clock may find another on each."""
    spec = make_spec(
        "capped",
        3,
        model__depth=14,
        parallel__micro_batches=6,
        schedule__activation_cap=cap,
        schedule__budget_s=0.2,
        schedule__placements=["linear", "v"],
    )
    found = Draft(spec).lowered if comm.rank == 0 else None
    check(comm, spec, broadcast(comm, found))


@pytest.mark.parametrize(
    ("name", "link"),
    [
        ("1f1b", 2.5),
        ("zb_v", 2.5),
        *((name, 1000.0) for name in ("gpipe", "1f1b", "interleaved_1f1b", "zb_v", "looped_bfs")),
    ],
)
def test_receives_far_ahead_for_slow_links(comm, name, link):
    """Of the second link some ranks post all that their first actions leave room for."""
    spec = make_spec(name, 4, model__depth=14, parallel__micro_batches=8, cost__link=link)
    made = Draft(spec).lowered
    assert made.rank_schedules != lower(compute_only(made)).rank_schedules
    check(comm, spec, made)


HALVES = [
    ("1f1b", 0),
    ("1f1b", 2),
    ("gpipe", None),
    ("layer_parallel", 1),
    ("gems_master", 0),
    ("gems_master", 1),
]


@pytest.mark.parametrize(("family", "delay"), HALVES)
def test_halves_of_a_backward_have_the_bits_of_the_whole(comm, family, delay, monkeypatch):
    """The same schedule with B, and with I and a W that follows at once or later.

    Equal to the last bit.
    """
    spec = make_spec(family, 4, train__precision="float32")
    compute = generate(family, 4, 4)
    found = []
    for made in (compute, halved(compute, delay)):
        values: list[dict[str, torch.Tensor]] = []

        def keep(ours, reference, floor, values=values):
            values.append({name: value.clone() for name, value in ours.items()})
            return 0.0, ""

        monkeypatch.setattr(comparing, "relative_error", keep)
        difference = compare(plan_of(spec, validate(lower(made))), comm, DEVICE)
        assert difference.peak_activation_bytes == difference.predicted_activation_bytes
        found.append(values)
    whole, halves = found
    assert len(whole) == len(halves) == 2 * 3 * len(compute.placement.stages_on(comm.rank))
    for ours, theirs in zip(whole, halves, strict=True):
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize(
    "norm", ["batch", "ghost_batch", "frozen_batch", "group", "layer", "none", "normalizer_free"]
)
def test_halves_with_every_norm(comm, norm):
    spec = make_spec(
        "1f1b", 3, model__norm=norm, model__version=2 if norm == "normalizer_free" else 1
    )
    check(comm, spec, validate(lower(halved(generate("1f1b", 3, 4), 1))))


def test_layers_that_are_not_split_are_named(comm):
    spec = make_spec("1f1b", 3, model__name="toy_tuples", parallel__boundaries=[0, 2, 3, 5])
    difference = check(comm, spec, validate(lower(halved(generate("1f1b", 3, 4), 1))))
    assert difference is None or difference.unsplit_layers == ("mix",)


@pytest.mark.parametrize(
    ("schedule", "micro_batches"),
    [
        ("layer_parallel", 1),
        ("layer_parallel", 3),
        ("gpipe", 2),
        ("gpipe", 7),
        ("1f1b", 1),
        ("1f1b", 7),
    ],
)
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
        "gems_master",
        3,
        optimizer__name=optimizer,
        optimizer__weight_decay=1e-3,
        optimizer__lr=1e-3,
    )
    check(comm, replace(spec, train=replace(spec.train, steps=4)))


@pytest.mark.parametrize(("schedule", "version"), [("1f1b", 2), ("gems_master", 1)])
def test_unequal_cuts(comm, schedule, version):
    depth = {1: 8, 2: 11}[version]
    check(
        comm,
        make_spec(
            schedule,
            3,
            model__version=version,
            model__depth=depth,
            parallel__boundaries=[0, 1, 2, 5],
        ),
    )


def test_group_norm_and_one_sample_micro_batches(comm):
    check(comm, make_spec("gems_master", 4, model__norm="group", parallel__micro_batch_size=1))


@pytest.mark.parametrize("replicas", [1, 2])
def test_number_of_classes_and_cut_reach_both_directions(comm, replicas):
    """MPI4DL #9: its second GEMS model ignores num_classes and the balance."""
    check(
        comm,
        make_spec("gems_mast", 2, replicas, data__num_classes=7, parallel__boundaries=[0, 2, 5]),
    )


def test_comparison_sees_a_wrong_gradient(comm, monkeypatch):
    from gems.engine.evaluation.metrics import LossSums

    scale = LossSums.loss_gradient
    monkeypatch.setattr(
        LossSums, "loss_gradient", lambda self, weight: scale(self, weight) * (1 + 1e-9)
    )
    spec = make_spec("gems_master", 2)
    part = sub_world(comm, spec.world_size)
    if part is not None:
        assert compare(plan_of(spec), part, DEVICE).max_rel_error > 1e-10


RECIPES = {
    "groups": {
        "optimizer__name": "adamw",
        "optimizer__lr": 1e-3,
        "optimizer__weight_decay": 0.05,
        "optimizer__decay_norms_and_biases": False,
        "optimizer__layer_decay": 0.8,
        "optimizer__frozen": ["*.bias"],
    },
    "lamb": {
        "optimizer__name": "lamb",
        "optimizer__weight_decay": 0.01,
        "optimizer__frozen": ["stem"],
    },
}
CLIPPED = {
    "train__max_grad_norm": 0.9,
    "train__ema_decay": 0.9,
    "train__steps": 20,
    "optimizer__lr": 0.02,
    "lr_scheduler__name": "one_cycle",
    "lr_scheduler__warmup_steps": 4,
}


@pytest.mark.parametrize(
    ("schedule", "partitions", "replicas", "recipe"),
    [("1f1b", 2, 2, "groups"), ("gems_master", 3, 1, "groups"), ("gems_master", 2, 2, "lamb")],
)
def test_recipes(comm, schedule, partitions, replicas, recipe):
    spec = make_spec(schedule, partitions, replicas, **RECIPES[recipe])
    check(comm, replace(spec, train=replace(spec.train, steps=4)))


def test_clipping_average_and_schedule_over_20_steps(comm, monkeypatch):
    """Rates change in every step; some gradients are clipped and some are not."""
    norms: list[float] = []
    reduce = Update.reduce
    monkeypatch.setattr(
        Update, "reduce", lambda self, losses: (reduce(self, losses), norms.append(self.grad_norm))
    )
    check(comm, make_spec("gems_master", 2, 2, **CLIPPED))
    assert len(norms) == 20 and min(norms) < 0.9 < max(norms)
    assert allgather(comm, norms) == [norms] * comm.size


CLIPPED_MEAN = {"train__max_grad_norm": 0.9, "train__ema_decay": 0.9}
SELECTIVE = {"memory__name": "recompute", "memory__recompute": "selective"}
MIXED = [
    ("1f1b", 4, 1, "bf16_mixed", {"model__depth": 14}),
    ("zb_h1", 4, 1, "fp16_mixed", {"model__depth": 14, "model__norm": "group"}),
    ("gems_master", 2, 2, "bf16_mixed", CLIPPED_MEAN),
    ("gems_master", 2, 2, "fp16_mixed", CLIPPED_MEAN),
    ("zb_h1", 2, 1, "bf16_mixed", SELECTIVE),
]


@pytest.mark.parametrize(("schedule", "partitions", "replicas", "precision", "changes"), MIXED)
def test_mixed_precision_computes_as_one_process(
    comm, schedule, partitions, replicas, precision, changes
):
    """Messages have 16 bits, gradients 32.

    Bytes are as predicted, weights are copied once, and I and W are split.
    """
    spec = make_spec(schedule, partitions, replicas, train__precision=precision, **changes)
    part = sub_world(comm, spec.world_size)
    if part is None:
        return
    difference = compare(plan_once(part, spec).for_ranks, part, DEVICE)
    assert difference.dtype == precision and difference.unsplit_layers == ()
    assert difference.max_rel_error <= 1e-5, difference
    assert difference.peak_activation_bytes == difference.predicted_activation_bytes, difference
