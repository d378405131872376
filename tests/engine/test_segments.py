"""Segments in the executor: the bits of whole stages under every plan, and no byte left."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import pytest
import torch
from torch import Tensor, nn

from gems.engine.supervision.recorder import COPY_IN, COPY_OUT
from gems.errors import ConfigError, DoesNotFitError
from gems.schedule import generate
from gems.schedule.action import Kind
from gems.trace import KINDS
from tests.helpers.device import forget_races
from tests.helpers.planned import (
    OFFLOAD,
    OFFLOAD_INPUTS,
    PLANS,
    RECOMPUTE,
    assert_nothing_left,
    assert_same_bits,
    plan_of,
    rig_of,
    step,
    watch,
)
from tests.helpers.rig import SIZE, WIDTH, Rig


class Views(nn.Module):
    """Saves many views of one storage: strided, transposed, broadcast, of several shapes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, 2 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        wide = self.linear(x)
        left = wide[:, :WIDTH]
        right = wide[:, 1::2]
        rows = wide.t()[0].expand(3, -1)
        return left * right + (rows * rows.exp()).sum() * wide.view(-1, 2, WIDTH)[:, 1]


class Skip(nn.Module):
    """Hands its input on beside what it makes of it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return torch.relu(self.linear(x)), x, x.argmax(1)


class Through(nn.Module):
    """Works on the first of several tensors and hands the others on as views."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
        return (self.layer(x), *(other.view_as(other) for other in others))


class Join(nn.Module):
    """Adds a skip, which comes from layers before."""

    def forward(self, x: Tensor, skip: Tensor, index: Tensor) -> Tensor:
        return x * skip.sigmoid() + skip * (1 + index.unsqueeze(1))


def linear() -> nn.Module:
    return nn.Linear(WIDTH, WIDTH)


NETWORKS: dict[str, Callable[[], list[nn.Module]]] = {
    "in place": lambda: [
        linear(),
        nn.ReLU(inplace=True),
        linear(),
        nn.Dropout(0.3, inplace=True),
        nn.LeakyReLU(0.2, inplace=True),
        linear(),
    ],
    "norms and dropout": lambda: [
        linear(),
        nn.BatchNorm1d(WIDTH),
        nn.Dropout(0.5),
        nn.GELU(),
        linear(),
        nn.BatchNorm1d(WIDTH, momentum=None),
    ],
    "views": lambda: [Views(), nn.Identity(), nn.Flatten(), Views(), nn.Tanh()],
    "skips": lambda: [
        linear(),
        Skip(),
        Through(nn.Tanh()),
        Through(linear()),
        Join(),
        nn.Softmax(1),
    ],
}
FAMILIES = [
    ("1f1b", 3, 1),
    ("gems_master", 3, 1),
    ("layer_parallel", 2, 0),
    ("gpipe", 1, 0),
    ("zb_h1", 3, 1),
    ("zb_v", 2, 1),
]


# every two of a family, a network and a plan
CASES = [
    (*family, network, plan)
    for (f, family), (n, network), (p, plan) in product(
        *map(enumerate, (FAMILIES, NETWORKS, PLANS))
    )
    if (f + n + p) % len(NETWORKS) == 0
]


def bytes_of_step(rig: Rig, number: int) -> list[tuple[int, ...]]:
    """Return the actions of a step with the bytes that each moved and left, without times."""
    return [row[2:8] + row[10:] for row in rig.part.rows if row[1] == number]


@pytest.mark.parametrize(("family", "num_ranks", "rank", "network", "plan"), CASES)
def test_bits_are_those_of_whole_stages(family, num_ranks, rank, network, plan):
    compute = generate(family, num_ranks, 4)
    layers = NETWORKS[network]
    cut = plan_of([len(layers())] * compute.num_stages, PLANS[plan])
    whole = rig_of(compute, rank, layers, None)
    ours = rig_of(compute, rank, layers, cut)
    assert ours.executor.store is not None and whole.executor.store is None
    for number in range(2):
        scores = [step(rig, number) for rig in (whole, ours)]
        assert scores[0] == scores[1]
        assert_nothing_left(ours)
    assert_same_bits(ours, whole)
    first, second = (bytes_of_step(ours, number) for number in range(2))
    assert first == second, "what is not measured again is counted and moved as before"
    counters = ours.segments.store.counters
    assert counters.num_misses == 0
    assert counters.prefetched_bytes <= counters.offloaded_bytes <= counters.saved_bytes
    if plan == "offload" and any(
        action.kind is Kind.OFFLOAD for action in ours.executor.schedule.rank_schedules[rank]
    ):
        assert counters.prefetched_bytes == counters.offloaded_bytes > 0


