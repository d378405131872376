"""The activation store by itself, and on whole stages.

Misses, reading twice, small storages, lists without FREE.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from gems.engine.offload.activation_store import ActivationStore
from gems.engine.offload.host_pool import HostPool, PinnedMemory
from gems.engine.supervision.recorder import Recorder
from gems.schedule.action import Action
from gems.schedule.placement import Placement
from gems.schedule.schedule import Schedule
from tests.helpers.device import DEVICE, ON_GPU, forget_races
from tests.helpers.planned import assert_nothing_left, assert_same_bits, rig_of, step
from tests.helpers.rig import WIDTH

PLACE = (0, 0, 0)


@pytest.fixture(autouse=True)
def on_device() -> Iterator[None]:
    with DEVICE:
        yield


def schedule_of(row: str, num_micro_batches: int = 1) -> Schedule:
    actions = tuple(Action.parse(text) for text in row.split())
    return Schedule("test", num_micro_batches, Placement(1, ((0,),)), (actions,))


class StoreBench:
    """A store for one micro-batch of a stage of one or two segments."""

    def __init__(self, row: str, **options) -> None:
        self.recorder = Recorder(None, DEVICE)
        self.memory = self.recorder.memory
        self.pool = HostPool(PinnedMemory("rank 0") if ON_GPU else None, "rank 0")
        schedule = schedule_of(row)
        self.store = ActivationStore(schedule, self.pool, self.recorder, DEVICE, **options)
        self.store.begin(PLACE, ())

    def copy(self, text: str) -> None:
        action = Action.parse(text)
        acts = {
            "OFFLOAD": self.store.offload,
            "FREE": self.store.free,
            "PREFETCH": self.store.prefetch,
        }
        acts[action.kind.value](action)


ONE = "0.0F0 0.0OFFLOAD0 0.0FREE0 0.0PREFETCH0 0.0B0"
TWO = "0.0F0 0.0OFFLOAD0 0.1F0 0.1OFFLOAD0 0.0FREE0 0.1FREE0 0.1PREFETCH0 0.1B0 0.0PREFETCH0 0.0B0"


def graph_of(bench: StoreBench, function, x: torch.Tensor, segment: int = 0) -> torch.Tensor:
    """Run a function in the store; its input is not a leaf that would hold memory."""
    start = torch.zeros((), requires_grad=True)
    bench.start = start
    with bench.store.saved_tensor_hooks(PLACE, segment):
        return function(x + start)


def test_a_graph_may_be_run_twice():
    bench = StoreBench(ONE)
    x = torch.randn(8)
    out = graph_of(bench, lambda v: (v.exp() * v.sin()).sum(), x)
    for text in ("0.0OFFLOAD0", "0.0FREE0", "0.0PREFETCH0"):
        bench.copy(text)
    wanted = (x.exp() * (x.sin() + x.cos())).sum()
    for _ in range(2):
        bench.start.grad = None
        out.backward(retain_graph=True)
        assert torch.allclose(bench.start.grad, wanted)
    counters = bench.store.counters
    assert (
        counters.num_misses == 0
        and counters.prefetched_bytes == counters.offloaded_bytes == 3 * 8 * 4
    )
    bench.store.end_backward(PLACE, 0)
    assert bench.memory.held_bytes == bench.pool.used_bytes == bench.store.num_in_flight == 0


def test_what_is_read_before_its_prefetch_is_fetched_and_counted():
    bench = StoreBench(ONE)
    x = torch.randn(8)
    out = graph_of(bench, lambda v: (v.exp() * v.sin()).sum(), x)
    bench.copy("0.0OFFLOAD0")
    bench.copy("0.0FREE0")
    assert bench.memory.held_bytes == 0 and bench.store.on_host.held_bytes == 3 * 8 * 4
    out.backward()
    assert torch.allclose(bench.start.grad, (x.exp() * (x.sin() + x.cos())).sum())
    assert bench.store.counters.num_misses == 3
    assert bench.memory.held_bytes == 3 * 8 * 4
    bench.store.end_backward(PLACE, 0)
    assert bench.memory.held_bytes == bench.pool.used_bytes == 0


def test_views_of_one_storage_are_one_copy_and_come_back_as_they_were():
    bench = StoreBench(ONE)
    x = torch.randn(6, 4)
    seen = []

    class Look(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *tensors):
            ctx.save_for_backward(*tensors)
            return sum(tensor.sum() for tensor in tensors)

        @staticmethod
        def backward(ctx, gradient):
            seen.extend(ctx.saved_tensors)
            return tuple(gradient.expand_as(tensor) for tensor in ctx.saved_tensors)

    def views(v):
        return (
            v,
            v.t(),
            v[1:, ::2],
            v[:1].expand(3, 4),
            v.view(2, 12),
            v.view(torch.int32),
            v[0, :0],
        )

    # what is saved are views, their gradients those of their base
    made = x.clone()
    kept = [tensor.clone() for tensor in views(made)]
    strides = [tensor.stride() for tensor in views(made)]
    start = torch.zeros((), requires_grad=True)
    with bench.store.saved_tensor_hooks(PLACE, 0):
        out = Look.apply(start, *views(made))
    del made
    for text in ("0.0OFFLOAD0", "0.0FREE0", "0.0PREFETCH0"):
        bench.copy(text)
    out.backward()
    back = seen[1:]
    assert all(torch.equal(a, b) for a, b in zip(back, kept, strict=True))
    assert [tensor.stride() for tensor in back] == strides
    assert len({tensor.untyped_storage().data_ptr() for tensor in back[:-1]}) == 1, (
        "one storage, as before"
    )
    # beside the one of the views, that of the scalar
    assert bench.store.counters.offloaded_bytes == 6 * 4 * 4 + 4


def test_parameters_what_was_given_and_small_storages_stay():
    weight = torch.randn(64, requires_grad=True)
    given = torch.randn(64)
    bench = StoreBench(ONE, parameters=[weight], min_offload_bytes=100)
    bench.store.begin(PLACE, [given])
    with bench.store.saved_tensor_hooks(PLACE, 0):
        large = weight * given.view(8, 8).view(64)
        out = large.sin().sum() + large[:4].clone().exp().sum()
    bench.copy("0.0OFFLOAD0")
    bench.copy("0.0FREE0")
    assert bench.store.counters.offloaded_bytes == 64 * 4, "what sin saved"
    assert bench.store.activations.held_bytes == 4 * 4, "what exp saved"
    bench.copy("0.0PREFETCH0")
    out.backward()
    inside = (weight * given).detach()
    wanted = given * inside.cos()
    wanted[:4] += given[:4] * inside[:4].exp()
    assert torch.allclose(weight.grad, wanted)
    bench.store.end_backward(PLACE, 0)
    assert bench.memory.held_bytes == bench.pool.used_bytes == 0


def test_a_storage_of_two_segments_has_one_copy_that_comes_back_for_the_later_one():
    bench = StoreBench(TWO)
    x = torch.randn(8)
    first = graph_of(bench, torch.tanh, x)
    bench.store.record_outputs(PLACE, 0, [first])
    bench.copy("0.0OFFLOAD0")
    between = first.detach()
    second = graph_of(bench, torch.sin, between, 1)  # saves a sum, and not the shared one
    with bench.store.saved_tensor_hooks(PLACE, 1):
        start = torch.zeros((), requires_grad=True)
        product = (between * start.exp()).sum()
    del between
    bench.copy("0.1OFFLOAD0")
    for text in ("0.0FREE0", "0.1FREE0"):
        bench.copy(text)
    output = first.detach().clone()
    table = bench.store._tables[PLACE]
    shared = table.find(first.untyped_storage())
    assert shared is not None and shared.on_host is not None and not shared.is_on_device
    moved = bench.store.counters.offloaded_bytes
    assert moved == bench.store.counters.saved_bytes
    del first
    assert shared.memory() is None
    bench.copy("0.1PREFETCH0")
    assert shared.is_on_device
    product.backward()
    assert torch.allclose(start.grad, output.sum())
    second.sum().backward()
    bench.store.end_backward(PLACE, 1)
    assert shared.is_on_device, "the first segment has still to read it"
    bench.copy("0.0PREFETCH0")
    assert bench.store.counters.prefetched_bytes == moved
    bench.store.end_backward(PLACE, 0)
    assert bench.memory.held_bytes == bench.pool.used_bytes == 0


def test_a_tensor_that_was_changed_behind_its_copy_and_is_saved_again_is_another_storage():
    bench = StoreBench(TWO)
    x = torch.randn(8)
    made = x.clone()
    with bench.store.saved_tensor_hooks(PLACE, 0):
        start = torch.zeros((), requires_grad=True)
        lost = (made * start.exp()).sum()
    bench.copy("0.0OFFLOAD0")
    made.mul_(3)
    with bench.store.saved_tensor_hooks(PLACE, 1):
        again = torch.zeros((), requires_grad=True)
        out = (made * again.exp()).sum()
    bench.copy("0.1OFFLOAD0")
    del made
    for text in ("0.0FREE0", "0.1FREE0", "0.1PREFETCH0", "0.0PREFETCH0"):
        bench.copy(text)
    out.backward()
    assert torch.allclose(again.grad, 3 * x.sum())
    with pytest.raises(RuntimeError, match="changed in place"):
        lost.backward()
    forget_races()  # the change comes while the copy to the host is under way


def test_a_tensor_read_after_its_step_was_broken_off_is_an_error():
    bench = StoreBench(ONE)
    x = torch.randn(8)
    out = graph_of(bench, lambda v: v.exp().sum(), x)
    bench.copy("0.0OFFLOAD0")
    bench.store.reset()
    assert bench.memory.held_bytes == bench.pool.used_bytes == bench.store.on_host.held_bytes == 0
    with pytest.raises(RuntimeError, match="a step that has ended"):
        out.backward()


def whole_layers() -> list[nn.Module]:
    return [
        nn.Linear(WIDTH, WIDTH),
        nn.BatchNorm1d(WIDTH),
        nn.Tanh(),
        nn.Dropout(0.4),
        nn.Linear(WIDTH, WIDTH),
    ]


WHOLE = {
    "offload": "0F0 0OFFLOAD0 0F1 0F2 0OFFLOAD2 0F3 0B3 0PREFETCH0 0B1 0PREFETCH2 0B2 0B0",
    "recompute": "0F0 0F1 0R1 0B1 0F2 0F3 0B3 0R2 0B2 0R0 0B0",
    "both, split": "0F0 0OFFLOAD0 0F1 0F2 0I2 0W2 0R1 0I1 0F3 0W1 0I3 0W3 0PREFETCH0 0I0 0W0",
}


@pytest.mark.parametrize("row", WHOLE.values(), ids=WHOLE)
def test_whole_stages_leave_and_are_run_again_without_free_in_the_list(row):
    plain = " ".join(
        text
        for text in row.split()
        if "FETCH" not in text and "OFFLOAD" not in text and "R" not in text
    )
    ours = rig_of(schedule_of(row, 4), 0, whole_layers, None)
    whole = rig_of(schedule_of(plain, 4), 0, whole_layers, None)
    for number in range(2):
        assert step(ours, number) == step(whole, number)
        assert_nothing_left(ours)
    assert_same_bits(ours, whole)
    assert ours.executor.activations.peak_bytes < whole.executor.activations.peak_bytes
    counters = ours.segments.store.counters
    assert (counters.offloaded_bytes == counters.prefetched_bytes > 0) == ("OFFLOAD" in row)
