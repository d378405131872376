"""Counts of an experiment and the user's own: the user's win, and an error names the experiment."""

from __future__ import annotations

import pytest

from gems.config.compose import compose
from gems.errors import ConfigError

QUICKSTART = "experiment=quickstart"  # 4 replications of 1 part under gems_master


@pytest.mark.cases
@pytest.mark.parametrize(
    ("words", "counts"),
    [
        ([], (4, 4, 1)),
        (["schedule=1f1b"], (4, 4, 1)),
        (["schedule=1f1b", "parallel.micro_batches=2"], (2, 2, 1)),
        (["parallel.micro_batches=6"], (6, 6, 1)),
        (["parallel.micro_batches=4"], (4, 4, 1)),
        (["parallel.micro_batches=12", "parallel.parts=3"], (12, 4, 3)),
        (["parallel.micro_batches=12", "parallel.replications=2"], (12, 2, 6)),
        (["parallel.parts=3"], (12, 4, 3)),
    ],
)
def test_the_users_counts_win(words: list[str], counts: tuple[int, int, int]) -> None:
    parallel = compose([QUICKSTART, *words]).parallel
    assert (parallel.micro_batches, parallel.replications, parallel.parts) == counts


@pytest.mark.cases
def test_a_conflict_names_the_experiment_or_the_users_own_keys() -> None:
    with pytest.raises(
        ConfigError, match=r"^parallel\.micro_batches=7: must be even for gems_master"
    ):
        compose([QUICKSTART, "parallel.micro_batches=7"])
    with pytest.raises(
        ConfigError,
        match=r"^parallel\.replications=4: is set by experiment=quickstart, and must be 2",
    ):
        compose([QUICKSTART, "schedule=gems_mast"])
    with pytest.raises(
        ConfigError, match=r"^parallel\.micro_batches=8: must be replications x parts = 3 x 2"
    ):
        compose(
            [
                QUICKSTART,
                "schedule=1f1b",
                "parallel.micro_batches=8",
                "parallel.replications=3",
                "parallel.parts=2",
            ]
        )
