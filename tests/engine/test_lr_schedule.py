"""The learning rate by step and epoch against torch's schedulers by themselves, and its state."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from gems.engine.optimization.lr_schedule import LrSchedule
from gems.errors import ConfigError
from tests.helpers.toys import make_spec

STEPS = 12


def optimizer(lrs: tuple[float, ...] = (0.1,)) -> torch.optim.Optimizer:
    return torch.optim.SGD(
        [{"params": [nn.Parameter(torch.zeros(1))], "lr": lr} for lr in lrs], momentum=0.9
    )


def make(
    name: str | None = None,
    lrs: tuple[float, ...] = (0.1,),
    samples: int = 64,
    steps: int = STEPS,
    **changes,
):
    made = optimizer(lrs)
    config = {f"lr_scheduler__{key}": value for key, value in changes.items()}
    named = {} if name is None else {"lr_scheduler__name": name}
    spec = make_spec(train__steps=steps, **named, **config)
    batch = spec.parallel.global_batch
    return made, LrSchedule(spec.lr_scheduler, spec.optimizer, made, steps, batch, samples)


def rates(made: torch.optim.Optimizer, schedule, steps: int = STEPS) -> list[list[float]]:
    found = []
    for _ in range(steps):
        found.append([group["lr"] for group in made.param_groups])
        schedule.step()
    return found


OF_TORCH = {
    "cosine": ({}, lambda made: lr_scheduler.CosineAnnealingLR(made, STEPS)),
    "linear": (
        {"start_factor": 1.0, "end_factor": 0.0},
        lambda made: lr_scheduler.LinearLR(made, 1.0, 0.0, total_iters=STEPS),
    ),
    "polynomial": ({"power": 2.0}, lambda made: lr_scheduler.PolynomialLR(made, STEPS, 2.0)),
    "one_cycle": ({}, lambda made: lr_scheduler.OneCycleLR(made, [0.1, 0.2], total_steps=STEPS)),
    "exponential": ({"gamma": 0.9}, lambda made: lr_scheduler.ExponentialLR(made, 0.9)),
    "multi_step": ({"milestones": [2, 5]}, lambda made: lr_scheduler.MultiStepLR(made, [2, 5])),
    "step": ({"step_size": 3}, lambda made: lr_scheduler.StepLR(made, 3)),
    "constant": (
        {"factor": 0.5},
        lambda made: lr_scheduler.ConstantLR(made, 0.5, total_iters=STEPS),
    ),
}


@pytest.mark.filterwarnings("ignore:Detected call")
@pytest.mark.parametrize("name", OF_TORCH)
def test_each_name_is_torchs_scheduler_with_the_length_of_the_run(name):
    kwargs, by_itself = OF_TORCH[name]
    reference = optimizer((0.1, 0.2))
    expected = rates(reference, by_itself(reference))
    assert rates(*make(name, (0.1, 0.2), kwargs=kwargs)) == expected
    assert len({tuple(rate) for rate in expected}) > 1 or name == "constant"


@pytest.mark.filterwarnings("ignore:Detected call")
def test_warm_up_rises_linearly_and_then_the_scheduler_has_the_rest_of_the_steps():
    found = [rate for (rate,) in rates(*make("cosine", warmup_steps=4, warmup_start=0.2))]
    assert found[:5] == pytest.approx([0.02, 0.04, 0.06, 0.08, 0.1])
    reference = optimizer()
    after = lr_scheduler.CosineAnnealingLR(reference, STEPS - 4)
    assert found[4:] == [rate for (rate,) in rates(reference, after, STEPS - 4)]


def test_an_epoch_begins_where_its_first_sample_is_taken():
    """8 samples a step and 20 an epoch.

    Epochs begin within steps 2, 5, 7 and 10 and count from the step after.
    """
    found = [
        rate
        for (rate,) in rates(*make("step", samples=20, interval="epoch", kwargs={"step_size": 1}))
    ]
    epochs = [step * 8 // 20 for step in range(STEPS)]
    assert found == pytest.approx([0.1 * 0.1**epoch for epoch in epochs])


@pytest.mark.parametrize("stop", [2, 7])
@pytest.mark.parametrize("name", ["one_cycle", "cosine"])
def test_a_restored_schedule_goes_on_to_the_bit(name, stop):
    whole, schedule = make(name, warmup_steps=3)
    expected = rates(whole, schedule)
    before, schedule = make(name, warmup_steps=3)
    rates(before, schedule, stop)
    state = schedule.state()
    after, schedule = make(name, warmup_steps=3)
    schedule.restore(stop, state)
    assert rates(after, schedule, STEPS - stop) == expected[stop:]


def test_a_changed_schedule_continues_as_if_it_had_always_been_so():
    expected = rates(*make("cosine", steps=20), steps=20)
    _, schedule = make("cosine")
    state = schedule.state()
    after, schedule = make("cosine", steps=20)
    schedule.restore(5, state)
    assert rates(after, schedule, 15) == expected[5:]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"name": "step"}, "step_size"),
        ({"target": "torch.optim.lr_scheduler.ReduceLROnPlateau"}, "needs metrics at each step"),
        ({"target": "torch.nn.Identity"}, "must give a scheduler"),
        ({"name": "cosine", "kwargs": {"t_max": 3}}, "t_max"),
    ],
)
def test_what_is_refused(changes, said):
    with pytest.raises(ConfigError, match=said):
        make(**changes)
