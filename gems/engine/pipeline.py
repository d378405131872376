"""A rank's share of a run: its stages, links, gradients and executors, put together from the configuration."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import cast

import torch
from torch import nn

from gems.autograd.memory_counter import Ledger
from gems.config.schema import RunSpec
from gems.data import labels_per_step
from gems.engine.activation_store.segments import Segments, needs_store, open_segments
from gems.engine.device import DTYPES, seed_generators
from gems.engine.executor import Executor
from gems.engine.gradients import Gradients, Held
from gems.engine.optimizer import build_optimizer
from gems.engine.stage import Stage
from gems.engine.stage_modules import Contents, contents_of
from gems.engine.supervision.consistency_check import check_same_schedule, check_world
from gems.engine.supervision.recorder import Recorder
from gems.engine.transport.mpi import Comm, Transport, ranks_here
from gems.engine.transport.p2p_channels import Links, open_transports
from gems.engine.transport.polling import sharpen_sleep, spin_of
from gems.engine.transport.staging import open_staging
from gems.memory.plan import MemoryPlan
from gems.partition.methods import cut
from gems.runs.heartbeat import Heartbeat
from gems.runs.run_plan import plan_run
from gems.schedule.families.forward_only import forward_only
from gems.schedule.lower import lower
from gems.schedule.schedule import Schedule
from gems.schedule.validate import validate
from gems.trace import TracePart


@dataclass(slots=True)
class Pipeline:
    """What one rank runs. `rank` is its place in its pipeline, `replica` which copy of the pipeline it is in."""

    spec: RunSpec
    comm: Comm
    rank: int
    replica: int
    device: torch.device
    schedule: Schedule
    contents: Contents
    modules: dict[Held, nn.ModuleList]
    stages: dict[Held, Stage]
    gradients: Gradients
    optimizer: torch.optim.Optimizer
    recorder: Recorder
    control: Transport
    train: Executor
    evaluate: Executor
    plan: MemoryPlan | None = None
    segments: Segments | None = None

    @property
    def images_of(self) -> Collection[int]:
        """Micro-batches of a step whose images this rank reads."""
        return self._micro_batches_of(0)

    @property
    def labels_of(self) -> Collection[int]:
        """Micro-batches of a step whose labels this rank reads."""
        return self._micro_batches_of(self.schedule.num_stages - 1)

    def _micro_batches_of(self, stage: int) -> list[int]:
        placement = self.schedule.placement
        return [
            m
            for m, direction in sorted(self.schedule.directions().items())
            if placement.rank_of(direction, stage) == self.rank
        ]

    def named_layers(self, held: Held) -> list[tuple[str, nn.Module]]:
        """Return the layers of a stage on this rank, or the operator of one, with the layers' names, in order."""
        return list(zip(self.contents.names_in(held[1]), self.modules[held], strict=True))

    @property
    def cuts(self) -> tuple[int, ...]:
        """Where the layers are cut into stages; none where operators are placed."""
        return self.contents.cuts

    def has_in_evaluation(self, stage: int) -> bool:
        """Whether this rank holds `stage` in the direction that evaluation uses."""
        return self.schedule.placement.rank_of(0, stage) == self.rank

    def set_training(self, is_training: bool) -> None:
        """Switch layers such as batch norm between batch and running statistics."""
        for modules in self.modules.values():
            modules.train(is_training)


def build_pipeline(
    spec: RunSpec,
    comm: Comm,
    device: torch.device,
    part: TracePart | None = None,
    heartbeat: Heartbeat | None = None,
    schedule: Schedule | None = None,
    cuts: tuple[int, ...] | None = None,
    plan: MemoryPlan | None = None,
) -> Pipeline:
    """Build the share of one rank; collective over `comm`, whose size is partitions x replicas.

    `schedule` is the lowered list of the run folder and `cuts` its boundaries; without them they are made anew. `plan`
    is the memory plan that the list's segments are from; None where stages run whole. Every rank builds the layers of its own stages only; the seed and the layer's index give the weights, so copies
    are equal from the start. What layers draw while they train differs from rank to rank, and comes from the seed too.

    Raises:
        ConfigError: another number of ranks, ranks that disagree about the schedule, or a plan of another schedule.
    """
    check_world(spec, comm)
    if schedule is None:
        made = plan_run(spec)
        schedule, cuts, plan = made.schedule, made.boundaries, made.memory_plan
    check_same_schedule(schedule, comm)
    if device.type == "cuda" and plan is not None and "cudnn_benchmark" in (plan.counters or {}):
        torch.backends.cudnn.benchmark = bool((plan.counters or {})["cudnn_benchmark"])
    parallel, placement = spec.parallel, schedule.placement
    replica, rank = divmod(comm.rank, parallel.partitions)
    dtype = DTYPES[spec.train.dtype]
    is_graph = placement.feeders is not None
    cuts = () if is_graph else cuts or cut(spec, schedule).boundaries
    contents = contents_of(spec, placement, cuts)
    boundaries = contents.boundaries(spec, dtype)
    hang_timeout_s = spec.train.hang_timeout_s
    spin_s = spin_of(ranks_here(comm))
    sharpen_sleep()
    pipeline_comm = cast(Comm, comm.Split(replica, rank))
    reduce_comm = cast(Comm, comm.Split(placement.reduce_group(rank, parallel.replicas)[0], comm.rank))
    recorder = Recorder(part, Ledger(device), device)
    transports = open_transports(pipeline_comm, schedule.num_directions, hang_timeout_s, spin_s)
    staging = open_staging(spec.machine.transport, device, comm)
    links = Links(schedule, rank, boundaries, transports, staging, recorder)
    built = [
        contents.build(
            [stage for way, stage in placement.stages_on(rank) if way == direction], spec.seed, dtype, device
        )
        for direction in range(placement.num_directions)
    ]
    modules = {(direction, stage): built[direction][stage] for direction, stage in placement.stages_on(rank)}
    stages = {held: Stage(kept, held[1] == 0, links.poll) for held, kept in modules.items()}
    gradients = Gradients(modules, Transport(reduce_comm, hang_timeout_s, spin_s), dtype, device)
    optimizer = build_optimizer(spec.train, (p for kept in modules.values() for p in kept.parameters()))
    recorder.hold(sum(stage.state_bytes for stage in stages.values()))
    segments = None
    if needs_store(schedule):
        host_bytes, sharers = spec.machine.host_bytes, ranks_here(comm)
        segments = open_segments(
            schedule, rank, stages, plan, recorder, device, links.poll, spec.memory.min_offload_bytes,
            None if host_bytes is None else host_bytes // sharers,
        )  # fmt: skip
    train = Executor(
        schedule, rank, stages, links, recorder, heartbeat,
        labels_per_step=labels_per_step(spec), gradients=gradients, optimizer=optimizer, segments=segments,
    )  # fmt: skip
    forward = validate(lower(forward_only(placement, min(schedule.num_micro_batches, 2 * placement.num_stages))))
    evaluation_links = Links(forward, rank, boundaries, transports, staging, recorder)
    evaluate = Executor(forward, rank, stages, evaluation_links, recorder, heartbeat)
    control = Transport(comm, hang_timeout_s)
    seed_generators(device, spec.seed, replica, rank)
    return Pipeline(
        spec, comm, rank, replica, device, schedule, contents, modules, stages, gradients, optimizer, recorder, control, train, evaluate,
        plan, segments,
    )  # fmt: skip
