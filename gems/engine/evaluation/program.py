"""The program of the ranks of `gems evaluate`: the trained weights of a run on the validation split of some data."""

from __future__ import annotations

import sys
from contextlib import closing
from pathlib import Path

from gems.engine.checkpoint.state_dict import restore
from gems.engine.device import open_device
from gems.engine.pipeline import build_pipeline
from gems.engine.supervision.failure import abort_all_ranks, ensure_exit, report_failure
from gems.engine.train import evaluate, open_loader
from gems.engine.transport.environment import launched_rank
from gems.engine.transport.mpi import world
from gems.runs.folder import RunFolder
from gems.utils.atomic_io import write_json
from gems.utils.logs import set_up_rank_logging


def main(argv: list[str]) -> None:
    """Run one rank of the evaluation of a prepared run, whose train.initial_checkpoint are the weights."""
    set_up_rank_logging(launched_rank())
    folder = RunFolder(Path(argv[0]))
    try:
        spec = folder.read_spec()
        device = open_device(spec.machine, spec.cluster.device_order)
        comm = world()
        read = (folder.read_schedule(), folder.read_boundaries(), folder.read_memory_plan())
        pipeline = build_pipeline(spec, comm, device, None, None, *read)
        restore(pipeline, Path(str(spec.train.initial_checkpoint)))
        loader, num_validation, _ = open_loader(pipeline)
        with closing(loader):
            found = evaluate(pipeline, loader, num_validation)
        if comm.rank == 0:
            write_json(folder.result_json, found)
    except BaseException as error:
        ensure_exit()
        abort_all_ranks(report_failure(folder, launched_rank(), error))


if __name__ == "__main__":
    main(sys.argv[1:])
