"""Test gems.memory.timeline.

Bytes along a rank's list are checked against the memory model, figures by hand and brute-force
counting.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from gems.config.schema import DataConfig, MachineConfig, ModelConfig
from gems.memory import storages
from gems.memory.model import OPTIMIZERS, MemoryModel, static_blocks
from gems.memory.plan import Choice, MemoryPlan, Segment, add_memory
from gems.memory.slots import assign_slots
from gems.memory.storages import Layers
from gems.memory.timeline import RankTimeline, micro_batch_states, rank_timeline, segment_costs
from gems.profile import LayerProfile, ModelProfile
from gems.profile.model_profile import LIBRARY_BYTES, Saved
from gems.profile.profilers.fake import fake_profile
from gems.profile.spans import Spans
from gems.schedule import generate
from gems.schedule.action import Kind
from gems.schedule.lower import lower
from gems.schedule.schedule import Schedule
from tests.helpers.profiles import profile, random_profile

SGD = OPTIMIZERS["sgd"]
SCHEDULES = (
    ("layer_parallel", 1, 3),
    ("1f1b", 3, 6),
    ("gpipe", 2, 4),
    ("gems_master", 3, 4),
    ("gems_master", 2, 4),
    ("zb_h1", 2, 6),
    ("zb_v", 2, 6),
    ("chimera", 2, 4),
    ("interleaved_1f1b", 2, 4),
    ("zb_h2", 2, 4),
)
ZOO = {
    "resnet": ModelConfig(depth=11, version=2),
    "unet": ModelConfig(name="unet", depth=3, width=8),
    "vgg": ModelConfig(name="vgg", depth=16),
}


@pytest.fixture(scope="module")
def profiles() -> dict[str, ModelProfile]:
    """Made-up ones, and three networks of the zoo."""
    data = DataConfig(height_px=32, width_px=32)
    machine = MachineConfig(device="cuda")
    taken = {name: fake_profile(model, data, 2, "float32", machine) for name, model in ZOO.items()}
    return taken | {f"random{seed}": random_profile(16, seed, decay=0.9) for seed in range(3)}


def even_cuts(profile: ModelProfile, num_stages: int) -> tuple[int, ...]:
    return tuple(round(profile.num_layers * stage / num_stages) for stage in range(num_stages + 1))


@pytest.mark.parametrize(("name", "ranks", "micro_batches"), SCHEDULES)
def test_what_is_kept_in_whole_stages_is_what_the_memory_model_says(
    profiles: dict[str, ModelProfile], name: str, ranks: int, micro_batches: int
) -> None:
    compute = generate(name, ranks, micro_batches)
    for made in profiles.values():
        if made.num_layers < compute.num_stages:
            continue
        made = replace(made, facts={LIBRARY_BYTES: 1000})
        cuts = even_cuts(made, compute.num_stages)
        plan = MemoryPlan.by_layer("keep", cuts, {}).joined()
        expected = MemoryModel(Spans(made), SGD).peak_bytes(lower(compute), cuts)
        for schedule in (lower(compute), lower(add_memory(compute, plan))):
            walks = [rank_timeline(made, plan, schedule, rank, SGD) for rank in range(ranks)]
            assert tuple(walked.peak_bytes for walked in walks) == expected
            assert not any(walked.peak_host_bytes for walked in walks)
            static = [sum(static_blocks(made, schedule, rank, cuts, SGD)) for rank in range(ranks)]
            assert [walked.points[-1].device_bytes for walked in walks] == static


@pytest.mark.parametrize(("name", "ranks", "micro_batches"), SCHEDULES)
def test_graphs_hold_a_slot_for_each_of_the_most_in_flight_on_each_stage(
    profiles: dict[str, ModelProfile], name: str, ranks: int, micro_batches: int
) -> None:
    compute = generate(name, ranks, micro_batches)
    for made in profiles.values():
        if made.num_layers < compute.num_stages:
            continue
        spans = Spans(made)
        made = made.captured(True)
        cuts = even_cuts(made, compute.num_stages)
        plan = MemoryPlan.keeping(cuts)
        expected = MemoryModel(Spans(made), SGD).peak_bytes(lower(compute), cuts)
        for schedule in (lower(compute), lower(add_memory(compute, plan))):
            for rank in range(ranks):
                walked = rank_timeline(made, plan, schedule, rank, SGD)
                assert walked.peak_bytes == expected[rank]
                counts = assign_slots(schedule, rank).counts.items()
                table = spans.slot
                if schedule.has_split_backward:  # of all stages, in these schedules
                    table = table + spans.slot_for_weights
                bytes_of = [int(table[cuts[s], cuts[s + 1]]) for s in range(len(cuts) - 1)]
                held = sum(number * bytes_of[stage] for (_, stage), number in counts)
                assert {point.activation_bytes for point in walked.points} == {held}
                assert walked.points[-1].device_bytes >= held


def unread_products(layer: LayerProfile) -> int:
    """Return the bytes of products that only a recomputation of the layer reads."""
    made = (*layer.saved, *layer.passing)
    return sum(s.total_bytes for s in made if s.is_product and not s.savers and not s.last_use)


@pytest.mark.parametrize("choice", [each for each in Choice if each is not Choice.KEEP])
def test_segments_share_a_slot_of_the_largest_of_a_rank(
    profiles: dict[str, ModelProfile], choice: Choice
) -> None:
    made = profiles["resnet"]
    spans = Spans(made)
    cuts = even_cuts(made, 4)
    layers = {layer: Segment(layer, layer + 1, choice) for layer in range(made.num_layers)}
    plan = MemoryPlan.by_layer("test", cuts, layers)
    schedule = lower(add_memory(generate("interleaved_1f1b", 2, 4), plan))
    for rank in range(2):
        eager, captured = (
            rank_timeline(each, plan, schedule, rank, SGD).points
            for each in (made, made.captured(True))
        )
        mine = [s for _, stage in schedule.placement.stages_on(rank) for s in plan.stages[stage]]
        largest = max(
            (spans.slot if each.first in cuts else spans.segment_slot)[each.first, each.end]
            + unread_products(made.layers[each.first]) * (choice is Choice.SELECTIVE)
            for each in mine
        )
        for before, after in zip(eager, captured, strict=True):
            assert after.activation_bytes == before.activation_bytes + largest
            assert after.device_bytes == before.device_bytes + largest
            assert after.during_bytes == before.during_bytes + largest
            assert after.host_bytes == before.host_bytes


def test_a_slot_by_hand() -> None:
    # an input of 30; 100 of a's own, and its output of 50, which b saves; a gradient of 50
    spans = Spans(CHAIN)
    assert spans.slot[0, 1] == 30 + 100 + 50 + 50
    # the output of a is the input of b, whose gradient is 50 as well; b's is saved by c
    assert spans.slot[1, 2] == 50 + 100 + 50 + 50 + 50
    # within a stage a's output is saved, and counts once
    assert spans.slot[0, 2] == 30 + 100 + 50 + 100 + 50 + 50
    # beside what it saves, its backward needs 20 more than the gradient that it is given
    assert spans.slot_pool[0, 1] == 230 + 20
    scored = replace(CHAIN.layers[3], score_bytes=7, score_grad_bytes=9, loss_bytes=40)
    last = Spans(replace(CHAIN, layers=(*CHAIN.layers[:3], scored)))
    assert last.slot[3, 4] == 50 + 100 - 40 + 7 + 9 + 50
    # the gradient of b's output is that of its input
    passing = replace(CHAIN.layers[1], input_grads_at=((0, 0),))
    passed = Spans(replace(CHAIN, layers=(CHAIN.layers[0], passing, *CHAIN.layers[2:])))
    assert (passed.slot[1, 2], passed.slot[1, 3]) == (250, spans.slot[1, 3])
    # I leaves the gradient of a's output within a stage, at whose end it is given
    held = replace(CHAIN.layers[0], held_grad_bytes=60, held_output_grad_bytes=50)
    split = Spans(replace(CHAIN, layers=(held, *CHAIN.layers[1:]))).slot_for_weights
    assert (split[0, 1], split[0, 2], split[1, 2]) == (10, 60, 0)


# a layer's own 100, an output of 40 that the next saves and, but for the last, hands on; half of
# its own are products
def _layer(name: str, ahead: tuple[int, ...] = (1,)) -> LayerProfile:
    saved = (
        Saved(60, is_product=True),
        Saved(40),
        *((Saved(50, ahead, ahead[-1]),) if ahead else ()),
    )
    return LayerProfile(
        name,
        "x",
        1.0,
        2.0,
        3.0,
        1.0,
        0.25,
        stash_bytes=100,
        saved_later=((1, 50),) if ahead else (),
        output_bytes=50,
        output_grad_bytes=50,
        unsaved_input_bytes=50,
        forward_peak_bytes=150,
        backward_peak_bytes=70,
        cheap_bytes=60,
        plain_peak_bytes=90,
        cheap_peak_bytes=80,
        saved=saved,
    )


CHAIN = profile([_layer("a"), _layer("b", (1, 2)), _layer("c"), _layer("d", ())], input_bytes=30)


def walked_of(*choices: Choice, micro_batches: int = 1, least_bytes: int = 0) -> RankTimeline:
    segments = tuple(Segment(at, at + 1, choice) for at, choice in enumerate(choices))
    plan = MemoryPlan("test", (segments,), least_bytes)
    return rank_timeline(
        CHAIN, plan, lower(add_memory(generate("layer_parallel", 1, micro_batches), plan)), 0, SGD
    )


def along(walked: RankTimeline, what: str) -> dict[str, int]:
    return {str(point.action): getattr(point, what) for point in walked.points}


KEEP, OFFLOAD, RECOMPUTE, SELECTIVE, OFFLOAD_INPUTS = Choice


def test_kept_by_hand() -> None:
    """Each F adds 100 and the 50 of the layer before.

    Each B lets go what its layer was the first to save.
    """
    held = along(walked_of(KEEP, KEEP, KEEP, KEEP), "activation_bytes")
    assert [held[f"0.{layer}F0"] for layer in range(4)] == [100, 250, 400, 550]
    assert [held[f"0.{layer}B0"] for layer in (3, 2, 1, 0)] == [400, 250, 100, 0]


def test_offloaded_by_hand() -> None:
    """Of a and b all but what c, which stays, saves too: b's output."""
    walked = walked_of(OFFLOAD, OFFLOAD, KEEP, KEEP)
    moved = along(walked, "moved_bytes")
    host = along(walked, "host_bytes")
    held = along(walked, "activation_bytes")
    assert (moved["0.0OFFLOAD0"], moved["0.1OFFLOAD0"]) == (100, 150)
    assert (moved["0.1PREFETCH0"], moved["0.0PREFETCH0"]) == (150, 100)
    assert walked.peak_host_bytes == 250 and host["0.0B0"] == 0
    assert held["0.0FREE0"] == 250 - 100 and held["0.1FREE0"] == 400 - 250
    assert held["0.0B0"] == 0


