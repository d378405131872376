"""scripts/on_gpu.sh: rows end in time or say why they have no figures, the file keeps them, the page shows them."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gems.config.schema import RunSpec
from scripts.bench.rig import composed
from scripts.gpu import __main__ as program
from scripts.gpu import cases
from scripts.gpu.page import page
from scripts.gpu.parts import LIMIT_S, TITLES, rows_of
from scripts.gpu.record import read_lines, run_part
from scripts.gpu.row import FAILED, MEASURED, NOT_MEASURED, Row, answer, pytest_counts, run
from tests.fake_cuda.build import library, why_not

ROOT = Path(__file__).resolve().parent.parent.parent
PAGE = ROOT / "docs" / "gpu.md"
LINES = ROOT / "docs" / "gpu.jsonl"
HARDWARE = {"gpu": "A GPU", "gpu_bytes": 2**34, "num_cores": 8}
MACHINE = {
    "hardware": HARDWARE,
    "versions": {"torch": "2.11", "cuda": "13.0"},
    "commit": "0123456789abcdef",
    "is_fake": False,
}


def a_row(statement: str, limit_s: float = 30.0, **more: Any) -> Row:
    """A row that runs a statement of Python; timeit's own line comes last."""
    return Row("a row", "What does it say?", ("timeit", "-n1", "-r1", statement), limit_s, **more)


def printing(*answers: object) -> str:
    return "; ".join(f"print({json.dumps(each)!r})" for each in answers)


def a_line(**more: Any) -> dict[str, Any]:
    return {
        "schema": "gems.gpu/1",
        "part": 2,
        "row": "peaks",
        "status": MEASURED,
        "figures": [],
        "reason": "",
        "wall_s": 1.0,
        "command": "python -m x",
        "date": "2026-01-02 03:04 UTC",
        "commit": "0123456789abcdef",
        "hardware": HARDWARE,
        "versions": {"torch": "2.11"},
        "is_fake": False,
    } | more


def test_a_row_gives_the_figures_of_the_last_answer() -> None:
    found = run(
        a_row(
            "import time; time.sleep(0.2); "  # wall_s counts in tenths of a second
            + printing(
                {"rows": []}, {"rows": [{"step_s": 1.5, "ways": {"a": {"x": 1}, "b": {"x": 2}}}]}
            ),
            read=answer("rows"),
        ),
        30,
    )
    assert (found.status, found.reason) == (MEASURED, "")
    assert found.figures == [
        {"step_s": 1.5, "way": "a", "x": 1},
        {"step_s": 1.5, "way": "b", "x": 2},
    ]
    assert 0 < found.wall_s < 30


def test_a_row_that_does_not_end_is_ended() -> None:
    found = run(a_row("while True: pass", limit_s=1.0), 30)
    assert (found.status, found.figures) == (FAILED, [])
    assert "did not end within 1 s" in found.reason
    assert found.wall_s < 20


def test_a_row_that_does_not_end_keeps_the_figures_it_has_printed() -> None:
    statement = f"{printing([{'x': 1}], [{'x': 1}, {'x': 2}])}\nwhile True: pass"
    found = run(a_row(statement, limit_s=2.0), 30)
    assert found.status == FAILED and "did not end within 2 s" in found.reason
    assert found.figures == [{"x": 1}, {"x": 2}]


@pytest.mark.parametrize(
    ("statement", "status", "reason"),
    [
        ("raise ValueError('no good')", FAILED, "ValueError: no good"),
        ("import no_such_module", FAILED, "ModuleNotFoundError: No module named 'no_such_module'"),
        ("pass", FAILED, "printed no answer"),
        (printing([{"way": "a", "failed": "too large"}]), FAILED, "too large"),
        (printing([{"way": "a", "failed": "too large"}, {"way": "b", "x": 1}]), MEASURED, ""),
        (printing({"unmeasured": "no such kernel"}), NOT_MEASURED, "no such kernel"),
        (printing({"x": 1}) + "; raise SystemExit", MEASURED, "exit code 1"),
    ],
)
def test_a_row_says_why_it_has_no_figures(statement: str, status: str, reason: str) -> None:
    found = run(a_row(statement), 30)
    assert found.status == status
    assert reason in found.reason and bool(reason) == bool(found.reason)


def test_tests_that_passed_are_counted() -> None:
    assert pytest_counts(["...", "12 passed, 1 skipped in 3.1s", "11 passed in 3.0s"]) == [
        {"num_passed": 12, "num_failed": 0}
    ]
    (found,) = pytest_counts(
        ["FAILED tests/a.py::test_b - no", "1 failed, 2 passed, 1 error in 1s"]
    )
    assert (found["num_passed"], found["num_failed"]) == (2, 2)
    assert "test_b" in found["failed"]
    with pytest.raises(ValueError, match="no test ended"):
        pytest_counts(["mpiexec: no such program"])