@pytest.mark.parametrize("size", [2, 3, 6])
@pytest.mark.parametrize("distances", [(0, 0), (0, 5), (4, 2)])
def test_segments_of_any_size_and_distance(size, distances):
    compute = generate("gpipe", 1, 4)
    layers = NETWORKS["norms and dropout"]
    cut = plan_of([6], (OFFLOAD, RECOMPUTE), size, *distances)
    whole = rig_of(compute, 0, layers, None)
    ours = rig_of(compute, 0, layers, cut)
    for rig in (whole, ours):
        step(rig)
    assert_same_bits(ours, whole)
    assert_nothing_left(ours)


def test_everything_leaves_once_and_the_pool_is_made_in_the_first_step():
    compute = generate("gpipe", 1, 4)
    layers = NETWORKS["views"]
    ours = rig_of(compute, 0, layers, plan_of([5], (OFFLOAD,), free_after=0))
    kept = rig_of(compute, 0, layers, plan_of([5], PLANS["keep"]))
    counters = ours.segments.store.counters
    pool = ours.segments.pool
    made = []
    for number in range(3):
        for rig in (ours, kept):
            step(rig, number)
        assert counters.saved_bytes == kept.segments.store.counters.saved_bytes
        made.append(pool.num_made)
    assert made[0] == made[-1] > 0
    # each storage once, whatever views of it were saved
    assert counters.offloaded_bytes == counters.prefetched_bytes == counters.saved_bytes
    assert ours.executor.activations.peak_bytes < 0.5 * kept.executor.activations.peak_bytes


@pytest.mark.parametrize(("choice", "least"), [(OFFLOAD, 24), (OFFLOAD_INPUTS, 20)])
def test_memory_is_gone_behind_free_and_back_with_prefetch(choice, least):
    """Of all that a copy takes: no graph, leaf or frame holds it."""
    rig = rig_of(
        generate("gpipe", 1, 4),
        0,
        NETWORKS["norms and dropout"],
        plan_of([6], (choice,), free_after=2),
    )
    store = rig.segments.store
    seen = {Kind.FREE: 0, Kind.PREFETCH: 0}

    def see(action):
        if action.kind in seen:
            table = store._tables[0, 0, action.micro_batch]
            copied = [saved for saved in table.storages if saved.on_host is not None]
            held = [saved.is_on_device for saved in copied]
            # the labels, which the loss saves, are the batch's
            gone = [
                s
                for s, is_held in zip(copied, held, strict=True)
                if not is_held and s.num_bytes != SIZE * 8
            ]
            assert all(saved.memory() is None for saved in gone)
            assert all(
                saved.memory() is not None
                for saved, is_held in zip(copied, held, strict=True)
                if is_held
            )
            seen[action.kind] += len(gone if action.kind is Kind.FREE else copied)

    watch(rig, see)
    for number in range(2):
        step(rig, number)
        assert seen[Kind.FREE] >= (number + 1) * least and seen[Kind.PREFETCH] > 0


class Changing(nn.Module):
    """Saves other tensors in some of its calls: fewer, more, or as many of other sizes."""

    def __init__(self, change: str) -> None:
        super().__init__()
        self.change = change
        self.num_calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.num_calls += 1
        if self.num_calls % 6 != 0:
            return torch.tanh(x.exp().mul(0.5).sin())
        return {
            "fewer": lambda: x.sin(),
            "more": lambda: x.exp().mul(0.5).sin().exp().cos().tanh(),
            "other sizes": lambda: x[:, :1].exp().mul(0.5).sin().tanh().expand_as(x),
            "in place": lambda: x.sin().tanh_().mul(2.0).cos(),
        }[self.change]()


