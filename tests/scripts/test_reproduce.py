"""scripts.reproduce: the papers' studies by one command each."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from scripts.reproduce import mcap


def run(*words: str) -> str:
    ended = subprocess.run([sys.executable, "-m", *words], capture_output=True, text=True, timeout=200)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


@pytest.mark.parametrize(("script", "verb"), [("vdnn", "vdnn"), ("pal", "hybrid")])
def test_a_script_prints_what_its_verb_prints(script: str, verb: str) -> None:
    assert run(f"scripts.reproduce.{script}") == run("analysis", verb) != ""


def test_the_scaling_of_gems_is_a_study(tmp_path: Path) -> None:
    shown = run("scripts.reproduce.gems", f"runs_dir={tmp_path}", "--dry-run", "model.depth=20")
    assert "model=resnet1001_v2" in shown and "parallel.replicas=128" in shown


def test_parameters_are_set_beside_the_paper_s(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = {"exact": 30, "mcap": 20, "torchgpipe_size": 10, "torchgpipe_time": 16}
    rows = [{"family": "vgg", "ranks": 4, "method": name, "num_parameters": size} for name, size in sizes.items()]
    monkeypatch.setattr(mcap, "largest_models", lambda: rows)
    assert mcap.main([]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split() for line in lines[2:]] == [
        ["vgg", "4", "mcap", "torchgpipe_size", "2.00", "1.55"],
        ["vgg", "4", "mcap", "torchgpipe_time", "1.25", "1.55"],
        ["vgg", "4", "exact", "torchgpipe_size", "3.00", "-"],
        ["vgg", "4", "exact", "torchgpipe_time", "1.88", "-"],
    ]
