"""What stages a rank opens if CUDA graphs are asked for; stages on a GPU are in tests/fake_cuda."""

from __future__ import annotations

import torch
from torch import nn

from gems.engine.rank import Rank
from gems.engine.stages.open_stages import StageOptions, open_stages
from gems.engine.stages.whole import WholeStage
from gems.engine.supervision.recorder import Recorder
from gems.engine.transport.mpi import world
from gems.plan.evaluate import evaluate
from tests.helpers.toys import make_spec

CPU = torch.device("cpu")


def test_graphs_without_a_gpu_are_named_by_the_first_rank_and_stages_stay(caplog):
    schedule = evaluate(make_spec("1f1b", 2)).schedule
    for rank in (0, 1):
        made = open_stages(
            {(0, rank): nn.ModuleList([nn.Identity()])},
            StageOptions(schedule, rank, CPU, captures=True),
            lambda: None,
            Recorder(None, CPU),
        )
        assert type(made.whole[0, rank]) is WholeStage
    (record,) = caplog.records
    assert record.getMessage() == "train.cuda_graphs has no effect: the device is no GPU"


def test_graphs_that_nobody_asked_for_are_not_missed(caplog):
    for value in (False, "auto"):
        made = evaluate(make_spec("1f1b", 1, train__cuda_graphs=value)).for_ranks
        Rank.open(made, world(), CPU)
    assert not caplog.records
