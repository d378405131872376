"""Files and words that the hybrid planner is given: what they mean, and bad ones in one line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gems.errors import ConfigError
from gems.search.hybrid.epochs import EpochTable, NoiseScale, fit_noise_scale
from gems.search.hybrid.inputs import (
    epochs_json,
    published_series,
    read_efficiency,
    read_epochs,
    read_speedups,
)
from gems.search.hybrid.quantity import Quantity

PUBLISHED_EPOCHS = Path(__file__).parents[3] / "scripts/data/epochs_to_target.csv"
HEAD = "schedule,source,replicas,partitions,images_per_step,step_median_s\n"


def written(folder: Path, text: str, name: str = "given.csv") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def test_epochs_from_a_csv(tmp_path: Path) -> None:
    path = written(tmp_path, "global_batch,epochs,low,high\n64,2,,\n256,5,4,6\n128,3,,\n128,4,,\n")
    law = read_epochs(path).law
    assert isinstance(law, EpochTable) and not law.beyond
    assert law.global_batches == (64, 128, 256)
    assert law.numbers == (Quantity.exact(2.0), Quantity(3.5, 3.0, 4.0), Quantity(5.0, 4.0, 6.0))


def test_a_byte_order_mark_is_no_part_of_a_file(tmp_path: Path) -> None:
    path = written(tmp_path, "\ufeffglobal_batch,epochs\n64,2\n")
    assert read_epochs(path).law.epochs(64) == 2.0
    path = written(tmp_path, '\ufeff{"e_min": 1, "b_crit": 2}', "a.json")
    assert read_epochs(path).law.epochs(2) == 2.0


def test_epochs_from_json_as_table_and_as_noise_scale(tmp_path: Path) -> None:
    runs = [
        {"global_batch": batch, "epochs": 2.0 * (1 + batch / 100)} for batch in (50, 100, 200, 400)
    ]
    document = {"runs": runs, "samples_per_epoch": 5000, "beyond": True}
    found = read_epochs(written(tmp_path, json.dumps(document), "a.json"))
    assert isinstance(found.law, EpochTable) and found.law.beyond and found.num_samples == 5000
    found = read_epochs(
        written(tmp_path, json.dumps({**document, "model": "noise_scale"}), "b.json")
    )
    assert isinstance(found.law, NoiseScale) and found.fit is not None
    assert found.law.critical_batch.value == pytest.approx(
        100
    ) and found.law.least_epochs.value == pytest.approx(2)
    shown = epochs_json(found)
    assert shown["b_crit"] == pytest.approx(100) and [
        each["residual"] for each in shown["runs"]
    ] == pytest.approx([0] * 4)
    given = {"e_min": 2, "b_crit": 100, "b_crit_low": 50, "b_crit_high": 150}
    law = read_epochs(written(tmp_path, json.dumps(given), "c.json")).law
    assert isinstance(law, NoiseScale) and law.critical_batch == Quantity(100.0, 50.0, 150.0)
    assert epochs_json(read_epochs(tmp_path / "c.json"))["b_crit_high"] == 150


@pytest.mark.parametrize(
    ("name", "text", "why"),
    [
        ("a.csv", "", "must hold rows"),
        ("a.csv", "global_batch,epochs\n", "must hold rows"),
        ("a.csv", "batch,epochs\n1,2\n", "column global_batch holds nothing"),
        ("a.csv", "global_batch,epochs\n1,many\n", "column epochs holds 'many'"),
        ("a.csv", "global_batch,epochs\n1,-2\n", "number above 0"),
        ("a.csv", "global_batch,epochs\n1,nan\n", "number above 0"),
        ("a.csv", "global_batch,epochs,low,high\n1,2,3,4\n", "within its interval"),
        ("a.csv", "global_batch,epochs,low,high\n1,2,1,\n", "column high holds nothing"),
        ("a.csv", 'global_batch,epochs\n"1,2\n', "cannot be read"),
        ("a.json", "[1]", "one JSON object"),
        ("a.json", "{", "cannot be read"),
        ("a.json", '{"runs": 3}', "must hold rows"),
        ("a.json", '{"runs": [3]}', "must hold rows"),
        ("a.json", '{"runs": [{"global_batch": 1, "epochs": true}]}', "column epochs holds True"),
        ("a.json", '{"runs": [{"global_batch": 1, "epochs": 1e999}]}', "number above 0"),
        ("a.json", '{"model": "magic", "runs": []}', "model magic"),
        (
            "a.json",
            '{"model": "noise_scale", "runs": [{"global_batch": 1, "epochs": 1}]}',
            "two global batches",
        ),
        ("a.json", '{"e_min": 1}', "column b_crit holds nothing"),
        ("a.json", '{"samples_per_epoch": 1.5, "e_min": 1, "b_crit": 2}', "whole number"),
        (
            "a.json",
            '{"samples_per_epoch": 0, "e_min": 1, "b_crit": 2}',
            "column samples_per_epoch holds 0",
        ),
    ],
)
def test_bad_epochs_are_one_line(tmp_path: Path, name: str, text: str, why: str) -> None:
    with pytest.raises(ConfigError) as refused:
        read_epochs(written(tmp_path, text, name))
    assert why in str(refused.value) and "\n" not in str(refused.value)


def test_a_missing_file_and_one_of_bytes_are_one_line(tmp_path: Path) -> None:
    for path in (tmp_path / "none.json", tmp_path, written(tmp_path, "x", "b.csv")):
        if path.name == "b.csv":
            path.write_bytes(b"\xff\xfe\x00")
        with pytest.raises(ConfigError, match="cannot be read"):
            read_epochs(path)


def test_efficiency_from_a_scaling_study(tmp_path: Path) -> None:
    rows = [
        "1f1b,measured,1,2,16,1.0",
        "1f1b,measured,2,2,32,1.25",
        "1f1b,simulated,2,2,32,9.0",
        "1f1b,simulated,4,2,64,2.0",
        "1f1b,emulated,1,4,16,1.0",
        "1f1b,emulated,2,4,32,1.6",
    ]
    table, source = read_efficiency(written(tmp_path, HEAD + "\n".join(rows) + "\n"))
    assert source == "simulated", "the least real of what counts"
    assert {
        ways: {n: each.value for n, each in found.items()}
        for ways, found in table.by_degree.items()
    } == {2: {1: 1.0, 2: 0.8, 4: 0.5}, 4: {1: 1.0, 2: 0.625}}


def test_efficiency_of_the_runs_own_schedule_and_from_json(tmp_path: Path) -> None:
    names = HEAD.strip().split(",")
    lines = [
        ("gpipe, pipelines of 2", 1, 4, 1.0),
        ("gpipe, pipelines of 2", 2, 8, 2.0),
        ("1f1b", 1, 4, 1.0),
        ("1f1b", 2, 8, 1.1),
    ]
    rows = [
        dict(zip(names, (line, "simulated", n, 2, images, step), strict=True))
        for line, n, images, step in lines
    ]
    path = written(tmp_path, json.dumps({"points": rows}), "scaling.json")
    assert read_efficiency(path, "gpipe")[0](2, 2) == 0.5
    assert read_efficiency(path, "1f1b")[0](2, 2) == pytest.approx(1 / 1.1)
    with pytest.raises(ConfigError, match="must hold chimera once"):
        read_efficiency(path, "chimera")


def test_plain_efficiency(tmp_path: Path) -> None:
    table, source = read_efficiency(
        written(tmp_path, "workers,efficiency,low,high,ways\n1,1,,,\n8,.9,.85,.95,\n8,.8,,,4\n")
    )
    assert (
        source == "given"
        and table.by_degree[1][8] == Quantity(0.9, 0.85, 0.95)
        and table(8, 4) == 0.8
    )


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("workers,efficiency\n1.5,1\n", "whole number"),
        ("workers,efficiency\n1,0\n", "number above 0"),
        (HEAD + "1f1b,measured,1,2,16,1.0\n", "two numbers of replicas"),
        (HEAD + "1f1b,measured,1,2,16,1.0\n1f1b,measured,2,2,16,1.0\n", "weak scaling"),
        (HEAD + "1f1b,guessed,1,2,16,1.0\n1f1b,measured,2,2,32,1.0\n", "source guessed"),
        (HEAD + "1f1b,measured,1,2,16,none\n1f1b,measured,2,2,32,1.0\n", "step_median_s"),
        (
            HEAD + '"capped, cap 1",measured,1,2,16,1\n"capped, cap 2",measured,2,2,32,1\n',
            "must hold capped once",
        ),
        ("a,b\n1,2\n", "column partitions holds nothing"),
    ],
)
def test_bad_efficiencies_are_one_line(tmp_path: Path, text: str, why: str) -> None:
    with pytest.raises(ConfigError) as refused:
        read_efficiency(written(tmp_path, text), "capped")
    assert why in str(refused.value) and "\n" not in str(refused.value)


def test_speedups() -> None:
    assert read_speedups("2:1.32,4:1.5:1.9:2") == {
        2: Quantity.exact(1.32),
        4: Quantity(1.9, 1.5, 2.0),
    }


@pytest.mark.parametrize(
    "text",
    [
        "",
        "2",
        "2:",
        "2:x",
        "1:1",
        "2:0",
        "2:-1",
        "2:1,2:1",
        "2:2:1",
        "2:2:1:3",
        "2:nan",
        "2:inf",
        "2.5:1",
        "9999999:1",
    ],
)
def test_bad_speedups_are_one_line(text: str) -> None:
    with pytest.raises(ConfigError, match="--speedup"):
        read_speedups(text)


def test_a_series_of_published_epochs_has_a_noise_scale(tmp_path: Path) -> None:
    found = read_epochs(Path(f"{PUBLISHED_EPOCHS}:gnmt_v0.6_v0.7"))
    assert found.fit is not None and len(found.fit.runs) == 5
    assert found.law.epochs(8192) == pytest.approx(6.2, rel=0.02)
    own = written(
        tmp_path,
        "# a note\nseries,global_batch,epochs\na,64,4\na,128,5\nb,64,1\nb,256,2\n",
        "my:own.csv",
    )
    assert read_epochs(Path(f"{own}:b")).law.epochs(160) == pytest.approx(1.5)


@pytest.mark.parametrize(
    ("name", "says"),
    [("", "has the series a; choose one: --epochs .*:a"), (":c", "has the series a; choose one")],
)
def test_a_series_must_be_chosen(tmp_path: Path, name: str, says: str) -> None:
    path = written(tmp_path, "series,global_batch,epochs\na,64,4\na,128,5\n", "e.csv")
    with pytest.raises(ConfigError, match=says):
        read_epochs(Path(f"{path}{name}"))
    plain = written(tmp_path, "global_batch,epochs\n64,4\n128,5\n", "p.csv")
    with pytest.raises(ConfigError, match="has no column series to choose c from"):
        read_epochs(Path(f"{plain}:c"))


@pytest.mark.parametrize("name", published_series(PUBLISHED_EPOCHS))
def test_the_middle_of_a_published_series_follows_from_its_ends(name: str) -> None:
    """Within 5 % for GNMT and ResNet-50; docs/benchmarks/outside.md has all points."""
    runs = published_series(PUBLISHED_EPOCHS)[name]
    law = fit_noise_scale([runs[0], runs[-1]]).law
    batch, epochs = runs[len(runs) // 2]
    assert law.epochs(batch) == pytest.approx(epochs, rel=0.05 if name != "deepcam" else 0.11)
