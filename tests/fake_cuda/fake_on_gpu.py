"""The three parts of scripts/on_gpu.sh, whole, with small sizes.

Each row has figures or says why not.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from scripts.gpu.parts import TITLES, rows_of
from scripts.gpu.record import read_lines
from scripts.gpu.row import MEASURED, NOT_MEASURED, TIME_OVER

ROOT = Path(__file__).resolve().parent.parent.parent
# what only a GPU, or its MPI, can answer
ONLY_ON_A_GPU = {"races", "idle share"}
# far above what a part takes on two cores: only a part that hangs reaches it
PATIENCE_S = 1500


@pytest.mark.timeout(PATIENCE_S + 60)
@pytest.mark.parametrize("part", TITLES)
def test_a_part_fills_every_row(part: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHON", sys.executable)
    out = tmp_path / "gpu.jsonl"
    ended = subprocess.run(
        [
            *(ROOT / "scripts" / "on_gpu.sh", str(part)),
            *("--out", out, "--limit-s", str(PATIENCE_S)),
        ],
        capture_output=True,
        text=True,
    )
    print(ended.stderr)
    assert ended.returncode == 0, ended.stderr
    lines = read_lines(out)
    assert [line["row"] for line in lines] == [row.name for row in rows_of(part)]
    assert all(line["is_fake"] for line in lines)
    without = {line["row"]: line["reason"] for line in lines if line["status"] == NOT_MEASURED}
    assert set(without) <= ONLY_ON_A_GPU and TIME_OVER not in without.values()
    assert all(line["figures"] for line in lines if line["status"] == MEASURED)
