"""The program of the ranks of `gems evaluate` and `gems predict`: the weights of a run on the validation split."""

from __future__ import annotations

import sys
from contextlib import closing
from pathlib import Path

from gems.engine.checkpoint.state_dict import restore
from gems.engine.device import open_device
from gems.engine.evaluation.predictions import Numbered, write_predictions
from gems.engine.pipeline import build_pipeline
from gems.engine.supervision.failure import abort_all_ranks, ensure_exit, report_failure
from gems.engine.train import evaluate, open_loader
from gems.engine.transport.environment import launched_rank
from gems.engine.transport.mpi import world
from gems.launch.scratch_run import REQUEST_JSON
from gems.runs.folder import RunFolder
from gems.utils.atomic_io import read_json, write_json
from gems.utils.logs import set_up_rank_logging


def main(argv: list[str]) -> None:
    """Run one rank of the evaluation of a prepared run, whose train.initial_checkpoint are the weights.

    If the folder holds a request, predictions are written as it says, and labels are not read.
    """
    set_up_rank_logging(launched_rank())
    folder = RunFolder(Path(argv[0]))
    try:
        spec = folder.read_spec()
        device = open_device(spec.machine, spec.cluster.device_order)
        comm = world()
        read = (folder.read_schedule(), folder.read_boundaries(), folder.read_memory_plan())
        pipeline = build_pipeline(spec, comm, device, None, None, *read)
        restore(pipeline, Path(str(spec.train.initial_checkpoint)))
        request = read_json(folder.path / REQUEST_JSON)
        loader, count, _ = open_loader(pipeline, spec.train.steps, Numbered if request else lambda dataset: dataset)
        with closing(loader):
            if request:
                found = write_predictions(pipeline, loader, count, request)
            else:
                found = evaluate(pipeline, loader, count)
        if comm.rank == 0:
            write_json(folder.result_json, found)
    except BaseException as error:
        ensure_exit()
        abort_all_ranks(report_failure(folder, launched_rank(), error))


if __name__ == "__main__":
    main(sys.argv[1:])
