"""Loggers: what they write can be read again by their own packages, also after a run that continues."""

from __future__ import annotations

import csv
import importlib
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gems.engine.supervision.loggers import CsvLogger, LoggedRun, Loggers, open_loggers
from gems.errors import ConfigError
from gems.runs.folder import RunFolder
from tests.helpers.small_disk import small_disk
from tests.helpers.toys import make_spec

NAMES = ("train_loss", "learning_rate", "validation_accuracy")


def write(folder: Path, first_step: int, num_steps: int, *loggers: str) -> RunFolder:
    """The losses 1/step of some steps, with an accuracy at every second one."""
    spec = make_spec(train__loggers=list(loggers), runs_dir=str(folder), name="logged")
    run = RunFolder.of(spec)
    run.path.mkdir(parents=True, exist_ok=True)
    logged = LoggedRun("logged", "12345678", run.path, spec.changed_values(), first_step)
    opened = open_loggers(loggers, logged, NAMES)
    for step in range(first_step + 1, num_steps + 1):
        values = {"train_loss": 1 / step, "learning_rate": 0.1}
        opened.log(step, values | ({"validation_accuracy": step / 10} if step % 2 == 0 else {}))
    opened.close()
    return run


def rows(run: RunFolder) -> list[dict[str, str]]:
    with run.metrics_csv.open(newline="") as file:
        return list(csv.DictReader(file))


def test_csv_has_a_row_a_step_and_empty_cells(tmp_path: Path) -> None:
    found = rows(write(tmp_path, 0, 3))
    assert [row["step"] for row in found] == ["1", "2", "3"]
    assert [float(row["train_loss"]) for row in found] == [1.0, 0.5, 1 / 3]
    assert [row["validation_accuracy"] for row in found] == ["", "0.2", ""]


def test_steps_that_are_run_again_are_in_the_csv_once(tmp_path: Path) -> None:
    write(tmp_path, 0, 5)
    found = rows(write(tmp_path, 3, 6))
    assert [row["step"] for row in found] == ["1", "2", "3", "4", "5", "6"]


def test_tensorboard_reads_its_events(tmp_path: Path) -> None:
    run = write(tmp_path, 0, 4, "tensorboard")
    accumulator = importlib.import_module("tensorboard.backend.event_processing.event_accumulator")
    events = accumulator.EventAccumulator(str(run.path / "tensorboard"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("validation_accuracy")] == [
        (2, pytest.approx(0.2)),
        (4, pytest.approx(0.4)),
    ]
    assert len(events.Scalars("train_loss")) == 4


def wandb_records(data: bytes) -> Iterator[Any]:
    """The records of a file in LevelDB's log format, after a header of 7 bytes.

    All in its first block of 32 KiB.
    """
    kinds = importlib.import_module("wandb.proto.wandb_internal_pb2")
    assert 7 < len(data) < 1 << 15
    place = 7
    while place < len(data):
        _, size, _ = struct.unpack_from("<IHB", data, place)
        yield kinds.Record.FromString(data[place + 7 : place + 7 + size])
        place += 7 + size


def test_wandb_writes_an_offline_run_that_it_can_sync(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    run = write(tmp_path, 0, 3, "wandb")
    (file,) = (run.path / "wandb").glob("offline-run-*/run-*.wandb")
    deadline_s = time.monotonic() + 60
    while (
        file.stat().st_size <= 7 and time.monotonic() < deadline_s
    ):  # written by a process of wandb's
        time.sleep(0.05)
    steps = []
    configured = ""
    for record in wandb_records(file.read_bytes()):
        if record.WhichOneof("record_type") == "history":
            values = {
                item.key or "/".join(item.nested_key): item.value_json
                for item in record.history.item
            }
            steps.append(float(values["train_loss"]))
        elif record.WhichOneof("record_type") == "run":
            configured = str(record.run.config)
    assert steps == [1.0, 0.5, 1 / 3]
    assert "model.depth" in configured


def test_mlflow_reads_its_file_store(tmp_path: Path) -> None:
    write(tmp_path, 0, 2, "mlflow")
    write(tmp_path, 2, 4, "mlflow")
    client = importlib.import_module("mlflow.tracking").MlflowClient(
        tracking_uri=(tmp_path / "mlruns").as_uri()
    )
    (run,) = client.search_runs([client.get_experiment_by_name("logged").experiment_id])
    assert [
        metric.value for metric in client.get_metric_history(run.info.run_id, "train_loss")
    ] == [1, 1 / 2, 1 / 3, 1 / 4]
    assert run.data.params["model.depth"] == "8"
    assert run.info.status == "FINISHED"


def test_settings_are_what_differs_from_the_defaults() -> None:
    found = make_spec("1f1b", 2).changed_values()
    assert found["parallel.partitions"] == 2 and found["schedule.name"] == "1f1b"
    assert "model.norm" not in found


def test_a_package_that_is_missing_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = importlib.import_module

    def without_wandb(name: str, *args: object) -> object:
        if name == "wandb":
            raise ModuleNotFoundError("No module named 'wandb'", name="wandb")
        return real(name, *args)

    monkeypatch.setattr(importlib, "import_module", without_wandb)
    with pytest.raises(
        ConfigError,
        match=r"^train\.loggers=wandb: needs wandb, .*pip install 'gems-train\[wandb\]'$",
    ):
        write(tmp_path, 0, 1, "wandb")


def test_rows_that_find_no_room_are_written_later_and_end_no_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with small_disk(tmp_path / "disk", 64) as disk:
        path = disk.path / "metrics.csv"
        opened = Loggers([CsvLogger(path, NAMES, 0)])
        for step in range(1, 1000):
            opened.log(step, {"train_loss": 1 / step})
            if step == 10:
                disk.fill()
            if step == 900:
                assert path.read_text().count("\n") < 300
                disk.free()
        opened.close()
        with path.open(newline="") as file:
            assert [int(row["step"]) for row in csv.DictReader(file)] == list(range(1, 1000))
    assert capsys.readouterr().err.count("CsvLogger cannot write (No space left on device)") == 1
