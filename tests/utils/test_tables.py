from __future__ import annotations

from gems.utils.tables import MIN_LAST_CHARS, RIGHT, name_values, printable, table


def test_texts_are_left_and_numbers_right_below_their_heads() -> None:
    columns = {"method": "", "peak [MiB]": ".1f", "ranks": "d", "N x M": RIGHT}
    rows = [
        ("exact", 1234.56, 4, "2 x 2"),
        ("gpipe, time", 7.0, 16, "16 x 1"),
        ("none", None, None, None),
    ]
    assert table(columns, rows, title="resnet", indent=2).splitlines() == [
        "resnet",
        "  method       peak [MiB]  ranks   N x M",
        "  exact            1234.6      4   2 x 2",
        "  gpipe, time         7.0     16  16 x 1",
        "  none                  -      -       -",
    ]


def test_a_table_without_rows_is_its_heads() -> None:
    assert table({"a": "", "b": "d"}, []) == "a  b"


def test_a_text_stands_in_a_column_of_numbers() -> None:
    assert table({"rank": "d"}, [(1,), ("all",)]).splitlines() == ["rank", "   1", " all"]


def test_the_last_column_is_cut_to_the_terminal() -> None:
    columns = {"run": "", "note": ""}
    note = "n" * 60
    assert table(columns, [("a", note)], width=50).splitlines()[1] == "a    " + "n" * 42 + "..."
    assert (
        table(columns, [("a", note)], width=10).splitlines()[1]
        == "a    " + "n" * (MIN_LAST_CHARS - 3) + "..."
    )
    assert table(columns, [("a", note)]).splitlines()[1] == f"a    {note}"


def test_values_stand_below_each_other() -> None:
    assert name_values([("step [s]", 1.5), ("cap", "none")], title="gpipe").splitlines() == [
        "gpipe",
        "  step [s]  1.5",
        "  cap       none",
    ]
    assert name_values([]) == ""


def test_what_a_terminal_would_obey_is_not_printed() -> None:
    assert printable("a\x1b]0;x\x07b\nc é") == "a ]0;x b c é"
    assert table({"name": ""}, [("a\x1b[2Jb",)]).splitlines() == ["name", "a [2Jb"]
