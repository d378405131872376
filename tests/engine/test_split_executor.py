"""Split backward in the executor.

Bits of the whole backward, buffers that W still reads, bytes, and errors.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

from gems.engine.executor import Batch
from gems.models.build import TensorSpec
from gems.schedule import generate
from gems.schedule.action import Kind, backward, forward
from gems.schedule.costs import StageCosts
from gems.schedule.ledger import peaks
from gems.schedule.lower import lower
from gems.schedule.placement import Placement, v
from gems.schedule.schedule import Schedule
from gems.schedule.validate import validate
from tests.helpers.halves import halved
from tests.helpers.rig import SIZE, WIDTH, N, Rig, images_and_labels
from tests.helpers.toys import Fork, Join, Mix, Pass

DELAYS = [0, 1, 2, None]


def on_one_rank(num_stages: int, order: str) -> Schedule:
    down = range(num_stages)
    up = range(num_stages - 1, -1, -1)
    if order == "gpipe":
        row = [forward(s, m) for m in range(N) for s in down] + [
            backward(s, m) for m in range(N) for s in up
        ]
    else:
        row = [
            a
            for m in range(N)
            for a in [*(forward(s, m) for s in down), *(backward(s, m) for s in up)]
        ]
    return Schedule("test", N, Placement(1, ((0,) * num_stages,)), (tuple(row),))


def gradients_of(rig: Rig) -> dict[object, list[torch.Tensor]]:
    return {
        held: [p.grad for p in stage.modules.parameters()] for held, stage in rig.stages.items()
    }


def assert_same_bits(ours: Rig, theirs: Rig) -> None:
    expected = gradients_of(theirs)
    for held, gradients in gradients_of(ours).items():
        assert len(gradients) == len(expected[held])
        for got, wanted in zip(gradients, expected[held], strict=True):
            assert torch.equal(got, wanted)
    assert any(bool(g.abs().max() > 0) for gradients in expected.values() for g in gradients)


def check_activations(rig: Rig, schedule: Schedule, rank: int) -> None:
    """The counted peak is what the schedule says of the measured sizes, and all is back to zero."""
    assert rig.executor.activations.held_bytes == rig.executor.router.between_stages.held_bytes == 0
    assert rig.memory.held_bytes == 0
    assert all(stage.num_in_flight == 0 for stage in rig.stages.values())
    stages = {stage: rig.stages[direction, stage] for direction, stage in rig.stages}
    each = range(schedule.num_stages)
    none = (0.0,) * schedule.num_stages
    costs = StageCosts(
        none,
        none,
        none,
        activation=tuple(float(stages[s].stash_bytes or 0) if s in stages else 0.0 for s in each),
        held_for_weights=tuple(
            float(stages[s].held_for_weights_bytes or 0) if s in stages else 0.0 for s in each
        ),
    )
    assert rig.executor.activations.peak_bytes == peaks(schedule, costs)[rank]


MAKERS: dict[str, Callable[[], list[nn.Module]]] = {
    "linear": lambda: [nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Identity(), nn.Linear(WIDTH, WIDTH)],
    "views": lambda: [nn.Identity(), nn.Flatten(), nn.Identity(), nn.Linear(WIDTH, WIDTH)],
    "tuples": lambda: [Fork(WIDTH, 3), Pass(), Mix(WIDTH, 3), Join(WIDTH, 3, WIDTH)],
    "norms": lambda: [
        nn.Linear(WIDTH, WIDTH),
        nn.BatchNorm1d(WIDTH),
        nn.LayerNorm(WIDTH),
        nn.Linear(WIDTH, WIDTH),
    ],
}


@pytest.mark.parametrize("delay", DELAYS)
@pytest.mark.parametrize("order", ["gpipe", "one by one"])
@pytest.mark.parametrize("name", MAKERS)
def test_stages_on_one_rank(name, order, delay):
    torch.manual_seed(1)
    modules = MAKERS[name]()
    plain = copy.deepcopy(modules)
    compute = on_one_rank(4, order)
    images, labels = images_and_labels()
    rigs = []
    for kept, schedule in ((modules, halved(compute, delay)), (plain, compute)):
        lowered = validate(lower(schedule))
        rig = Rig(
            lowered,
            0,
            {(0, s): [module] for s, module in enumerate(kept)},
            labels_per_step=N * SIZE,
        )
        for step in range(2):
            rig.run(Batch(images, labels), step)
        check_activations(rig, lowered, 0)
        rigs.append(rig)
    assert_same_bits(*rigs)


def numbered(action, index) -> torch.Tensor:
    """What the neighbours send: a tensor that no other transfer has."""
    generator = torch.Generator().manual_seed(
        10 * action.micro_batch + (action.kind is Kind.RECV_B)
    )
    return torch.randn(SIZE, WIDTH, generator=generator)


CHUNKS: dict[str, Callable[[], list[nn.Module]]] = {
    "linear": lambda: [nn.Linear(WIDTH, WIDTH)],
    "in the middle": lambda: [nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh()],
    "behind": lambda: [nn.Tanh(), nn.Linear(WIDTH, WIDTH)],
    "before": lambda: [nn.Linear(WIDTH, WIDTH), nn.Tanh()],
    "norm": lambda: [nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH)],
}


@pytest.mark.parametrize("delay", DELAYS)
@pytest.mark.parametrize("name", CHUNKS)
@pytest.mark.parametrize("family", ["1f1b", "gpipe", "layer_parallel"])
def test_a_buffer_that_w_reads_is_not_filled_again(family, name, delay):
    """The middle rank: its linear map reads the tensor that was received, and the gradient that was."""
    torch.manual_seed(1)
    modules = CHUNKS[name]()
    plain = copy.deepcopy(modules)
    boundary = (TensorSpec("x", (SIZE, WIDTH), torch.float32),)
    compute = generate(family, 3, N)
    rigs = []
    for kept, schedule in ((modules, halved(compute, delay)), (plain, compute)):
        lowered = validate(lower(schedule))
        rig = Rig(lowered, 1, {(0, 1): kept}, [boundary, boundary], numbered)
        for step in range(2):
            rig.run(Batch({}, {}), step)
        check_activations(rig, lowered, 1)
        rigs.append(rig)
    assert_same_bits(*rigs)
    ours, theirs = (rig.transports[0].sent for rig in rigs)
    assert ours.keys() == theirs.keys() and len(ours) == 2 * N
    for action in ours:
        assert all(torch.equal(a, b) for a, b in zip(ours[action], theirs[action], strict=True))


def v_schedule(num_ranks: int) -> Schedule:
    """A V placement, micro-batch after micro-batch.

    The two stages at the turn lie on the last rank.
    """
    placement = v(num_ranks)
    last = placement.num_stages - 1
    rows = []
    for rank in range(num_ranks):
        mine = [stage for _, stage in placement.stages_on(rank)]
        rows.append(
            tuple(
                action
                for m in range(N)
                for action in (
                    *(forward(s, m) for s in range(last + 1) if s in mine),
                    *(backward(s, m) for s in range(last, -1, -1) if s in mine),
                )
            )
        )
    return Schedule("v", N, placement, tuple(rows))


@pytest.mark.parametrize("delay", DELAYS)
@pytest.mark.parametrize("rank", [0, 1])
def test_two_stages_of_a_v_placement(rank, delay):
    torch.manual_seed(1)
    boundary = (TensorSpec("x", (SIZE, WIDTH), torch.float32),)
    compute = v_schedule(2)
    stages = [stage for _, stage in compute.placement.stages_on(rank)]
    modules = {
        (0, s): [nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)] for s in stages
    }
    plain = copy.deepcopy(modules)
    images, labels = images_and_labels()
    rigs = []
    for kept, schedule in ((modules, halved(compute, delay)), (plain, compute)):
        lowered = validate(lower(schedule))
        rig = Rig(lowered, rank, kept, [boundary] * 3, numbered, labels_per_step=N * SIZE)
        rig.run(Batch(images if rank == 0 else {}, labels if rank == 0 else {}))
        check_activations(rig, lowered, rank)
        rigs.append(rig)
    assert_same_bits(*rigs)
    # the tensor that the turn hands over, there and back
    assert (rigs[0].executor.router.between_stages.peak_bytes > 0) == (rank == 1)


def test_what_is_handed_over_on_a_rank_is_counted():
    schedule = validate(lower(on_one_rank(3, "one by one")))
    modules = {(0, s): [nn.Linear(WIDTH, WIDTH), nn.Tanh()] for s in range(3)}
    rig = Rig(schedule, 0, modules, labels_per_step=N * SIZE)
    images, labels = images_and_labels()
    rig.run(Batch(images, labels))
    per_tensor = SIZE * WIDTH * 4
    # two boundaries forward; while the last stage's gradient comes back its inputs are still there
    assert rig.executor.router.between_stages.peak_bytes == 3 * per_tensor
    assert rig.executor.router.between_stages.held_bytes == 0


@pytest.mark.parametrize("kind", [Kind.I, Kind.W])
def test_an_error_between_i_and_w_leaves_nothing_behind(kind, monkeypatch):
    torch.manual_seed(1)
    schedule = validate(lower(halved(on_one_rank(2, "gpipe"), 2)))
    modules = {(0, 0): [nn.Linear(WIDTH, WIDTH), nn.Tanh()], (0, 1): [nn.Linear(WIDTH, WIDTH)]}
    rig = Rig(schedule, 0, modules, labels_per_step=N * SIZE)
    stage = rig.stages[0, 0]
    name = {Kind.I: "backward_input", Kind.W: "backward_weight"}[kind]
    plain = getattr(stage, name)
    calls = []

    def third_fails(*args):
        calls.append(args)
        if len(calls) == 3:
            raise RuntimeError("broken on purpose")
        return plain(*args)

    monkeypatch.setattr(stage, name, third_fails)
    images, labels = images_and_labels()
    with pytest.raises(RuntimeError, match="on purpose"):
        rig.run(Batch(images, labels))
    assert all(stage.num_in_flight == 0 for stage in rig.stages.values())
    assert rig.executor.router.is_empty
    assert rig.executor.activations.held_bytes == rig.executor.router.between_stages.held_bytes == 0
    assert rig.memory.held_bytes == 0
    # a later step is as the first one would have been
    for held_stage in rig.stages.values():
        for parameter in held_stage.modules.parameters():
            parameter.grad = None
    rig.run(Batch(images, labels))
    fresh = Rig(schedule, 0, copy.deepcopy(modules), labels_per_step=N * SIZE)
    for held_stage in fresh.stages.values():
        for parameter in held_stage.modules.parameters():
            parameter.grad = None
    fresh.run(Batch(images, labels))
    assert_same_bits(rig, fresh)


def test_layers_stay_plain_where_no_backward_is_split():
    layer = nn.Linear(WIDTH, WIDTH)
    schedule = validate(lower(on_one_rank(1, "gpipe")))
    rig = Rig(schedule, 0, {(0, 0): [layer]}, labels_per_step=N * SIZE)
    images, labels = images_and_labels()
    rig.run(Batch(images, labels))
    assert "forward" not in vars(layer)
