"""Whole pipelines on four ranks.

Copies that stay equal, evaluation, and what a training run leaves.
"""

from __future__ import annotations

import hashlib
import math
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as functional

from gems.data import open_dataset
from gems.engine.batch_loader import BatchLoader
from gems.engine.checkpoint import weights
from gems.engine.checkpoint.state import state_tensors
from gems.engine.evaluation.measure import evaluate
from gems.engine.executor import Batch
from gems.engine.optimization.gradients import running_statistics
from gems.engine.optimization.nonfinite import find_nonfinite
from gems.engine.rank import Rank
from gems.engine.train import train
from gems.engine.transport.mpi import allgather, broadcast, meet
from gems.engine.verification.compare import compare
from gems.engine.verification.unsplit import named_values
from gems.models import layers_of
from gems.models.build import build_layers
from gems.plan.evaluate import evaluate as plan_run
from gems.plan.rank_plan import RankPlan
from gems.runs.folder import RunFolder
from gems.runs.heartbeat import Heartbeat
from gems.trace import KINDS, merge_parts, part_path, read_part
from gems.utils.atomic_io import read_json
from tests.helpers.device import DEVICE
from tests.helpers.toys import make_spec, plan_of
from tests.mpi.conftest import sub_world

WORLDS = [("gems_master", 4, 1), ("gems_master", 3, 1), ("gems_mast", 2, 2), ("1f1b", 2, 2)]


def open_feed(rank: Rank) -> BatchLoader:
    return BatchLoader.open(rank.plan, rank.comm, DEVICE)


def take_steps(spec, rank: Rank) -> None:
    loader = open_feed(rank)
    rank.stages.set_training(True)
    for step in range(spec.train.steps):
        rank.train.run(step, loader.batch(step))
    loader.close()


def copies(rank: Rank, of) -> list[tuple[int, list[torch.Tensor]]]:
    """Return (stage, tensors on the host) of each copy of a stage on this rank."""
    return [
        (stage, [t.detach().cpu().clone() for t in of(module)])
        for (_, stage), module in rank.stages.modules.items()
    ]


def digest(tensors: list[torch.Tensor]) -> str:
    data = b"".join(
        tensor.detach().contiguous().view(torch.uint8).cpu().numpy().tobytes() for tensor in tensors
    )
    return hashlib.sha256(data).hexdigest()


# --- several tensors a boundary, views
# -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("schedule", "boundaries"),
    [
        ("1f1b", [0, 1, 2, 3, 5]),
        ("gems_master", [0, 1, 2, 3, 5]),
        ("gems_master", [0, 2, 3, 4, 5]),
        ("1f1b", [0, 2, 3, 5]),
        ("gems_master", [0, 1, 5]),
    ],
    ids=str,
)
def test_a_boundary_of_several_tensors_trains_as_one_process(comm, schedule, boundaries):
    """An integer tensor without gradient, a feature, and a skip that crosses three boundaries."""
    check_equal(comm, make_toy("toy_tuples", schedule, boundaries))


@pytest.mark.parametrize(
    ("schedule", "boundaries"),
    [
        ("1f1b", [0, 1, 2, 3, 4]),
        ("gems_master", [0, 1, 2, 3, 4]),
        ("gems_master", [0, 1, 2, 4]),
        ("1f1b", [0, 1, 4]),
    ],
    ids=str,
)
def test_stages_without_parameters_that_hand_on_views_train_as_one_process(
    comm, schedule, boundaries
):
    check_equal(comm, make_toy("toy_views", schedule, boundaries))


def make_toy(name: str, schedule: str, boundaries: list[int]):
    return make_spec(
        schedule,
        len(boundaries) - 1,
        model__name=name,
        parallel__boundaries=boundaries,
        train__precision="float64",
    )


def check_equal(comm, spec) -> None:
    part = sub_world(comm, spec.world_size)
    if part is not None:
        difference = compare(plan_of(spec), part, DEVICE)
        assert difference.max_rel_error <= 1e-12, difference


