"""Validation while training.

When it is due, which weights are kept, when training ends early, and what is recorded.
"""

from __future__ import annotations

import errno
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from gems.config.resolve import resolve
from gems.config.schema import TrainConfig
from gems.engine.evaluation.validator import Best, Validator
from gems.engine.transport.mpi import Comm, world
from gems.errors import ConfigError
from gems.runs.folder import RunFolder
from gems.trace import TracePart, part_path
from gems.trace.parts import load_trace
from tests.helpers.toys import make_spec


class Case:
    """A validator of one rank whose metric takes given values, one for each validation."""

    def __init__(
        self, path: Path, values: Sequence[float], first_step: int = 0, **train: object
    ) -> None:
        self.folder, self._values = RunFolder(path), iter(values)
        self.measured = 0
        self.part = TracePart(
            part_path(path, 0), 0, {"schema_version": "1.3", "source": "measured", "world_size": 1}
        )
        comm: Comm = world()
        config = TrainConfig(steps=100, **train)  # type: ignore[arg-type]
        self.validator = Validator(config, self.folder, comm, self.part, 10, first_step, self)

    def measure(self) -> dict[str, float]:
        self.measured += 1
        value = next(self._values)
        return {"validation_loss": value, "validation_accuracy": 1 - value}

    def save(self, path: Path) -> None:
        path.mkdir(parents=True)
        (path / "stage0000.pt").write_text(str(self.measured))

    def run(self, first: int, last: int) -> Iterator[int]:
        """The steps after which training validated, up to its early end."""
        for num_steps in range(first, last + 1):
            if self.validator.after(num_steps):
                yield num_steps
            if self.validator.is_over:
                return


@pytest.mark.parametrize(
    ("train", "due"),
    [
        ({"validate_steps": 4}, [4, 8, 12]),
        ({"validate_epochs": 1}, [10]),
        ({}, []),
        ({"validate_epochs": 2}, []),
    ],
)
def test_when_it_is_due(tmp_path: Path, train: dict[str, int], due: list[int]) -> None:
    case = Case(tmp_path, [0.5] * 9, **train)
    assert list(case.run(1, 13)) == due


def test_the_last_step_is_validated_once(tmp_path: Path) -> None:
    case = Case(tmp_path, [0.5, 0.4])
    assert list(case.run(98, 100)) == [100]
    assert case.validator.validate()["validation_loss"] == 0.5
    assert case.measured == 1


@pytest.mark.parametrize(
    ("monitor", "step"), [("loss", 4), ("accuracy", 4), ("validation_accuracy", 4)]
)
def test_the_weights_of_the_best_are_kept(tmp_path: Path, monitor: str, step: int) -> None:
    case = Case(tmp_path, [0.5, 0.2, 0.3, math.nan], validate_steps=2, monitor=monitor)
    assert list(case.run(1, 8)) == [2, 4, 6, 8]
    best = case.validator.best
    assert best is not None and (best.step, best.num_worse) == (step, 2)
    assert [path.name for path in case.folder.best.iterdir()] == [best.weights]
    assert (case.folder.best / best.weights / "stage0000.pt").read_text() == "2"


def test_training_ends_after_so_many_worse_validations(tmp_path: Path) -> None:
    case = Case(
        tmp_path, [0.5, 0.6, 0.4, 0.45, 0.41, 0.1], validate_steps=2, monitor="loss", patience=2
    )
    assert list(case.run(1, 100)) == [2, 4, 6, 8, 10]
    assert case.validator.best == Best("validation_loss", 6, 0.4, 2)


def test_a_small_improvement_does_not_count(tmp_path: Path) -> None:
    train = {"validate_steps": 1, "monitor": "loss", "patience": 2, "min_improvement": 0.1}
    case = Case(tmp_path, [0.5, 0.45, 0.41, 0.1], **train)
    assert list(case.run(1, 9)) == [1, 2, 3]


def test_a_run_that_continues_knows_its_best(tmp_path: Path) -> None:
    train = {"validate_steps": 2, "monitor": "loss", "patience": 3}
    first = Case(tmp_path, [0.5, 0.6], **train)
    assert list(first.run(1, 4)) == [2, 4]
    first.part.close()
    again = Case(tmp_path, [0.7, 0.8, 0.1], first_step=4, **train)
    assert list(again.run(5, 20)) == [6, 8]
    assert again.validator.best == Best("validation_loss", 2, 0.5, 3)
    again.part.close()
    from_start = Case(tmp_path, [0.9], first_step=0, **train)
    assert from_start.validator.best is None


def test_an_unknown_metric_is_one_line(tmp_path: Path) -> None:
    case = Case(tmp_path, [0.5], validate_steps=1, monitor="dice")
    with pytest.raises(ConfigError, match=r"^train\.monitor=dice: allowed: loss, accuracy$"):
        case.validator.after(1)


def test_validations_are_in_the_trace(tmp_path: Path) -> None:
    case = Case(tmp_path, [0.5, 0.25], validate_steps=3)
    list(case.run(1, 6))
    case.part.close()
    trace = load_trace(tmp_path)
    assert list(trace.attributes["metrics"]) == ["validation_loss", "validation_accuracy"]
    assert trace.validations.tolist() == [(3, 0, 0.5), (3, 1, 0.5), (6, 0, 0.25), (6, 1, 0.75)]


@pytest.mark.parametrize(
    ("train", "says"),
    [
        (
            {"patience": 2, "validate_steps": 1},
            r"^train\.patience=2: needs a metric to judge by; give train\.monitor",
        ),
        ({"patience": 2, "monitor": "loss"}, r"^train\.patience=2: needs validations"),
        (
            {"validate_steps": 1, "validate_epochs": 1},
            r"^train\.validate_epochs=1: excludes train\.validate_steps",
        ),
        ({"monitor": "loss", "evaluate": False}, r"^train\.monitor=loss: needs validations"),
    ],
)
def test_keys_that_need_each_other(train: dict[str, object], says: str) -> None:
    spec = make_spec()
    with pytest.raises(ConfigError, match=says):
        resolve(replace(spec, train=replace(spec.train, **train)))


def test_weights_that_find_no_room_end_no_run_and_the_earlier_ones_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case(tmp_path, [0.5, 0.4, 0.3], validate_steps=2, monitor="loss")
    assert list(case.run(1, 2)) == [2]

    def full(path: Path) -> None:
        path.mkdir(parents=True)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(case, "save", full)
    assert list(case.run(3, 4)) == [4]
    assert (
        case.validator.best == Best("validation_loss", 2, 0.5)
        and case.folder.best_weights() is not None
    )
    assert [path.name for path in case.folder.best.iterdir()] == ["step00000002"]
    monkeypatch.undo()
    assert list(case.run(5, 6)) == [6]
    assert [path.name for path in case.folder.best.iterdir()] == ["step00000006"]
