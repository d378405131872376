"""A run on emulated devices: what `train` is to a real one, without model, data and torch."""

from __future__ import annotations

import math
import socket
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import cast

import h5py
import numpy as np
from mpi4py import __version__ as mpi4py_version

from gems import __version__
from gems.config.resolve import global_batch
from gems.config.run_id import run_id
from gems.config.schema import RunSpec
from gems.engine.checkpoint.resume import beginning_of
from gems.engine.checkpoint.saver import Asks, Saver
from gems.engine.emulation.channels import EmulatedLinks
from gems.engine.emulation.executor import Emulated, Holdings
from gems.engine.emulation.message_cost import measure_hop
from gems.engine.supervision.consistency_check import check_same_schedule, check_world
from gems.engine.supervision.progress import Progress
from gems.engine.supervision.recorder import Recorder
from gems.engine.transport.clock import measure_offset
from gems.engine.transport.mpi import Comm, Transport, library, ranks_here
from gems.engine.transport.polling import Patience, look_s, sharpen_sleep
from gems.runs.folder import RunFolder
from gems.runs.heartbeat import Heartbeat
from gems.schedule.schedule import Schedule
from gems.simulation.costs import activation_cap, gradient_bytes, replica_pace, schedule_costs
from gems.trace import TracePart, part_path, root_attributes
from gems.utils.atomic_io import write_json


@dataclass(slots=True)
class _Rank:
    """What one emulated rank runs, and how it meets the others."""

    device: Emulated
    links: EmulatedLinks
    holdings: Holdings
    control: Transport
    hop: Callable[[], float]


def emulate(spec: RunSpec, folder: RunFolder, comm: Comm, heartbeat: Heartbeat, stop: Asks | None = None) -> None:
    """Run all steps on one emulated rank and leaves its part of the trace; collective.

    All ranks begin a step together, as in the simulation, so that its time is that of one step alone. The hop between
    neighbours (`measure_hop`) is measured before the first step and behind the last; their mean, in seconds, is in
    result.json and in the trace as `hop_s`. There is no state to save: a checkpoint tells how many steps are done.

    Raises:
        ConfigError: another number of ranks, or ranks that disagree about the schedule.
        StalledError: a message did not come within the stall limit.
    """
    part = TracePart(part_path(folder.path, comm.rank), comm.rank, _attributes(spec, comm))
    try:
        check_world(spec, comm)
        schedule = folder.read_schedule()
        check_same_schedule(schedule, comm)
        sharpen_sleep()
        rank = _build(spec, comm, schedule, part, heartbeat)
        beginning = beginning_of(spec, folder, comm)
        part.set_attributes(beginning.attributes() | measure_offset(comm).attributes("clock"))
        about = beginning.about(spec, schedule, (), {})
        hops_s = [rank.hop()]
        with closing(Saver(folder, spec.train, rank.control, about, heartbeat, stop=stop)) as saver:
            stops = _steps(spec, rank, part, heartbeat, folder.progress_json, saver, beginning.step)
            saver.finish()
        hops_s.append(rank.hop())
        known = {"hop_s": mean(hops_s), "peak_allocated_bytes": rank.holdings.peak_bytes}
        part.set_attributes(measure_offset(comm).attributes("clock_end") | known)
        rank.links.close()
        if comm.rank == 0 and not stops:
            write_json(folder.result_json, {
                "num_steps": spec.train.steps,
                "hop_s": mean(hops_s),
                "schedule_sha256": schedule.digest(),
                "schedule_rows": [" ".join(map(str, row)) for row in schedule.rows],
            })  # fmt: skip
        rank.control.barrier()
    finally:
        part.close()


def _build(spec: RunSpec, comm: Comm, schedule: Schedule, part: TracePart, heartbeat: Heartbeat) -> _Rank:
    placement, hang_timeout_s, nap_s = schedule.placement, spec.train.hang_timeout_s, look_s(ranks_here(comm))
    replica, rank = divmod(comm.rank, spec.parallel.partitions)
    costs = schedule_costs(spec, placement)

    def open_transport(of: Comm) -> Transport:
        return Transport(of, hang_timeout_s, spin_s=0.0, sleep_s=nap_s)

    pipeline = cast(Comm, comm.Split(replica, rank))
    group = placement.reduce_group(rank, spec.parallel.replicas)
    peers = open_transport(cast(Comm, comm.Split(group[0], comm.rank)))
    control = open_transport(comm)
    transports = [open_transport(pipeline) for _ in range(schedule.num_directions)]
    holdings = Holdings()
    recorder = Recorder(part, holdings)
    links = EmulatedLinks(schedule, rank, costs.boundary_bytes, transports, recorder)
    patience = Patience(links.poll, nap_s, hang_timeout_s)
    gradients = np.zeros(gradient_bytes(spec, placement, rank) // 4, np.float32)
    reduce_ns = round(costs.reduce[placement.lowest_stage(rank)] * spec.cost.unit_s * 1e9)

    def reduce() -> None:
        if len(gradients) and peers.size > 1:
            peers.sum_in_place(gradients)
        elif peers.size > 1:
            peers.barrier()
            patience.until(time.perf_counter_ns() + reduce_ns)

    device = Emulated(
        schedule, rank, costs, spec.cost.unit_s, spec.cost.activation_bytes, activation_cap(spec),
        links, patience, recorder, reduce, heartbeat, replica_pace(spec, replica),
    )  # fmt: skip
    size = round(max(costs.boundary_bytes))
    return _Rank(
        device, links, holdings, control, lambda: measure_hop(transports[0], control, size, nap_s, hang_timeout_s)
    )


def _steps(
    spec: RunSpec,
    rank: _Rank,
    part: TracePart,
    heartbeat: Heartbeat,
    progress_json: Path,
    saver: Saver,
    first_step: int,
) -> bool:
    control = rank.control
    images, num_steps = global_batch(spec), spec.train.steps
    progress = Progress(spec.name, num_steps, images, progress_json, first_step) if control.rank == 0 else None
    try:
        for step in range(first_step, num_steps):
            saver.begin()
            heartbeat.beat(step, "begin")
            control.barrier()
            start_ns = time.perf_counter_ns()
            rank.device.run(step)
            end_ns = time.perf_counter_ns()
            is_warmup = step - first_step < spec.train.warmup_steps
            part.add("rank_steps", (control.rank, step, start_ns, end_ns, images, math.nan, is_warmup))
            part.flush()
            if progress is not None:
                progress.show(step + 1, math.nan)
            if saver.end(step + 1, ()):
                return True
    finally:
        if progress is not None:
            progress.close()
    return False


def _attributes(spec: RunSpec, comm: Comm) -> dict[str, object]:
    versions = {
        "gems": __version__, "mpi4py": mpi4py_version, "mpi": library(), "h5py": h5py.__version__, "numpy": np.__version__,
    }  # fmt: skip
    return root_attributes(
        "emulated", run_id(spec), comm.size, hostname=socket.gethostname(), device="emulated",
        versions=[f"{key} {value}" for key, value in versions.items()], clock="perf_counter_ns",
    )  # fmt: skip
