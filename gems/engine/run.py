"""The program that every rank runs: `python -m gems.engine.run RUN_FOLDER`."""

from __future__ import annotations

import os
import signal
import sys
import time
import traceback
from datetime import UTC, datetime
from pathlib import Path

from gems.config import RunSpec
from gems.errors import GemsError, RankFailedError
from gems.heartbeat import Heartbeat, read_beat
from gems.runfolder import RunFolder, write_json

SPEAK_S = 0.3  # launchers pass nothing on once a rank aborts, not even what it had said before


def main(argv: list[str]) -> None:
    """Runs one rank. Whatever goes wrong is said in one line, kept in a file, and ends all ranks.

    Without the abort the others would wait for this rank in MPI_Finalize until the job's time is over.
    """
    if len(argv) != 1:
        print("usage: python -m gems.engine.run RUN_FOLDER", file=sys.stderr)
        sys.exit(2)
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)  # a scheduler's warning, whose default would kill the rank
    folder = RunFolder(Path(argv[0]))
    try:
        _work(folder)
    except BaseException as error:
        code = report(folder, launched_rank(), error)
        from gems.engine.transport import abort

        abort(code)


def _work(folder: RunFolder) -> None:
    spec = folder.read_spec()
    if spec.machine.kind == "emulated":
        _emulate(spec, folder)
        return
    from gems.engine.device import open_device

    # Before MPI starts: one that knows GPUs looks at the current device then.
    device = open_device(spec.machine)
    from gems.engine.train import train
    from gems.engine.transport import world

    comm = world()
    heartbeat = Heartbeat(folder.heartbeat(comm.rank))
    train(spec, folder, comm, device, heartbeat)
    heartbeat.close()


def _emulate(spec: RunSpec, folder: RunFolder) -> None:
    from gems.engine.emulated_run import emulate
    from gems.engine.transport import world

    comm = world()
    heartbeat = Heartbeat(folder.heartbeat(comm.rank))
    emulate(spec, folder, comm, heartbeat)
    heartbeat.close()


def launched_rank() -> int:
    """Gives this process's rank as its launcher numbers it, which stands also where MPI did not start."""
    names = ("PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_RANK", "PALS_RANKID", "SLURM_PROCID")
    return next((int(os.environ[name]) for name in names if name in os.environ), 0)


def report(folder: RunFolder, rank: int, error: BaseException) -> int:
    """Writes FAILED.rank<k>.json and the line on stderr; gives the exit code for the job."""
    beat = read_beat(folder.heartbeat(rank))
    step, action = (beat.step, beat.action) if beat is not None else (-1, "start")
    node = os.uname().nodename
    code = error.exit_code if isinstance(error, GemsError) else RankFailedError.exit_code
    cause = (
        " ".join(str(error).split())
        if isinstance(error, GemsError)
        else f"{type(error).__name__}: {' '.join(str(error).split())}"
    )
    where = f"in step {step}, action {action}" if step >= 0 else f"before the first step ({action})"
    if not isinstance(error, GemsError):
        traceback.print_exception(error)
    print(f"gems: rank {rank} on node {node} failed {where}: {cause}", file=sys.stderr, flush=True)
    record = {
        "rank": rank, "node": node, "pid": os.getpid(), "step": step, "action": action, "cause": cause,
        "exit_code": code, "utc": datetime.now(UTC).isoformat(timespec="milliseconds"),
    }  # fmt: skip
    try:
        write_json(folder.failed_json(rank), record)
    except OSError as failure:
        print(f"gems: rank {rank} cannot write to {folder.path}: {failure}", file=sys.stderr, flush=True)
    time.sleep(SPEAK_S)
    return code


if __name__ == "__main__":
    main(sys.argv[1:])
