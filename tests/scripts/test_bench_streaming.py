"""The methods of bench-streaming compute the gradients of the whole image, and are judged."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from scripts.bench.streaming import CHECKPOINT, LIGHTSTREAM, STREAM, WHOLE, measured, targets


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    threads = torch.get_num_threads()
    measured(("resnet34", 64, "float64"), WHOLE, "", 1, str(folder))
    torch.set_num_threads(threads)
    return folder


@pytest.mark.parametrize(
    ("method", "how"), [(CHECKPOINT, ""), (STREAM, "4:2"), (STREAM, "2x2"), (LIGHTSTREAM, "64")]
)
def test_gradients_are_those_of_the_whole_image(method: str, how: str, scratch: Path) -> None:
    if method == LIGHTSTREAM and find_spec(LIGHTSTREAM) is None:
        pytest.skip("lightstream is not installed")
    threads = torch.get_num_threads()
    found = measured(("resnet34", 64, "float64"), method, how, 1, str(scratch))
    torch.set_num_threads(threads)
    assert found["error"] < 1e-10
    assert found["step_s"] > 0 and found["tensor_bytes"] > 1 << 20 and found["resident_bytes"] >= 0


def row(way: str, step_s: float, tensor_bytes: float, **more: Any) -> dict[str, Any]:
    return {"way": way, "step_s": step_s, "tensor_bytes": tensor_bytes, "error": 0.0, **more}


def test_only_methods_with_half_of_the_bytes_count() -> None:
    rows = [
        row("whole ", 4.0, 100.0),
        row("checkpoint ", 5.0, 60.0),
        row("lightstream 2048", 8.0, 100.0),
        row("lightstream 1536", 6.0, 90.0, error=0.5),
        row("stream 4", 4.2, 40.0),
        row("stream 8", 4.4, 30.0, whole=1.1),
        {"way": "stream 16", "failed": "OutOfMemoryError"},
    ]
    assert [*targets("resnet50", 2048, rows)] == [
        "resnet50, 2048 px, beside checkpoint: stream 8 takes 0.88 of its time, with 0.50 of its"
        " bytes (target: at most 0.8)",
        "resnet50, 2048 px, beside lightstream 2048: stream 4 takes 0.53 of its time, with 0.40 of"
        " its bytes (target: at most 0.5)",
        "resnet50, 2048 px: stream 8 takes 1.10 of the whole image's time (target: at most 1.1)",
    ]
