"""The MPI probe, two ranks of `python -m gems.engine.transport.probe RESULT_JSON DEVICE [ORDER]`.

They start MPI as a run does and exchange messages whose content is checked, on GPUs from device
memory too. Rank 0 writes the result; a rank that fails writes its error to the same file.
"""

from __future__ import annotations

import logging
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gems.config.schema import MachineConfig
from gems.engine.transport.environment import launched_rank
from gems.errors import ConfigError, GemsError, RankFailedError
from gems.utils.atomic_io import write_json
from gems.utils.gpus import may_have_gpu
from gems.utils.logs import set_up_rank_logging

if TYPE_CHECKING:
    import torch

    from gems.engine.transport.mpi import Comm, Transport

SCHEMA = "gems.probe/1"
RANKS = 2
SMALL_BYTES = 8
LARGE_BYTES = 1 << 22
SMALL_TIMES = 200
LARGE_TIMES = 20
WARMUP_TIMES = 3
HANG_TIMEOUT_S = 60.0
FLUSH_S = 0.3  # launchers forward nothing after a rank aborts, not even what it wrote before
# Outcome of a message from device memory; the second stays in the file if such a message ends the
# ranks.
NO_GPU = "no GPU"
TRYING = "trying"
PASSED = "passed"
STAGED = "not taken"
_log = logging.getLogger(__name__)


def main(argv: Sequence[str]) -> None:
    """Run one rank of the probe; any error is written to the result and ends both ranks."""
    if len(argv) not in (2, 3):
        print(
            "usage: python -m gems.engine.transport.probe RESULT_JSON DEVICE [ORDER]",
            file=sys.stderr,
        )
        sys.exit(2)
    set_up_rank_logging(launched_rank())
    result = Path(argv[0])
    order = [int(word) for word in "".join(argv[2:]).split(",") if word]
    try:
        _probe(result, argv[1], order)
    except BaseException as error:
        code = _report_error(result, error)
        from gems.engine.transport.mpi import (
            abort,
        )  # fails too if MPI is missing, which ends the process

        abort(code)


def _probe(result: Path, wanted: str, order: Sequence[int]) -> None:
    begin = time.perf_counter()
    device = _device(
        wanted, order
    )  # before MPI starts: one that supports GPUs looks at the current device then
    from gems.engine.transport.mpi import Transport, gpu_support, library, thread_level, world

    comm = world()
    if comm.size != RANKS:
        raise ConfigError(
            "cluster.launcher",
            os.environ.get("SLURM_MPI_TYPE", "mpiexec"),
            f"MPI sees a world of {comm.size}, and the probe was started with {RANKS} ranks",
            "the launcher and the MPI that mpi4py loads must be the same: load one MPI, and see"
            " cluster.mpi",
        )
    transport = Transport(comm, hang_timeout_s=HANG_TIMEOUT_S)
    gpu = None
    if device is not None:
        import torch

        gpu = {
            "name": torch.cuda.get_device_name(device),
            "index": device.index,
            "visible": torch.cuda.device_count(),
        }
    ranks = comm.gather(
        {"node": os.uname().nodename, "gpu": gpu, "sees_folder": result.parent.is_dir()}
    )
    document: dict[str, Any] = {
        "schema": SCHEMA,
        "mpi": library(),
        "threads": thread_level(),
        "world_size": comm.size,
        "ranks": ranks,
        "takes_device_memory": gpu_support(),
        "device_message": NO_GPU,
        "host": _measure(transport, _host_data),
        "device": None,
    }
    if device is not None and all(comm.allgather(device is not None)):
        document["device_message"] = TRYING
        if comm.rank == 0:
            write_json(result, document)
        comm.Barrier()
        document |= _try_device(transport, comm, device)
    comm.Barrier()  # the other rank has no error either
    document["wall_s"] = time.perf_counter() - begin
    document["utc"] = datetime.now(UTC).isoformat(timespec="seconds")
    if comm.rank == 0:
        write_json(result, document)
    transport.close()


def _device(wanted: str, order: Sequence[int]) -> torch.device | None:
    """Open the rank's GPU as a run would; return None, without loading torch, if it has none."""
    if wanted == "cpu" or (wanted == "auto" and not may_have_gpu()):
        return None
    from gems.engine.device import open_device

    device = open_device(MachineConfig(device=wanted), order)
    return None if device.type == "cpu" else device


def _try_device(transport: Transport, comm: Comm, device: torch.device) -> dict[str, Any]:
    """Run the engine's own test of messages from device memory, and measure them if it passes."""
    import torch

    from gems.engine.transport.staging import open_staging

    if not open_staging("auto", device, comm).is_direct:
        return {"device_message": STAGED}

    def data(num_bytes: int, seed: int) -> torch.Tensor:
        pattern = (
            torch.arange(num_bytes, dtype=torch.int32, device=device).add(seed).to(torch.uint8)
        )
        torch.cuda.synchronize(device)
        return pattern

    return {"device_message": PASSED, "device": _measure(transport, data)}


def _host_data(num_bytes: int, seed: int) -> Any:
    """Return bytes that differ between ranks and positions."""
    import numpy as np

    return (np.arange(num_bytes) + seed).astype(np.uint8)


def _measure(transport: Transport, data: Callable[[int, int], Any]) -> dict[str, float]:
    """Measure seconds of an empty message, and bytes per second beyond it, by round trips.

    Raises:
        RankFailedError: a message arrived with other content than it was sent with.
    """
    small_s = _half_trip_s(transport, data, SMALL_BYTES, SMALL_TIMES)
    large_s = _half_trip_s(transport, data, LARGE_BYTES, LARGE_TIMES)
    bytes_per_s = (LARGE_BYTES - SMALL_BYTES) / max(large_s - small_s, 1e-12)
    return {"latency_s": small_s, "bytes_per_s": bytes_per_s, "message_bytes": LARGE_BYTES}


def _half_trip_s(
    transport: Transport, data: Callable[[int, int], Any], num_bytes: int, num_times: int
) -> float:
    """Return the median time of half a round trip."""
    rank = transport.rank
    other = 1 - transport.rank
    sent = data(num_bytes, 17 * rank)
    expected = data(num_bytes, 17 * other)
    received = data(num_bytes, 99)
    trips_s = [transport.round_trip_s(sent, received) for _ in range(WARMUP_TIMES + num_times)]
    if bool((received != expected).any()):
        raise RankFailedError(
            f"rank {rank} received {num_bytes} bytes with other content than was sent"
        )
    return statistics.median(trips_s[WARMUP_TIMES:]) / 2


def _report_error(result: Path, error: BaseException) -> int:
    """Log why a rank failed and write it to the result; return the exit code."""
    code = error.exit_code if isinstance(error, GemsError) else RankFailedError.exit_code
    text = " ".join(str(error).split())
    cause = text if isinstance(error, GemsError) else f"{type(error).__name__}: {text}"
    _log.error("the probe on node %s failed: %s", os.uname().nodename, cause)
    arguments = list(map(str, error.__reduce__()[1])) if isinstance(error, ConfigError) else []
    try:
        write_json(
            result, {"schema": SCHEMA, "error": cause, "config_error": arguments, "exit_code": code}
        )
    except OSError as failure:
        _log.error("the probe cannot write %s: %s", result, failure)
    time.sleep(FLUSH_S)
    return code


if __name__ == "__main__":
    main(sys.argv[1:])
