"""Which errors of a profile the memory report of a run answers by measured sizes."""

from __future__ import annotations

import pytest

from gems.engine.batch_loader import BatchLoader
from gems.engine.rank import Rank
from gems.engine.supervision import memory_report
from gems.engine.transport.mpi import world
from tests.helpers.device import DEVICE
from tests.helpers.toys import make_spec, plan_of


@pytest.fixture(scope="module")
def rank() -> Rank:
    spec = make_spec("1f1b", 1, parallel__strips=2, model__norm="ghost_batch")
    made = Rank.open(plan_of(spec), world(), DEVICE)
    loader = BatchLoader.open(made.plan, made.comm, DEVICE)
    made.stages.set_training(True)
    made.train.run(0, loader.batch(0))
    loader.close()
    return made


def fails(*_: object) -> None:
    raise RuntimeError("on purpose")


def test_layers_that_do_not_run_on_fake_tensors_have_measured_sizes(
    rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_report, "strips_of", fails)
    report = memory_report.memory_report(rank)
    assert report["predicted_activation_bytes"] == memory_report._bytes_from_stages(rank)


def test_any_other_fault_of_a_prediction_shows(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_report, "rank_timeline", fails)
    with pytest.raises(RuntimeError, match="on purpose"):
        memory_report.memory_report(rank)