# --- what layers draw while they train
# -------------------------------------------------------------------------------


def test_dropout_comes_from_the_seed_and_differs_between_replicas(comm):
    """The weights at the start are those of a run without dropout, on every replica."""
    part = sub_world(comm, 2)
    if part is None:
        return

    def run(**changes):
        spec = make_spec("1f1b", 1, 2, **({"model__dropout": 0.5} | changes))
        rank = Rank.open(plan_of(spec), part, DEVICE)
        weights = [
            parameter
            for module in rank.stages.modules.values()
            for parameter in module.parameters()
        ]
        start = digest(weights)
        masks = []
        for module in rank.stages.modules.values():
            module[-1].dropout.register_forward_hook(
                lambda _, given, dropped: masks.append(dropped == 0)
            )
        take_steps(spec, rank)
        return start, digest(masks), digest(weights)

    start, masks, end = run()
    assert run() == (start, masks, end)
    assert len(set(allgather(part, start))) == len(set(allgather(part, end))) == 1
    assert len(set(allgather(part, masks))) == 2
    assert run(model__dropout=0.0)[0] == start
    assert run(seed=1)[1] != masks


# --- reduction over the copies of a stage
# ----------------------------------------------------------------------------


@pytest.mark.parametrize(("schedule", "partitions", "replicas"), WORLDS)
def test_gradients_are_summed_and_statistics_averaged_over_all_copies(
    comm, schedule, partitions, replicas
):
    """One message serves both directions of a pair of ranks, the middle rank of an odd number, and the replicas."""
    spec = make_spec(schedule, partitions, replicas, train__precision="float64")
    part = sub_world(comm, spec.world_size)
    if part is None:
        return
    rank = Rank.open(plan_of(spec), part, DEVICE)
    generator = torch.Generator().manual_seed(part.rank)
    for module in rank.stages.modules.values():
        for parameter in module.parameters():
            parameter.grad.copy_(torch.randn(parameter.shape, generator=generator))
        for buffer in running_statistics(module):
            buffer.copy_(torch.randn(buffer.shape, generator=generator))
    before = (
        allgather(part, copies(rank, lambda module: [p.grad for p in module.parameters()])),
        allgather(part, copies(rank, running_statistics)),
    )
    rank.update.gradients.reduce()
    after = (
        copies(rank, lambda module: [p.grad for p in module.parameters()]),
        copies(rank, running_statistics),
    )
    num_copies = rank.plan.schedule.num_directions * replicas
    for given, got, divisor in zip(before, after, (1, num_copies), strict=True):
        for stage, tensors in got:
            same = [held for rank in given for number, held in rank if number == stage]
            assert len(same) == num_copies and len(tensors) == len(same[0])
            for index, tensor in enumerate(tensors):
                expected = sum(copy[index] for copy in same) / divisor
                torch.testing.assert_close(tensor, expected, rtol=1e-13, atol=1e-14)


def test_bfloat16_gradients_are_summed_in_float32(comm):
    """256 + 1 + 1 + 1 is 256 when added in bfloat16, and 259 rounds to 260."""
    spec = make_spec("1f1b", 1, 4, train__precision="bf16_pure")
    rank = Rank.open(plan_of(spec), comm, DEVICE)
    for parameter in rank.stages.modules[0, 0].parameters():
        parameter.grad.fill_(256.0 if comm.rank == 0 else 1.0)
    rank.update.gradients.reduce()
    for parameter in rank.stages.modules[0, 0].parameters():
        assert parameter.grad.dtype is torch.bfloat16
        assert bool((parameter.grad == 260).all())