@pytest.mark.parametrize("change", ["fewer", "more", "other sizes", "in place"])
@pytest.mark.parametrize("plan", [(OFFLOAD,), (OFFLOAD_INPUTS, OFFLOAD)])
def test_layers_that_save_other_tensors_than_before_give_the_same_bits(change, plan):
    def layers():
        return [linear(), nn.Tanh(), Changing(change), linear()]

    compute = generate("1f1b", 1, 4)
    ours = rig_of(compute, 0, layers, plan_of([4], plan, free_after=0))
    whole = rig_of(compute, 0, layers, None)
    for number in range(4):
        assert step(ours, number) == step(whole, number)
        assert_same_bits(ours, whole)
        assert_nothing_left(ours)


@pytest.mark.parametrize(
    ("family", "rank"), [("1f1b", 1), ("zb_h1", 1), ("gpipe", 2), ("interleaved_1f1b", 1)]
)
@pytest.mark.parametrize("network", ["in place", "norms and dropout", "views"])
def test_what_a_stage_received_leaves_until_it_is_recomputed(family, rank, network):
    compute = generate(family, 3, 4)
    layers = NETWORKS[network]
    size = len(layers())
    cut = plan_of([size] * compute.num_stages, (OFFLOAD_INPUTS,), size, free_after=0, ahead=0)
    whole = rig_of(compute, rank, layers, None)
    ours = rig_of(compute, rank, layers, cut)
    gone = []

    def see(action):
        if action.kind is Kind.FREE:
            table = ours.segments.store._tables[action.direction, action.stage, action.micro_batch]
            gone.extend((saved.num_bytes, saved.memory()) for saved in table.storages)

    watch(ours, see)
    for number in range(2):
        assert step(whole, number) == step(ours, number)
        assert_nothing_left(ours)
    assert_same_bits(ours, whole)
    assert gone and all(each == (SIZE * WIDTH * 4, None) for each in gone), (
        "only the inputs are kept, and away"
    )
    counters = ours.segments.store.counters
    assert counters.offloaded_bytes == counters.prefetched_bytes == sum(size for size, _ in gone)
    assert counters.num_misses == 0


def test_a_backward_frees_a_kept_segment_layer_by_layer():
    """The store counts a segment until its backward ends, and holds nothing that the graph has let go."""
    alive = []

    class Probe(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, gradient):
            for table in rig.segments.store._tables.values():
                alive.append(
                    sum(saved.num_bytes for saved in table.storages if saved.memory() is not None)
                )
            return gradient * 2

    class Tell(nn.Module):
        def forward(self, x):
            return Probe.apply(x)

    def layers():
        return [linear(), Tell(), *(nn.Tanh() for _ in range(6)), Tell()]

    rig = rig_of(generate("layer_parallel", 1, 1), 0, layers, plan_of([9], PLANS["keep"], 9))
    step(rig)
    assert len(alive) == 2 and alive[1] < alive[0] - 5 * 2 * WIDTH * 4
    assert_nothing_left(rig)


def test_copies_are_spans_of_their_streams_with_host_bytes():
    rig = rig_of(generate("gpipe", 1, 4), 0, NETWORKS["skips"], plan_of([6], (OFFLOAD,)))
    step(rig)
    rows = {
        stream: [row for row in rig.part.rows if row[7] == stream] for stream in (COPY_OUT, COPY_IN)
    }
    for stream, kind in ((COPY_OUT, Kind.OFFLOAD), (COPY_IN, Kind.PREFETCH)):
        actions = [
            action for action in rig.executor.schedule.rank_schedules[0] if action.kind is kind
        ]
        assert [(KINDS[row[2]], row[3], row[4], row[6]) for row in rows[stream]] == [
            (kind.value, action.stage, action.segment, action.micro_batch) for action in actions
        ]
    counters = rig.segments.store.counters
    assert sum(row[10] for row in rows[COPY_OUT]) == counters.offloaded_bytes
    assert sum(row[10] for row in rows[COPY_IN]) == counters.prefetched_bytes
    assert max(row[12] for row in rig.part.rows) == rig.segments.store.on_host.peak_bytes > 0