def test_lines_are_kept_and_rows_without_time_are_recorded(tmp_path: Path) -> None:
    out = tmp_path / "folder" / "gpu.jsonl"
    run_part(1, [a_row(printing({"x": 1}))], MACHINE, out, 60)
    first = out.read_text()
    late = run_part(1, [a_row("while True: pass")] * 2, MACHINE, out, 5)
    assert [(line["status"], line["reason"]) for line in late] == [
        (NOT_MEASURED, "time was over")
    ] * 2
    assert out.read_text().startswith(first)
    kept = read_lines(out)
    assert [line["status"] for line in kept] == [MEASURED, NOT_MEASURED, NOT_MEASURED]
    assert kept[0]["figures"] == [{"x": 1}]
    assert kept[0]["hardware"] == HARDWARE
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d UTC", kept[0]["date"])
    assert kept[0]["command"].startswith("python -m timeit -n1")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["4"], "PART=4: allowed are 1 (prove), 2 (measure), 3 (claims)"),
        (["1", "--only", "zzz"], "--only=zzz: is in no name of a row; they are machine"),
        ([], "GPU=None: torch sees no GPU here: nothing was measured"),
        (["1"], "GPU=None: torch sees no GPU here: nothing was measured"),
        (["--render", "/no/such"], "--render=/no/such: cannot be read"),
        (["--render", str(PAGE)], f"--render={PAGE}:1: is no line of gems.gpu/1"),
        (["--render", "--page", "/no/such/page.md"], "--page=/no/such/page.md: cannot be written"),
    ],
)
def test_bad_input_is_one_line(
    words: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        program, "in_child", lambda *given, **more: {"failed": "torch sees no GPU here"}
    )
    assert program.main(words) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith(f"on_gpu: {said}")
    assert shown.err.count("\n") == 1


def test_rows_run_side_by_side(tmp_path: Path) -> None:
    """Each of two waits for the other's file, and both end."""
    wait = (
        "import pathlib, time\n{0}.touch()\nwhile not {1}.exists(): time.sleep(.05)\n"
        + printing({"x": 1}).replace("{", "{{").replace("}", "}}")
    )
    files = [f"pathlib.Path({str(tmp_path / name)!r})" for name in "ab"]
    rows = [a_row(wait.format(*files)), a_row(wait.format(*reversed(files)))]
    lines = run_part(1, rows, MACHINE, tmp_path / "gpu.jsonl", 60, side_by_side=2)
    assert [line["status"] for line in lines] == [MEASURED, MEASURED]
    assert len(read_lines(tmp_path / "gpu.jsonl")) == 2


