"""Published step times: tables, and what the law says of the steps of larger runs."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from analysis.__main__ import main
from analysis.scaling.law import Row
from analysis.scaling.published import choose_series, read_table
from gems.errors import ConfigError
from scripts.bench.outside import TABLE, forecast_rows, summary

COLUMNS = "series,accelerators,global_batch,step_s\n"


def written(folder: Path, text: str) -> Path:
    path = folder / "t.csv"
    path.write_text(text)
    return path


def answers(
    capsys: pytest.CaptureFixture[str], *words: str, table: Path = TABLE
) -> list[dict[str, Any]]:
    assert main(["scaling", "--table", str(table), "--json", *words]) == 0
    found: list[dict[str, Any]] = json.loads(capsys.readouterr().out)
    return found


def test_the_answer_holds_the_rows_beyond_those_fitted_to(
    capsys: pytest.CaptureFixture[str],
) -> None:
    (found,) = answers(capsys, "--series", "paradl_resnet50_spatial", "--fit-to", "256")
    assert (found["series"], found["fit_to"], found["source"]) == (
        "paradl_resnet50_spatial",
        256,
        "published",
    )
    assert [point["accelerators"] for point in found["points"]] == [512, 1024]
    last = found["points"][-1]
    assert last["low_s"] < last["predicted_step_s"] < last["high_s"]
    assert abs(last["predicted_step_s"] / 0.278239 - 1) <= 0.05
    for words in (
        (),
        ("--fit-to", "1024"),
        ("--fit-to", "5000"),
    ):  # nothing is left to compare with
        (found,) = answers(capsys, "--series", "daint_deepcam", *words)
        assert [(point["accelerators"], point["measured_step_s"]) for point in found["points"]] == [
            (2048, None),
            (4096, None),
        ]


def test_a_series_of_one_batch_is_forecast_with_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = written(tmp_path, f"{COLUMNS}a,8,1024,1\na,16,1024,.6\na,32,1024,.4\n")
    (found,) = answers(capsys, table=table)
    assert [(each["accelerators"], each["global_batch"]) for each in found["points"]] == [
        (64, 1024),
        (128, 1024),
    ]
    assert (found["source"], found["note"]) == (
        "measured",
        "",
    )  # no row says where it was published


def test_series_without_a_row_to_fit_to_and_forecasts_of_no_use_are_named(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["scaling", "--table", str(TABLE), "--fit-to", "64"]) == 0
    said = capsys.readouterr()
    assert (
        "analysis: left out: daint_deepcam has no row of 64 accelerators or fewer"
        in said.err.splitlines()
    )
    assert any(
        line.startswith("a100_resnet50: too uncertain for 1024, 4320")
        for line in said.out.splitlines()
    )


def forecasts(table: Path) -> dict[str, float]:
    return summary(
        [
            row
            for name, measured in read_table(table).items()
            for row in forecast_rows(name, measured)
        ]
    )


def test_forecasts_are_as_good_as_docs_say() -> None:
    """docs/benchmarks/outside.md has the figures."""
    found = forecasts(TABLE)
    assert (
        found["median_error"] <= 0.03
        and found["mean_error"] <= 0.04
        and found["worst_error"] <= 0.15
        and found["share_inside"] >= 0.95
    )
    found = forecasts(TABLE.with_name("mlperf_scaling.csv"))
    assert (
        found["median_error"] <= 0.075
        and found["mean_error"] <= 0.11
        and found["share_inside"] >= 0.9
    )
    assert found["mean_error"] < found["mean_error_without_law"]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--series", "gaudi3"], "series=gaudi3: is not in the table"),
        (["--fit-to", "2"], "--fit-to=2: leaves no row to fit to; the smallest has 8"),
        (["a-run"], "is fitted in place of runs"),
    ],
)
def test_wrong_words_are_one_line(
    capsys: pytest.CaptureFixture[str], words: list[str], says: str
) -> None:
    assert main(["scaling", "--table", str(TABLE), *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert says in line


REFUSED = {
    "no column": ("series,accelerators\na,8\n", "has no column global_batch"),
    "semicolons": (
        "series;accelerators\n",
        "has no column series, accelerators, global_batch; separate columns by",
    ),
    "no time": (f"{COLUMNS}a,8,64,\n", "line 2: epoch_s is ''"),
    "words": (
        f"# a note\n{COLUMNS}a,8,64,1\na,x,64,1\n",
        "line 4: accelerators is 'x', and must be a number above 0",
    ),
    "below 0": (f"{COLUMNS}a,8,64,-1\n", "line 2: step_s is '-1', and must be a number above 0"),
    "infinite": (
        f"{COLUMNS}a,8,64,inf\n",
        "step_s is 'inf', and must be a number above 0, written as 1024 or 0.25",
    ),
    "parts": (f"{COLUMNS}a,8.5,64,1\n", "line 2: accelerators and global_batch must be whole"),
    "too many": (f"{COLUMNS}a,1e300,64,1\n", "line 2: accelerators is '1e300'"),
    "too short": (
        f"{COLUMNS}a,8,64,1e-200\n",
        "line 2: a step of 1e-200 s: allowed 1e-09 to 1e+09",
    ),
    "a long epoch": (
        "series,accelerators,global_batch,epoch_s,train_samples\na,8,64,1e300,64\n",
        "line 2: a step of 1e+300 s",
    ),
    "thousands": (f'{COLUMNS}a,8,"1,024",1\n', "global_batch is '1,024'"),
    "thousands without quotes": (
        f"{COLUMNS}a,8,1,024,1\n",
        "line 2 has no series, or more cells than there are",
    ),
    "no name": (f"{COLUMNS} ,8,64,1\n", "line 2 has no series"),
    "a short row": ("accelerators,global_batch,step_s,series\n8,64,1\n", "line 2 has no series"),
    "an open quote": (f'{COLUMNS}a,8,64,1\n"a,8,64,1\n', "cannot be read (unexpected end"),
    "no row": (COLUMNS, "has no row"),
    "empty": ("", "has no column"),
}


@pytest.mark.parametrize(("text", "says"), REFUSED.values(), ids=REFUSED)
def test_a_bad_table_is_one_line(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=f"^table=.*{re.escape(says)}") as refused:
        read_table(written(tmp_path, text))
    assert "\n" not in str(refused.value)


def test_a_missing_table_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.csv: cannot be read"):
        read_table(tmp_path / "none.csv")


def test_a_table_of_a_spreadsheet_is_read_with_names_in_any_case(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    text = (
        "Series, accelerators ,GLOBAL_BATCH, step_s\r\na100_resnet50, 8, 64,"
        " 1\r\nv100_resnet50,8,64,2,\r\n"
    )
    path.write_bytes(b"\xef\xbb\xbf" + text.encode())
    assert choose_series(read_table(path), "V100") == {"v100_resnet50": [Row(8, 64, 2.0)]}


def test_a_step_is_an_epoch_over_its_steps(tmp_path: Path) -> None:
    head = "series,accelerators,global_batch,epoch_s,train_samples\n"
    (row,) = read_table(written(tmp_path, f"{head}a,8,64,10,100\n"))["a"]
    assert row.step_s == 5.0
