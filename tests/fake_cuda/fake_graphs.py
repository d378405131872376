"""Stages as CUDA graphs on the fake device: the numbers of eager stages, and what shows if they would differ.

Run by test_fake_cuda.py.
"""

from __future__ import annotations

import gc
import logging
import re
import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from gems.config.schema import MemoryConfig
from gems.engine.batch_loader import BatchLoader
from gems.engine.device import use_own_stream
from gems.engine.offload.saved_tensor_table import SavedTensor
from gems.engine.rank import Rank
from gems.engine.stages import graphed_segment
from gems.engine.stages.graphed import Captures, GraphedStage
from gems.engine.stages.whole import WholeStage
from gems.engine.transport.mpi import world
from gems.plan.evaluate import evaluate
from gems.schedule.action import Kind
from tests.fake_cuda.load import native
from tests.fake_cuda.workloads import trained
from tests.helpers.device import DEVICE
from tests.helpers.toys import make_spec

IN_FLIGHT = 3
ROUNDS = 4
SHAPE = (2, 3, 8, 8)

pytestmark = pytest.mark.usefixtures("clean_device", "own_stream")


@pytest.fixture
def own_stream():
    before = torch.cuda.current_stream()
    use_own_stream(DEVICE)
    native().clear_counts()
    yield
    torch.cuda.set_stream(before)


class _Reads(nn.Module):
    """Reads a value on the host, as a gate that depends on data does."""

    def forward(self, images: Tensor) -> Tensor:
        return images * (2.0 if float(images.sum()) > 0 else 1.0)


class _Counts(nn.Module):
    """Depends on how often it was called, which a replay does not know."""

    calls = 0

    def forward(self, images: Tensor) -> Tensor:
        self.calls += 1
        return images * self.calls


