"""Strips against one unsplit process, in float64 and in mixed precision, on worlds of one to four ranks."""

from __future__ import annotations

import importlib.util
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from gems.config.schema import DataConfig, LossConfig, ModelConfig, RunSpec
from gems.data import open_dataset
from gems.data.dataset import batch_indices
from gems.engine import rank_stages
from gems.engine.batch_loader import BatchLoader
from gems.engine.checkpoint.state_dict import restore
from gems.engine.evaluation.measure import evaluate
from gems.engine.optimization.nonfinite import find_nonfinite
from gems.engine.rank import Rank
from gems.engine.transport.mpi import broadcast
from gems.engine.verification.compare import compare
from gems.errors import ConfigError
from gems.launch.verification import Verification
from gems.profile import store
from gems.utils.targets import import_module
from tests.helpers.device import DEVICE, NAME
from tests.helpers.toys import make_spec, plan_of
from tests.mpi.conftest import plan_once, sub_world

OWN = "tests.helpers.own_streams."
CLASSES = {
    "name": "synthetic",
    "num_classes": 3,
    "width_px": 8,
    "train_samples": 64,
    "validation_samples": 5,
}
MASKS = {**CLASSES, "num_classes": 2, "task": "segmentation"}
MODELS = {
    "frozen": ({"target": f"{OWN}Residual", "kwargs": {"num_classes": 3}}, CLASSES, {}),
    "standardised": (
        {"target": f"{OWN}Residual", "kwargs": {"num_classes": 3, "is_frozen": False}},
        CLASSES,
        {},
    ),
    "resnet": ({"name": "resnet", "depth": 8, "width": 4, "norm": "none"}, CLASSES, {}),
    "ghost": (
        {"name": "resnet", "depth": 8, "width": 4, "norm": "ghost_batch"},
        {**CLASSES, "width_px": 32},
        {},
    ),
    "own ghost": (
        {"target": "tests.helpers.own_segmenters.OwnSegmenter", "norm": "ghost_batch"},
        {**MASKS, "width_px": 32},
        {},
    ),
    "nf_resnet": (
        {"name": "resnet", "depth": 11, "version": 2, "width": 4, "norm": "normalizer_free"},
        CLASSES,
        {},
    ),
    "vgg": (
        {"name": "vgg", "depth": 11, "width": 2, "norm": "none", "dropout": 0.5},
        {**CLASSES, "width_px": 32},
        {},
    ),
    "alexnet": (
        {"name": "alexnet", "width": 4, "norm": "none", "dropout": 0.5},
        {**CLASSES, "width_px": 64},
        {},
    ),
    "convnext": (
        {"name": "convnext", "depth": 18, "width": 4, "norm": "layer"},
        {**CLASSES, "width_px": 32},
        {},
    ),
    "unet": (
        {"name": "unet", "depth": 3, "width": 4, "norm": "none"},
        MASKS,
        {"kwargs": {"weight": [1, 9]}},
    ),
    "focal unet": (
        {"name": "unet", "depth": 3, "width": 4, "norm": "none"},
        MASKS,
        {"target": "tests.helpers.own_losses.Focal"},
    ),
    "dice unet": (
        {"name": "unet", "depth": 3, "width": 4, "norm": "none"},
        MASKS,
        {"target": "tests.helpers.own_losses.image_dice"},
    ),
    "plain unet": ({"name": "unet", "depth": 3, "width": 4, "norm": "none"}, MASKS, {}),
    "pooled": ({"target": f"{OWN}Pooled"}, CLASSES, {}),
    "gated": ({"target": f"{OWN}Pooled", "kwargs": {"gate": True}}, CLASSES, {}),
    "dilated": ({"target": f"{OWN}Dilated"}, MASKS, {}),
    "two outputs": (
        {"target": f"{OWN}Dilated", "kwargs": {"has_class": True}},
        MASKS,
        {"target": "tests.helpers.own_losses.of_pixels_and_image"},
    ),
}
CAPPED = {"schedule__activation_cap": 1.5, "schedule__budget_s": 0.2}
WAITING = {"parallel__min_strip_positions": 32}  # thin layers take several strips at once
RUNS = [  # each network, and each schedule with two of them; few ranks, since each traces all layers
    ("frozen", "layer_parallel", 1, 1, 2, 37, {}),
    ("standardised", "zb_h1", 2, 1, 3, 37, {}),
    ("resnet", "gems_master", 4, 1, 3, 20, WAITING),
    ("resnet", "interleaved_1f1b", 2, 1, 3, 20, {}),
    ("ghost", "gems_master", 2, 1, 3, 40, WAITING),
    ("ghost", "zb_h1", 4, 1, 7, 41, WAITING),
    ("own ghost", "1f1b", 1, 2, 3, 37, WAITING),
    ("nf_resnet", "zb_h1", 2, 1, 3, 20, {}),
    ("vgg", "capped", 2, 1, 2, 37, CAPPED),
    ("alexnet", "1f1b", 2, 1, 2, 79, WAITING),
    ("convnext", "gems_master", 2, 1, 3, 67, WAITING),
    ("unet", "1f1b", 1, 1, 7, 20, WAITING),
    ("unet", "gems_master", 2, 2, 2, 20, {}),
    ("unet", "capped", 2, 1, 3, 20, {**CAPPED, **WAITING}),
    ("dilated", "1f1b", 2, 1, 3, 22, WAITING),
    ("focal unet", "zb_h1", 2, 1, 3, 20, {}),
    ("dice unet", "1f1b", 2, 1, 3, 20, {}),
    ("two outputs", "gems_master", 2, 1, 7, 22, {}),
    ("frozen", "zb_h1", 2, 1, 3, 37, {"optimizer__frozen": ["stem.*", "*.bias", "block2.*"]}),
    ("resnet", "gems_master", 4, 1, 3, 20, {"optimizer__frozen": ["stem*", "stage1*"]}),
    ("pooled", "1f1b", 2, 1, 4, 37, WAITING),
    ("gated", "gems_master", 2, 1, 4, 37, {"parallel__strips_until": "block2"}),
    # in blocks, which the sides are no multiples of
    ("resnet", "gems_master", 4, 1, [3, 5], 20, WAITING),
    ("frozen", "zb_h1", 1, 1, [7, 2], 37, {}),
    ("pooled", "zb_h1", 1, 1, [2, 2], 37, {}),
    ("gated", "1f1b", 2, 1, [2, 2], 37, {"parallel__strips_until": "block2"}),
    ("unet", "capped", 2, 1, [2, 3], 20, CAPPED),
    ("two outputs", "1f1b", 2, 2, [2, 2], 22, {}),
]