def test_a_host_limit_refuses_in_words_and_leaves_nothing():
    rig = rig_of(
        generate("gpipe", 1, 4),
        0,
        NETWORKS["views"],
        plan_of([5], (OFFLOAD,)),
        host_limit_bytes=500,
    )
    with pytest.raises(
        DoesNotFitError, match=r"rank 0: .* above its share of machine\.host_bytes=500"
    ):
        step(rig)
    assert_nothing_left(rig)
    assert rig.segments.pool.held_bytes <= 500


@pytest.mark.parametrize("kind", [Kind.F, Kind.R, Kind.B, Kind.FREE, Kind.PREFETCH])
@pytest.mark.parametrize("place", [0, 5])
def test_a_step_that_breaks_leaves_nothing_and_the_next_is_as_ever(kind, place):
    compute = generate("gpipe", 1, 4)
    layers = NETWORKS["norms and dropout"]
    cut = plan_of([6], PLANS["mixed"])
    rig, fresh = (rig_of(compute, 0, layers, cut) for _ in range(2))
    num_seen = 0
    is_on = True

    def see(action):
        nonlocal num_seen
        num_seen += action.kind is kind
        if is_on and num_seen > place:
            raise RuntimeError("broken on purpose")

    watch(rig, see)
    before = {
        id(p): p.detach().clone() for stage in rig.stages.values() for p in stage.modules.buffers()
    }
    with pytest.raises(RuntimeError, match="on purpose"):
        step(rig)
    is_on = False
    assert_nothing_left(rig)
    for stage in rig.stages.values():
        for parameter in stage.modules.parameters():
            parameter.grad = None
        for buffer in stage.modules.buffers():
            buffer.copy_(before[id(buffer)])
    for one in (rig, fresh):
        step(one, 1)
    assert_same_bits(rig, fresh)
    assert_nothing_left(rig)


class Spoil(nn.Module):
    """Changes what the layer before has saved for its backward."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mul_(2)


class Scale(nn.Module):
    """Does the same and leaves the layer before alone."""

    def forward(self, x: Tensor) -> Tensor:
        return x * 2


def spoiled(spoil: type[nn.Module]) -> Callable[[], list[nn.Module]]:
    return lambda: [linear(), nn.Tanh(), spoil(), linear()]


@pytest.mark.parametrize(("plan", "free_after"), [("keep", 1), ("offload", 1), ("offload", 3)])
def test_a_saved_tensor_that_is_changed_in_place_is_an_error(plan, free_after):
    compute = generate("gpipe", 1, 4)
    layers = spoiled(Spoil)
    with pytest.raises(RuntimeError, match="changed in place"):
        step(rig_of(compute, 0, layers, None))
    rig = rig_of(compute, 0, layers, plan_of([4], PLANS[plan], free_after=free_after))
    with pytest.raises(RuntimeError, match="changed in place"):
        step(rig)
    assert_nothing_left(rig)
    forget_races()  # the change comes while the copy to the host is under way


@pytest.mark.parametrize(("plan", "free_after"), [("offload", 0), ("recompute", 1)])
def test_a_change_in_place_that_comes_behind_the_copy_or_is_made_on_one_is_none(plan, free_after):
    compute = generate("layer_parallel", 1, 2) if plan == "recompute" else generate("gpipe", 1, 4)
    ours = rig_of(compute, 0, spoiled(Spoil), plan_of([4], PLANS[plan], free_after=free_after))
    whole = rig_of(compute, 0, spoiled(Scale), None)
    for rig in (ours, whole):
        step(rig)
    assert_same_bits(ours, whole)


def test_a_plan_of_another_cut_is_refused():
    compute = generate("gpipe", 1, 4)
    layers = NETWORKS["views"]
    schedule = rig_of(compute, 0, layers, plan_of([5], (OFFLOAD,))).executor.schedule
    for other in (plan_of([5], (OFFLOAD,), 2), plan_of([4], (OFFLOAD,)), None):
        with pytest.raises(ConfigError, match="memory plan"):
            Rig(schedule, 0, {(0, 0): layers()}, plan=other)