def test_small_storages_stay() -> None:
    moved = along(walked_of(OFFLOAD, OFFLOAD, KEEP, KEEP, least_bytes=45), "moved_bytes")
    assert (moved["0.0OFFLOAD0"], moved["0.1OFFLOAD0"]) == (60, 110)


def test_recomputed_by_hand() -> None:
    """A layer that is run again keeps its inputs.

    B and c 50 each, and d 100 with the output of b that it is given.
    """
    walked = walked_of(RECOMPUTE, RECOMPUTE, RECOMPUTE, KEEP)
    held = along(walked, "activation_bytes")
    during = along(walked, "during_bytes")
    assert [held[f"0.{layer}F0"] for layer in range(4)] == [0, 50, 100, 100 + 50 + 100]
    assert [held[f"0.{layer}R0"] for layer in (2, 1, 0)] == [200, 150, 100]
    still = walked.points[-1].device_bytes
    assert during["0.0F0"] - still == 90, "a forward that keeps nothing needs less"
    assert during["0.2F0"] - still == 50 + 50 + 90, "a's output is kept, b's is passed on"
    assert along(walked, "device_bytes")["0.1F0"] - still == 50 + 50


def test_offloaded_inputs_by_hand() -> None:
    """Of b its input of 50 leaves, and not that of c, which d saves too; a's is the stage's."""
    walked = walked_of(OFFLOAD_INPUTS, OFFLOAD_INPUTS, OFFLOAD_INPUTS, KEEP)
    held, host, moved = (
        along(walked, what) for what in ("activation_bytes", "host_bytes", "moved_bytes")
    )
    assert {name: size for name, size in moved.items() if size} == {
        "0.1OFFLOAD0": 50,
        "0.1PREFETCH0": 50,
    }
    assert [held[f"0.{layer}F0"] for layer in range(4)] == [0, 50, 100, 50 + 50 + 100]
    assert (held["0.1FREE0"], held["0.1PREFETCH0"]) == (50, 100)
    assert [held[f"0.{layer}R0"] for layer in (2, 1, 0)] == [200, 150, 100]
    assert held["0.0B0"] == host["0.1B0"] == 0 and host["0.1R0"] == 50
    during = along(walked, "during_bytes")
    assert (
        during["0.1R0"]
        == along(walked_of(RECOMPUTE, RECOMPUTE, RECOMPUTE, KEEP), "during_bytes")["0.1R0"]
    )