@pytest.fixture(autouse=True)
def without_times_of_strips(monkeypatch):
    """Take no profiles of shorter images for the times of strips, on which what is computed does not depend."""
    monkeypatch.setattr(store, "_with_times_of_strips", lambda _, profile: profile)


@pytest.fixture
def without_evaluation(monkeypatch):
    """Trace no layers for evaluation: it takes as long as the tracing that a comparison needs."""
    monkeypatch.setattr(rank_stages, "find_evaluation_forms", lambda *_: None)


def built(comm, spec, trains=True):
    return Rank.open(plan_once(comm, spec, trains).for_ranks, comm, DEVICE, trains=trains)


def strip_spec(
    name: str,
    schedule: str,
    partitions: int,
    replicas: int,
    strips: int | list[int],
    height: int,
    **more,
) -> RunSpec:
    model, data, loss = MODELS[name]
    return make_spec(
        schedule,
        partitions,
        replicas,
        model=ModelConfig(**model),
        data=DataConfig(**data, height_px=height),
        loss=LossConfig(**loss),
        parallel__strips=strips,
        **{"train__precision": "float64", **more},
    )


@pytest.mark.usefixtures("without_evaluation")
@pytest.mark.parametrize(
    ("name", "schedule", "partitions", "replicas", "strips", "height", "more"), RUNS
)
def test_trains_as_one_process(comm, name, schedule, partitions, replicas, strips, height, more):
    spec = strip_spec(name, schedule, partitions, replicas, strips, height, **more)
    part = sub_world(comm, spec.world_size)
    if part is None:
        return
    made = plan_once(part, spec)
    assert made.schedule.num_strips == spec.parallel.num_strips
    found = compare(made.for_ranks, part, DEVICE)
    assert found.max_rel_error <= 1e-12, found
    if spec.loss == LossConfig():  # else the loss may save more than that of the task does
        assert_predicted_bytes(found)


