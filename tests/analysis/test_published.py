"""Published step times: tables, MLPerf's logs of three versions, and what laws say of the steps of larger runs."""

from __future__ import annotations

import json
import math
import random
import re
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from analysis.__main__ import main
from analysis.scaling.forecasts import forecast_series
from analysis.scaling.published import choose_series, read_log, read_table
from analysis.scaling.step_time import Row, fit_steps, next_row
from gems.errors import ConfigError
from scripts.bench.outside import TABLE, forecast_rows, summary

V05 = """
0: :::MLPv0.5.0 resnet 1541635731.18 (train.py:40) run_start
0: :::MLPv0.5.0 resnet 1541635731.20 (train.py:52) input_batch_size: 100
:::MLPv0.5.0 resnet 1541635731.22 (train.py:53) preproc_num_train_examples: 1000
:::MLPv0.5.0 resnet 1541635731.24 (train.py:60) opt_name: "sgd"
:::MLPv0.5.0 resnet 1541635731.26 (train.py:61) model_hp_final_shape: some words
:::MLPv0.5.0 resnet 1541635740.00 (train.py:80) train_epoch: 0
:::MLPv0.5.0 resnet 1541635760.00 (train.py:80) train_epoch: 1
:::MLPv0.5.0 resnet 1541635778.00 (train.py:80) train_epoch: 2
:::MLPv0.5.0 resnet 1541635798.00 (train.py:80) train_epoch: 3
:::MLPv0.5.0 resnet 1541635820.00 (train.py:90) run_stop: {"success": true}
"""
V06 = """
:::MLL 1556733699.710 init_start: {"value": null, "metadata": {"file": "train.py", "lineno": 10}}
:::MLL 1556733699.711 global_batch_size: {"value": 100, "metadata": {"file": "train.py", "lineno": 11}}
:::MLL 1556733699.712 train_samples: {"value": 1000, "metadata": {"file": "train.py", "lineno": 12}}
:::MLL 1556733700.000 run_start: {"value": null, "metadata": {"file": "train.py", "lineno": 13}}
:::MLL 1556733700.000 block_start: {"value": null, "metadata": {"first_epoch_num": 1, "epoch_count": 4}}
:::MLL 1556733780.000 block_stop: {"value": null, "metadata": {"first_epoch_num": 1}}
:::MLL 1556733781.000 eval_accuracy: {"value": 0.5, "metadata": {"epoch_num": 4}}
:::MLL 1556733790.000 block_start: {"value": null, "metadata": {"first_epoch_num": 5, "epoch_count": 4}}
:::MLL 1556733870.000 block_stop: {"value": null, "metadata": {"first_epoch_num": 5}}
:::MLL 1556733875.000 run_stop: {"value": null, "metadata": {"status": "success"}}
"""


def v07(*times_ms: int) -> str:
    def line(key: str, time_ms: int, value: object = None, **metadata: object) -> str:
        document = {
            "namespace": "",
            "time_ms": time_ms,
            "event_type": "POINT_IN_TIME",
            "key": key,
            "value": value,
        }
        return ":::MLLOG " + json.dumps(
            {**document, "metadata": {"file": "train.py", "lineno": 7, **metadata}}
        )

    lines = [
        line("cache_clear", 0, True),
        line("global_batch_size", 1, 100),
        line("train_samples", 2, 1000),
    ]
    for number, time_ms in enumerate(times_ms):
        start_ms = 100_000 * (number + 1)
        lines += [
            line("epoch_start", start_ms, epoch_num=number),
            line("epoch_stop", start_ms + time_ms),
        ]
    return "\n".join(
        [*lines, "a line of the program's own", line("run_stop", 900_000, status="success")]
    )


def v06(*lines: str) -> str:
    """Lines without their time, one second apart unless one begins with its second."""
    timed = (
        (line.split(" ", 1) if line[0].isdigit() else (str(second), line))
        for second, line in enumerate(lines)
    )
    return "\n".join(f":::MLL {second} {line}" for second, line in timed)


def entry(second: float, key: str, value: object = None, **metadata: object) -> str:
    return f"{second} {key}: " + json.dumps({"value": value, "metadata": metadata})


