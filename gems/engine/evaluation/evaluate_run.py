"""What the ranks of `gems evaluate` and `gems predict` do.

The weights of a run on the validation split.
"""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import torch

from gems.engine.checkpoint.state_dict import restore
from gems.engine.evaluation.predictions import Numbered, write_predictions
from gems.engine.pipeline import build_pipeline
from gems.engine.train import evaluate, open_loader
from gems.engine.transport.mpi import Comm
from gems.launch.scratch_run import REQUEST_JSON
from gems.runs.folder import RunFolder
from gems.utils.atomic_io import read_json


def evaluate_run(folder: RunFolder, comm: Comm, device: torch.device) -> dict[str, Any]:
    """Evaluate a prepared run, whose train.initial_checkpoint are the weights; collective.

    If the folder holds a request, predictions are written as it says, and labels are not read.
    """
    spec = folder.read_spec()
    read = (folder.read_schedule(), folder.read_boundaries(), folder.read_memory_plan())
    pipeline = build_pipeline(spec, comm, device, None, None, *read, trains=False)
    restore(pipeline, Path(str(spec.train.initial_checkpoint)))
    request = read_json(folder.path / REQUEST_JSON)
    loader, count, _ = open_loader(
        pipeline, spec.train.steps, Numbered if request else lambda dataset: dataset
    )
    with closing(loader):
        if request:
            return write_predictions(pipeline, loader, count, request)
        return evaluate(pipeline, loader, count)