def assert_predicted_bytes(found: Verification) -> None:
    assert max(found.peak_activation_bytes) > 0 and found.has_predicted_bytes, found
    if NAME != "cuda":
        wanted = found.predicted_activation_bytes or found.peak_activation_bytes
        assert found.peak_activation_bytes == wanted, found


POLICIES = {
    "recompute": {"memory__name": "recompute", "memory__recompute": "strip"},
    "recompute, inputs leave": {
        "memory__name": "recompute",
        "memory__recompute": "strip",
        "memory__offload_inputs": True,
        "memory__min_offload_bytes": 0,
    },
    "recompute, thin layers wait": {
        "memory__name": "recompute",
        "memory__recompute": "strip",
        **WAITING,
    },
    "vdnn_all": {"memory__name": "vdnn_all", "memory__min_offload_bytes": 0},
    "vdnn_all, thin layers wait": {
        "memory__name": "vdnn_all",
        "memory__min_offload_bytes": 0,
        **WAITING,
    },
    "vdnn_all of large storages": {"memory__name": "vdnn_all", "memory__min_offload_bytes": 1000},
}
STORED = [
    ("frozen", "1f1b", 2, 2, 3, 37, "recompute"),
    ("standardised", "zb_h1", 2, 1, 3, 37, "recompute, thin layers wait"),
    ("standardised", "gems_master", 2, 1, 7, 37, "vdnn_all"),
    ("resnet", "zb_v", 2, 1, 2, 19, "recompute, inputs leave"),
    ("vgg", "1f1b", 1, 1, 2, 37, "recompute"),
    ("plain unet", "zb_h1", 4, 1, 3, 28, "recompute"),
    ("plain unet", "1f1b", 2, 1, 2, 20, "vdnn_all of large storages"),
    ("dice unet", "1f1b", 1, 1, 3, 20, "recompute"),
    ("ghost", "zb_h1", 2, 1, 3, 40, "recompute, thin layers wait"),
    ("two outputs", "zb_h1", 2, 1, 3, 22, "recompute"),
    ("two outputs", "1f1b", 2, 1, 7, 22, "vdnn_all, thin layers wait"),
    ("plain unet", "1f1b", 2, 1, [2, 3], 20, "recompute, inputs leave"),
    ("standardised", "gems_master", 2, 1, [3, 2], 37, "vdnn_all"),
]


@pytest.mark.usefixtures("without_evaluation")
@pytest.mark.parametrize(
    ("name", "schedule", "partitions", "replicas", "strips", "height", "policy"), STORED
)
def test_strips_are_recomputed_and_leave(
    comm, name, schedule, partitions, replicas, strips, height, policy
):
    test_trains_as_one_process(
        comm, name, schedule, partitions, replicas, strips, height, POLICIES[policy]
    )


MIXED = [
    ("resnet", "gems_master", 2, 1, 3, 20, "bf16_mixed", {}),
    ("resnet", "zb_h1", 2, 1, 3, 20, "fp16_mixed", POLICIES["recompute"]),
    ("frozen", "1f1b", 1, 2, 3, 37, "fp16_mixed", {}),
    ("standardised", "zb_v", 2, 1, 3, 37, "bf16_mixed", POLICIES["vdnn_all"]),
    ("plain unet", "zb_h1", 2, 1, 3, 28, "bf16_mixed", {}),
]


@pytest.mark.usefixtures("without_evaluation")
@pytest.mark.parametrize(
    ("name", "schedule", "partitions", "replicas", "strips", "height", "precision", "more"), MIXED
)
def test_mixed_precision_computes_as_one_process(
    comm, name, schedule, partitions, replicas, strips, height, precision, more
):
    """Up to what sums of 16 bits in another order differ by, of one step; bytes are as predicted.

    Images are wide: of maps of one column oneDNN's convolutions of bfloat16 return gradients that
    are not initialised.
    """
    more = {**more, "train__precision": precision, "train__steps": 1}
    spec = strip_spec(name, schedule, partitions, replicas, strips, height, **more)
    spec = replace(spec, data=replace(spec.data, width_px=32))
    part = sub_world(comm, spec.world_size)
    if part is None:
        return
    made = plan_once(part, spec)
    found = compare(made.for_ranks, part, DEVICE)
    assert found.dtype == precision and found.is_equal, found
    assert_predicted_bytes(found)


