"""The executor on one rank: hand-over without messages, views of what was received, and evaluation."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as functional
from torch import nn

from gems.autograd.outputs import as_tuple
from gems.engine.evaluation.metrics import ClassAccuracy
from gems.engine.executor import Batch
from gems.models.build import TensorSpec
from gems.runs.heartbeat import Heartbeat, read_beat
from gems.schedule import generate
from gems.schedule.action import RECV_KINDS, Kind, backward, forward
from gems.schedule.families.given_placement import forward_only
from gems.schedule.lower import lower
from gems.schedule.placement import Placement
from gems.schedule.schedule import Schedule
from gems.schedule.validate import validate
from tests.helpers.rig import SIZE, WIDTH, N, Rig, images_and_labels
from tests.helpers.toys import Fork, Join, Mix, Pass


def on_one_rank(num_stages: int, order: str) -> Schedule:
    """All stages on rank 0: every forward before every backward, or micro-batch after micro-batch."""
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
    made = Schedule("test", N, Placement(1, ((0,) * num_stages,)), (tuple(row),))
    return validate(lower(made))


def total_loss(modules, images, labels) -> torch.Tensor:
    losses = []
    for m in sorted(images):
        values: tuple[torch.Tensor, ...] = (images[m],)
        for module in modules:
            values = as_tuple(module(*values))
        losses.append(functional.cross_entropy(values[0], labels[m], reduction="sum"))
    return torch.stack(losses).sum() / (len(images) * SIZE)


@pytest.mark.parametrize("order", ["gpipe", "one by one"])
@pytest.mark.parametrize(
    "make",
    [
        lambda: [nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Identity(), nn.Linear(WIDTH, WIDTH)],
        lambda: [nn.Identity(), nn.Flatten(), nn.Identity(), nn.Linear(WIDTH, WIDTH)],
        lambda: [Fork(WIDTH, 3), Pass(), Mix(WIDTH, 3), Join(WIDTH, 3, WIDTH)],
    ],
    ids=["linear", "views", "tuples"],
)
def test_stages_on_one_rank_hand_over_without_messages(make, order):
    torch.manual_seed(1)
    modules = [module.double() for module in make()]
    plain = copy.deepcopy(modules)
    schedule = on_one_rank(4, order)
    assert not any(action.kind in RECV_KINDS for action in schedule.rank_schedules[0])
    images, labels = images_and_labels()
    images = {m: image.double() for m, image in images.items()}
    rig = Rig(
        schedule,
        0,
        {(0, s): [module] for s, module in enumerate(modules)},
        labels_per_step=N * SIZE,
    )
    loss_sum = rig.run(Batch(images, labels))

    loss = total_loss(plain, images, labels)
    loss.backward()
    assert loss_sum / (N * SIZE) == pytest.approx(float(loss.detach()), rel=1e-14)
    for module, expected in zip(modules, plain, strict=True):
        for got, parameter in zip(module.parameters(), expected.parameters(), strict=True):
            torch.testing.assert_close(got.grad.cpu(), parameter.grad, rtol=1e-13, atol=1e-15)
    assert rig.memory.held_bytes == 0
    assert all(stage.num_in_flight == 0 for stage in rig.stages.values())


def numbered(action, index) -> torch.Tensor:
    """What the neighbours send: a tensor that no other transfer has."""
    return (
        torch.arange(SIZE * WIDTH).reshape(SIZE, WIDTH)
        + 1000.0 * (action.micro_batch + 1)
        + (50.0 if action.kind is Kind.RECV_B else 0.0)
    )


VIEWS = {
    "identity": nn.Identity,
    "pass": Pass,
    "flatten": nn.Flatten,
    "unflatten": lambda: nn.Unflatten(1, (WIDTH,)),
}


@pytest.mark.parametrize("make", VIEWS.values(), ids=VIEWS)
@pytest.mark.parametrize("family", ["1f1b", "gpipe", "layer_parallel"])
def test_a_view_of_what_was_received_is_sent_whole(family, make):
    """Its buffer is filled again while the message may still be under way."""
    schedule = validate(lower(generate(family, 3, N)))
    boundary = (TensorSpec("x", (SIZE, WIDTH), torch.float32),)
    rig = Rig(schedule, 1, {(0, 1): [make()]}, [boundary, boundary], numbered)
    rig.run(Batch({}, {}))
    sent = rig.transports[0].sent
    assert len(sent) == 2 * N
    for action, (tensor,) in sent.items():
        came_by = Kind.RECV_F if action.kind is Kind.SEND_F else Kind.RECV_B
        expected = numbered(type(action)(came_by, 1, action.micro_batch), 0)
        assert torch.equal(tensor, expected), action
    assert rig.memory.held_bytes == 0


@pytest.mark.parametrize("make", VIEWS.values(), ids=VIEWS)
def test_a_view_is_sent_whole_in_evaluation(make):
    schedule = validate(lower(forward_only(Placement(3, ((0, 1, 2),)), N)))
    boundary = (TensorSpec("x", (SIZE, WIDTH), torch.float32),)
    rig = Rig(schedule, 1, {(0, 1): [make()]}, [boundary, boundary], numbered)
    rig.run(Batch({}, {}))
    sent = rig.transports[0].sent
    assert sorted(action.micro_batch for action in sent) == list(range(N))
    for action, (tensor,) in sent.items():
        assert torch.equal(tensor, numbered(type(action)(Kind.RECV_F, 1, action.micro_batch), 0))
    assert rig.memory.held_bytes == 0


def test_evaluation_counts_no_sample_without_a_label():
    modules = [nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH)]
    for module in modules:
        module.eval()
    modules[1].running_mean.uniform_(-1, 1)
    schedule = validate(lower(forward_only(Placement(1, ((0, 0),)), N)))
    images, labels = images_and_labels()
    labels[2], labels[3] = labels[2][:1], labels[3][:0]
    rig = Rig(schedule, 0, {(0, 0): modules[:1], (0, 1): modules[1:]})
    metric = ClassAccuracy(WIDTH)
    rig.executor.measure_with([metric])
    rig.run(Batch(images, labels))
    with torch.no_grad():
        logits = nn.Sequential(*modules)(torch.cat([images[m] for m in range(N)])[:5])
    known = torch.cat([labels[m] for m in range(N)])[:5]
    assert len(known) == 5
    assert metric.compute()["accuracy"] == float((logits.argmax(1) == known).double().mean())
    assert metric.compute()["majority"] == max(torch.bincount(known).tolist()) / 5


def test_the_loss_is_one_log_softmax_of_the_logits():
    """MPI4DL #8: a softmax before the loss keeps it near the logarithm of the number of classes."""
    images = {0: torch.eye(WIDTH)[:SIZE] * 50}
    labels = {0: torch.arange(SIZE)}
    made = Schedule("test", 1, Placement(1, ((0,),)), ((forward(0, 0), backward(0, 0)),))
    rig = Rig(validate(lower(made)), 0, {(0, 0): [nn.Identity()]}, labels_per_step=SIZE)
    assert rig.run(Batch(images, labels)) < 1e-9


def test_the_heartbeat_names_the_action_at_fault(tmp_path):
    class Broken(nn.Module):
        calls = 0

        def forward(self, x):
            self.calls += 1
            if self.calls == 3:
                raise RuntimeError("broken on purpose")
            return x * 1.0

    path = tmp_path / "rank0000"
    heartbeat = Heartbeat(path)
    modules = {(0, 0): [nn.Linear(WIDTH, WIDTH)], (0, 1): [Broken()]}
    rig = Rig(on_one_rank(2, "gpipe"), 0, modules, heartbeat=heartbeat, labels_per_step=1)
    images, labels = images_and_labels()
    with pytest.raises(RuntimeError, match="on purpose"):
        rig.run(Batch(images, labels), step=7)
    beat = read_beat(path)
    assert (beat.step, beat.action) == (7, "1F2")
    heartbeat.close()
    assert read_beat(path).action == "finished"
