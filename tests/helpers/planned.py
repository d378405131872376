"""Plans for toy stages, and a rank's step played under them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

from gems.engine.executor import Batch
from gems.memory.plan import Choice, MemoryPlan, Segment, add_memory
from gems.models.build import TensorSpec
from gems.schedule.action import Action, Kind
from gems.schedule.lower import lower
from gems.schedule.schedule import Schedule
from gems.schedule.validate import validate
from tests.helpers.rig import SIZE, WIDTH, N, Rig, images_and_labels

KEEP, OFFLOAD, RECOMPUTE, SELECTIVE, OFFLOAD_INPUTS = Choice
SEED = 7
BOUNDARY = (TensorSpec("x", (SIZE, WIDTH), torch.float32),)

PLANS: dict[str, tuple[Choice, ...]] = {
    "keep": (KEEP,),
    "offload": (OFFLOAD,),
    "recompute": (RECOMPUTE,),
    "selective": (SELECTIVE,),
    "offload inputs": (OFFLOAD_INPUTS,),
    "inputs of some": (OFFLOAD_INPUTS, KEEP, OFFLOAD_INPUTS, OFFLOAD, OFFLOAD_INPUTS, RECOMPUTE),
    "mixed": (OFFLOAD, KEEP, RECOMPUTE, OFFLOAD, SELECTIVE, OFFLOAD, OFFLOAD),
    "other mix": (SELECTIVE, OFFLOAD, OFFLOAD, RECOMPUTE, KEEP),
}


def plan_of(
    num_layers: Sequence[int],
    choices: Sequence[Choice],
    size: int = 1,
    free_after: int = 1,
    ahead: int = 1,
) -> MemoryPlan:
    """Cut each stage into segments of `size` layers, whose choices come in turn."""
    stages = []
    first = 0
    for number in num_layers:
        cuts = range(first, first + number, size)
        stages.append(
            tuple(
                Segment(
                    cut,
                    min(cut + size, first + number),
                    choices[place % len(choices)],
                    free_after,
                    ahead,
                )
                for place, cut in enumerate(cuts)
            )
        )
        first += number
    return MemoryPlan("test", tuple(stages))


def numbered(action: Action, index: int) -> torch.Tensor:
    """What the neighbours send: a tensor that no other transfer has."""
    seed = 100 * action.stage + 10 * (action.micro_batch or 0) + (action.kind is Kind.RECV_B)
    return torch.randn(SIZE, WIDTH, device="cpu", generator=torch.Generator().manual_seed(seed))


def rig_of(
    compute: Schedule,
    rank: int,
    layers: Callable[[], list[nn.Module]],
    plan: MemoryPlan | None,
    **options,
) -> Rig:
    """Build a rank whose stages all have the same layers, with equal weights in every rig."""
    torch.manual_seed(SEED)
    modules = {held: layers() for held in compute.placement.stages_on(rank)}
    schedule = validate(lower(compute if plan is None else add_memory(compute, plan)))
    boundaries = [BOUNDARY] * (schedule.num_stages - 1)
    return Rig(
        schedule,
        rank,
        modules,
        boundaries,
        numbered,
        plan=plan,
        labels_per_step=N * SIZE,
        **options,
    )


def step(rig: Rig, number: int = 0, shape: tuple[int, ...] = (WIDTH,)):
    """Simulate a step with the same random numbers in every rig."""
    torch.manual_seed(SEED + number)
    images, labels = images_and_labels(shape=shape)
    return rig.run(Batch(images, labels), number)


def state_tensors(rig: Rig) -> list[torch.Tensor]:
    """Return gradients and buffers of all stages."""
    modules = [stage.modules for _, stage in sorted(rig.stages.items())]
    gradients = [p.grad for kept in modules for p in kept.parameters() if p.grad is not None]
    return gradients + [buffer for kept in modules for buffer in kept.buffers()]


def assert_same_bits(ours: Rig, theirs: Rig) -> None:
    """Gradient, running statistics and what was sent."""
    got = state_tensors(ours)
    wanted = state_tensors(theirs)
    assert len(got) == len(wanted) and any(bool(value.abs().max() > 0) for value in wanted)
    assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))
    for mine, other in zip(ours.transports, theirs.transports, strict=True):
        assert mine.sent.keys() == other.sent.keys()
        for action, tensors in mine.sent.items():
            assert all(torch.equal(a, b) for a, b in zip(tensors, other.sent[action], strict=True))


def assert_nothing_left(rig: Rig) -> None:
    """No byte on the device or the host, and no micro-batch in flight."""
    assert rig.memory.held_bytes == rig.executor.activations.held_bytes == 0
    assert rig.executor.router.is_empty
    assert (
        rig.executor.router.between_segments.held_bytes
        == rig.executor.router.between_stages.held_bytes
        == 0
    )
    if rig.segments.store is not None:
        assert rig.segments.store.on_host.held_bytes == rig.segments.pool.used_bytes == 0
        assert rig.segments.store.num_in_flight == 0
        assert all(part.num_in_flight == 0 for part in rig.segments.by_key.values())


def watch(rig: Rig, see: Callable[[Action], None]) -> None:
    """Call `see` behind each action of the row."""

    def watched(handler: Callable[[Action], None]) -> Callable[[Action], None]:
        def run(action: Action) -> None:
            handler(action)
            see(action)

        return run

    loop = rig.executor._loop
    loop._items = [(watched(handler), action, text) for handler, action, text in loop._items]
