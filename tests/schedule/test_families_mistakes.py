"""What the generators refuse, with the key at fault and what is allowed."""

from __future__ import annotations

import pytest

from gems.errors import ConfigError
from gems.schedule import generate

MISTAKES: list[tuple[str, int, int, dict[str, object], str]] = [
    (
        "1f1b",
        4,
        8,
        {"cap": 0.5},
        (
            "schedule.activation_cap=0.5: must be 1 or more for 1f1b: a rank holds whole"
            " micro-batches of its stage; raise it to 1, or use schedule=capped, whose stages are"
            " smaller"
        ),
    ),
    (
        "interleaved_1f1b",
        4,
        8,
        {"chunks": 1},
        (
            "schedule.chunks=1: must be 2 or more for interleaved_1f1b; one chunk a rank is"
            " schedule=1f1b"
        ),
    ),
    (
        "looped_bfs",
        4,
        8,
        {"chunks": 1},
        "schedule.chunks=1: must be 2 or more for looped_bfs; one chunk a rank is schedule=gpipe",
    ),
    (
        "group_interleaved",
        4,
        8,
        {"chunks": 1},
        (
            "schedule.chunks=1: must be 2 or more for group_interleaved; one chunk a rank is"
            " schedule=zb_h1"
        ),
    ),
    (
        "group_interleaved",
        4,
        8,
        {"cap": 1},
        (
            "schedule.activation_cap=1: must be 3 or more for group_interleaved with 2 chunks on 4"
            " ranks; raise it, or use schedule=capped"
        ),
    ),
    (
        "v_adaptive",
        8,
        16,
        {"cap": 3.5},
        (
            "schedule.activation_cap=3.5: must be 4 or more for v_adaptive on 8 ranks; raise it, or"
            " use schedule=capped"
        ),
    ),
    (
        "dualpipe_v",
        4,
        7,
        {},
        (
            "parallel.micro_batches=7: must be 8 or more for dualpipe_v, twice"
            " parallel.partitions=4; use more micro-batches, or schedule=zb_v"
        ),
    ),
    (
        "chimera",
        4,
        7,
        {},
        "parallel.micro_batches=7: must be even for chimera: half run in each direction; use 8",
    ),
    (
        "gems_zb",
        4,
        1,
        {},
        "parallel.micro_batches=1: must be even for gems_zb: the two directions take turns; use 2",
    ),
]


@pytest.mark.parametrize(("name", "p", "n", "more", "line"), MISTAKES)
def test_one_line_says_what_is_wrong(
    name: str, p: int, n: int, more: dict[str, object], line: str
) -> None:
    with pytest.raises(ConfigError) as found:
        generate(name, p, n, **more)
    assert str(found.value) == line
    assert found.value.exit_code == 2


@pytest.mark.parametrize(
    ("name", "p", "n", "more"),
    [
        ("1f1b", 4, 8, {"cap": 1}),
        ("interleaved_1f1b", 4, 8, {"chunks": 2}),
        ("looped_bfs", 4, 8, {"chunks": 2}),
        ("group_interleaved", 4, 8, {"chunks": 2, "cap": 3}),
        ("v_adaptive", 8, 16, {"cap": 4}),
        ("dualpipe_v", 4, 8, {}),
        ("chimera", 4, 8, {}),
        ("gems_zb", 4, 2, {}),
        ("gpipe", 4, 8, {"cap": 0.5}),  # no cap of its own: who asked for one checks it afterwards
    ],
)
def test_the_advice_works(name: str, p: int, n: int, more: dict[str, object]) -> None:
    assert generate(name, p, n, **more).num_micro_batches == n