TORCHVISION = {"num_classes": 3}
FROZEN = ("conv1.", "bn1.", "layer1.")


def torchvision_network() -> tuple[nn.Module, list[nn.BatchNorm2d]]:
    """Return ResNet-18 with drawn running statistics, and its norms."""
    torch.manual_seed(0)
    network = import_module("torchvision").models.resnet18(**TORCHVISION).double()
    norms = [module for module in network.modules() if isinstance(module, nn.BatchNorm2d)]
    for norm in norms:
        norm.running_mean.normal_(std=0.1)
        norm.running_var.uniform_(0.5, 2)
    return network, norms


def step_of_torchvision(network: nn.Module, norms: list[nn.BatchNorm2d], spec: RunSpec) -> None:
    """Take one step of SGD in one process, with norms in evaluation."""
    network.train()
    for norm in norms:
        norm.eval()
    for name, parameter in network.named_parameters():
        parameter.requires_grad_(not name.startswith(FROZEN))
    dataset = open_dataset(spec.data, spec.seed)
    chosen = [
        (int(index), int(draw)) for index, draw in batch_indices(dataset.num_train, spec.seed, 0, 2)
    ]
    images = torch.stack(
        [torch.from_numpy(dataset.image("train", *each)) for each in chosen]
    ).double()
    labels = torch.tensor([int(dataset.label("train", *each)) for each in chosen])
    torch.nn.functional.cross_entropy(network(images), labels).backward()
    config = spec.optimizer
    trained = [parameter for parameter in network.parameters() if parameter.requires_grad]
    torch.optim.SGD(trained, config.lr, config.momentum, weight_decay=config.weight_decay).step()


@pytest.mark.usefixtures("without_evaluation")
def test_trains_torchvision_from_its_weights_with_frozen_statistics(comm, tmp_path_factory):
    """One step of SGD on two ranks in strips is that of torchvision's own network with batch norm in evaluation."""
    if importlib.util.find_spec("torchvision") is None:
        pytest.skip("torchvision is not installed")
    part = sub_world(comm, 2)
    if part is None:
        return
    network, norms = torchvision_network()
    path = broadcast(
        part, tmp_path_factory.mktemp("weights") / "resnet18.pt" if part.rank == 0 else None
    )
    if part.rank == 0:
        torch.save(network.state_dict(), path)
    part.Barrier()
    model = ModelConfig(
        target="torchvision.models.resnet18", kwargs=TORCHVISION, norm="frozen_batch"
    )
    spec = make_spec(
        "1f1b",
        2,
        model=model,
        data=DataConfig(**CLASSES, height_px=67),
        parallel__strips=3,
        parallel__micro_batch_size=1,
        parallel__micro_batches=2,
        train__precision="float64",
        train__steps=1,
        optimizer__frozen=[f"{name}*" for name in FROZEN],
    )
    rank = built(part, spec)
    match = restore(rank, path)
    assert len(match.names) == len(network.state_dict()) and not match.drawn_anew
    rank.stages.set_training(True)
    loader = BatchLoader.open(rank.plan, rank.comm, DEVICE)
    before = {name: value.clone() for name, value in network.state_dict().items()}
    rank.train.run(0, loader.batch(0))
    loader.close()

    step_of_torchvision(network, norms, spec)
    wanted = network.state_dict()
    parameters = dict(network.named_parameters())
    found = {
        name: value
        for key in rank.stages.modules
        for _, module in rank.stages.named_layers(key)
        for name, value in module.state_dict().items()
    }
    assert len(found) == len({*found} & {*wanted}) > 0
    for name, value in found.items():
        is_kept = name.startswith(FROZEN) or name not in parameters
        assert (
            torch.equal(value, before[name]) if is_kept else not torch.equal(value, before[name])
        ), name
        torch.testing.assert_close(value, wanted[name], rtol=1e-11, atol=1e-13)
    rank.connections.close()


class LargestMap(TorchDispatchMode):
    """Notes the bytes of the largest map, images too, that an operation takes or makes."""

    num_bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        found = (
            each for each in (*args, made) if isinstance(each, torch.Tensor) and each.dim() == 4
        )
        self.num_bytes = max(self.num_bytes, *(each.nbytes for each in found), 0)
        return made


