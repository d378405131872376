"""The section of a proposal: its figures, what is asked for, what is missing, and how it prints."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from analysis.__main__ import main
from analysis.report.proposal import proposal_section
from analysis.scaling.proposal import Ask, propose
from gems.errors import ConfigError
from gems.trace import Trace, write_trace

Simulate = Callable[..., Trace]
RANKS = (2, 4, 8)
NS = 1_000_000_000


class Study:
    """Writes runs of a pipeline of two ranks and its replicas, whose steps take planted times."""

    def __init__(self, simulate: Simulate, folder: Path) -> None:
        self.simulate = simulate
        self.folder = folder

    def run(self, ranks: int, images: int, steps_s: Iterable[float], **fields: Any) -> Path:
        """Write a run with a warm-up step of 9 s before its steps."""
        times_ns = np.array([9.0, *steps_s]) * NS
        trace = self.simulate(
            **{"source": "measured", "partitions": 2, "micro_batches": 2} | fields,
            replicas=ranks // 2,
            steps=len(times_ns),
            images_per_step=images,
        )
        trace.steps["end_ns"] = np.cumsum(times_ns)
        trace.steps["start_ns"] = np.cumsum(times_ns) - times_ns
        trace.attributes |= {"hostnames": ["node1", "node2"], "versions": ["gems 0.1"]}
        path = self.folder / f"{trace.source}-{ranks}-{images}-{len(list(self.folder.iterdir()))}"
        write_trace(path / "trace.h5", trace)
        return path

    def strong(self, **fields: Any) -> list[Path]:
        """Write steps of 16 images: 4, 2.5 and 2 s."""
        return [
            self.run(ranks, 16, [s] * 7, **fields)
            for ranks, s in zip(RANKS, (4.0, 2.5, 2.0), strict=True)
        ]

    def weak(self, **fields: Any) -> list[Path]:
        """Write steps of 8 images a rank: 4, 5 and 8 s; the first is that of the strong series."""
        return [
            self.run(ranks, 8 * ranks, [s] * 7, **fields)
            for ranks, s in zip(RANKS, (4.0, 5.0, 8.0), strict=True)
        ]


@pytest.fixture
def study(simulate: Simulate, tmp_path: Path) -> Study:
    folder = tmp_path / "runs"
    folder.mkdir()
    return Study(simulate, folder)


def test_the_section_and_its_figures(
    study: Study, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = [*study.strong(), *study.weak()]
    out = tmp_path / "page.html"
    words = ["--proposal", "--num-steps", "900", "--num-runs", "3", "--gpus", "4"]
    assert main(["report", *map(str, runs), *words, "--out", str(out), "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    page = out.read_text()
    section = page[page.index('id="proposal"') :].partition("</section>")[0]
    assert section.count("data:image/svg+xml") == 2 and "Asked for: 7.50 GPU-hours" in section
    assert "#proposal { break-after: page;" in page and "@page { size: A4;" in page
    assert answer["csv"] == str(tmp_path / "proposal.csv")
    with (tmp_path / "proposal.csv").open() as file:
        rows = list(csv.DictReader(file))
    keys = [
        "scaling",
        "source",
        "ranks",
        "images_per_step",
        "num_runs",
        "num_steps",
        "num_warmup_steps",
    ]
    assert [" ".join(row[key] for key in keys) for row in rows] == [
        "strong measured 2 16 2 14 1",
        "strong measured 4 16 1 7 1",
        "strong measured 8 16 1 7 1",
        "weak measured 2 16 2 14 1",
        "weak measured 4 32 1 7 1",
        "weak measured 8 64 1 7 1",
    ]

    def column(name: str) -> list[float]:
        return [float(row[name]) for row in rows]

    assert column("parallel_efficiency") == pytest.approx([1, 0.8, 0.5, 1, 0.8, 0.5])
    assert column("step_median_s") == pytest.approx([4, 2.5, 2, 4, 5, 8])
    hours = [
        2700 * ranks * step / 3600
        for ranks, step in zip((2, 4, 8) * 2, column("step_median_s"), strict=True)
    ]
    assert column("gpu_hours") == pytest.approx(hours)
    assert [row["is_asked"] for row in rows].index("True") == 1 and [
        row["is_asked"] for row in rows
    ].count("True") == 1
    assert answer["gpu_hours"]["value"] == pytest.approx(7.5)
    assert (
        answer["request"].startswith("7.50 GPU-hours") and "measured, median" in answer["request"]
    )
    assert (
        "1 warm-up step" in answer["method"]
        and "on 2 hosts" in answer["method"]
        and not answer["missing"]
    )


def test_the_interval_of_the_step_is_that_of_the_hours(study: Study) -> None:
    runs = [study.run(2, 16, [4.0] * 8), study.run(4, 16, [2.0, 2.2, 2.1, 2.4, 2.0, 2.3, 2.2, 2.1])]
    found = propose(runs, Ask(num_steps=900))
    (row,) = [row for row in found.rows if row["ranks"] == 4]
    assert (found.gpu_hours.low, found.gpu_hours.high) == pytest.approx(
        (row["step_low_s"], row["step_high_s"])
    )
    assert found.gpu_hours.value == pytest.approx(2.15)
    assert 2.0 <= found.gpu_hours.low < found.gpu_hours.value < found.gpu_hours.high <= 2.4


def test_without_steps_the_study_is_asked_for_again(study: Study) -> None:
    found = propose([*study.strong(), *study.weak()], Ask())
    own = [
        7 * ranks * s / 3600
        for ranks, s in zip(RANKS * 2, (4.0, 2.5, 2.0, 4.0, 5.0, 8.0), strict=True)
    ]
    assert found.gpu_hours.value == pytest.approx(sum(own))  # the base of both series was run twice
    assert "6 runs of this study once more" in found.request


def test_a_kind_without_a_series_names_the_run_that_is_missing(
    study: Study, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--proposal", "--out", str(tmp_path / "page.html")]
    assert main(["report", *map(str, study.strong()), *words]) == 0
    said = capsys.readouterr().err
    assert (
        "No weak scaling in these runs. Run gems_master" in said
        and "on 4 ranks with 32 images a step" in said
    )
    more = [*study.folder.iterdir(), study.run(4, 32, [5.0] * 7)]  # what it named
    assert not propose(more, Ask()).missing


def test_predictions_are_marked(study: Study) -> None:
    found = propose([*study.strong(source="simulated"), *study.weak()], Ask(num_steps=10))
    assert "measured" in found.request  # what ran comes first
    assert "All figures: SIMULATED, a prediction and measured." in proposal_section(found)
    predicted = propose(study.strong(source="simulated"), Ask(num_steps=10))
    assert "predicted by simulation" in predicted.request
    assert all(row["source"] == "simulated" for row in predicted.rows)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--proposal", "--num-steps", "5", "--gpus", "3"], "gpus=3: allowed: 2, 4, 8"),
        (["--proposal", "--num-runs", "3"], "num-runs=3"),
        (["--proposal", "--num-steps", "0"], "--num-steps=0: must be a whole number from 1"),
        (["--num-steps", "5"], "num-steps=5: is of a proposal alone"),
    ],
)
def test_what_makes_no_sense_is_refused(
    words: list[str], says: str, study: Study, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", *map(str, study.strong()), *words]) == 2
    assert says in capsys.readouterr().err


def test_runs_without_a_series_are_refused(study: Study) -> None:
    runs = [study.run(2, 16, [4.0] * 7), study.run(4, 24, [4.0] * 7)]
    with pytest.raises(ConfigError, match="on 4 ranks with 16 images a step"):
        propose(runs, Ask())
