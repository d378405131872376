"""Networks with several tensors between layers, and on tokens, against one unsplit process.

And that they learn.
"""

from __future__ import annotations

import math

import pytest

from gems.config.schema import DataConfig, ModelConfig, RunSpec
from gems.engine.batch_loader import BatchLoader
from gems.engine.evaluation.measure import evaluate
from gems.engine.rank import Rank
from gems.engine.verification.compare import compare
from scripts.reproduce.language import CHANCES
from tests.helpers import toys
from tests.helpers.device import DEVICE
from tests.helpers.toys import plan_of
from tests.mpi.conftest import sub_world

IMAGES = {"name": "synthetic", "height_px": 21, "width_px": 35, "num_classes": 3}
TOKENS = {"num_classes": 11, "length": 6}
NETWORKS = {
    "unet": ({"depth": 3, "width": 4, "norm": "none"}, IMAGES),
    "amoebanet": ({"depth": 3, "width": 8}, {**IMAGES, "height_px": 40}),
    "biglstm": ({"depth": 2, "width": 4, "vocabulary": 13}, {"name": "tokens", **TOKENS}),
    "gnmt": ({"depth": 3, "width": 4, "vocabulary": 11}, {"name": "token_pairs", **TOKENS}),
}


def make_spec(name: str, schedule: str, partitions: int, replicas: int = 1, **changes) -> RunSpec:
    model, data = NETWORKS[name]
    sizes = {"train_samples": 64, "validation_samples": 9, **data}
    return toys.make_spec(
        schedule,
        partitions,
        replicas,
        model=ModelConfig(name=name, **model),
        data=DataConfig(**sizes),
        plugins=["scripts.reproduce.language"],
        **{"partition__name": "even", "train__precision": "float64", **changes},
    )


@pytest.mark.parametrize(
    ("name", "schedule", "partitions", "replicas"),
    [
        ("unet", "gems_master", 4, 1),
        ("unet", "zb_h1", 2, 2),
        ("amoebanet", "gems_master", 3, 1),
        ("biglstm", "gems_master", 2, 1),
        ("biglstm", "zb_h1", 2, 2),
        ("gnmt", "1f1b", 4, 1),
        ("gnmt", "gems_master", 2, 2),
    ],
)
def test_trains_as_one_process(comm, name, schedule, partitions, replicas):
    spec = make_spec(name, schedule, partitions, replicas)
    part = sub_world(comm, spec.world_size)
    if part is not None:
        difference = compare(plan_of(spec), part, DEVICE)
        assert difference.max_rel_error <= 1e-12, difference
        assert difference.peak_activation_bytes == difference.predicted_activation_bytes, difference


def test_the_gradient_is_that_of_the_mean_over_all_tokens(comm):
    """The loss that is reported begins at the logarithm of the vocabulary, whatever the length of a sequence."""
    spec = make_spec("biglstm", "1f1b", 2, 2, model__width=16)
    rank = Rank.open(plan_of(spec), comm, DEVICE)
    loader = BatchLoader.open(rank.plan, comm, DEVICE)
    rank.stages.set_training(True)
    loss_sum = rank.train.run(0, loader.batch(0))
    loader.close()
    sums = comm.allreduce(loss_sum), comm.allreduce(rank.training.step_weight.mine)
    assert sums[1] == 2 * 4 * 2 * 6
    assert sums[0] / sums[1] == pytest.approx(math.log(13), rel=0.1)


def test_a_language_model_learns_the_chain(comm):
    """Guessing the likeliest successor of each token is right for 70 %.

    The loss of that chain is 0.80 nats.
    """
    spec = make_spec(
        "biglstm",
        "gems_master",
        2,
        2,
        train__precision="float32",
        train__steps=40,
        optimizer__name="adam",
        optimizer__lr=0.03,
        model__width=16,
        data__length=16,
        data__train_samples=512,
    )
    rank = Rank.open(plan_of(spec), comm, DEVICE)
    loader = BatchLoader.open(rank.plan, comm, DEVICE)
    rank.stages.set_training(True)
    for step in range(spec.train.steps):
        rank.train.run(step, loader.batch(step))
    found = evaluate(rank, loader)
    loader.close()
    assert found["num_validation"] == 9
    assert found["validation_loss"] < 1.4 < math.log(11)
    assert (
        found["validation_majority"]
        < 0.25
        < 0.55
        < found["validation_accuracy"]
        < CHANCES[0] + 0.12
    )
