"""The program that every rank runs: `python -m gems.engine.run RUN_FOLDER`."""

from __future__ import annotations

import faulthandler
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from gems.config.schema import RunSpec
from gems.engine.supervision.failure import DUMP_S, SPEAK_S, end_all, guard, launched_rank, report
from gems.engine.supervision.stop_request import StopWatch, stop_watch
from gems.errors import StalledError
from gems.runs.folder import RunFolder
from gems.runs.heartbeat import Heartbeat

if TYPE_CHECKING:
    from gems.engine.supervision.watchdog import Watchdog
    from gems.engine.transport.mpi import Comm


def main(argv: list[str]) -> None:
    """Run one rank. Whatever goes wrong is said in one line, kept in a file, and ends all ranks.

    Without the abort the others would wait for this rank in MPI_Finalize until the job's time is over.
    """
    if len(argv) != 1:
        print("usage: python -m gems.engine.run RUN_FOLDER", file=sys.stderr)
        sys.exit(2)
    faulthandler.register(signal.SIGUSR1, all_threads=True)  # whose default would do the same
    folder = RunFolder(Path(argv[0]))
    stop = stop_watch(folder.stop_json, launched_rank())
    stop.start()  # before MPI and all else that has threads
    try:
        run_rank(folder, stop)
        stop.close()
    except BaseException as error:
        guard()
        code = report(folder, launched_rank(), error)
        end_all(code, DUMP_S if code == StalledError.exit_code else SPEAK_S)


def run_rank(folder: RunFolder, stop: StopWatch) -> None:
    """Run this rank of a prepared run, real or emulated; collective."""
    spec = folder.read_spec()
    if spec.machine.kind == "emulated":
        _emulate(folder.read_run(), folder, stop)
        return
    from gems.engine.device import open_device

    # Before MPI starts: one that knows GPUs looks at the current device then.
    device = open_device(spec.machine, spec.cluster.device_order)
    from gems.engine.supervision.affinity import write_affinity
    from gems.engine.train import train
    from gems.engine.transport.mpi import world

    comm = world()
    write_affinity(comm, device, folder.affinity_json, spec.cluster.cpus_per_rank)
    heartbeat = Heartbeat(folder.heartbeat(comm.rank))
    with _watchdog(spec, folder, comm, heartbeat):
        train(spec, folder, comm, device, heartbeat, stop)
    heartbeat.close()


def _emulate(spec: RunSpec, folder: RunFolder, stop: StopWatch) -> None:
    from gems.engine.emulation.run import emulate
    from gems.engine.supervision.affinity import write_affinity
    from gems.engine.transport.mpi import world

    comm = world()
    write_affinity(comm, None, folder.affinity_json, spec.cluster.cpus_per_rank)
    heartbeat = Heartbeat(folder.heartbeat(comm.rank))
    with _watchdog(spec, folder, comm, heartbeat):
        emulate(spec, folder, comm, heartbeat, stop)
    heartbeat.close()


def _watchdog(spec: RunSpec, folder: RunFolder, comm: Comm, heartbeat: Heartbeat) -> Watchdog:
    """Return this rank's watchdog, with the ranks of its node; collective."""
    from gems.engine.supervision.local_peer import Neighbour
    from gems.engine.supervision.watchdog import Watchdog
    from gems.engine.transport.mpi import gather_here

    here = gather_here(comm, Neighbour.me(comm.rank))
    return Watchdog(folder, comm.rank, comm.size, heartbeat, spec.train.hang_timeout_s, here)


if __name__ == "__main__":
    main(sys.argv[1:])