def test_the_inputs_of_a_stage_leave_after_its_forward() -> None:
    """They are 50, and count as received up to its forward, then as saved; images stay."""
    segments = [
        (Segment(0, 2, OFFLOAD_INPUTS),),
        (Segment(2, 3, OFFLOAD_INPUTS),),
        (Segment(3, 4),),
    ]
    plan = MemoryPlan("test", tuple(segments))
    schedule = lower(add_memory(generate("gpipe", 3, 3), plan))
    first, middle = (rank_timeline(CHAIN, plan, schedule, rank, SGD) for rank in (0, 1))
    held, device, moved, host = (
        along(middle, what)
        for what in ("activation_bytes", "device_bytes", "moved_bytes", "host_bytes")
    )
    assert held["1RECV_F0"] == 0 and held["1.0F0"] == 50
    assert moved["1.0OFFLOAD0"] == moved["1.0PREFETCH0"] == host["1.0OFFLOAD0"] == 50
    assert held["1.0FREE0"] == 50, "only that of the next one is there"
    still = middle.points[-1].device_bytes
    assert (
        device["1RECV_F0"] == device["1.0F0"] == still + 50
        and device["1.0FREE0"] == still + 50 + 50
    ), "and its output"
    assert held["1.0R0"] == held["1.0PREFETCH1"] + 100 and held["1.0B2"] == host["1.0B2"] == 0
    assert middle.peak_host_bytes == 3 * 50 and not first.peak_host_bytes
    costs = segment_costs(CHAIN, plan, schedule, 10.0, 10.0).segments[1][0]
    assert (costs.boundary, costs.activation, costs.moved) == (50.0, 150.0, 50.0)


