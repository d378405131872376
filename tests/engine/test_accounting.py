"""What a step leaves in the ledger and the trace.

Bytes that come and go, peaks, and the actions of the row.
"""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import nn

from gems.engine.executor import Batch
from gems.engine.supervision.recorder import COMPUTE, LINK
from gems.memory.model import boundary_tensors
from gems.models.build import TensorSpec
from gems.schedule import generate
from gems.schedule.action import RANK_KINDS
from gems.schedule.costs import Network, StageCosts, uniform
from gems.schedule.ledger import peaks
from gems.schedule.lower import compute_only, lower
from gems.schedule.validate import validate
from gems.trace import KINDS
from tests.helpers.planned import watch
from tests.helpers.rig import SIZE, WIDTH, Rig, images_and_labels

DEEP = 24
PER_TENSOR = SIZE * WIDTH * 4


def deep_rig(
    family: str, num_ranks: int, num_micro_batches: int, parts: int, rank: int, link: float = 0.0
) -> Rig:
    """Stages of many layers, each of which keeps its output.

    Stashes far larger than what crosses a boundary.
    """
    made = generate(family, num_ranks, num_micro_batches, parts)
    schedule = validate(lower(made, uniform(num_ranks, made.num_stages), Network(latency=link)))
    boundaries = [(TensorSpec("x", (SIZE, WIDTH), torch.float32),)] * (schedule.num_stages - 1)
    modules = {
        held: [nn.Linear(WIDTH, WIDTH), *(nn.Tanh() for _ in range(DEEP))]
        for held in schedule.placement.stages_on(rank)
    }
    return Rig(
        schedule,
        rank,
        modules,
        boundaries,
        lambda action, index: torch.ones(SIZE, WIDTH),
        at_once=True,
        labels_per_step=num_micro_batches * SIZE,
    )


CASES = [
    *(("1f1b", 4, 8, 1, rank, 4 - rank) for rank in range(4)),
    *(("gpipe", 3, 5, 1, rank, 5) for rank in range(3)),
    *(("layer_parallel", 3, 4, 1, rank, 1) for rank in range(3)),
    *(("gems_master", 4, 8, 1, rank, 1) for rank in range(4)),
    *(("gems_master", 3, 12, 3, rank, 3) for rank in range(3)),
    *(("gems_mast", 4, 4, 2, rank, 2) for rank in range(4)),
]


@pytest.mark.parametrize(("family", "num_ranks", "n", "parts", "rank", "in_flight"), CASES)
def test_peak_bytes_are_the_schedule_s_stashes(family, num_ranks, n, parts, rank, in_flight):
    rig = deep_rig(family, num_ranks, n, parts, rank)
    images, labels = images_and_labels(n)
    directions = rig.executor.schedule.directions()
    placement = rig.executor.schedule.placement
    batch = Batch(
        {m: images[m] for m in images if placement.rank_of(directions[m], 0) == rank},
        {m: labels[m] for m in labels if placement.rank_of(directions[m], num_ranks - 1) == rank},
    )
    rig.run(batch)
    assert rig.memory.held_bytes == 0, "bytes return to where they started"
    rig.part.rows.clear()
    rig.run(batch, step=1)
    assert rig.memory.held_bytes == 0
    stash = min(stage.stash_bytes for stage in rig.stages.values())
    peak = max(row[11] for row in rig.part.rows) - sum(
        image.nbytes for image in batch.images.values()
    )
    # beside the stashes: the inputs of those micro-batches, buffers posted one action ahead, what
    # is being sent, and the last stage's loss
    loss_bytes = max(stage.stash_bytes for stage in rig.stages.values()) - stash
    buffers = peak - in_flight * stash
    assert 0 <= buffers <= (in_flight + 3) * PER_TENSOR + in_flight * loss_bytes < stash


