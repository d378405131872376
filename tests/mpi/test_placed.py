"""Operators of one model on several ranks, against one unsplit process, and what such a run leaves."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest

from gems.config.resolve import resolve
from gems.config.schema import DataConfig, ModelConfig
from gems.engine.batch_loader import BatchLoader
from gems.engine.checkpoint import weights
from gems.engine.checkpoint.state import layer_owners
from gems.engine.checkpoint.state_dict import restore
from gems.engine.evaluation.measure import evaluate
from gems.engine.rank import Rank
from gems.engine.transport.mpi import broadcast, meet
from gems.engine.verification.compare import compare
from gems.models import layers_of
from gems.models.steps import operators_of
from gems.schedule.action import Action, Kind
from gems.schedule.families.given_placement import placed
from gems.schedule.lower import lower
from gems.schedule.placement import Placement
from gems.schedule.validate import validate
from tests.helpers import toys
from tests.helpers.device import DEVICE
from tests.helpers.toys import plan_of
from tests.mpi.conftest import sub_world

DATA = {"name": "synthetic", "num_classes": 3, "train_samples": 32, "validation_samples": 5}
SIDES = {"googlenet": 64, "inception_v3": 107}


def make_run(model: str, partitions: int, replicas: int = 1, is_split: bool = False, seed: int = 0):
    """Return a run whose operators lie anywhere, and its schedule."""
    spec = toys.make_spec(
        "gpipe",
        partitions,
        replicas,
        model=ModelConfig(name=model, width=4, norm="batch"),
        data=DataConfig(height_px=SIDES[model], width_px=SIDES[model], **DATA),
        partition__name="even",
        train__precision="float64",
    )
    operators = operators_of(layers_of(spec.model, spec.data))
    rng = random.Random(seed)
    ranks = [
        *range(partitions),
        *(rng.randrange(partitions) for _ in range(len(operators) - partitions)),
    ]
    rng.shuffle(ranks)
    placement = Placement(
        partitions, (tuple(ranks),), tuple(operator.predecessors for operator in operators)
    )
    order = range(len(operators))
    schedule = placed(placement, spec.parallel.micro_batches, order, order[::-1])
    if is_split:
        rows = (tuple(itertools.chain(*map(_split, row))) for row in schedule.rank_schedules)
        schedule = replace(schedule, rank_schedules=tuple(rows))
    return resolve(spec), validate(lower(schedule))


def _split(action: Action) -> tuple[Action, ...]:
    kinds = (Kind.I, Kind.W) if action.kind is Kind.B else (action.kind,)
    return tuple(action._replace(kind=kind) for kind in kinds)


@pytest.mark.parametrize(
    ("model", "partitions", "replicas", "is_split"),
    [("googlenet", 4, 1, True), ("googlenet", 2, 2, False), ("inception_v3", 2, 1, False)],
)
def test_gradients_are_those_of_one_process_to_the_bit(comm, model, partitions, replicas, is_split):
    spec, schedule = make_run(model, partitions, replicas, is_split)
    part = sub_world(comm, spec.world_size)
    if part is None:
        return
    difference = compare(plan_of(spec, schedule), part, DEVICE)
    assert difference.max_rel_error <= (0.0 if replicas == 1 else 1e-12), difference
    assert difference.peak_activation_bytes == difference.predicted_activation_bytes, difference


def test_a_step_leaves_nothing_behind_and_weights_go_to_a_chain_and_back(comm, tmp_path_factory):
    folder = broadcast(comm, tmp_path_factory.mktemp("placed") if comm.rank == 0 else None)
    spec, schedule = make_run("googlenet", 4, seed=3)
    rank = Rank.open(plan_of(spec, schedule), comm, DEVICE)
    loader = BatchLoader.open(rank.plan, rank.comm, DEVICE)
    rank.stages.set_training(True)
    held = [_step(rank, loader, step) for step in range(2)]
    assert held[0] == held[1]
    router = rank.train.router
    assert (
        router.is_empty
        and router.between_stages.held_bytes == 0
        and router.between_stages.peak_bytes > 0
    )
    accuracy = evaluate(rank, loader)
    assert rank.evaluate.router.is_empty and rank.evaluate.router.between_stages.held_bytes == 0
    loader.close()
    assert set(layer_owners(rank)) == {unit.name for unit in rank.stages.of_model.units}
    weights.save(rank, folder)
    meet(comm)
    chain = Rank.open(plan_of(spec), comm, DEVICE)
    again = Rank.open(plan_of(*make_run("googlenet", 4, seed=4)), comm, DEVICE)
    for other in (chain, again):
        restore(other, folder)
        loader = BatchLoader.open(other.plan, other.comm, DEVICE)
        assert evaluate(other, loader) == accuracy
        loader.close()


def _step(rank, loader, step: int) -> int:
    rank.train.run(step, loader.batch(step))
    return rank.recorder.memory.held_bytes