def test_a_file_that_cannot_be_written_ends_the_part(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(program.ConfigError, match=r"--out=.*cannot be written"):
        run_part(1, [a_row(printing({"x": 1}))], MACHINE, tmp_path / "file" / "gpu.jsonl", 60)


@pytest.mark.parametrize("part", TITLES)
def test_rows_name_what_is_there(part: int) -> None:
    rows = rows_of(part)
    small = rows_of(part, is_small=True, is_fake=True)
    names = [row.name for row in rows]
    assert names == [row.name for row in small]
    assert len(set(names)) == len(names)
    assert all(row.limit_s <= LIMIT_S / 2 for row in rows)
    for row in (*rows, *small):
        assert row.question.endswith("?")
        assert importlib.util.find_spec(row.program[0]) is not None
        assert all((ROOT / word).is_file() for word in row.program if word.startswith("tests/"))


@pytest.mark.parametrize("is_small", [False, True], ids=["large", "small"])
def test_configurations_of_rows_are_composed(is_small: bool) -> None:
    found: list[RunSpec] = []
    for part in TITLES:
        for row in rows_of(part, is_small):
            if row.program[:2] == ("gems", "verify"):
                found.append(composed(list(row.program[3:])))
            if row.program[0] == "scripts.bench.rig" and row.program[1].endswith(
                (":trained", ":staged")
            ):
                words, ways, *_ = json.loads(row.program[2])
                found += [composed(words, own, "machine=cuda") for own in ways.values()]
    assert len(found) >= 9
    assert {spec.world_size for spec in found} >= {1, 2, 4}


def test_kernels_that_overlap_count_once() -> None:
    assert cases.union([(0, 4), (1, 3), (3, 6), (10, 11)]) == 7


def test_the_page_is_that_of_the_lines() -> None:
    lines = read_lines(LINES) if LINES.exists() else []
    assert page(lines) == PAGE.read_text(), (
        "python -m scripts.gpu --render [docs/gpu.jsonl] --page docs/gpu.md"
    )


def test_the_page_shows_figures_with_units_and_reasons() -> None:
    figures = [
        {
            "model": "unet",
            "side_px": 1024,
            "policy": "keep",
            "allocated_bytes": 2**21,
            "error": -0.25,
            "step_s": 0.01,
        },
        {"model": "unet", "side_px": 1024, "policy": "plan", "refused": "too | large"},
    ]
    rates = {"d2h_bytes_per_s": 5e10, "images_per_s": 1.0}
    text = page(
        [
            a_line(figures=[{"step_s": 9.0}]),
            a_line(figures=figures),
            a_line(row="profile", status=FAILED, reason="no"),
            a_line(status=NOT_MEASURED, reason="time was over"),
            a_line(row="gone", figures=[rates], commit="01-dirty"),
            a_line(is_fake=True, hardware={"gpu": "of tests"}),
        ]
    )
    assert "| model | side [px] | policy | allocated [MiB] | error | step [ms] | refused |" in text
    assert "| unet | 1024 | keep | 2.0 | -0.25 | 10.00 | |" in text
    assert "| unet | 1024 | plan | | | | too \\| large |" in text
    assert "Failed: no. `python -m x`, 2026-01-02 03:04 UTC, commit 0123456789ab." in text
    assert "time was over" not in text
    assert "| d2h [GB/s] | speed [images/s] |\n| --- | --- |\n| 50.0 | 1.00 |" in text
    assert "commit 01 with changes." in text
    assert "| its memory | 16.0 GiB |" in text
    assert "**Half the memory.**" in text and "Not measured on a GPU." in text
    assert "of tests" not in text and "9000" not in text


def test_lines_of_the_fake_device_make_no_figures() -> None:
    assert page([a_line(is_fake=True)]) == page([])


@pytest.mark.skipif(why_not() is not None, reason=why_not() or "")
@pytest.mark.timeout(400)  # the first one compiles the device
def test_a_row_runs_on_the_fake_device(tmp_path: Path) -> None:
    library()
    out = tmp_path / "gpu.jsonl"
    words = f"-m tests.fake_cuda -m scripts.gpu 1 --only machine --out {out}"
    argv = [sys.executable, *words.split()]
    ended = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    (line,) = read_lines(out)
    assert line["is_fake"] and line["status"] == MEASURED
    assert line["figures"][0]["torch"] and line["hardware"]["gpu"]
    assert "no figure of a GPU" in ended.stderr


class Wrapper:
    """scripts/on_gpu.sh with a stand-in for Python that lacks hydra until wheels are installed, and notes the calls."""

    def __init__(self, folder: Path, lacking: str) -> None:
        self.folder, self.notes = folder, folder / "notes"
        self.python = folder / "python"
        self.python.write_text(
            f'#!/bin/sh\ncase "$1 $2" in\n"- ") echo "{lacking}" ;;\n'
            f'"-m pip"|"-m scripts.gpu") echo "$@" >>{self.notes} ;;\n'
            f'*) exec {sys.executable} "$@" ;;\nesac\n'
        )
        self.python.chmod(0o755)

    def run(self, *words: str, **more: str) -> subprocess.CompletedProcess[str]:
        paths = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
        environment = (
            os.environ
            | {"PYTHON": str(self.python), "VENV": str(self.folder / "venv"), "PATH": paths}
            | more
        )
        argv = [str(ROOT / "scripts" / "on_gpu.sh"), *words]
        return subprocess.run(argv, env=environment, capture_output=True, text=True, timeout=60)


def test_the_shell_script_takes_a_python_that_has_all(tmp_path: Path) -> None:
    wrapper = Wrapper(tmp_path, "")
    assert wrapper.run("2", "--only", "copy rates").returncode == 0
    assert wrapper.notes.read_text() == "-m scripts.gpu 2 --only copy rates\n"
    assert not (tmp_path / "venv").exists()


def test_the_shell_script_makes_an_environment_of_wheels(tmp_path: Path) -> None:
    wrapper = Wrapper(tmp_path, "hydra")
    (tmp_path / "one.whl").write_text("")
    for _ in range(2):  # the second time it is there
        ended = wrapper.run("9", GEMS_WHEELS=str(tmp_path))
        assert (ended.returncode, ended.stderr.split(":")[:2]) == (2, ["on_gpu", " PART=9"])
    (called,) = wrapper.notes.read_text().splitlines()
    assert called.startswith(f"-m pip --python {tmp_path}/venv/bin/python install")
    assert "--no-index --no-deps" in called and called.endswith("one.whl")
    assert not (tmp_path / "venv" / "bin" / "pip").exists()


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({}, "GEMS_WHEELS=: missing here: hydra; name a folder of wheels, or install them"),
        (
            {"GEMS_WHEELS": "/no/such"},
            "GEMS_WHEELS=/no/such: there is no wheel in it; missing here: hydra",
        ),
        ({"PYTHON": "/no/such"}, "PYTHON=/no/such does not run: name a Python 3.11 or later"),
    ],
)
def test_the_shell_script_refuses_in_one_line(
    more: dict[str, str], said: str, tmp_path: Path
) -> None:
    ended = Wrapper(tmp_path, "hydra").run("1", **{"GEMS_WHEELS": "", **more})
    assert ended.returncode == 2
    assert ended.stderr.splitlines()[-1] == f"on_gpu.sh: {said}"
