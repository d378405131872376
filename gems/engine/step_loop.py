"""The loop over the steps of a run, on real and on emulated devices, and the attributes of its trace."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable
from pathlib import Path

import h5py
import numpy as np
from mpi4py import __version__ as mpi4py_version

from gems import __version__
from gems.config.resolve import global_batch, run_id
from gems.config.schema import RunSpec
from gems.engine.checkpoint.saver import Saver
from gems.engine.supervision.progress import Progress
from gems.engine.transport.mpi import Comm, library
from gems.trace import TracePart, root_attributes

Step = Callable[[int], tuple[int, int, float]]  # step number -> begin and end in ns, and the loss on rank 0


def run_steps(
    spec: RunSpec,
    rank: int,
    part: TracePart,
    progress_json: Path,
    saver: Saver,
    first_step: int,
    run_step: Step,
    losses: list[float] | None = None,
) -> bool:
    """Run the steps from `first_step` on, and return whether the run stops early; collective.

    Rank 0 shows the progress, and appends each loss to `losses`; an emulated run has none, and returns NaN.
    """
    images, num_steps = global_batch(spec), spec.train.steps
    progress = Progress(spec.name, num_steps, images, progress_json, first_step) if rank == 0 else None
    with contextlib.nullcontext() if progress is None else contextlib.closing(progress):
        for step in range(first_step, num_steps):
            saver.begin()
            start_ns, end_ns, loss = run_step(step)
            is_warmup = step - first_step < spec.train.warmup_steps
            part.add("rank_steps", (rank, step, start_ns, end_ns, images, loss, is_warmup))
            part.flush()
            if progress is not None:
                if losses is not None:
                    losses.append(loss)
                progress.show(step + 1, loss)
            if saver.end(step + 1, losses or ()):
                return True
    return False


def trace_attributes(source: str, spec: RunSpec, comm: Comm, device: str, **versions: str) -> dict[str, object]:
    """Return the root attributes of a rank's trace part; `versions` are those of more libraries."""
    versions = {
        "gems": __version__, **versions, "mpi4py": mpi4py_version, "mpi": library(), "h5py": h5py.__version__,
        "numpy": np.__version__,
    }  # fmt: skip
    return root_attributes(
        source, run_id(spec), comm.size, hostname=socket.gethostname(), device=device,
        versions=[f"{key} {value}" for key, value in versions.items()], clock="perf_counter_ns",
    )  # fmt: skip