class _Several(nn.Module):
    """Returns what a loss of a user's own may take."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 2, 1)

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        made = self.conv(images)
        return {"map": made, "mean": made.mean((2, 3)), "best": made.argmax(1)}


def layers(*more: nn.Module) -> nn.ModuleList:
    torch.manual_seed(2)
    made = nn.ModuleList(
        [
            nn.Conv2d(3, 4, 3, padding=1),
            nn.Sequential(nn.BatchNorm2d(4), nn.ReLU(inplace=True)),
            *more,
        ]
    ).to(DEVICE)
    for parameter in made.parameters():
        parameter.grad = torch.zeros_like(parameter)
    return made


def whole(made: nn.ModuleList) -> WholeStage:
    return WholeStage(made, is_first=False, poll=lambda: None)


def graphed(
    made: nn.ModuleList,
    is_drawing: Callable[[nn.Module], bool] = lambda _: False,
    is_split: bool = False,
):
    return GraphedStage(whole(made), Captures("stage 3", is_drawing), is_split)


def play(stage, is_split: bool = False, loss=None, shapes: Sequence[tuple[int, ...]] = (SHAPE,)):
    """Run micro-batches, several of which are in flight, and return all that they make."""
    found = []
    generator = torch.Generator().manual_seed(3)

    def draw(shape: Sequence[int]) -> Tensor:
        return torch.randn(tuple(shape), generator=generator).to(DEVICE)

    for number in range(ROUNDS):
        sizes = {}
        for index in range(IN_FLIGHT):
            images = draw(shapes[(number + index) % len(shapes)])
            (output,) = stage.forward(index, (images,), loss, is_split)
            found.append(output.clone())
            sizes[index] = output.shape
        for index in range(IN_FLIGHT):
            back = stage.backward_input if is_split else stage.backward
            gradients, _ = back(index, (draw(sizes[index]),))
            found += [gradient.clone() for gradient in gradients]
            if is_split:
                stage.backward_weight(index)
    assert stage.num_in_flight == 0
    parts = [each for module in stage.modules for each in (module.parameters(), module.buffers())]
    tensors = [tensor for part in parts for tensor in part]
    return found + tensors + [tensor.grad for tensor in tensors if tensor.grad is not None]


def launches() -> int:
    return native().counts().get("graph launches", 0)


def same(one: Sequence[Tensor], other: Sequence[Tensor]) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))


def summed(outputs: dict[str, Tensor]) -> Tensor:
    return outputs["map"].square().sum() + outputs["mean"].abs().sum()


CASES = {
    "backward": {},
    "split backward": {"is_split": True},
    "two shapes": {"shapes": (SHAPE, (1, 3, 6, 8))},
    "loss of several outputs": {"loss": summed},
}


@pytest.mark.parametrize("case", CASES)
def test_a_graphed_stage_has_the_bits_of_an_eager_one(case, caplog):
    options = CASES[case]
    more = [_Several()] if "loss" in options else []
    eager = play(whole(layers(*more)), **options)
    assert launches() == 0
    replayed = play(graphed(layers(*more), is_split=options.get("is_split", False)), **options)
    assert same(replayed, eager)
    assert launches() > 0
    assert not caplog.records


@pytest.mark.parametrize("case", CASES)
def test_each_action_of_a_later_step_is_one_launch(case):
    options = CASES[case]
    more = [_Several()] if "loss" in options else []
    stage = graphed(layers(*more), is_split=options.get("is_split", False))
    play(stage, **options)
    native().clear_counts()
    play(stage, **options)
    assert launches() == ROUNDS * IN_FLIGHT * (3 if options.get("is_split") else 2)


@pytest.mark.parametrize(
    ("layer", "reason"),
    [
        (_Reads(), "F cannot be captured: .* not permitted when stream is capturing: item"),
        (_Counts(), "the replay of F differs from the same action run eagerly"),
        (nn.Dropout(0.5), "Dropout draws random numbers"),
    ],
)
def test_what_cannot_be_captured_runs_eagerly_and_is_named_once(layer, reason, caplog):
    is_drawing = lambda each: isinstance(each, nn.Dropout)  # noqa: E731
    layer.calls = 0
    made = layers(layer)
    torch.cuda.manual_seed(1)
    found = play(graphed(made, is_drawing))
    ((_, level, message),) = caplog.record_tuples
    assert level == logging.WARNING
    assert re.match(f"stage 3 runs without CUDA graphs: {reason}", message)
    made = layers(layer)
    torch.cuda.manual_seed(1)
    if not isinstance(layer, _Counts):  # which has also counted the capture
        assert same(found, play(whole(made)))


class _Litters(nn.Module):
    """Leaves garbage that only a collection finds, and notes whether one ran in a capture."""

    def __init__(self) -> None:
        super().__init__()
        self.ended: list[bool] = []

    def forward(self, images: Tensor) -> Tensor:
        for _ in range(20):
            garbage = nn.Identity()
            garbage.itself = [garbage]
            weakref.finalize(garbage, self._note)
        return images * 2

    def _note(self) -> None:
        self.ended.append(torch.cuda.is_current_stream_capturing())


def test_no_garbage_is_collected_in_a_capture():
    """Finalizers of pinned memory synchronize, which a capture does not allow."""
    litters = _Litters()
    thresholds = gc.get_threshold()
    was_enabled = gc.isenabled()
    gc.enable()
    gc.set_threshold(10, 1, 1)
    try:
        play(graphed(layers(litters)))
        assert gc.isenabled()
    finally:
        gc.set_threshold(*thresholds)
        if not was_enabled:
            gc.disable()
    assert launches() > 0
    assert litters.ended and not any(litters.ended)


SCHEDULES = {
    "1f1b": {},
    "gpipe": {},
    "zb_h1": {},
    "dualpipe_v": {},
    "gems_master": {},
    "bf16_mixed": {"train__precision": "bf16_mixed"},
    "fp16_mixed": {"train__precision": "fp16_mixed"},
    "1f1b in strips": {"parallel__strips": 4, "model__norm": "ghost_batch"},
    "zb_h1 in strips": {"parallel__strips": 3, "model__norm": "none"},  # no buffers to compare
    "gems_master in strips": {"parallel__strips": 2, "model__norm": "frozen_batch"},
}


@pytest.mark.parametrize("case", SCHEDULES)
def test_a_training_has_the_bits_of_an_eager_one(case, caplog):
    more = SCHEDULES[case]
    schedule = "1f1b" if "mixed" in case else case.removesuffix(" in strips")
    eager = trained(schedule, False, **more)
    assert same(trained(schedule, True, **more), eager)
    assert launches() > 0
    assert not caplog.records


def test_an_evaluation_is_one_launch_for_a_micro_batch_and_follows_other_weights():
    made = layers(_Several()).eval()
    stage = graphed(made)
    generator = torch.Generator().manual_seed(3)
    weight = made[0].weight
    wanted, found = [], []
    for number in range(8):
        images = torch.randn(SHAPE, generator=generator).to(DEVICE)
        if number == 2:
            weight.data.mul_(2)  # as an optimizer
        if number == 5:
            weight.data = weight.data * 3  # as averages in place of the weights
        with torch.no_grad():
            wanted += _through(made, images)
        found += stage.infer((images,)).values()
    assert same(found, wanted)
    assert launches() == 4 + 2 + 2  # the first of both weights runs eagerly; two comparisons


def _through(made: nn.ModuleList, values: Tensor) -> list[Tensor]:
    for layer in made:
        values = layer(values)
    return list(values.values())


POLICIES = {
    "recompute of stages": MemoryConfig("recompute", recompute="stage"),
    "recompute": MemoryConfig("recompute"),
    "recompute with offloaded inputs": MemoryConfig("recompute", offload_inputs=True),
    "vdnn_all": MemoryConfig("vdnn_all", asynchronous=True, min_offload_bytes=0),
    "vdnn_conv": MemoryConfig("vdnn_conv", min_offload_bytes=0),
    "selective": MemoryConfig("recompute", recompute="selective"),
}


# a whole backward, a split one, and both directions, each with both kinds of policies
UNDER_POLICIES = [
    ("recompute of stages", "1f1b"),
    ("recompute of stages", "zb_h1"),
    ("recompute", "gems_master"),
    ("recompute with offloaded inputs", "1f1b"),
    ("recompute with offloaded inputs", "gems_master"),
    ("vdnn_all", "1f1b"),
    ("vdnn_all", "zb_h1"),
    ("vdnn_conv", "gems_master"),
    ("selective", "1f1b"),
    ("selective", "zb_h1"),
]


@pytest.mark.parametrize(("policy", "schedule"), UNDER_POLICIES)
def test_a_training_under_a_memory_policy_has_the_bits_of_an_eager_one(policy, schedule, caplog):
    more = {"memory": POLICIES[policy]}
    eager = trained(schedule, False, **more)
    assert same(trained(schedule, True, **more), eager)
    assert launches() > 0
    assert not caplog.records


def test_products_that_a_later_layer_changes_are_computed_again(monkeypatch):
    more = {"memory": POLICIES["selective"]}
    eager = trained("zb_h1", False, **more)
    monkeypatch.setattr(SavedTensor, "is_changed", property(lambda self: True))
    before = launches()
    assert same(trained("zb_h1", True, **more), eager)
    assert launches() > before  # of first runs


POLICIES_OF_STRIPS = {
    "recompute": MemoryConfig("recompute"),
    "recompute with offloaded inputs": MemoryConfig("recompute", offload_inputs=True),
    "vdnn_all": MemoryConfig("vdnn_all", asynchronous=True, min_offload_bytes=0),
}
STRIPS_UNDER_POLICIES = [
    ("recompute", "1f1b", 4, "ghost_batch"),
    ("recompute", "zb_h1", [2, 2], "none"),
    ("recompute with offloaded inputs", "gems_master", 2, "frozen_batch"),
    ("vdnn_all", "1f1b", 4, "ghost_batch"),
    ("vdnn_all", "zb_h1", 2, "frozen_batch"),
]


@pytest.mark.parametrize(("policy", "schedule", "strips", "norm"), STRIPS_UNDER_POLICIES)
def test_strips_under_a_memory_policy_have_the_bits_of_eager_ones(
    policy, schedule, strips, norm, caplog
):
    more = {"memory": POLICIES_OF_STRIPS[policy], "parallel__strips": strips, "model__norm": norm}
    eager = trained(schedule, False, **more)
    assert same(trained(schedule, True, **more), eager)
    assert launches() > 0
    assert not caplog.records


WATCHED = {
    "keep": {},
    "recompute": {"memory": POLICIES["recompute"]},
    "strips": {"parallel__strips": 2, "model__norm": "frozen_batch"},
    "strips that run again": {
        "parallel__strips": 2,
        "model__norm": "frozen_batch",
        "memory": POLICIES["recompute"],
    },
}


@pytest.mark.parametrize("case", WATCHED)
def test_watched_layers_run_eagerly(case):
    """So that the layer is named at which a loss stopped being finite."""
    spec = make_spec("1f1b", 1, train__cuda_graphs=True, train__steps=4, **WATCHED[case])
    rank = Rank.open(evaluate(spec).for_ranks, world(), DEVICE)
    loader = BatchLoader.open(rank.plan, rank.comm, DEVICE)
    rank.stages.set_training(True)
    for step in range(3):
        rank.train.run(step, loader.batch(step))
    before = launches()
    assert before > 0
    seen = []
    with ExitStack() as watches:
        for layer in rank.stages.layers:
            hook = layer.module.register_forward_hook(lambda *_: seen.append("module"))
            watches.callback(hook.remove)
        for stage in rank.train.stages.values():
            watches.enter_context(stage.watched(lambda name, made: seen.append(name)))
        rank.train.run(3, loader.batch(3))
    loader.close()
    assert seen and launches() == before


def _ends_early(stage: GraphedStage) -> None:
    """Let a forward give its slot back, as if nothing read it any more."""
    forward = stage.forward

    def mutated(index: int, *given: object, **named: object) -> object:
        found = forward(index, *given, **named)
        flight = stage._flights[index]
        if flight.graphs is not None:
            stage._free[flight.layouts].append(flight.graphs)
        return found

    stage.forward = mutated


def _replays_backward_first(stage: GraphedStage) -> None:
    """Let the replays of forwards wait for a backward."""
    take = stage._take
    kept = []

    def late_take(index: int, *given: object) -> object:
        graphs = take(index, *given)
        if graphs is not None and not isinstance(graphs._graphs, _Late):
            graphs._graphs = _Late(graphs._graphs, kept)
        return graphs

    stage._take = late_take


class _Late(dict):
    def __init__(self, graphs: dict, kept: list) -> None:
        super().__init__(graphs)
        self.kept = kept

    def __getitem__(self, kind: object) -> object:
        graph = super().__getitem__(kind)
        if kind is Kind.F:
            self.kept.append(graph)
            return SimpleNamespace(replay=lambda: None)

        def replay() -> None:
            graph.replay()
            for each in self.kept:
                each.replay()
            self.kept.clear()

        return SimpleNamespace(replay=replay)


@pytest.mark.parametrize("mutate", [_ends_early, _replays_backward_first])
def test_a_wrong_use_of_slots_shows(mutate):
    eager = play(whole(layers()))
    stage = graphed(layers())
    mutate(stage)
    assert not same(play(stage), eager)


def test_a_segment_whose_tensors_are_not_moved_out_shows(monkeypatch):
    more = {"memory": POLICIES["recompute of stages"]}
    eager = trained("gems_master", False, **more)
    monkeypatch.setattr(graphed_segment, "_spill", lambda pairs: None)
    monkeypatch.setattr(graphed_segment.SharedSlot, "take", lambda self, holder=None: False)
    assert not same(trained("gems_master", True, **more), eager)
