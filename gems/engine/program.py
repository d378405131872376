"""The program of the ranks of a scratch run.

`python -m gems.engine.program MODULE:FUNCTION RUN_FOLDER`.
The function gets the folder, the world and the device; what it returns on rank 0 is the run's
result.json.
"""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path

from gems.engine.supervision.failure import abort_all_ranks, ensure_exit, report_failure
from gems.engine.transport.environment import launched_rank
from gems.runs.folder import RunFolder
from gems.utils import start_up
from gems.utils.atomic_io import write_json
from gems.utils.logs import set_up_rank_logging


def main(argv: list[str]) -> None:
    """Run one rank; a failure is reported and aborts all ranks."""
    start_up.begin()
    set_up_rank_logging(launched_rank())
    (module, _, name), folder = argv[0].partition(":"), RunFolder(Path(argv[1]))
    try:
        from gems.engine.device import open_device

        spec = folder.read_spec()
        # before MPI starts: one that supports GPUs looks at the current device then
        device = open_device(spec.machine, spec.cluster.device_order)
        from gems.engine.transport.mpi import world

        comm = world()
        found = getattr(import_module(module), name)(folder, comm, device)
        if comm.rank == 0:
            write_json(folder.result_json, found)
    except BaseException as error:
        ensure_exit()
        abort_all_ranks(report_failure(folder, launched_rank(), error), error)


if __name__ == "__main__":
    main(sys.argv[1:])