def test_cheap_by_hand() -> None:
    held = along(walked_of(SELECTIVE, SELECTIVE, KEEP, KEEP), "activation_bytes")
    assert [held[f"0.{layer}F0"] for layer in range(2)] == [60, 60 + 50 + 60], (
        "products, and b's input"
    )
    assert held["0.1R0"] == held["0.1F0"] + 40, "the rest of b"
    during = along(walked_of(SELECTIVE, SELECTIVE, KEEP, KEEP), "during_bytes")
    still = walked_of(SELECTIVE, SELECTIVE, KEEP, KEEP).points[-1].device_bytes
    assert during["0.0R0"] - still == 60 + 80 + 50, (
        "products, what the second run makes, and the gradient that waits"
    )


def test_costs_of_segments() -> None:
    plan = MemoryPlan(
        "test",
        (
            (
                Segment(0, 1, OFFLOAD),
                Segment(1, 2, SELECTIVE),
                Segment(2, 3, RECOMPUTE),
                Segment(3, 4),
            ),
        ),
    )
    schedule = lower(add_memory(generate("layer_parallel", 1, 3), plan))
    costs = segment_costs(CHAIN, plan, schedule, 10.0, 20.0)
    first, second, third, last = costs.segments[0]
    assert [one.forward for one in costs.segments[0]] == [1.0] * 4
    assert (first.moved, first.copy_out, first.copy_in) == (100.0, 10.0, 5.0)
    assert (second.recompute, third.recompute) == (0.25, 1.0)
    assert first.activation == 100.0 + 30.0, "and the stage's input"
    assert (second.boundary, second.activation) == (50.0 + 60.0, 50.0 + 100.0)
    assert (third.boundary, third.activation) == (50.0, 150.0), (
        "b's output; what c makes is the rest"
    )
    assert last.activation == 50.0 + 100.0
    assert costs.forward == (4.0,) and costs.boundary_bytes == (50.0,)


