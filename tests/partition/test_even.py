"""gems.partition.even: cuts by the number of layers, and the check of given ones."""

from __future__ import annotations

import itertools

import pytest

from gems.config.constraints import check_boundaries
from gems.errors import ConfigError
from gems.partition.even import even


@pytest.mark.parametrize("num_layers", range(1, 40))
def test_every_cut_is_whole_and_even(num_layers: int) -> None:
    for num_stages in range(1, num_layers + 1):
        boundaries = even(num_layers, num_stages)
        sizes = [b - a for a, b in itertools.pairwise(boundaries)]
        assert check_boundaries(boundaries, num_layers, num_stages) is boundaries
        assert sum(sizes) == num_layers
        assert max(sizes) - min(sizes) <= 1
        long = [stage for stage, size in enumerate(sizes) if size > min(sizes)]
        assert long == list(range(long[0], long[0] + len(long))) if long else True
        if long and len(long) <= num_stages - 2:
            assert long[0] > 0 and long[-1] < num_stages - 1, "the odd layers are in the middle"


@pytest.mark.parametrize(
    ("num_layers", "num_stages", "expected"),
    [
        (5, 1, (0, 5)),
        (5, 5, (0, 1, 2, 3, 4, 5)),
        (8, 4, (0, 2, 4, 6, 8)),
        (9, 4, (0, 2, 5, 7, 9)),
        (10, 4, (0, 2, 5, 8, 10)),
        (11, 4, (0, 3, 6, 9, 11)),
    ],
)
def test_cuts(num_layers: int, num_stages: int, expected: tuple[int, ...]) -> None:
    assert even(num_layers, num_stages) == expected


@pytest.mark.parametrize(
    "boundaries",
    [
        (),
        (0,),
        (0, 6),
        (0, 2, 4, 6),
        (1, 3, 6),
        (0, 3, 5),
        (0, 3, 7),
        (0, 0, 6),
        (0, 6, 6),
        (0, -3, 6),
        (0, 7, 6),
    ],
    ids=str,
)
def test_boundaries_that_do_not_cut_6_layers_in_2(boundaries: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match="must be 3 rising numbers from 0 to 6") as error:
        check_boundaries(boundaries, 6, 2)
    assert error.value.key == "parallel.boundaries"
    assert error.value.value == list(boundaries)


def test_uneven_boundaries_are_the_users_choice() -> None:
    assert check_boundaries((0, 5, 6), 6, 2) == (0, 5, 6)
