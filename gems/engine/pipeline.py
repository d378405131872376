"""A rank's share of a run: stages, channels, gradients and executors, built by configuration."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import nn

from gems.autograd.random_draws import RandomDraws
from gems.config.resolve import global_batch
from gems.config.schema import ORDERED_TRANSPORTS, RunSpec
from gems.data import find_source, open_dataset
from gems.engine.device import DTYPES, seed_generators
from gems.engine.executor import Executor
from gems.engine.loss import StepWeight, SummedLoss
from gems.engine.optimization.ema import WeightAverage
from gems.engine.optimization.gradients import Gradients
from gems.engine.optimization.lr_schedule import LrSchedule
from gems.engine.optimization.optimizer import build_optimizer
from gems.engine.optimization.parameter_groups import NumberedLayer, check_frozen, trained
from gems.engine.optimization.update import Update
from gems.engine.stage import Stage, StageKey
from gems.engine.stage_modules import StageModules
from gems.engine.stages.compiled import CompiledStage
from gems.engine.stages.open_stages import Segments, needs_store, open_segments, wrap_stages
from gems.engine.stages.strip_forms import draws_in, find_evaluation_forms, find_forms
from gems.engine.stages.whole import WholeStage
from gems.engine.step_loop import check_ranks
from gems.engine.supervision.recorder import Recorder
from gems.engine.transport.links import Links, Sums
from gems.engine.transport.memory_format import ChannelsLast
from gems.engine.transport.mpi import Comm, Transport, allgather, broadcast, ranks_here
from gems.engine.transport.p2p_channels import P2PChannels
from gems.engine.transport.polling import WaitState, reduce_timer_slack, spin_time_s
from gems.engine.transport.process_groups import open_groups
from gems.engine.transport.staging import open_staging
from gems.memory.plan import MemoryPlan
from gems.models.build import freeze
from gems.models.mixed import Precision
from gems.plan.evaluate import evaluate as plan_run
from gems.runs.heartbeat import Heartbeat
from gems.schedule.action import Kind
from gems.schedule.edges import check_message_order
from gems.schedule.families.given_placement import forward_only
from gems.schedule.lower import lower
from gems.schedule.schedule import Schedule
from gems.schedule.validate import validate
from gems.trace import TracePart
from gems.utils import start_up

EPOCH = "epoch"


@dataclass(slots=True)
class Pipeline:
    """The parts that one rank runs; `rank` counts in its pipeline, `replica` counts pipelines."""

    spec: RunSpec
    comm: Comm
    rank: int
    replica: int
    device: torch.device
    schedule: Schedule
    stage_modules: StageModules
    modules: dict[StageKey, nn.ModuleList]
    stages: dict[StageKey, Stage]
    layers: list[NumberedLayer]
    update: Update
    recorder: Recorder
    control: Transport
    transports: tuple[Links | Sums, ...]
    loss: SummedLoss
    step_weight: StepWeight
    train: Executor
    evaluate: Executor
    plan: MemoryPlan | None = None
    segments: Segments | None = None
    norm_ends: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    @property
    def image_micro_batches(self) -> Collection[int]:
        """Return the micro-batches of a step whose images this rank reads."""
        return self._micro_batches(0)

    @property
    def label_micro_batches(self) -> Collection[int]:
        """Return the micro-batches of a step whose labels this rank reads."""
        return self._micro_batches(self.schedule.num_stages - 1)

    @property
    def strip_order(self) -> list[int]:
        """Return the strips whose rows this rank reads, in the order of their forwards.

        The list is empty if images run whole.
        """
        if self.schedule.num_strips == 1:
            return []
        return [
            action.micro_batch
            for action in self.schedule.rows[self.rank]
            if action.kind is Kind.F and not action.stage and action.micro_batch is not None
        ]

    def _micro_batches(self, stage: int) -> list[int]:
        rank_of = self.schedule.placement.rank_of
        return [
            m
            for m, way in sorted(self.schedule.whole_directions().items())
            if rank_of(way, stage) == self.rank
        ]

    def named_layers(self, key: StageKey) -> list[tuple[str, nn.Module]]:
        """Return the modules of a stage on this rank, in order, with the names of their layers."""
        return list(zip(self.stage_modules.layer_names(key[1]), self.modules[key], strict=True))

    def has_in_evaluation(self, stage: int) -> bool:
        """Return whether this rank has `stage` in the direction used for evaluation."""
        return self.schedule.placement.rank_of(0, stage) == self.rank

    def close(self) -> None:
        """Free the communicators, of which MPI has a limited number.

        The call is collective. Nothing may be under way.
        """
        for transport in self.transports:
            transport.close()

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
    boundaries: tuple[int, ...] | None = None,
    plan: MemoryPlan | None = None,
    wait_state: WaitState | None = None,
    trains: bool = True,
) -> Pipeline:
    """Build the share of one rank; collective over `comm`.

    If it `trains`, layers that run in strips only in evaluation are refused. A rank builds only the
    layers of its own stages. Seed and layer index determine the weights, so all copies start equal.
    Without a `schedule`, the run is planned anew; a schedule comes with its `boundaries` and `plan`
    from the run folder.

    Raises:
        ConfigError: The number of ranks is wrong, the ranks disagree about the schedule, or the
            plan belongs to another schedule.
    """
    if schedule is None:
        run = plan_run(spec)
        schedule = run.schedule
        boundaries = run.boundaries
        plan = run.memory_plan
    check_ranks(spec, schedule, comm)
    if device.type == "cuda" and plan is not None and "cudnn_benchmark" in (plan.counters or {}):
        torch.backends.cudnn.benchmark = bool((plan.counters or {})["cudnn_benchmark"])
    parallel = spec.parallel
    placement = schedule.placement
    replica, rank = divmod(comm.rank, parallel.partitions)
    dtype = DTYPES[spec.train.dtype]
    precision = Precision.of(spec.train.precision)
    stage_modules = StageModules.from_spec(spec, schedule, boundaries)
    num_sharers = ranks_here(comm)
    hang_timeout_s = spec.train.hang_timeout_s
    spin_s = spin_time_s(num_sharers)
    reduce_timer_slack()
    recorder = Recorder(part, device)
    open_group = partial(
        Transport.of_group,
        comm,
        hang_timeout_s=hang_timeout_s,
        spin_s=spin_s,
        wait_state=wait_state,
    )
    transport = spec.machine.transport
    if transport in ORDERED_TRANSPORTS:
        check_message_order(schedule, transport)
        groups = open_groups(
            transport, comm, device, placement, parallel.replicas, hang_timeout_s, wait_state
        )
        links: Sequence[Links] = groups.links
        sums: Sums = groups.gradients
    else:
        links = [open_group(replica) for _ in range(2)]  # forward, backward
        sums = open_group(placement.reduce_group(rank, parallel.replicas)[0])
    staging = open_staging(transport, device, comm)
    mine = placement.stages_on(rank)
    built = [
        stage_modules.build(
            [stage for way, stage in mine if way == direction], spec.seed, precision, device
        )
        for direction in range(placement.num_directions)
    ]
    modules = {(direction, stage): built[direction][stage] for direction, stage in mine}
    if spec.machine.channels_last:
        for of_stage in modules.values():
            of_stage.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    layers = [layer for key in modules for layer in stage_modules.numbered(key[1], modules[key])]
    _freeze(spec, comm, layers)
    in_strips = (
        find_forms(spec, stage_modules, modules, precision, trains)
        if schedule.num_strips > 1
        else None
    )
    output_specs = (
        stage_modules.output_specs(spec, precision) if in_strips is None else in_strips.specs
    )
    open_channels = ChannelsLast if spec.machine.channels_last else P2PChannels
    channels = open_channels(schedule, rank, output_specs, links, staging, recorder)
    draws = RandomDraws(spec.seed, spec.model.target is not None)
    named = {
        key: list(zip(stage_modules.layer_names(key[1]), modules[key], strict=True))
        for key in modules
    }
    compiles = spec.train.compile and trains
    open_stage = (
        partial(CompiledStage, device=device, is_drawing=draws.is_drawing)
        if compiles
        else WholeStage
    )
    stages: dict[StageKey, Stage] = {
        key: open_stage(of_stage, key[1] == 0, channels.poll) for key, of_stage in modules.items()
    }
    if in_strips is not None:
        seeds = {key: draws_in(of_stage, draws) for key, of_stage in named.items()}
        stages.update(in_strips.open(modules, channels.poll, device, seeds))
    for name, layer in itertools.chain.from_iterable(named.values()):
        draws.watch(name, layer)
    first = replica * schedule.num_whole
    started = [action.stage for action in schedule.rows[rank] if action.kind is Kind.START_REDUCE]
    gradients = Gradients(modules, sums, dtype, device, started)
    if started and sums.size > 1:
        channels.poll_also(gradients.poll)
    optimizer = build_optimizer(spec.optimizer, layers, len(stage_modules.layers))
    average = None
    if spec.train.ema_decay is not None:
        average = WeightAverage(
            trained(p for layer in layers for p in layer.module.parameters()), spec.train.ema_decay
        )
    control = Transport(comm, hang_timeout_s, spin_s, wait_state=wait_state)
    update = Update(
        spec.train,
        modules,
        gradients,
        optimizer,
        control,
        rank,
        parallel.partitions,
        replica,
        LrSchedule(spec, optimizer, _samples_per_epoch(spec, comm)),
        average,
    )
    recorder.weights.count_bytes(sum(stage.state_bytes for stage in stages.values()))
    segments = None
    if needs_store(schedule):
        host_bytes = spec.machine.host_bytes
        segments = open_segments(
            schedule,
            rank,
            stages,
            plan,
            recorder,
            device,
            channels.poll,
            spec.memory.min_offload_bytes,
            None if host_bytes is None else host_bytes // num_sharers,
        )
    running = wrap_stages(stages, segments, spec.train.stage_wrappers)
    loss = SummedLoss(spec.loss, spec.data, dtype, device, stage_modules.output(spec, dtype))
    reads_labels = any(stage == schedule.num_stages - 1 for _, stage in mine)
    label_transport = open_group(int(reads_labels))
    step_weight = StepWeight(loss, global_batch(spec), label_transport)
    train = Executor(
        schedule,
        rank,
        running,
        channels,
        recorder,
        heartbeat,
        loss=loss,
        step_weight=step_weight,
        update=update,
        segments=segments,
        draws=lambda step, micro_batch: draws.at(step, first + micro_batch),
    )
    by_strips = in_strips
    strips = 1
    last = placement.num_stages - 1
    if in_strips is not None and trains:
        by_strips = find_evaluation_forms(spec, stage_modules, modules, precision, comm.rank == 0)
    if by_strips is None:
        evaluated = running
        specs = stage_modules.output_specs(spec, precision, training=False)
    else:
        evaluated = by_strips.open_evaluation(modules, channels.poll, device, last)
        specs = by_strips.specs
        strips = schedule.num_strips
    num_at_once = min(schedule.num_whole, math.ceil(2 * placement.num_stages / strips))
    forward = validate(lower(forward_only(placement, num_at_once, strips)))
    evaluate = Executor(
        forward,
        rank,
        evaluated,
        open_channels(forward, rank, specs, links, staging, recorder),
        recorder,
        heartbeat,
    )
    seed_generators(device, spec.seed, replica, rank)
    start_up.end()
    return Pipeline(
        spec,
        comm,
        rank,
        replica,
        device,
        schedule,
        stage_modules,
        modules,
        stages,
        layers,
        update,
        recorder,
        control,
        (*links, sums, label_transport, control),
        loss,
        step_weight,
        train,
        evaluate,
        plan,
        segments,
        {} if in_strips is None else in_strips.norm_ends,
    )


def _freeze(spec: RunSpec, comm: Comm, layers: Sequence[NumberedLayer]) -> None:
    """Freeze the parameters that match optimizer.frozen; collective if there are patterns.

    Raises:
        ConfigError: A pattern matches nothing in the whole model.
    """
    patterns = spec.optimizer.frozen
    if not patterns:
        return
    used = set().union(
        *allgather(comm, freeze(((each.name, each.module) for each in layers), patterns))
    )
    check_frozen(patterns, used)


def _samples_per_epoch(spec: RunSpec, comm: Comm) -> int:
    """Return the number of training samples; collective if the source must be asked for it."""
    if spec.lr_scheduler.interval != EPOCH or not find_source(spec.data).counts_itself:
        return spec.data.train_samples
    return int(
        broadcast(comm, open_dataset(spec.data, spec.seed).num_train if comm.rank == 0 else None)
    )
