"""What benchmarks offer to measure on a GPU.

Profiles side by side, strips by model, reasons of what does not run.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from gems.config.schema import RunSpec
from gems.errors import DoesNotFitError
from gems.profile.model_profile import LayerProfile, ModelProfile
from scripts.bench import memory_gpu, rig, split, strips
from scripts.bench.profile import compared
from scripts.bench.rig import cause_of, gpu_machine

OUT_OF_MEMORY = """Traceback (most recent call last):
File "train.py", line 91, in run_step
torch.OutOfMemoryError: CUDA out of memory.
[rank 0] ERROR failed on node n in step 1, action 0REDUCE_GRAD: OutOfMemoryError: CUDA out of memory.
Abort(4) on node 0 (rank 0 in comm 0): application called MPI_Abort(MPI_COMM_WORLD, 4) - process 0
[mpiexec@n] Exit codes: [n] 1024"""


def profile_of(*forward_s: float, kept_bytes: int = 8) -> ModelProfile:
    layers = tuple(
        LayerProfile(f"l{i}", "conv", forward_s=t, stash_bytes=kept_bytes)
        for i, t in enumerate(forward_s)
    )
    return ModelProfile("m", 8, 8, 1, "float32", "cpu", "fake", layers)


def test_profiles_are_compared_in_sum_and_by_large_layer() -> None:
    row = compared(profile_of(1.0, 4.0, 50.0), profile_of(2.0, 2.0, 0.001), "forward_s")
    assert row["predicted_s"] == 55.0 and row["measured_s"] == pytest.approx(4.001)
    assert (row["least_ratio"], row["most_ratio"]) == (0.5, 2.0), (
        "the third is too small to count on its own"
    )
    assert compared(profile_of(1.0), profile_of(1.0), "kept_bytes")["ratio"] == 1.0
    with pytest.raises(ValueError, match="backward_s: nothing was measured"):
        compared(profile_of(1.0), profile_of(1.0), "backward_s")


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        (OUT_OF_MEMORY, OUT_OF_MEMORY.splitlines()[3]),
        ("Traceback\n  x\nValueError: no good\nmpiexec: ended", "ValueError: no good"),
        (
            "torch.cuda._sanitizer.CUDASanitizerErrors: detected 1 errors",
            "CUDASanitizerErrors: detected 1 errors",
        ),
        ("one\nlast", "last"),
        ("", ""),
    ],
)
def test_the_cause_of_a_failure_is_found(text: str, cause: str) -> None:
    assert cause_of(text.splitlines()).endswith(cause)


@pytest.mark.parametrize(
    "failure", [SystemExit(OUT_OF_MEMORY), DoesNotFitError("rank 0", 9, 8, "use more")]
)
def test_strips_name_what_does_not_run(
    failure: BaseException, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tried: list[RunSpec] = []

    @contextmanager
    def run(spec: RunSpec) -> Iterator[Any]:
        tried.append(spec)
        raise failure
        yield

    monkeypatch.setattr(rig, "finished_run", run)
    words = "--part time --models convnext_tiny --heights 256 --width 0 --strips 2,4 --rounds 1"
    assert strips.main([*words.split(), "train.precision=bf16_mixed"]) == 0
    assert [spec.parallel.strips for spec in tried] == [1, 2, 4]
    assert {(spec.data.height_px, spec.data.width_px) for spec in tried} == {(256, 256)}
    assert {spec.train.precision for spec in tried} == {"bf16_mixed"}
    shown = capsys.readouterr()
    assert shown.err.count("rank 0") == shown.out.count('"failed": ') == 3


def test_strips_of_an_unknown_model_are_refused() -> None:
    with pytest.raises(SystemExit, match="--models=x: allowed are resnet50, vgg16, convnext_tiny"):
        strips.main(["--models", "x"])


def test_a_split_backward_is_timed() -> None:
    case = next(case for case in split.CASES if case[0].startswith("conv 3x3, 64 ch, 8 px"))
    row = split._run_case(case, torch.device("cpu"), 2)
    assert row["bit_equal"]
    assert (
        row["full_ms"] > 0
        and row["ours_ratio"] > 0
        and 0 < row["ours_input_share"] < row["ours_ratio"]
    )


@pytest.mark.parametrize(
    ("name", "machine"),
    [
        ("NVIDIA H200", "machine=h200"),
        ("NVIDIA H100 80GB HBM3", "machine=h100"),
        ("x", "machine=cuda"),
    ],
)
def test_a_gpu_takes_its_data_sheet(
    name: str, machine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: name)
    assert gpu_machine(d2h_bytes_per_s=5.0) == f"{machine} machine.d2h_bytes_per_s=5.0"


def test_the_largest_image_is_sought_in_given_steps_under_given_bytes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tried: list[tuple[Any, ...]] = []

    def child(what: Any, *words: Any) -> dict[str, Any]:
        tried.append(words)
        return {"step_s": 1.0} if words[1] <= 1500 else {"refused": "needs more"}

    monkeypatch.setattr(memory_gpu, "_child", child)
    (row,) = memory_gpu.largest_rows(["keep"], {}, "unet", 1024, 256, 16_000_000_000)
    assert (row["side_px"], row["next_px"], row["why"]) == (1280, 1536, "does not run: needs more")
    assert {(model, limit) for model, _, _, _, limit in tried} == {("unet", 16_000_000_000)}
    assert [side_px for _, side_px, *_ in tried] == [1024, 2048, 1536, 1280]