@pytest.mark.parametrize(
    ("schedule", "partitions", "replicas", "optimizer"),
    [(*world, "sgd") for world in WORLDS] + [("gems_mast", 2, 2, "adam")],
)
def test_all_copies_stay_bit_equal_in_float32(comm, schedule, partitions, replicas, optimizer):
    """MPI4DL #10: its running statistics are never synchronised, so its copies of the model drift apart."""
    spec = make_spec(
        schedule,
        partitions,
        replicas,
        train__steps=5,
        optimizer__name=optimizer,
        optimizer__lr=0.01,
    )
    part = sub_world(comm, spec.world_size)
    if part is None:
        return
    rank = Rank.open(plan_of(spec), part, DEVICE)
    before = digest([p for module in rank.stages.modules.values() for p in module.parameters()])
    take_steps(spec, rank)
    assert (
        digest([p for module in rank.stages.modules.values() for p in module.parameters()])
        != before
    )
    for of in (lambda module: list(module.parameters()), running_statistics):
        mine = [(stage, digest(tensors), len(tensors)) for stage, tensors in copies(rank, of)]
        everyone = [held for rank in allgather(part, mine) for held in rank]
        for stage in range(partitions):
            same = [held for held in everyone if held[0] == stage]
            assert len(same) == rank.plan.schedule.num_directions * replicas
            assert len(set(same)) == 1, f"stage {stage}"
        assert sum(num_tensors for *_, num_tensors in everyone) > 0


# --- evaluation
# ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("schedule", "partitions", "replicas", "num_validation"),
    [
        *((*world, 7) for world in WORLDS),
        ("gems_master", 3, 1, 1),
        ("gems_mast", 2, 2, 1),
        ("gems_mast", 2, 2, 30),
        ("1f1b", 2, 2, 30),
    ],
)
def test_evaluation_equals_the_unsplit_model(comm, schedule, partitions, replicas, num_validation):
    """Odd numbers of images over replicas and micro-batches.

    Each is counted once, and filling counts for nothing.
    """
    spec = make_spec(
        schedule,
        partitions,
        replicas,
        train__precision="float64",
        data__validation_samples=num_validation,
    )
    part = sub_world(comm, spec.world_size)
    if part is None:
        return
    rank = Rank.open(plan_of(spec), part, DEVICE)
    take_steps(spec, rank)
    dataset = open_dataset(spec.data, spec.seed)
    loader = open_feed(rank)
    found = evaluate(rank, loader)
    loader.close()
    assert all(module.training for modules in rank.stages.modules.values() for module in modules)

    layers = layers_of(spec.model, spec.data)
    mine = {
        layers[rank.stages.of_model.boundaries[stage] + index].name: {
            key: value.cpu() for key, value in module.state_dict().items()
        }
        for (direction, stage), modules in rank.stages.modules.items()
        for index, module in enumerate(modules)
        if direction == 0 and rank.replica == 0
    }
    states = {name: state for held in allgather(part, mine) for name, state in held.items()}
    model = torch.nn.Sequential(*build_layers(layers, 0, len(layers), spec.seed, torch.float64))
    for layer, module in zip(layers, model, strict=True):
        module.load_state_dict(states[layer.name])
    model.eval()
    images = np.stack([dataset.image("validation", index) for index in range(num_validation)])
    labels = torch.tensor([dataset.label("validation", index) for index in range(num_validation)])
    with torch.no_grad():
        logits = model(torch.from_numpy(images).double())
    assert found["num_validation"] == num_validation
    assert found["validation_loss"] == pytest.approx(
        float(functional.cross_entropy(logits, labels)), rel=1e-12
    )
    assert found["validation_accuracy"] == float((logits.argmax(1) == labels).double().mean())
    assert found["validation_majority"] == max(torch.bincount(labels).tolist()) / num_validation
    assert all(other == found for other in allgather(part, found))


# --- whole runs
# ------------------------------------------------------------------------------------------------------


def run_training(comm, spec, path: Path) -> RunFolder:
    """Train on all ranks into a folder that they share."""
    folder = RunFolder(broadcast(comm, path))
    if comm.rank == 0:
        made = plan_run(spec)
        folder.write_schedule(made.schedule)
        folder.write_boundaries(made.boundaries)
    meet(comm)
    heartbeat = Heartbeat(folder.heartbeat(comm.rank))
    plan = RankPlan(spec, folder.read_schedule(), folder.read_boundaries())
    train(plan, folder, comm, DEVICE, heartbeat)
    heartbeat.close()
    meet(comm)
    return folder