HEAD = (entry(0, "global_batch_size", 100), entry(0, "num_train_examples", 1000))
OVERLAPPING = v06(
    *HEAD,
    entry(0, "block_start", first_epoch_num=4, epoch_count=4),
    entry(100, "block_stop", first_epoch_num=4),
    entry(100, "block_start", first_epoch_num=8, epoch_count=4),
    entry(179, "eval_accuracy", 0.2, epoch_num=8),
    entry(180, "block_start", first_epoch_num=12, epoch_count=4),
    entry(180, "block_stop", first_epoch_num=8),
    entry(258, "block_stop", first_epoch_num=12),
)
MANY_RANKS = v06(
    *HEAD,
    entry(1, "epoch_start", epoch_num=1),
    entry(2, "epoch_start", epoch_num=1),
    entry(21, "epoch_stop", epoch_num=2),
    entry(22, "epoch_stop", epoch_num=2),
)
EVALUATED = """
:::MLPv0.5.0 gnmt 10.0 (train.py:61) input_batch_size: 100
:::MLPv0.5.0 gnmt 11.0 (train.py:62) preproc_num_train_examples: 1000
:::MLPv0.5.0 gnmt 12.0 (train.py:63) opt_learning_rate : {"deferred": true, "value": 0}
:::MLPv0.5.0 gnmt 20.0 (train.py:80) train_epoch: 0
:::MLPv0.5.0 gnmt 40.0 (train.py:80) eval_start: 0
:::MLPv0.5.0 gnmt 70.0 (train.py:61) input_batch_size: 7
:::MLPv0.5.0 gnmt 80.0 (train.py:80) train_epoch: 1
:::MLPv0.5.0 gnmt 100.0 (train.py:80) eval_start: 1
"""


