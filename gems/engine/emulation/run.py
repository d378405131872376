"""A run on emulated devices: `train` without a model, data and torch."""

from __future__ import annotations

import time
from contextlib import closing
from functools import partial
from statistics import mean

from gems.engine.checkpoint.saver import Saver
from gems.engine.emulation.executor import (
    EmulatedChannels,
    EmulatedDevice,
    EmulatedExecutor,
    EmulatedSums,
)
from gems.engine.emulation.message_cost import measure_hop
from gems.engine.step_loop import (
    SteppedRun,
    StepResult,
    check_ranks,
    measure_offset,
    schedule_record,
    trace_attributes,
)
from gems.engine.supervision.recorder import Recorder
from gems.engine.supervision.stop_request import StopListener
from gems.engine.transport.mpi import Comm, Transport, ranks_here
from gems.engine.transport.polling import Waiter, WaitState, poll_interval_s, reduce_timer_slack
from gems.plan.rank_plan import RankPlan
from gems.runs.folder import RunFolder
from gems.runs.heartbeat import Heartbeat
from gems.simulation.costs import RunCosts
from gems.trace import TracePart, part_path
from gems.utils.atomic_io import write_json


def emulate(
    folder: RunFolder,
    comm: Comm,
    heartbeat: Heartbeat,
    stop: StopListener | None = None,
    wait_state: WaitState | None = None,
) -> None:
    """Run all steps on one emulated rank and write its part of the trace; collective.

    The hop between neighbours (`measure_hop`) is measured before the first step and after the last;
    the mean is `hop_s` in result.json and in the trace. There is no state to save: a checkpoint
    says how many steps are done.

    Raises:
        ConfigError: another number of ranks, or ranks that disagree about the schedule.
        StalledError: a message did not come within the hang timeout.
    """
    plan = RankPlan(folder.read_run(), folder.read_schedule())
    attributes = trace_attributes("emulated", folder.run_id(plan.spec), comm, "emulated")
    with closing(TracePart(part_path(folder.path, comm.rank), comm.rank, attributes)) as part:
        check_ranks(plan, comm)
        reduce_timer_slack()
        run = EmulatedRun(plan, folder, comm, part, heartbeat, wait_state or WaitState())
        hops_s = [run.measure_hop()]
        manifest = run.start.manifest(plan, {})
        run.saver = Saver(folder, plan.spec.train, run.control, manifest, heartbeat, stop=stop)
        with closing(run.saver):
            stops = run.run_steps()
            run.saver.finish()
        hops_s.append(run.measure_hop())
        result = {"hop_s": mean(hops_s)}
        peak = {"peak_allocated_bytes": run.channels.recorder.memory.peak_bytes}
        part.set_attributes(measure_offset(comm, "clock_end") | result | peak)
        run.channels.close()
        if comm.rank == 0 and not stops:
            record = schedule_record(plan.schedule)
            write_json(folder.result_json, {"num_steps": plan.spec.train.steps, **result, **record})
        run.control.barrier()


class EmulatedRun(SteppedRun):
    """The emulation of one rank.

    All ranks begin a step together, as in the simulation, so that its time is that of one step
    alone.
    """

    def __init__(
        self,
        plan: RankPlan,
        folder: RunFolder,
        comm: Comm,
        part: TracePart,
        heartbeat: Heartbeat,
        wait_state: WaitState,
    ) -> None:
        """Open the connections and the emulated device; collective."""
        spec = plan.spec
        schedule = plan.schedule
        replica, rank = plan.position(comm.rank)
        run_costs = RunCosts.of(spec)
        costs = run_costs.stages(schedule.placement)
        self._heartbeat = heartbeat
        self._wait_state = wait_state
        self._interval_s = poll_interval_s(ranks_here(comm))
        open_group = partial(
            Transport.of_group,
            comm,
            hang_timeout_s=spec.train.hang_timeout_s,
            spin_s=0.0,
            sleep_s=self._interval_s,
            wait_state=wait_state,
        )
        peers = open_group(schedule.placement.reduce_group(rank, spec.parallel.replicas)[0])
        self.control = open_group(0)
        self._links = [open_group(replica) for _ in range(2)]  # forward, backward
        recorder = Recorder(part)
        link_ns = round(spec.cost.link / spec.parallel.num_strips * spec.cost.unit_s * 1e9)
        self._hop_bytes = round(max(costs.boundary_bytes))
        self.channels = EmulatedChannels(
            schedule, rank, costs.boundary_bytes, self._links, recorder, link_ns
        )
        self._sums = EmulatedSums(schedule, rank, peers, costs.param_bytes, recorder)
        waiter = Waiter(self._poll, self._interval_s, spec.train.hang_timeout_s, wait_state)
        device = EmulatedDevice(
            costs, spec.cost.activation_bytes, run_costs.cap, run_costs.pace(replica)
        )
        self._executor = EmulatedExecutor(
            schedule, rank, device, self.channels, waiter, self._sums, heartbeat
        )
        super().__init__(plan, folder, comm, part)
        part.set_attributes(self.start.attributes() | measure_offset(comm, "clock"))

    def step(self, step: int) -> StepResult:
        """Run one step; collective."""
        self._heartbeat.beat(step, "begin")
        self.control.barrier()
        start_ns = time.perf_counter_ns()
        self._executor.run(step)
        return StepResult(start_ns, time.perf_counter_ns())

    def measure_hop(self) -> float:
        """Measure the hop of this run's largest message; collective."""
        return measure_hop(
            self._links[0],
            self.control,
            self._hop_bytes,
            self._interval_s,
            self.plan.spec.train.hang_timeout_s,
            self._wait_state,
        )

    def _poll(self) -> None:
        self.channels.poll()
        self._sums.poll()