def training_spec():
    return make_spec(
        "gems_master",
        2,
        2,
        train__steps=25,
        benchmark__skip_steps=2,
        optimizer__lr=0.05,
        train__sample_interval_s=0.05,
        data__height_px=16,
        data__width_px=16,
        data__augment=False,
        parallel__micro_batches=8,
        parallel__parts=2,
        data__num_classes=2,
    )


@pytest.fixture(scope="module")
def finished(comm, tmp_path_factory):
    spec = training_spec()
    return spec, run_training(comm, spec, tmp_path_factory.mktemp("run"))


def test_the_loss_falls_and_the_result_is_kept(comm, finished):
    spec, folder = finished
    result = read_json(folder.result_json)
    assert result["num_steps"] == spec.train.steps
    assert result["last_loss"] < 0.5 * result["first_loss"]
    assert result["num_validation"] == spec.data.validation_samples
    assert 0.5 == result["validation_majority"] < result["validation_accuracy"] <= 1


def test_every_rank_leaves_its_part_of_the_trace(comm, finished):
    spec, folder = finished
    for rank in range(comm.size):
        part = read_part(part_path(folder.path, rank))
        assert part.rank_steps["step"].tolist() == list(range(spec.train.steps))
        assert set(part.events["rank"]) == set(part.samples["rank"]) == {rank}
        assert len(part.samples) >= 2 and (part.samples["rss_bytes"] > 0).all()
        assert (
            part.attributes["source"] == "measured" and part.attributes["world_size"] == comm.size
        )
        assert part.attributes["clock_error_ns"] >= (rank > 0)
        knows_loss = ~np.isnan(part.rank_steps["loss"])
        assert knows_loss.all() if rank == 0 else not knows_loss.any()


def test_steps_count_the_images_of_both_directions_and_all_replicas(comm, finished):
    """MPI4DL #3: it divides by the images of one direction."""
    spec, folder = finished
    trace = merge_parts([part_path(folder.path, rank) for rank in range(comm.size)], {})
    assert len(trace.steps) == spec.train.steps
    assert set(trace.steps["images"]) == {2 * 8 * 2} == {spec.parallel.global_batch}
    assert trace.steps["is_warmup"].tolist() == [1, 1] + [0] * (spec.train.steps - 2)
    assert (trace.steps["end_ns"] > trace.steps["start_ns"]).all()
    assert (np.diff(trace.steps["start_ns"]) > 0).all()
    # an image is counted where its forward begins: at stage 0 of a direction of a replica
    events = trace.events
    starts = (events["kind"] == KINDS.index("F")) & (events["stage"] == 0) & (events["step"] == 3)
    assert starts.sum() * spec.parallel.micro_batch_size == spec.parallel.global_batch
    assert set(events[starts]["direction"]) == {0, 1}


def test_events_of_each_step_are_the_row_of_the_rank_and_its_input(comm, finished):
    spec, folder = finished
    rows = read_json(folder.result_json)["schedule_rows"]
    for rank in range(comm.size):
        part = read_part(part_path(folder.path, rank))
        # every rank begins a direction, and so waits for the images of each step too
        wanted = sorted([*rows[rank % spec.parallel.partitions].split(), "-1INPUT"])
        for step in (0, 1, spec.train.steps - 1):
            seen = sorted(map(text_of, part.events[part.events["step"] == step]))
            assert seen == wanted, (rank, step)
        is_link = part.events["stream"] == 1
        sizes = set(part.events["moved_bytes"][is_link])
        assert sizes == {boundary_bytes(spec)} and set(part.events["moved_bytes"][~is_link]) == {0}


def text_of(event) -> str:
    micro_batch = "" if event["micro_batch"] < 0 else str(event["micro_batch"])
    direction = "/1" if event["direction"] else ""
    return f"{event['stage']}{KINDS[event['kind']]}{micro_batch}{direction}"