@pytest.mark.parametrize(
    "text",
    [V05, V06, v07(21_000, 20_000, 19_000), OVERLAPPING, MANY_RANKS, EVALUATED],
    ids=[
        "v0.5",
        "v0.6",
        "v0.7",
        "blocks that overlap",
        "lines of several ranks",
        "evaluation between epochs",
    ],
)
def test_the_logs_of_three_versions_tell_the_batch_and_the_median_step(
    tmp_path: Path, text: str
) -> None:
    path = tmp_path / "result_0.txt"
    path.write_text(text)
    assert read_log(path) == (100, pytest.approx(2.0))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (
            ':::MLLOG {"key": "epoch_start", "time_ms": 12',
            "line 1 is no entry of an MLPerf log: ':::MLLOG",
        ),
        (":::MLL 1556733699.71 epoch_start: no JSON", "line 1 is no entry"),
        (":::MLPv0.5.0 resnet yesterday", "line 1 is no entry"),
        (v07().replace("global_batch_size", "other"), "tells no global batch"),
        (V06.replace("block_stop", "other"), "has no whole epoch"),
        ("nothing of MLPerf's", "tells no global batch"),
    ],
)
def test_a_broken_log_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, says: str
) -> None:
    folder = result(tmp_path, text)
    assert main(["scaling", "--table", str(folder)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert (
        line.startswith(f"analysis: table={folder}/results/s8/resnet/result_0.txt: ")
        and says in line
    )


def result(folder: Path, *texts: str, system: str = "s8", nodes: int = 2) -> Path:
    place = folder / "results" / system / "resnet"
    place.mkdir(parents=True)
    for number, text in enumerate(texts):
        (place / f"result_{number}.txt").write_text(text)
    (folder / "systems").mkdir(exist_ok=True)
    facts = {
        "number_of_nodes": str(nodes),
        "accelerators_per_node": 4,
        "accelerator_model_name": "A100",
    }
    (folder / "systems" / f"{system}.json").write_text(json.dumps(facts))
    return folder


def test_a_folder_of_results_is_a_series_of_medians_over_runs(tmp_path: Path) -> None:
    result(tmp_path, v07(20_000), v07(30_000), v07(21_000))
    result(tmp_path, v07(10_000), system="s16", nodes=4)
    small, large = read_table(tmp_path)[f"resnet, {tmp_path.name}, A100"]
    assert (small.accelerators, small.nodes, small.global_batch, small.step_s) == (
        8,
        2,
        100,
        pytest.approx(2.1),
    )
    assert (large.accelerators, large.nodes) == (16, 4)
    assert small.where.endswith("results/s8/resnet, not verified by MLCommons")


@pytest.mark.parametrize(
    "facts",
    [
        '{"nodes": [{"num_nodes": 16, "accelerator": "Tesla V100", "num_accelerators": 8}]}',
        """entry: {"value": "\\"{'accelerator': 'Tesla V100', 'num_accelerators': '8', 'num_nodes': '16'}\\""}""",
        (
            '{"number_of_nodes": 16, "accelerators_per_node": "8", "accelerator_model_name": "Tesla'
            ' V100"}'
        ),
    ],
)
def test_systems_are_described_in_several_forms(tmp_path: Path, facts: str) -> None:
    result(tmp_path, v07(20_000))
    (tmp_path / "systems" / "s8.json").write_text(facts)
    ((name, (row,)),) = read_table(tmp_path).items()
    assert (name.split(", ")[-1], row.accelerators, row.nodes) == ("Tesla V100", 128, 16)


def test_results_without_a_step_are_left_out_with_a_note(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result(tmp_path, v07(20_000))
    result(tmp_path, v07().replace("global_batch_size", "other"), system="s16", nodes=4)
    result(tmp_path, v07(20_000), system="cpus", nodes=0)
    assert main(["scaling", "--table", str(tmp_path), "--json"]) == 0
    said = capsys.readouterr()
    assert [answer["fit_to"] for answer in json.loads(said.out)] == [8]
    first, second = said.err.splitlines()
    assert "left out" in first and "cpus.json: does not give the nodes and accelerators" in first
    assert "left out" in second and "s16/resnet/result_0.txt: tells no global batch" in second


def test_what_a_benchmark_is_counts_where_logs_do_not_say_it(tmp_path: Path) -> None:
    (resnet := tmp_path / "resnet").mkdir()
    (resnet / "result_0.txt").write_text(V06.replace("train_samples", "other"))
    assert read_log(resnet / "result_0.txt")[1] == pytest.approx(20.0 / 12812)  # ImageNet
    (bert := tmp_path / "bert").mkdir()  # which says how many samples the run has seen
    (bert / "result_0.txt").write_text(V06.replace('"value": 1000', '"value": 16000'))
    assert read_log(bert / "result_0.txt")[1] == pytest.approx(160.0 / 160)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("series,accelerators\na,8\n", "has no column global_batch"),
        (
            "series,accelerators,global_batch,step_s\na,8,64,\n",
            "line 2 has neither step_s nor epoch_s",
        ),
        (
            "# a note\nseries,accelerators,global_batch,step_s\na,8,64,1\na,x,64,1\n",
            "line 4: accelerators is 'x'",
        ),
        (
            "series,accelerators,global_batch,step_s\na,8,64,-1\n",
            "line 2: step_s is '-1', and must be a number above 0",
        ),
        (
            "series,accelerators,global_batch,step_s\na,8.5,64,1\n",
            "line 2: accelerators is '8.5', and must be a whole",
        ),
        ("series,accelerators,global_batch,step_s\n", "has no row"),
    ],
)
def test_a_bad_table_is_one_line(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "t.csv"
    path.write_text(text)
    with pytest.raises(ConfigError, match=f"^table=.*{says}"):
        read_table(path)


def test_a_table_of_a_spreadsheet_is_read(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_bytes(b"\xef\xbb\xbfseries,accelerators,global_batch,step_s\r\na,8,64,1\r\n")
    assert read_table(path) == {"a": [Row(8, 64, 1.0, None, "")]}


Times = Callable[[int, float], float]


def drawn_times(kind: str, rng: random.Random) -> Times:
    """Draw a law of a step: 2 to 25 % are fixed, and communication grows by up to 4 % a doubling."""
    fixed = rng.uniform(0.001, 0.0125)
    growth = rng.uniform(0.0, 0.04)
    share = rng.uniform(0.0, 0.2)
    if kind == "tree":
        return lambda ranks, samples: fixed + 0.05 * samples / 64 + 0.05 * growth * math.log2(ranks)
    if kind == "ring":
        return lambda ranks, samples: (
            fixed + 0.05 * samples / 64 + 0.05 * share * (1 - 1 / ranks) + 1e-5 * ranks
        )
    return lambda ranks, samples: 0.05 * (samples / 64) ** (0.7 + share) * ranks**growth


SCALING: dict[str, Callable[[int], int]] = {
    "weak": lambda ranks: 64 * ranks,
    "strong": lambda ranks: 2048,
    "weak, then strong": lambda ranks: 64 * min(ranks, 64),
}


@pytest.mark.parametrize(
    ("scaling", "max_median"), [("weak", 0.02), ("strong", 0.05), ("weak, then strong", 0.1)]
)
def test_series_of_all_reduces_are_foreseen(scaling: str, max_median: float) -> None:
    """Fitted to 8 to 64 ranks and asked for 128 and 256.

    A fall of samples that nothing announced is the hardest.
    """
    rng = random.Random(7)
    errors = []
    inside = []
    for kind in ("tree", "ring", "power") * 8:
        times = drawn_times(kind, rng)
        rows = [
            Row(ranks, batch, times(ranks, batch / ranks) * math.exp(rng.gauss(0.0, 0.01)))
            for ranks in (8, 16, 32, 64, 128, 256)
            for batch in [SCALING[scaling](ranks)]
        ]
        model = fit_steps(rows[:4])
        for row in rows[4:]:
            found = model.step_s(row)
            errors.append(abs(found.value / row.step_s - 1.0))
            inside.append(found.low <= row.step_s <= found.high)
    assert statistics.median(errors) <= max_median
    assert statistics.mean(inside) >= 0.9


def test_nodes_make_two_levels_of_the_network() -> None:
    rows = [
        Row(ranks, 32 * ranks, 0.1 + 0.01 * math.log2(nodes), nodes)
        for ranks, nodes in ((2, 1), (4, 1), (8, 1), (16, 2), (32, 4))
    ]
    found = fit_steps(rows).step_s(Row(64, 2048, 0.0, 8))
    assert found.low <= 0.13 <= found.high
    alone = fit_steps([Row(row.accelerators, row.global_batch, row.step_s) for row in rows]).step_s(
        Row(64, 2048, 0.0)
    )
    assert abs(found.value - 0.13) < abs(alone.value - 0.13)


def test_the_next_row_is_where_laws_differ_and_nothing_was_measured() -> None:
    rows = [Row(ranks, 64 * ranks, 0.1) for ranks in (8, 16, 32)]
    model = fit_steps(rows)
    following = next_row(model, rows)
    assert following.samples != 64 and following.accelerators in (32, 64)
    assert model.disagreement(following) > model.disagreement(Row(64, 4096, 0.0))


def answers(capsys: pytest.CaptureFixture[str], *words: str) -> list[dict[str, Any]]:
    assert main(["scaling", "--table", str(TABLE), "--json", *words]) == 0
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


WITH_NODES = "series,accelerators,nodes,global_batch,step_s\n"


def own_table(path: Path, rows: str) -> Path:
    path.write_text(WITH_NODES + rows)
    return path


def test_a_series_of_one_batch_is_forecast_with_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = own_table(tmp_path / "t.csv", "a,8,,1024,1\na,16,,1024,.6\na,32,,1024,.4\n")
    assert main(["scaling", "--table", str(table), "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)
    assert [(each["accelerators"], each["global_batch"]) for each in found["points"]] == [
        (64, 1024),
        (128, 1024),
    ]
    assert (found["source"], found["note"]) == (
        "measured",
        "",
    )  # no row says where it was published


def test_nodes_count_only_if_all_rows_have_them(tmp_path: Path) -> None:
    rows = "".join(
        f"a,{ranks},{{}},{32 * ranks},{1.1**doubling}\n"
        for doubling, ranks in enumerate((8, 16, 32, 64))
    )
    partly = own_table(tmp_path / "partly.csv", rows.format(1, 2, 4, ""))
    unknown = own_table(tmp_path / "unknown.csv", rows.format("", "", "", ""))
    assert forecast_series(read_table(partly), 32) == forecast_series(read_table(unknown), 32)


def test_nodes_that_grow_faster_than_ranks_make_no_sum_below_zero(tmp_path: Path) -> None:
    table = own_table(
        tmp_path / "t.csv", "a,1024,1,2048,.0357\na,2048,256,4096,.00612\na,4096,512,4096,.00828\n"
    )
    (found,) = forecast_series(read_table(table), None)
    assert all(
        0.0 <= each["low_s"] < each["predicted_step_s"] < each["high_s"] for each in found["points"]
    )


def test_series_without_a_row_to_fit_to_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["scaling", "--table", str(TABLE), "--fit-to", "64"]) == 0
    said = capsys.readouterr().err.splitlines()
    assert "analysis: left out: daint_deepcam has no row of 64 accelerators or fewer" in said


def forecasts(table: Path) -> list[dict[str, Any]]:
    return [
        row for name, measured in read_table(table).items() for row in forecast_rows(name, measured)
    ]


def test_forecasts_of_the_measured_series_hold() -> None:
    rows = forecasts(TABLE)
    found = summary(rows)
    assert found["median_error"] <= 0.05 and found["share_inside"] >= 0.8 and found["widest"] <= 0.4
    assert (
        sum(abs(row["error"]) > 0.15 for row in rows) <= 1
    )  # TPUs from 256 to 1024: see docs/benchmarks/outside.md


def test_intervals_hold_on_the_series_of_which_the_constants_are() -> None:
    found = summary(forecasts(TABLE.with_name("mlperf_scaling.csv")))
    assert found["median_error"] <= 0.1 and found["share_inside"] >= 0.8


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


WITHOUT_A_STEP = {
    "stop before start": (v07(-5_000), "has an epoch that does not end after its start"),
    "no time": (v07(0), "has an epoch that does not end after its start"),
    "negative count": (
        V06.replace('"epoch_count": 4', '"epoch_count": -4'),
        "has an epoch that does not end after",
    ),
    "count is NaN": (
        V06.replace('"epoch_count": 4', '"epoch_count": NaN'),
        "has an epoch that does not end after",
    ),
    "time is infinite": (
        v07(1_000).replace('"time_ms": 101000', '"time_ms": Infinity'),
        "has an epoch that does not",
    ),
    "time beyond floats": (
        v07(1_000).replace('"time_ms": 101000', f'"time_ms": {10**400}'),
        "is no entry",
    ),
    "a long time": (
        v07(1_000).replace('"time_ms": 101000', '"time_ms": 1e300'),
        "allowed 1e-09 to 1e+09 s",
    ),
    "half a sample": (
        v07(1_000).replace('"value": 100,', '"value": 0.5,'),
        "tells no global batch",
    ),
    "batch is NaN": (v07(1_000).replace('"value": 100,', '"value": NaN,'), "tells no global batch"),
    "infinite batch": (
        v07(1_000).replace('"value": 100,', '"value": Infinity,'),
        "tells no global batch",
    ),
    "samples beyond floats": (
        v07(1_000).replace('"value": 1000,', f'"value": {10**400},'),
        "tells no training samples",
    ),
    "a deep line": (f":::MLLOG {'[' * 100_000}", "line 1 is no entry"),
}


@pytest.mark.parametrize(("text", "says"), WITHOUT_A_STEP.values(), ids=WITHOUT_A_STEP)
def test_a_log_of_impossible_numbers_is_refused(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "result_0.txt"
    path.write_text(text)
    with pytest.raises(ConfigError, match=f"^table=.*result_0.txt: .*{re.escape(says)}"):
        read_log(path)


@pytest.mark.parametrize("number", ["9" * 5000, "9" * 8])
def test_a_system_of_impossibly_many_nodes_is_refused(tmp_path: Path, number: str) -> None:
    result(tmp_path, v07(20_000))
    (tmp_path / "systems" / "s8.json").write_text(
        f'{{"number_of_nodes": {number}, "accelerators_per_node": 8}}'
    )
    with pytest.raises(ConfigError, match="does not give the nodes and accelerators"):
        read_table(tmp_path)


RESTARTED = v06(
    *HEAD,
    entry(0, "run_start"),
    entry(1, "epoch_start", epoch_num=1),
    entry(400, "run_start"),
    entry(401, "epoch_start", epoch_num=1),
    entry(421, "epoch_stop", epoch_num=1),
)
RESTARTED_V05 = EVALUATED[: EVALUATED.index(":::MLPv0.5.0 gnmt 70.0")].replace(
    ":::MLPv0.5.0 gnmt 20.0 (train.py:80) train_epoch: 0",
    ":::MLPv0.5.0 gnmt 13.0 (train.py:80) train_epoch: 0\n:::MLPv0.5.0 gnmt 19.0 (train.py:40)"
    " run_start\n:::MLPv0.5.0 gnmt 20.0 (train.py:80) train_epoch: 0",
)


@pytest.mark.parametrize("text", [RESTARTED, RESTARTED_V05], ids=["v0.6", "v0.5"])
def test_an_epoch_that_a_restart_cut_off_does_not_count(tmp_path: Path, text: str) -> None:
    path = tmp_path / "result_0.txt"
    path.write_text(text)
    assert read_log(path) == (100, pytest.approx(2.0))


@pytest.mark.parametrize(
    ("inside", "table"),
    [
        (".", "results"),
        ("results", "."),
        ("results", "s8"),
        ("results/s8", ".."),
        ("results/s8/resnet", "."),
    ],
)
def test_results_are_read_from_inside_their_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, inside: str, table: str
) -> None:
    result(tmp_path, v07(20_000))
    monkeypatch.chdir(tmp_path / inside)
    ((name, (row,)),) = read_table(Path(table)).items()
    assert (name, row.nodes) == (f"resnet, {tmp_path.name}, A100", 2)


def test_a_result_outside_of_results_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "rglob", lambda *_: [Path("/resnet/result_0.txt")])
    with pytest.raises(ConfigError, match="table=/resnet: is not results/SYSTEM/BENCHMARK"):
        read_table(Path("/"))


COLUMNS = "series,accelerators,global_batch,step_s\n"
REFUSED = {
    "shorter than a step": (
        f"{COLUMNS}a,8,64,1e-200\n",
        "line 2: step_s is '1e-200', and must be from 1e-09 to 1e+09",
    ),
    "longer than a step": (
        f"{COLUMNS}a,8,64,1e200\n",
        "line 2: step_s is '1e200', and must be from 1e-09 to 1e+09",
    ),
    "a long epoch": (
        "series,accelerators,global_batch,epoch_s,train_samples\na,8,64,1e300,64\n",
        "line 2: an epoch of 1e+300 s",
    ),
    "a sample of nothing": (
        "series,accelerators,global_batch,epoch_s,train_samples\na,8,64,1,5e-324\n",
        "train_samples is '5e-324', and",
    ),
    "too many": (
        f"{COLUMNS}a,1e300,64,1\n",
        "line 2: accelerators is '1e300', and must be a whole number of at most",
    ),
    "a long cell": (
        f"{COLUMNS}a,8,64,{'1' * 140_000}\n",
        "line 2 is no line of a CSV (field larger than",
    ),
    "an open quote": (
        f'# note\n{COLUMNS}a,8,64,1\n"a,8,64,1\n',
        "line 4 is no line of a CSV (unexpected end",
    ),
    "after a cell of two lines": (
        f'{COLUMNS}# note\n"a\nb",8,64,1\nc,8,64,x\n',
        "line 5: step_s is 'x'",
    ),
    "infinite": (
        f"{COLUMNS}a,8,64,inf\n",
        "step_s is 'inf', and must be a number above 0, written as 1024 or 0.25",
    ),
    "thousands": (
        f'{COLUMNS}a,8,"1,024",1\n',
        "global_batch is '1,024', and must be a number above 0, written as",
    ),
    "thousands without quotes": (
        f"{COLUMNS}a,8,1,024,1\n",
        "line 2 has more cells than there are columns",
    ),
    "semicolons": (
        "series;accelerators\n",
        "accelerators, global_batch; it has series;accelerators; separate columns by commas",
    ),
    "empty": ("", "is empty"),
    "a short row": ("accelerators,global_batch,step_s,series\n8,64,1\n", "line 2 has no series"),
    "no name": (f"{COLUMNS} ,8,64,1\n", "line 2 has no series"),
}


@pytest.mark.parametrize(("text", "says"), REFUSED.values(), ids=REFUSED)
def test_a_table_of_impossible_rows_says_how_it_is_written(
    tmp_path: Path, text: str, says: str
) -> None:
    path = tmp_path / "t.csv"
    path.write_text(text)
    with pytest.raises(ConfigError, match=re.escape(says)) as refused:
        read_table(path)
    assert "\n" not in str(refused.value)


def test_a_missing_table_is_named_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as refused:
        read_table(tmp_path / "none.csv")
    assert (
        str(refused.value)
        == f"table={tmp_path}/none.csv: cannot be read (No such file or directory)"
    )


def test_names_of_columns_and_series_are_read_in_any_case(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text(
        "Series, accelerators ,GLOBAL_BATCH, step_s\na100_resnet50, 8, 64,"
        " 1\nv100_resnet50,8,64,2,\n"
    )
    assert choose_series(read_table(path), "V100") == {"v100_resnet50": [Row(8, 64, 2.0)]}
