"""The published schedules of small cases as pictures, to be read beside the papers' figures."""

from __future__ import annotations

import pytest

from gems.schedule import generate
from gems.schedule.costs import uniform
from gems.schedule.formats.grid import grid
from gems.schedule.lower import lower
from gems.schedule.simulate import simulate
from tests.helpers.drawings import lines

EQUAL = (1.0, 0.5, 0.5)  # f = b, as Chimera's and the interleaved schedules' figures are drawn
SPLIT = (1.0, 1.0, 1.0)  # f = i = w, as the zero bubble papers' figures are

PICTURES: list[tuple[str, int, dict[str, object], tuple[float, float, float], float, str]] = [
    (
        "1f1b",
        4,
        {"cap": 2},
        EQUAL,
        1,
        """
        F0 F1 .. .. .. .. .. B0 F2 B1 F3 .. .. .. .. B2 .. B3
        .. F0 F1 .. .. .. B0 .. B1 F2 .. F3 .. .. B2 .. B3 ..
        .. .. F0 F1 .. B0 .. B1 .. .. F2 .. F3 B2 .. B3 .. ..
        .. .. .. F0 B0 F1 B1 .. .. .. .. F2 B2 F3 B3 .. .. ..
    """,
    ),
    (
        "chimera",
        4,
        {},
        EQUAL,
        1,
        """
        F0 F1 .. f2 b2 f3 b3 B0 .. B1
        .. F0 f2 F1 f3 b2 B0 b3 B1 ..
        .. f2 F0 f3 F1 B0 b2 B1 b3 ..
        f2 f3 .. F0 B0 F1 B1 b2 .. b3
    """,
    ),
    (
        "chimera",
        8,
        {},
        EQUAL,
        1,
        """
        F0 F1 .. f2 b2 f3 b3 B0 F4 B1 F5 f6 b6 f7 b7 B4 .. B5
        .. F0 f2 F1 f3 b2 B0 b3 B1 F4 f6 F5 f7 b6 B4 b7 B5 ..
        .. f2 F0 f3 F1 B0 b2 B1 b3 f6 F4 f7 F5 B4 b6 B5 b7 ..
        f2 f3 .. F0 B0 F1 B1 b2 f6 b3 f7 F4 B4 F5 B5 b6 .. b7
    """,
    ),
    (
        "chimera",
        4,
        {},
        EQUAL,
        1,
        """
        F0 F1 .. f2 b2 B0 f3 b3 B1 ..
        .. F0 f2 F1 B0 f3 b2 B1 b3 ..
        f2 .. F0 B0 f3 F1 B1 b2 .. b3
    """,
    ),
    (
        "interleaved_1f1b",
        4,
        {"chunks": 2},
        EQUAL,
        0.5,
        """
        F0a F1a F0b F1b F2a B0b F3a B1b F2b B0a F3b B1a ... B2b ... B3b B2a B3a
        ... F0a F1a F0b B0b F1b B1b F2a B0a F3a B1a F2b B2b F3b B3b B2a B3a ...
    """,
    ),
    (
        "looped_bfs",
        2,
        {"chunks": 2},
        EQUAL,
        0.5,
        """
        F0a F1a F0b F1b ... ... B0b B1b B0a B1a
        ... F0a F1a F0b F1b B0b B1b B0a B1a ...
    """,
    ),
    (
        "group_interleaved",
        4,
        {"chunks": 2, "cap": 3},
        SPLIT,
        0.5,
        (
            "\n        F0a F1a ... ... F0b F1b F2a F3a ... ... ... I0b W0b F2b I1b W1b F3b I0a W0a"
            " I1a W1a I2b W2b I3b W3b I2a W2a I3a W3a\n        ... F0a F1a ... ... F0b F1b F2a ..."
            " ... I0b F3a I1b W0b F2b I0a W1b F3b I1a W0a I2b W1a I3b W2b I2a W3b I3a W2a W3a\n    "
            "    ... ... F0a F1a ... ... F0b F1b ... I0b F2a I1b F3a I0a W0b F2b I1a W1b F3b I2b"
            " W0a I3b W1a I2a W2b I3a W3b W2a W3a\n        ... ... ... F0a F1a ... ... F0b I0b F1b"
            " I1b F2a I0a F3a W0b I1a F2b I2b W1b F3b I3b W0a I2a W1a I3a W2b W3b W2a W3a\n    "
        ),
    ),
    (
        "zb_h1",
        6,
        {},
        SPLIT,
        1,
        """
        F0 F1 F2 F3 .. .. .. I0 W0 F4 I1 W1 F5 I2 W2 I3 W3 I4 W4 I5 W5
        .. F0 F1 F2 .. .. I0 F3 I1 W0 F4 I2 W1 F5 I3 W2 I4 W3 I5 W4 W5
        .. .. F0 F1 .. I0 F2 I1 F3 I2 W0 F4 I3 W1 F5 I4 W2 I5 W3 W4 W5
        .. .. .. F0 I0 F1 I1 F2 I2 F3 I3 W0 F4 I4 W1 F5 I5 W2 W3 W4 W5
    """,
    ),
    (
        "zb_h2",
        6,
        {},
        SPLIT,
        1,
        """
        F0 F1 F2 F3 F4 I0 W0 F5 I1 I2 W1 W2 I3 I4 W3 W4 I5 W5 .. ..
        .. F0 F1 F2 I0 F3 I1 F4 I2 W0 F5 I3 I4 W1 W2 I5 W3 W4 W5 ..
        .. .. F0 I0 F1 I1 F2 I2 F3 I3 F4 I4 W0 F5 I5 W1 W2 W3 W4 W5
    """,
    ),
    (
        "gems_zb",
        4,
        {},
        SPLIT,
        1,
        """
        F0 .. .. .. .. I0 W0 f1 i1 w1 F2 .. .. .. .. I2 W2 f3 i3 w3 .. ..
        .. F0 .. .. I0 W0 f1 .. .. i1 w1 F2 .. .. I2 W2 f3 .. .. i3 w3 ..
        .. .. F0 I0 W0 f1 .. .. .. .. i1 w1 F2 I2 W2 f3 .. .. .. .. i3 w3
    """,
    ),
    (
        "zb_v",
        6,
        {},
        SPLIT,
        0.5,
        (
            "\n        F0a F1a F2a F3a F4a F0b I0b W0b F1b I1b W1b F2b I2b W2b F5a I0a W0a F3b I3b"
            " W3b I1a W1a F4b I4b W4b I2a W2a F5b I5b I3a W5b I4a W3a I5a W4a W5a ... ...\n       "
            " ... F0a F1a F2a F0b F3a F1b I0b W0b F2b I1b W1b F4a I0a W0a F3b I2b W2b F5a I1a W1a"
            " F4b I3b W3b I2a W2a F5b I4b I3a I5b I4a W4b I5a W3a W5b W4a W5a ...\n        ... ..."
            " F0a F0b F1a F1b F2a F2b I0b W0b F3a I0a W0a F3b I1b W1b F4a I1a W1a F4b I2b W2b F5a"
            " I2a W2a F5b I3b I3a I4b I4a I5b I5a W3b W3a W4b W4a W5b W5a\n    "
        ),
    ),
    (
        "v_min",
        4,
        {},
        SPLIT,
        0.5,
        (
            "\n"
            "        F0a F1a ... ... ... ... ... F0b I0b F2a W0b ... ... F1b I1b I0a W1b F3a W0a "
            "F2b I2b I1a W2b W1a ... F3b I3b I2a W3b W2a ... ... ... I3a W3a\n"
            "        ... F0a ... ... ... ... F0b F1a ... I0b W0b ... F1b F2a I0a I1b W0a W1b F2b "
            "F3a I1a I2b W1a W2b F3b ... I2a I3b W2a W3b ... ... I3a W3a ...\n"
            "        ... ... F0a ... ... F0b ... ... F1a ... I0b F1b W0b I0a F2a W0a I1b F2b W1b "
            "I1a F3a W1a I2b F3b W2b I2a W2a ... I3b W3b ... I3a W3a ... ...\n"
            "        ... ... ... F0a F0b ... ... ... ... F1a F1b I0b I0a W0b W0a F2a F2b I1b I1a "
            "W1b W1a F3a F3b I2b I2a W2b W2a ... ... I3b I3a W3b W3a ... ...\n"
            "    "
        ),
    ),
    (
        "v_half",
        4,
        {},
        SPLIT,
        0.5,
        (
            "\n"
            "        F0a F1a ... ... ... F0b I0b F2a W0b F1b I1b I0a W1b F3a W0a F2b "
            "I2b I1a W2b W1a ... F3b I3b I2a W3b W2a ... I3a W3a\n"
            "        ... F0a ... ... F0b F1a ... I0b F1b W0b I0a F2a I1b W0a F2b W1b "
            "I1a F3a I2b W1a F3b W2b I2a I3b W2a W3b I3a W3a ...\n"
            "        ... ... F0a F0b ... ... F1a F1b I0b I0a W0b W0a F2a F2b I1b I1a "
            "W1b W1a F3a F3b I2b I2a W2b W2a I3b I3a W3b W3a ...\n"
            "    "
        ),
    ),
    (
        "v_half",
        4,
        {},
        SPLIT,
        0.5,
        (
            "\n"
            "        F0a F1a F2a F3a ... ... ... F0b I0b F1b I1b W0b W1b ... F2b I0a "
            "I2b W0a W2b F3b I3b I1a W3b I2a W1a W2a ... I3a W3a\n"
            "        ... F0a F1a F2a F3a ... F0b ... F1b I0b W0b I1b W1b F2b I0a W0a "
            "... I2b F3b W2b I1a I3b I2a W1a W3b W2a I3a W3a ...\n"
            "        ... ... F0a F1a F2a F0b F3a F1b ... ... I0b W0b F2b I0a I1b W0a "
            "W1b F3b I2b I1a W2b I2a I3b W1a W2a I3a W3b W3a ...\n"
            "        ... ... ... F0a F0b F1a F1b F2a F2b ... ... I0b I0a W0b F3a W0a "
            "F3b I1b I1a I2b I2a W1b W1a I3b I3a W2b W2a W3b W3a\n"
            "    "
        ),
    ),
    (
        "dualpipe_v",
        4,
        {},
        SPLIT,
        0.5,
        """
        F0a F1a F2a F0b I0b W0b F1b F3a B1b --- F2b B0a --- B2b --- F3b ... B1a --- B3b --- I2a W2a I3a W3a
        ... F0a F0b F1a F1b F2a B0b --- F2b B0a --- F3a B1b --- F3b B1a --- B2b --- B2a --- I3b I3a W3b W3a
    """,
    ),
]


@pytest.mark.parametrize(
    ("name", "n", "more", "cost", "unit", "picture"),
    PICTURES,
    ids=[f"{p[0]}-{len(lines(p[-1]))}" for p in PICTURES],
)
def test_pictures(
    name: str,
    n: int,
    more: dict[str, object],
    cost: tuple[float, float, float],
    unit: float,
    picture: str,
) -> None:
    """As drawn, compute-only and lowered alike.

    `a` is a rank's first chunk on a micro-batch's way, `b` its second.
    """
    num_ranks = len(lines(picture))
    made = generate(name, num_ranks, n, **more)
    costs = uniform(num_ranks, made.num_stages, *cost)
    for schedule in (made, lower(made)):
        found = grid(schedule, simulate(schedule, costs), unit)
        assert [line.partition("| ")[2] for line in found.splitlines()] == lines(picture)