def boundary_bytes(spec) -> int:
    layers = layers_of(spec.model, spec.data)
    modules = build_layers(layers, 0, plan_run(spec).boundaries[1], 0)
    images = torch.zeros(spec.parallel.micro_batch_size, 3, spec.data.height_px, spec.data.width_px)
    return torch.nn.Sequential(*modules)(images).nbytes


def test_bytes_return_to_where_a_step_began_and_peak_as_the_schedule_says(comm, finished):
    spec, folder = finished
    for rank in range(comm.size):
        events = read_part(part_path(folder.path, rank)).events
        steps = [events[events["step"] == step] for step in range(1, spec.train.steps)]
        ends = {int(step[step["kind"] == KINDS.index("STEP")]["device_bytes"][0]) for step in steps}
        assert len(ends) == 1, "bytes are lost or forgotten from step to step"
        resting = ends.pop()
        peaks = {int(step["device_bytes"].max()) for step in steps}
        assert max(peaks) > resting > 0


def test_the_checkpoint_is_restored_in_another_cut(comm, finished, tmp_path):
    """Nothing is normalised by the batch here, so a step of no size leaves the model as it was."""
    common = {
        "model__norm": "group",
        "data__height_px": 16,
        "data__width_px": 16,
        "data__num_classes": 2,
    }
    first = make_spec("gems_master", 2, 2, train__steps=10, **common)
    saved = run_training(comm, first, tmp_path / "first")
    assert sorted(path.name for path in saved.checkpoint.iterdir()) == [
        "stage0000.pt",
        "stage0001.pt",
    ]
    again = make_spec(
        "1f1b",
        4,
        parallel__boundaries=[0, 1, 2, 4, 5],
        train__steps=1,
        optimizer__lr=1e-30,
        train__initial_checkpoint=str(saved.path),
        **common,
    )
    continued = read_json(run_training(comm, again, tmp_path / "second").result_json)
    before = read_json(saved.result_json)
    for key in ("validation_loss", "validation_accuracy", "num_validation"):
        assert continued[key] == pytest.approx(before[key], rel=1e-6)
    fresh = replace(again, train=replace(again.train, initial_checkpoint=None))
    other = read_json(run_training(comm, fresh, tmp_path / "third").result_json)
    assert other["validation_loss"] != pytest.approx(before["validation_loss"], rel=1e-2)


def test_weights_of_the_checkpoint_are_those_of_the_ranks(comm, tmp_path):
    spec = make_spec("gems_master", 4, train__steps=1)
    rank = Rank.open(plan_of(spec), comm, DEVICE)
    take_steps(spec, rank)
    folder = broadcast(comm, tmp_path)
    weights.save(rank, folder)
    meet(comm)
    state = weights.load(folder)
    names = [layer.name for layer in layers_of(spec.model, spec.data)]
    assert list(state) == names
    cuts = rank.stages.of_model.boundaries
    for (_, stage), modules in rank.stages.modules.items():
        for name, module in zip(names[cuts[stage] : cuts[stage + 1]], modules, strict=True):
            parameters, _, statistics = named_values(name, module)
            for key, value in (parameters | statistics).items():
                assert torch.equal(value, state[name][key.removeprefix(f"{name}.")]), key