def evaluated(comm, spec, trains=True):
    """Return the metrics, the strips of the schedule, and the bytes of the largest map of a rank."""
    rank = built(comm, spec, trains)
    loader = BatchLoader.open(rank.plan, rank.comm, DEVICE)
    with LargestMap() as largest:
        metrics = evaluate(rank, loader)
    loader.close()
    assert rank.evaluate.router.is_empty and rank.recorder.memory.held_bytes >= 0
    rank.connections.close()
    return metrics, rank.evaluate.schedule.num_strips, largest.num_bytes


@pytest.mark.parametrize(
    ("name", "schedule", "partitions", "replicas", "height"),
    [
        ("frozen", "1f1b", 4, 1, 110),
        ("vgg", "zb_v", 2, 2, 128),
        ("alexnet", "interleaved_1f1b", 2, 1, 319),
        ("unet", "gems_master", 2, 1, 88),
        ("two outputs", "1f1b", 2, 1, 90),
    ],
)
def test_evaluates_strips_as_whole_images(comm, name, schedule, partitions, replicas, height):
    specs = [strip_spec(name, schedule, partitions, replicas, strips, height) for strips in (1, 4)]
    part = sub_world(comm, specs[0].world_size)
    if part is None:
        return
    (whole, _, whole_bytes), (found, strips, strip_bytes) = (
        evaluated(part, spec, trains=False) for spec in specs
    )
    assert strips == 4 and found["num_validation"] == 5
    assert found.keys() == whole.keys()
    assert all(found[key] == pytest.approx(value, rel=1e-12) for key, value in whole.items())
    assert part.rank or strip_bytes < 0.5 * whole_bytes  # of the rank that has most rows


def test_evaluates_in_mixed_precision(comm):
    """A dense output has the bits that it has without strips."""
    specs = [
        strip_spec("unet", "gems_master", 2, 1, k, 72, train__precision="bf16_mixed")
        for k in (1, 4)
    ]
    part = sub_world(comm, 2)
    if part is None:
        return
    (whole, _, _), (found, strips, _) = (evaluated(part, spec) for spec in specs)
    assert strips == 4 and all(
        found[key] == pytest.approx(value, rel=1e-6) for key, value in whole.items()
    )


def test_evaluation_that_needs_whole_images_has_them(comm):
    model = ModelConfig(target=f"{OWN}WholeInEvaluation")
    found = []
    for strips in (1, 3):
        spec = make_spec(
            "1f1b",
            2,
            2,
            model=model,
            data=DataConfig(**CLASSES, height_px=16),
            parallel__strips=strips,
            train__precision="float64",
        )
        found.append(evaluated(comm, spec))
    assert found[0][0] == found[1][0] and found[1][1] == 1


@pytest.mark.parametrize(
    ("model", "why"),
    [
        (
            {"name": "resnet", "depth": 8, "width": 4, "norm": "batch"},
            "BatchNorm2d.*needs statistics of the whole image",
        ),
        ({"target": f"{OWN}DropValues"}, "layer conv.drop drops values of a map"),
    ],
)
def test_what_cannot_run_in_strips_is_refused_on_all_ranks_alike(comm, model, why):
    spec = make_spec(
        "1f1b",
        2,
        2,
        model=ModelConfig(**model),
        data=DataConfig(**CLASSES, height_px=16),
        parallel__strips=2,
    )
    with pytest.raises(ConfigError, match=f"parallel.strips=2: .*{why}"):
        Rank.open(plan_of(spec), comm, DEVICE)


@pytest.mark.usefixtures("without_evaluation")
def test_the_layer_that_is_not_finite_is_named(comm):
    spec = strip_spec("resnet", "1f1b", 4, 1, 3, 20)
    rank = built(comm, spec)
    rank.stages.set_training(True)
    layer = rank.stages.layers[0]
    if comm.rank == 2:
        next(layer.module.parameters()).data.fill_(float("inf"))
    loader = BatchLoader.open(rank.plan, rank.comm, DEVICE)
    batch = loader.batch(0)
    rank.train.run(0, batch)
    assert rank.update.has_failed
    found = find_nonfinite(rank, 0, batch)
    named = broadcast(comm, layer.name, 2)
    assert (found.rank, found.what) == (
        2,
        f"the first output that is not finite is that of layer {named}",
    )
    loader.close()
    rank.connections.close()
