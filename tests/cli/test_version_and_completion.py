"""--version, --completion SHELL, and the label of each run of a sweep."""

from __future__ import annotations

import shlex
import subprocess
from pathlib import Path

import pytest

from analysis.__main__ import main as analysis
from gems import __version__
from gems.__main__ import VERBS
from gems.cli.framework import main
from jobs.__main__ import VERBS as JOBS

pytestmark = pytest.mark.cases


def test_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main("gems", VERBS, ["--version"]),
        main("jobs", JOBS, ["--version"]),
        analysis(["--version"]),
    ) == (0, 0, 0)
    assert capsys.readouterr().out.splitlines() == [
        f"{name} {__version__}" for name in ("gems", "gems-jobs", "gems-analysis")
    ]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("gems sim", {"simulate"}),
        ("gems simulate schedule=gp", {"gpipe"}),
        ("gems simulate parallel.micro_batch_s", {"parallel.micro_batch_size="}),
        ("gems evaluate --we", {"--weights"}),
    ],
)
def test_bash_completes(capsys: pytest.CaptureFixture[str], line: str, expected: set[str]) -> None:
    assert main("gems", VERBS, ["--completion", "bash"]) == 0
    words = line.split()
    program = (
        f"{capsys.readouterr().out}\nCOMP_LINE={shlex.quote(line)}; COMP_POINT={len(line)}\n"
        f"COMP_CWORD={len(words) - 1}; "
        f'COMP_WORDS=({shlex.join(words)}); _gems; echo "${{COMPREPLY[@]}}"'
    )
    ended = subprocess.run(["bash", "-c", program], capture_output=True, text=True, timeout=20)
    assert (set(ended.stdout.split()), ended.stderr) == (expected, "")


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells(capsys: pytest.CaptureFixture[str], shell: str) -> None:
    assert main("jobs", JOBS, [f"--completion={shell}"]) == analysis(["--completion", shell]) == 0
    assert "gems-jobs" in capsys.readouterr().out
    assert main("gems", VERBS, ["--completion", "csh"]) == 2
    assert "--completion=csh: allowed: bash, zsh, fish" in capsys.readouterr().err


def test_runs_of_a_sweep_have_labels(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["schedule", "-m", "schedule=gpipe,1f1b", "data=synthetic"]
    assert main("gems", VERBS, words) == 0
    assert [line for line in capsys.readouterr().out.splitlines() if line.startswith("==")] == [
        "== schedule=gpipe data=synthetic ==",
        "== schedule=1f1b data=synthetic ==",
    ]
