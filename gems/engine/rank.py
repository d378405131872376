"""A rank: its data, stages, connections, update and recorder, each opened from the plan."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from gems.config.training import captures_graphs
from gems.engine.device import DTYPES, seed_generators, use_own_stream
from gems.engine.executor import Executor, Training
from gems.engine.optimization.update import Update
from gems.engine.rank_stages import Stages
from gems.engine.reading.strip_requests import MaskParts
from gems.engine.stages.open_stages import open_stages
from gems.engine.step_loop import check_ranks
from gems.engine.step_weight import StepWeight
from gems.engine.supervision.recorder import Recorder
from gems.engine.transport.connections import Connections
from gems.engine.transport.mpi import Comm
from gems.engine.transport.polling import WaitState, reduce_timer_slack
from gems.losses.summed import SummedLoss
from gems.memory.plan import MemoryPlan
from gems.plan.rank_plan import RankPlan
from gems.runs.heartbeat import Heartbeat
from gems.trace import TracePart
from gems.utils import start_up


@dataclass(frozen=True, slots=True)
class Rank:
    """The parts that one rank runs; `index` counts in its pipeline, `replica` counts pipelines."""

    plan: RankPlan
    comm: Comm
    device: torch.device
    replica: int
    index: int
    stages: Stages
    connections: Connections
    training: Training
    recorder: Recorder
    train: Executor
    evaluate: Executor

    @classmethod
    def open(
        cls,
        plan: RankPlan,
        comm: Comm,
        device: torch.device,
        part: TracePart | None = None,
        heartbeat: Heartbeat | None = None,
        wait_state: WaitState | None = None,
        trains: bool = True,
    ) -> Rank:
        """Open the parts of one rank; collective over `comm`.

        If it `trains`, layers that run in strips only in evaluation are refused.

        Raises:
            ConfigError: The number of ranks is wrong, the ranks disagree about the schedule, or the
                memory plan belongs to another schedule.
        """
        check_ranks(plan, comm)
        spec = plan.spec
        replica, index = plan.position(comm.rank)
        if captures_graphs(spec.train, device.type == "cuda"):
            use_own_stream(device)
        _choose_convolutions(plan.memory_plan, device)
        reduce_timer_slack()
        recorder = Recorder(part, device)
        connections = Connections.open(plan, comm, device, wait_state)
        stages = Stages.open(plan, comm, device, trains)
        channels = connections.open_channels(plan.schedule, stages.output_specs(), recorder)
        dtype = DTYPES[spec.train.dtype]
        like = stages.of_model.output(spec.data, spec.parallel.micro_batch_size, dtype)
        loss = SummedLoss(spec.loss, spec.data, dtype, device, like)
        options = stages.options(trains, connections.num_sharers, loss)
        running = open_stages(stages.modules, options, channels.poll, recorder)
        recorder.weights.count_bytes(sum(stage.state_bytes for stage in running.whole.values()))
        update = Update.open(plan, stages, connections)
        if update.gradients.starts_early:
            channels.poll_also(update.gradients.poll)
        step_weight = StepWeight(loss, spec.parallel.global_batch, connections.labels)
        training = Training(loss, step_weight, update, stages.begin_draws)
        train = Executor(plan.schedule, index, running, channels, recorder, heartbeat, training)
        forward, evaluated, specs = stages.for_evaluation(running, channels.poll, trains)
        channels = connections.open_channels(forward, specs, recorder)
        evaluate = Executor(forward, index, evaluated, channels, recorder, heartbeat)
        seed_generators(device, spec.seed, replica, index)
        start_up.end()
        return cls(
            plan,
            comm,
            device,
            replica,
            index,
            stages,
            connections,
            training,
            recorder,
            train,
            evaluate,
        )

    @property
    def update(self) -> Update:
        """Return what changes the weights at the end of a step."""
        return self.training.update

    def mask_parts(self, executor: Executor) -> MaskParts | None:
        """Return the parts of masks that the strips of an executor of this rank take, if any."""
        boxes = executor.map_parts()
        loss = self.training.loss
        return None if boxes is None else MaskParts(boxes, not (loss.is_sum or loss.is_constant))

    def has_in_evaluation(self, stage: int) -> bool:
        """Return whether this rank has `stage` in the direction used for evaluation."""
        return self.plan.schedule.placement.rank_of(0, stage) == self.index


def _choose_convolutions(plan: MemoryPlan | None, device: torch.device) -> None:
    """Let cuDNN choose its algorithms as a memory plan was made with."""
    counters = (plan and plan.counters) or {}
    if device.type == "cuda" and "cudnn_benchmark" in counters:
        torch.backends.cudnn.benchmark = bool(counters["cudnn_benchmark"])