# --- a step that is not finite
# ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("schedule", "partitions", "replicas"), [("1f1b", 2, 2), ("gems_master", 3, 1)]
)
def test_a_skipped_step_leaves_everything_as_it_was(comm, schedule, partitions, replicas):
    spec = make_spec(
        schedule,
        partitions,
        replicas,
        train__on_nonfinite="skip",
        train__ema_decay=0.9,
        optimizer__name="adam",
    )
    part = sub_world(comm, spec.world_size)
    if part is None:
        return
    rank = Rank.open(plan_of(spec), part, DEVICE)
    rank.stages.set_training(True)

    def state() -> dict[str, torch.Tensor]:
        early, late = state_tensors(rank)
        return {
            name: tensor.clone() for name, tensor in (early | late).items() if name != "schedule"
        }

    with closing(open_feed(rank)) as loader:
        good = loader.batch(0)
        rank.train.run(0, good)
        before = state()
        bad = Batch({m: images.clone() for m, images in good.images.items()}, good.labels)
        if part.rank == 0:  # one micro-batch of one direction and replica
            bad.images[min(bad.images)][0, 0, 0, 0] = float("inf")
        rank.train.run(1, bad)
        assert allgather(part, rank.update.has_failed) == [True] * part.size
        after = state()
        assert before.keys() == after.keys() and all(
            torch.equal(before[name], after[name]) for name in before
        )
        found = find_nonfinite(rank, 1, bad)
        assert (found.place, found.rank, found.what) == (
            0,
            0,
            "samples of the batch are not finite",
        )
        rank.train.run(2, good)
        assert not rank.update.has_failed and math.isfinite(rank.update.grad_norm)
        assert any(not torch.equal(before[name], value) for name, value in state().items())


# --- mixed precision
# -------------------------------------------------------------------------------------------------


def updates_of(comm, precision: str, steps: int = 80) -> torch.Tensor:
    """Return what 80 steps of Adam change in the weights of the pipeline, on rank 0 of its stage."""
    spec = make_spec(
        "1f1b",
        2,
        1,
        train__precision=precision,
        train__steps=steps,
        optimizer__name="adam",
        optimizer__lr=1e-5,
        parallel__micro_batches=1,
    )
    rank = Rank.open(plan_of(spec), comm, DEVICE)
    parameters = [p for module in rank.stages.modules.values() for p in module.parameters()]
    before = torch.cat([p.detach().double().reshape(-1) for p in parameters])
    rank.stages.set_training(True)
    with closing(open_feed(rank)) as loader:
        for step in range(steps):
            rank.train.run(step, loader.batch(step))
    return torch.cat([p.detach().double().reshape(-1) for p in parameters]) - before


def test_mixed_precision_learns_in_small_steps_and_pure_bfloat16_does_not(comm):
    part = sub_world(comm, 2)
    if part is None:
        return
    full, mixed, pure = (
        updates_of(part, precision) for precision in ("float32", "bf16_mixed", "bf16_pure")
    )
    norms = [
        math.sqrt(sum(allgather(part, float(update.square().sum())))) for update in (full, mixed)
    ]
    assert norms[1] == pytest.approx(norms[0], rel=0.05)
    changed = [
        sum(allgather(part, int((u != 0).sum()))) / sum(allgather(part, len(u)))
        for u in (full, mixed, pure)
    ]
    assert min(changed[:2]) > 0.99 and changed[2] < 0.06, changed


@pytest.mark.parametrize(
    ("schedule", "partitions", "replicas"), [("1f1b", 2, 2), ("gems_master", 3, 1)]
)
def test_an_overflow_of_float16_skips_the_step_on_all_ranks(comm, schedule, partitions, replicas):
    spec = make_spec(schedule, partitions, replicas, train__precision="fp16_mixed")
    part = sub_world(comm, spec.world_size)
    if part is None:
        return
    rank = Rank.open(plan_of(spec), part, DEVICE)
    rank.stages.set_training(True)
    update = rank.update
    assert update.scale is not None
    update.scale.value = 2.0**40  # gradients of float16 end at 65504

    def state() -> dict[str, torch.Tensor]:
        early, late = state_tensors(rank)
        kept = ("schedule", "loss_scale")
        return {name: tensor.clone() for name, tensor in (early | late).items() if name not in kept}

    with closing(open_feed(rank)) as loader:
        before = state()
        rank.train.run(0, loader.batch(0))
        assert (
            allgather(part, (update.scale.value, update.has_failed))
            == [(2.0**39, False)] * part.size
        )
        assert all(torch.equal(value, before[name]) for name, value in state().items())
        update.scale.value = 2.0**10
        rank.train.run(1, loader.batch(1))
    assert allgather(part, update.scale.value) == [2.0**10] * part.size and math.isfinite(
        update.grad_norm
    )
    assert any(not torch.equal(value, before[name]) for name, value in state().items())
