"""A run on emulated devices: `train` without a model, data and torch."""

from __future__ import annotations

import time
from contextlib import closing
from functools import partial
from statistics import mean

from gems.config.schema import RunSpec
from gems.engine.checkpoint.resume import find_start
from gems.engine.checkpoint.saver import Saver
from gems.engine.emulation.executor import EmulatedChannels, EmulatedExecutor, EmulatedSums
from gems.engine.emulation.message_cost import measure_hop
from gems.engine.step_loop import (
    StepResult,
    check_ranks,
    measure_offset,
    run_steps,
    schedule_record,
    trace_attributes,
)
from gems.engine.supervision.recorder import Recorder
from gems.engine.supervision.stop_request import StopListener
from gems.engine.transport.mpi import Comm, Transport, ranks_here
from gems.engine.transport.polling import Waiter, WaitState, poll_interval_s, reduce_timer_slack
from gems.runs.folder import RunFolder
from gems.runs.heartbeat import Heartbeat
from gems.simulation.costs import RunCosts
from gems.trace import TracePart, part_path
from gems.utils.atomic_io import write_json


def emulate(
    spec: RunSpec,
    folder: RunFolder,
    comm: Comm,
    heartbeat: Heartbeat,
    stop: StopListener | None = None,
    wait_state: WaitState | None = None,
) -> None:
    """Run all steps on one emulated rank and write its part of the trace; collective.

    All ranks begin a step together, as in the simulation, so that its time is that of one step
    alone. The hop between neighbours (`measure_hop`) is measured before the first step and after
    the last; the mean is `hop_s` in result.json and in the trace. There is no state to save: a
    checkpoint says how many steps are done.

    Raises:
        ConfigError: another number of ranks, or ranks that disagree about the schedule.
        StalledError: a message did not come within the hang timeout.
    """
    attributes = trace_attributes("emulated", folder.run_id(spec), comm, "emulated")
    part = TracePart(part_path(folder.path, comm.rank), comm.rank, attributes)
    try:
        schedule = folder.read_schedule()
        check_ranks(spec, schedule, comm)
        reduce_timer_slack()
        placement = schedule.placement
        hang_timeout_s = spec.train.hang_timeout_s
        interval_s = poll_interval_s(ranks_here(comm))
        replica, rank = divmod(comm.rank, spec.parallel.partitions)
        run_costs = RunCosts.of(spec)
        costs = run_costs.stages(placement)

        open_group = partial(
            Transport.of_group,
            comm,
            hang_timeout_s=hang_timeout_s,
            spin_s=0.0,
            sleep_s=interval_s,
            wait_state=wait_state,
        )
        peers = open_group(placement.reduce_group(rank, spec.parallel.replicas)[0])
        control = open_group(0)
        transports = [open_group(replica) for _ in range(2)]  # forward, backward
        recorder = Recorder(part)
        link_ns = round(spec.cost.link / spec.parallel.strips * spec.cost.unit_s * 1e9)
        channels = EmulatedChannels(
            schedule, rank, costs.boundary_bytes, transports, recorder, link_ns
        )
        sums = EmulatedSums(schedule, rank, peers, costs.param_bytes, recorder)

        def poll() -> None:
            channels.poll()
            sums.poll()

        waiter = Waiter(poll, interval_s, hang_timeout_s, wait_state)
        executor = EmulatedExecutor(
            schedule,
            rank,
            costs,
            spec.cost.activation_bytes,
            run_costs.cap,
            channels,
            waiter,
            recorder,
            sums,
            heartbeat,
            run_costs.pace(replica),
        )

        def run_step(step: int) -> StepResult:
            heartbeat.beat(step, "begin")
            control.barrier()
            start_ns = time.perf_counter_ns()
            executor.run(step)
            return StepResult(start_ns, time.perf_counter_ns())

        def measure() -> float:
            num_bytes = round(max(costs.boundary_bytes))
            return measure_hop(
                transports[0], control, num_bytes, interval_s, hang_timeout_s, wait_state
            )

        start = find_start(spec, folder, comm)
        part.set_attributes(start.attributes() | measure_offset(comm, "clock"))
        hops_s = [measure()]
        manifest = start.manifest(spec, schedule, (), {})
        with closing(Saver(folder, spec.train, control, manifest, heartbeat, stop=stop)) as saver:
            stops = run_steps(
                spec, comm.rank, part, folder.progress_json, saver, start.step, run_step
            )
            saver.finish()
        hops_s.append(measure())
        known = {"hop_s": mean(hops_s), "peak_allocated_bytes": recorder.memory.peak_bytes}
        part.set_attributes(measure_offset(comm, "clock_end") | known)
        channels.close()
        if comm.rank == 0 and not stops:
            write_json(
                folder.result_json,
                {"num_steps": spec.train.steps, "hop_s": mean(hops_s), **schedule_record(schedule)},
            )
        control.barrier()
    finally:
        part.close()