@pytest.mark.parametrize("link", [0.0, 1.5, 4.0])
@pytest.mark.parametrize(
    ("family", "rank"), [("gpipe", 2), ("1f1b", 0), ("1f1b", 2), ("looped_bfs", 1)]
)
def test_buffers_of_receives_are_those_that_the_memory_model_counts(family, rank, link):
    """After each action of the row, however early a receive is posted for its link."""
    rig = deep_rig(family, 4, 8, 1, rank, link)
    schedule = rig.executor.schedule
    seen = []
    is_early = schedule.rank_schedules[rank] != lower(compute_only(schedule)).rank_schedules[rank]
    assert is_early == (link == 4.0) or link == 1.5
    images, labels = images_and_labels(8)
    batch = Batch({}, labels) if schedule.placement.rank_of(0, 0) != rank else Batch(images, labels)
    watch(
        rig, lambda action: seen.append(rig.memory.held_bytes - rig.executor.activations.held_bytes)
    )
    for step in range(2):
        seen.clear()
        rig.run(batch, step)
    counts, actions = boundary_tensors(schedule, rank)
    expected = [
        PER_TENSOR * sum(count["inputs"] + count["gradients"] for count in counts.values())
        for _, has_run in actions
        if has_run
    ]
    assert [held - seen[-1] for held in seen] == expected


SPLIT = [
    *(("zb_h1", 4, 8, rank) for rank in range(4)),
    *(("zb_h2", 3, 6, rank) for rank in range(3)),
    *(("gems_zb", 4, 6, rank) for rank in range(4)),
    *(("zb_v", 3, 6, rank) for rank in range(3)),
    *(("v_min", 4, 8, rank) for rank in range(4)),
]


@pytest.mark.parametrize(("family", "num_ranks", "n", "rank"), SPLIT)
def test_activations_of_a_split_backward_are_what_the_schedule_says(family, num_ranks, n, rank):
    """To the byte: stashes after F, of which I leaves what W reads, and nothing after the step."""
    rig = deep_rig(family, num_ranks, n, 1, rank)
    schedule = rig.executor.schedule
    images, labels = images_and_labels(n)
    for step in range(2):
        rig.run(Batch(images, labels), step)
        assert (
            rig.executor.activations.held_bytes
            == rig.executor.router.between_stages.held_bytes
            == 0
        )
        assert all(stage.num_in_flight == 0 for stage in rig.stages.values())
        assert rig.memory.held_bytes == 0, "bytes return to where they started"
    sizes: dict[int, tuple[int, int]] = {}
    for (_, stage), held in rig.stages.items():
        sizes[stage] = (held.stash_bytes or 0, held.held_for_weights_bytes or 0)
        # the deep chain behind the linear map is gone after I: what is left is the gradient that
        # reaches the map
        assert sizes[stage][1] == PER_TENSOR < sizes[stage][0]
    none = (0.0,) * schedule.num_stages
    costs = StageCosts(
        none,
        none,
        none,
        activation=tuple(float(sizes.get(s, (0, 0))[0]) for s in range(schedule.num_stages)),
        held_for_weights=tuple(float(sizes.get(s, (0, 0))[1]) for s in range(schedule.num_stages)),
    )
    assert rig.executor.activations.peak_bytes == peaks(schedule, costs)[rank] > 0


@pytest.mark.parametrize("family", ["1f1b", "gems_master", "zb_h1", "gems_zb"])
def test_events_of_a_step_are_the_actions_of_the_row(family):
    rig = deep_rig(family, 3, 4, 1, 1)
    images, labels = images_and_labels()
    for step in (0, 1):
        rig.part.rows.clear()
        rig.run(Batch(images, labels), step)
        row = rig.executor.schedule.rank_schedules[1]
        seen = [
            (KINDS[kind], stage, direction, micro_batch, stream)
            for _, _, kind, stage, _, direction, micro_batch, stream, *_ in sorted(
                rig.part.rows, key=lambda entry: (entry[8], entry[9])
            )
        ]
        wanted = [
            (
                action.kind.value,
                action.stage,
                action.direction,
                -1 if action.micro_batch is None else action.micro_batch,
            )
            for action in row
        ]
        compute_kinds = {"F", "B", "I", "W"} | {kind.value for kind in RANK_KINDS}
        assert [entry[:4] for entry in seen if entry[4] == COMPUTE] == [
            w for w in wanted if w[0] in compute_kinds
        ]
        channels = [entry[:4] for entry in seen if entry[4] == LINK]
        assert sorted(channels) == sorted(w for w in wanted if w[0] not in compute_kinds)
        assert {entry[1] for entry in rig.part.rows} == {step}
        assert {entry[0] for entry in rig.part.rows} == {1}
        moved = {entry[10] for entry in rig.part.rows if entry[7] == LINK}
        assert moved == {PER_TENSOR}
        computed = [entry for entry in rig.part.rows if entry[7] == COMPUTE]
        assert all(before[9] <= after[8] for before, after in pairwise(computed))
