"""Published pipelines: the table's errors, cuts, the runtime's variants, and one row to calibrate."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from analysis.__main__ import main
from analysis.outside.networks import boundaries_of
from analysis.outside.pipeline import Pipeline, direct_bytes
from analysis.outside.streams import STREAMS, received_bytes
from analysis.outside.table import Row, read_rows
from gems.profile import LayerProfile, ModelProfile
from gems.profile.model_profile import Saved
from gems.schedule.costs import Network
from gems.utils.units import MIB

TABLE = Path(__file__).parents[2] / "scripts" / "data" / "pipelines_of_others.csv"
HEAD = "id,model,image_px,batch,micro_batches,partitions,accelerator,images_per_s,memory_gib,note\n"
TINY = '"U-Net (1 convs a block, 4 channels, depth 1)",32'
ROW = Row("1", "", "", "", 32, 4, 8, 8, 1.0, None, None, None, "except_last")


def refusal(capsys: pytest.CaptureFixture[str], path: Path, row: str = "1") -> str:
    assert main(["outside", "--table", str(path), "--calibrate", row]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line


@pytest.mark.parametrize(
    ("text", "row", "says"),
    [
        ("id,model,image_px,partition\n", "1", "has an unknown column 'partition'"),
        ("id,model,image_px\n", "1", "has no column partitions"),
        (f"{HEAD}1,{TINY},x,2,1,,10,,\n", "1", "row 1: batch is 'x', and must be a whole number"),
        (f"{HEAD}1,{TINY},4,2,1,,10,,\n", "7", "--calibrate=7: is no row of the table"),
        (f"{HEAD}1,{TINY},4,2,1,,,3,\n", "1", "has no step_s"),
        (f"{HEAD}1,DenseNet,32,4,2,1,,10,,\n", "1", "model=DenseNet: of row 1 is unknown"),
        (HEAD, "1", "has no row"),
    ],
)
def test_bad_input_is_one_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, text: str, row: str, says: str
) -> None:
    path = tmp_path / "t.csv"
    path.write_text(text)
    assert says in refusal(capsys, path, row)


def test_both_options_are_needed(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["outside", "--table", "t.csv"]) == 2
    assert "--calibrate=none: must be given" in capsys.readouterr().err
    assert "cannot be read" in refusal(capsys, tmp_path / "none.csv")


def test_the_published_table_is_read() -> None:
    rows = {row.name: row for row in read_rows(TABLE)}
    assert rows["5"].cuts == (16, 27, 31, 44, 22, 57, 27, 17) and rows["5"].samples == 16
    assert [rows[name].recompute for name in ("1", "4", "6")] == ["never", "except_last", "always"]
    flags = [
        (rows[name].has_order, rows[name].has_streams, rows[name].has_portals)
        for name in ("20", "21", "22", "23", "4")
    ]
    assert flags == [(False,) * 3, (True, False, False), (True, True, False), *[(True,) * 3] * 2]


def profile_of(times: list[float]) -> ModelProfile:
    """A chain in which the last layer reads a skip of 5 bytes that the first one makes."""
    layers = tuple(
        LayerProfile(
            str(number),
            "conv",
            time,
            time,
            time,
            time,
            stash_bytes=0,
            saved_later=((1, 10), *(((len(times) - 1, 5),) if not number else ())),
            output_bytes=15,
            saved=(
                Saved(10, (1,), 1),
                *((Saved(5, (len(times) - 1,), len(times) - 1),) if not number else ()),
            ),
        )
        if number + 1 < len(times)
        else LayerProfile(str(number), "head", time, time, time, time, output_bytes=1)
        for number, time in enumerate(times)
    )
    return ModelProfile("chain", 32, 32, 1, "float32", "p40", "fake", layers)


def test_cuts_are_children_shares_or_balanced() -> None:
    profile = profile_of([1.0] * 8)
    assert boundaries_of(profile, (3, 5), 2) == (0, 3, 8)
    assert boundaries_of(profile, (6, 10), 2) == (0, 3, 8), "other children, the same shares"
    assert boundaries_of(profile, None, 4) == (0, 2, 4, 6, 8)
    assert boundaries_of(profile_of([9.0, 1.0, 1.0, 1.0]), None, 3)[1] == 1


def test_skips_that_pass_by_are_not_in_a_message() -> None:
    assert direct_bytes(profile_of([1.0] * 4), (0, 1, 2, 3, 4)) == (10, 10, 10, 0)
    assert direct_bytes(profile_of([1.0] * 4), (0, 2, 4)) == (15, 0)


def test_messages_on_copy_streams_take_whole_segments() -> None:
    profile, cuts = profile_of([1.0] * 4), (0, 1, 2, 3, 4)
    # the smallest segment on every device, in each of the pools
    assert received_bytes(profile, cuts, True, 3) == 4 * 3 * 2 * MIB
    assert received_bytes(profile, cuts, True, 64) == 4 * STREAMS * 2 * MIB
    assert received_bytes(profile, (0, 4), True, 3) == 0


def test_each_optimisation_of_the_runtime_shortens_the_step() -> None:
    profile = profile_of([1.0] * 4)
    links = Network(per_byte=0.02)
    steps = []
    for flags in ((False,) * 3, (True, False, False), (True, True, False), (True,) * 3):
        row = replace(ROW, has_order=flags[0], has_streams=flags[1], has_portals=flags[2])
        pipeline = Pipeline(row, profile, (0, 1, 2, 3, 4), 8, links)
        steps.append(pipeline.step_s)
        assert sum(pipeline.parts.values()) == pytest.approx(1.0)
    assert steps == sorted(steps, reverse=True) and len(set(steps)) == 4
    free = Pipeline(ROW, profile, (0, 1, 2, 3, 4), 8, Network()).step_s
    # forwards, backwards with recomputation but of the last, and the last one's way back
    assert free == pytest.approx(8 + 3 + 2 + 7 * 3 + 3 * 2)


def test_the_row_that_calibrates_is_met_and_no_other_is_read(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "t.csv"
    head = f"{HEAD}1,{TINY},4096,4,2,Tesla P40,"
    found = []
    for second in ("5000", "70000"):
        path.write_text(f"{head}60000,,\n2,{TINY},2048,1,1,Tesla P40,{second},2,no recompute\n")
        assert main(["outside", "--table", str(path), "--calibrate", "1", "--json"]) == 0
        found.append(json.loads(capsys.readouterr().out))
    first, other = found
    assert first["calibration"] == other["calibration"]
    assert abs(first["rows"][0]["error"]) < 1e-3
    assert first["rows"][1]["predicted"] == other["rows"][1]["predicted"]
    assert [row["figure"] for row in first["rows"]] == ["step_s", "step_s", "memory_gib"]
    assert first["summary"]["step_s"]["rows"] == 1