def test_costs_of_a_segment_whose_inputs_leave() -> None:
    plan = MemoryPlan(
        "test", ((Segment(0, 1), Segment(1, 2, OFFLOAD_INPUTS), Segment(2, 3), Segment(3, 4)),)
    )
    schedule = lower(add_memory(generate("layer_parallel", 1, 1), plan))
    one = segment_costs(CHAIN, plan, schedule, 10.0, 20.0).segments[0][1]
    assert (one.boundary, one.activation, one.recompute) == (50.0, 150.0, 1.0)
    assert (one.moved, one.copy_out, one.copy_in) == (50.0, 5.0, 2.5)


def test_whole_stages_that_are_run_again_or_leave() -> None:
    """As the scheduler with a cap makes them: no segments, and no FREE."""
    plan = MemoryPlan.by_layer("keep", (0, 4), {}).joined()
    compute = generate("layer_parallel", 1, 1)
    (row,) = compute.rank_schedules
    forward, backward = row
    for kinds, after in (
        ((Kind.R,), {"0F0": 0, "0R0": 550, "0B0": 0}),
        ((Kind.OFFLOAD, Kind.PREFETCH), {"0F0": 550, "0OFFLOAD0": 0, "0PREFETCH0": 550, "0B0": 0}),
    ):
        more = tuple(forward._replace(kind=kind) for kind in kinds)
        schedule = Schedule("test", 1, compute.placement, ((forward, *more, backward),))
        walked = rank_timeline(CHAIN, plan, lower(schedule), 0, SGD)
        held = along(walked, "activation_bytes")
        assert {name: held[name] for name in after} == after
        assert walked.peak_host_bytes == (550 if Kind.OFFLOAD in kinds else 0)


def test_the_storages_of_the_last_stages_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storages, "MAX_STAGES", 2)
    made = Layers(random_profile(6, 0))
    whole, *halves = (
        tuple(Segment(first, end, Choice.RECOMPUTE) for first, end in spans)
        for spans in (((0, 6),), ((0, 3), (3, 6)), ((0, 2), (2, 6)))
    )
    first = made.stage(whole, 0)
    assert made.stage(whole, 0) is first and made.stage(whole, 10**9) is not first
    found = [made.stage(segments, 0) for segments in halves]
    again = made.stage(whole, 0)
    assert again is not first and again.num_bytes == first.num_bytes
    assert made.stage(halves[1], 0) is found[1]


def test_micro_batches_that_are_alike_are_played_once() -> None:
    """Policies walk in loops."""
    made = random_profile(110)
    cuts = tuple(round(110 * stage / 4) for stage in range(5))
    plan = MemoryPlan.by_layer(
        "test", cuts, {at: Segment(at, at + 1, OFFLOAD) for at in range(110)}
    )
    schedule = lower(add_memory(generate("1f1b", 4, 8), plan))
    before = micro_batch_states.cache_info()
    first = [rank_timeline(made, plan, schedule, rank, SGD) for rank in range(4)]
    once = micro_batch_states.cache_info()
    assert once.hits + once.misses - before.hits - before.misses == 4 * 8
    assert once.misses - before.misses < 4 * 8
    assert [rank_timeline(made, plan, schedule, rank, SGD) for rank in range(4)] == first
    assert micro_batch_states.cache_info().misses == once.misses
