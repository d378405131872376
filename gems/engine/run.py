"""The program that every rank runs: `python -m gems.engine.run RUN_FOLDER [MODULE:FUNCTION]`.

Without a function, it runs the run. A function gets the folder, the world and the device; what it
returns on rank 0 is the run's result.json.
"""

from __future__ import annotations

import faulthandler
import signal
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from gems.config.schema import MachineConfig
from gems.engine.supervision.failure import abort_all_ranks, ensure_exit, report_failure
from gems.engine.supervision.stop_request import StopListener, stop_listener
from gems.engine.transport.environment import launched_rank
from gems.engine.transport.polling import WaitState
from gems.runs.folder import RunFolder
from gems.runs.heartbeat import Heartbeat, now_ns, set_clock
from gems.utils import start_up
from gems.utils.atomic_io import reserve, write_json
from gems.utils.logs import set_log_level, set_up_rank_logging

if TYPE_CHECKING:
    import torch


def main(argv: list[str]) -> None:
    """Run one rank; report a failure in one line and a file, and abort all ranks.

    Without the abort, the other ranks would wait for this one in MPI_Finalize until the job's time
    is over.
    """
    if len(argv) not in (1, 2):
        print("usage: python -m gems.engine.run RUN_FOLDER [MODULE:FUNCTION]", file=sys.stderr)
        sys.exit(2)
    start_up.begin()
    set_up_rank_logging(launched_rank())
    # the signal's default action would end the process
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    folder = RunFolder(Path(argv[0]))
    stop = stop_listener(folder.stop_json, launched_rank())
    stop.start()  # before MPI and anything else that has threads
    try:
        if argv[1:]:
            run_function(folder, argv[1])
        else:
            run_rank(folder, stop)
        stop.close()
    except BaseException as error:
        ensure_exit()
        code = report_failure(folder, launched_rank(), error)
        abort_all_ranks(code, error)


def run_rank(folder: RunFolder, stop: StopListener) -> None:
    """Run this rank of a prepared run, real or emulated; collective.

    An emulated run does not load torch.
    """
    spec = folder.read_spec()
    set_log_level(spec.train.log_level)
    device = (
        None if spec.machine.is_emulated else _open_device(spec.machine, spec.cluster.device_order)
    )
    from gems.engine.supervision.affinity import write_affinity
    from gems.engine.supervision.watchdog import LocalPeer, Watchdog
    from gems.engine.transport.mpi import broadcast, gather_here, meet, world

    comm = world()
    meet(comm)
    set_clock(broadcast(comm, now_ns()))
    if comm.rank == 0:
        for path in (folder.progress_json, folder.stopped_json, folder.failed_json(0)):
            reserve(path)
    write_affinity(comm, device, folder.affinity_json, spec.cluster.cpus_per_rank)
    heartbeat = Heartbeat(folder.heartbeat(comm.rank))
    waits = WaitState()
    peers = gather_here(comm, LocalPeer.this_process(comm.rank))
    with Watchdog(folder, comm.rank, comm.size, heartbeat, spec.train.hang_timeout_s, peers, waits):
        if device is None:
            from gems.engine.emulation.run import emulate

            start_up.end()
            emulate(folder, comm, heartbeat, stop, waits)
        else:
            from gems.engine.train import train

            train(folder.read_plan(), folder, comm, device, heartbeat, stop, waits)
    heartbeat.close()


def run_function(folder: RunFolder, function: str) -> None:
    """Call a function, as module:name, on this rank of a prepared run; collective."""
    spec = folder.read_spec()
    device = _open_device(spec.machine, spec.cluster.device_order)
    from gems.engine.transport.mpi import world

    module, _, name = function.partition(":")
    result = getattr(import_module(module), name)(folder, world(), device)
    if world().rank == 0:
        write_json(folder.result_json, result)


def _open_device(machine: MachineConfig, order: Sequence[int]) -> torch.device:
    """Open the device before MPI starts: one that supports GPUs looks at the current device."""
    from gems.engine.device import open_device

    return open_device(machine, order)


if __name__ == "__main__":
    main(sys.argv[1:])
