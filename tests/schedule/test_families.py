"""The generators of gems.schedule, against pictures, against torch's order, and by their peaks."""

from __future__ import annotations

import pytest

from gems.schedule import FAMILIES, generate, published
from gems.schedule.families.given_placement import forward_only
from gems.schedule.lower import lower
from gems.schedule.placement import Placement, bidirectional, linear
from gems.schedule.validate import validate
from tests.helpers.drawings import drawn, lines, play, played_rows, uniform_cost

PICTURES = [
    (
        "layer_parallel",
        2,
        1,
        """
        F0 .. .. .. B0 -- F1 .. .. .. B1 --
        .. F0 B0 -- .. .. .. F1 B1 -- .. ..
    """,
    ),
    (
        "gpipe",
        4,
        1,
        """
        F0 F1 F2 F3 .. .. .. .. .. .. B0 -- B1 -- B2 -- B3 --
        .. F0 F1 F2 F3 .. .. .. B0 -- B1 -- B2 -- B3 -- .. ..
        .. .. F0 F1 F2 F3 B0 -- B1 -- B2 -- B3 -- .. .. .. ..
    """,
    ),
    (
        "1f1b",
        4,
        1,
        """
        F0 F1 F2 .. .. .. .. B0 -- F3 B1 -- .. B2 -- .. B3 --
        .. F0 F1 .. .. B0 -- F2 B1 -- F3 B2 -- .. B3 -- .. ..
        .. .. F0 B0 -- F1 B1 -- F2 B2 -- F3 B3 -- .. .. .. ..
    """,
    ),
    (
        "1f1b",
        2,
        1,
        """
        F0 F1 .. .. .. .. .. .. .. .. B0 -- .. B1 --
        .. F0 F1 .. .. .. .. .. B0 -- .. B1 -- .. ..
        .. .. F0 F1 .. .. B0 -- .. B1 -- .. .. .. ..
        .. .. .. F0 B0 -- F1 B1 -- .. .. .. .. .. ..
    """,
    ),
    (
        "gems_mast",
        2,
        1,
        """
        F0 .. .. .. .. .. .. B0 -- f1 b1 -- .. .. .. ..
        .. F0 .. .. .. B0 -- f1 .. .. .. .. b1 -- .. ..
        .. .. F0 B0 -- f1 .. .. .. .. .. .. .. .. b1 --
    """,
    ),
    (
        "gems_mast",
        4,
        2,
        """
        F0 F1 .. .. .. .. .. .. B0 -- B1 -- f2 f3 b2 -- b3 -- .. .. .. ..
        .. F0 F1 .. .. .. B0 -- B1 -- f2 f3 .. .. .. .. b2 -- b3 -- .. ..
        .. .. F0 F1 B0 -- B1 -- f2 f3 .. .. .. .. .. .. .. .. b2 -- b3 --
    """,
    ),
    (
        "gems_master",
        4,
        1,
        """
        F0 .. .. .. B0 -- f1 b1 -- F2 .. .. .. .. B2 -- f3 b3 -- .. ..
        .. F0 B0 -- f1 .. .. .. .. b1 -- F2 B2 -- f3 .. .. .. .. b3 --
    """,
    ),
]


@pytest.mark.parametrize(("name", "n", "parts", "picture"), PICTURES)
def test_pictures(name: str, n: int, parts: int, picture: str) -> None:
    """Forward 1, backward 2 units: the schedule as drawn, compute-only and lowered alike."""
    made = generate(name, len(lines(picture)), n, parts)
    expected = drawn(picture, made.placement)
    for schedule in (made, lower(made)):
        assert played_rows(schedule, play(schedule, uniform_cost(1, 2))) == expected


def counts_of(name: str, p: int) -> list[tuple[int, int]]:
    """Return some (micro-batches, parts) that the family serves on `p` ranks."""
    if name == "dualpipe_v":
        return [(2 * p, 1), (3 * p + 1, 1)]
    even = [(2, 1), (8, 4), (6, 3)]
    return even if FAMILIES[name].num_directions == 2 else [*even, (1, 1), (2 * p + 1, 1)]


@pytest.mark.parametrize("name", ["layer_parallel", "gpipe", "1f1b", "gems_mast", "gems_master"])
def test_peaks_of_each_rank(name: str) -> None:
    for p in range(1, 17):
        for n, parts in ((2, 1), (6, 3), (12, 6)):
            expected = {
                "layer_parallel": (1,) * p,
                "gpipe": (n,) * p,
                "1f1b": tuple(min(n, p - s) for s in range(p)),
            }.get(name, (parts,) * p)
            made = generate(name, p, n, parts)
            assert made.num_micro_batches == n
            for schedule in (made, lower(made)):
                assert play(schedule, uniform_cost(1, 2)).peak == expected


@pytest.mark.parametrize("p", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("name", published())
def test_every_family_is_valid_and_whole(name: str, p: int) -> None:
    for n, parts in counts_of(name, p):
        for chunks in (2, 3) if FAMILIES[name].stages_per_rank is None else (2,):
            made = generate(name, p, n, parts, chunks=chunks)
            assert made.name == name
            assert made.num_micro_batches == n
            assert made.num_directions == FAMILIES[name].num_directions
            assert made.num_stages == p * FAMILIES[name].stages(chunks)
            assert set(made.directions()) == set(range(n))
            validate(made)
            validate(lower(made))


@pytest.mark.parametrize("name", published())
def test_many_ranks(name: str) -> None:
    p, n = (17, 34) if name == "dualpipe_v" else (128, 4)
    made = generate(name, p, n, 2)
    validate(made)


@pytest.mark.parametrize(
    "placement", [linear(1), linear(3), bidirectional(3), Placement(2, ((0, 1, 1, 0),))]
)
def test_forward_only(placement: Placement) -> None:
    made = forward_only(placement, 3)
    lowered = validate(lower(validate(made)))
    kinds = {action.kind.value for _, action in lowered.actions()}
    assert kinds <= {"F", "SEND_F", "RECV_F"}
    assert {action.direction for _, action in lowered.actions()} == {0}
    assert len(list(made.actions())) == 3 * placement.num_stages
    strips = validate(lower(validate(forward_only(placement, 3, num_strips=2))))
    assert (strips.num_whole, strips.num_micro_batches) == (3, 6)
    assert {action.kind for _, action in strips.actions()} == {
        action.kind for _, action in lowered.actions()
    }
