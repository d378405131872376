"""The ranks that stay alive between the tests of tests/mpi.

What they say of a test, and what becomes of them.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

import pytest

from gems.engine.transport.mpi import meet, world
from tests.mpi.world import IN_RANK, World

if IN_RANK:  # what the ranks are asked to run

    @pytest.fixture(scope="module")
    def number() -> list[int]:
        return [world().rank]

    def test_pass(number: list[int]) -> None:
        number.append(len(number))
        meet(world())

    def test_pass_again(number: list[int]) -> None:
        assert number == [world().rank, 1], "fixtures of a module are set up once"

    def test_skip() -> None:
        pytest.skip("not here")

    def test_fail_alike() -> None:
        print(f"printed by {world().rank}")
        raise AssertionError("on purpose")

    def test_fail_alone() -> None:
        assert world().rank != 2

    def test_fail_while_others_wait() -> None:
        assert world().rank != 2
        meet(world())

    def test_die() -> None:
        if world().rank == 1:
            os._exit(3)
        meet(world())

    def test_hang() -> None:
        while world().rank == 3:
            time.sleep(0.1)

else:

    @pytest.fixture(scope="module")
    def ranks(warm_executable: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
        folder = tmp_path_factory.mktemp("ranks")
        started = World(folder, warm_executable, test_s=5.0, alone_s=1.0)
        yield started
        started.close()

    def run(ranks: World, name: str) -> tuple[str, str, bool]:
        """Return the outcome and its text, and whether the same ranks go on."""
        before = [rank.pid for rank in ranks.ranks]
        outcome, text = ranks.run(f"tests/test_mpi_world.py::test_{name}")
        return outcome, text, before == [rank.pid for rank in ranks.ranks]

    def test_ranks_go_on_after_tests_that_end_alike(ranks: World) -> None:
        assert run(ranks, "pass")[:2] == run(ranks, "pass_again")[:2] == ("passed", "")
        outcome, text, goes_on = run(ranks, "skip")
        assert outcome == "skipped" and "not here" in text and goes_on
        outcome, text, goes_on = run(ranks, "fail_alike")
        assert outcome == "failed" and goes_on
        assert (
            all(f"printed by {rank}" in text for rank in range(4))
            and "AssertionError: on purpose" in text
        )
        assert run(ranks, "is_missing")[0] == "failed"
        assert run(ranks, "pass") == ("passed", "", True)

    @pytest.mark.parametrize(
        ("name", "said"),
        [
            ("fail_alone", ["rank 2: call failed", "assert world().rank != 2"]),
            (
                "fail_while_others_wait",
                ["rank 2: call failed", "rank 0, 1, 3: the rank did not come to the end"],
            ),
            ("die", ["the rank died", "Exit codes: "]),
            ("hang", ["rank 3: the rank did not come to the end of the test", "in test_hang"]),
        ],
    )
    def test_ranks_start_again_after_a_test_that_fails_on_some(
        ranks: World, name: str, said: list[str]
    ) -> None:
        run(ranks, "pass")
        outcome, text, goes_on = run(ranks, name)
        assert outcome == "failed" and not goes_on
        assert [each for each in said if each not in text] == []
        assert run(ranks, "pass")[:2] == ("passed", "")
