"""gems.schedule.placement: who holds which stage, and who reduces with whom."""

from __future__ import annotations

import pytest

from gems.schedule.placement import bidirectional, linear, looped, v, wave

RANKS = [1, 2, 3, 4, 5, 8]


@pytest.mark.parametrize("num_ranks", RANKS)
def test_linear(num_ranks: int) -> None:
    placement = linear(num_ranks)
    assert (placement.num_ranks, placement.num_stages, placement.num_directions) == (
        num_ranks,
        num_ranks,
        1,
    )
    for rank in range(num_ranks):
        assert placement.rank_of(0, rank) == rank
        assert placement.stages_on(rank) == ((0, rank),)
        assert placement.lowest_stage(rank) == rank
        assert placement.peers_of(rank) == (rank,)


@pytest.mark.parametrize("num_ranks", RANKS)
def test_bidirectional_mirrors(num_ranks: int) -> None:
    placement = bidirectional(num_ranks)
    assert (placement.num_ranks, placement.num_stages, placement.num_directions) == (
        num_ranks,
        num_ranks,
        2,
    )
    for rank in range(num_ranks):
        mirror = num_ranks - 1 - rank
        assert placement.rank_of(0, rank) == placement.rank_of(1, mirror) == rank
        assert set(placement.stages_on(rank)) == {(0, rank), (1, mirror)}
        assert placement.lowest_stage(rank) == min(rank, mirror)
        assert placement.peers_of(rank) == tuple(sorted({rank, mirror}))


@pytest.mark.parametrize("num_replicas", [1, 2, 3])
@pytest.mark.parametrize("num_ranks", RANKS)
def test_reduce_group_is_the_pair_group_of_gems(num_ranks: int, num_replicas: int) -> None:
    """pair_group(r) = [d P + q for d in range(R) for q in sorted({r, P-1-r})], of size 2R (R in the middle)."""
    for rank in range(num_ranks):
        pair = sorted({rank, num_ranks - 1 - rank})
        expected = tuple(d * num_ranks + q for d in range(num_replicas) for q in pair)
        assert bidirectional(num_ranks).reduce_group(rank, num_replicas) == expected
        assert linear(num_ranks).reduce_group(rank, num_replicas) == tuple(
            d * num_ranks + rank for d in range(num_replicas)
        )


@pytest.mark.parametrize("chunks", [1, 2, 3, 4])
@pytest.mark.parametrize("num_ranks", [*RANKS, 17])
def test_looped_goes_round(num_ranks: int, chunks: int) -> None:
    placement = looped(num_ranks, chunks)
    assert (placement.num_ranks, placement.num_stages) == (num_ranks, num_ranks * chunks)
    for stage in range(placement.num_stages):
        assert placement.rank_of(0, stage) == stage % num_ranks
    for rank in range(num_ranks):
        assert placement.stages_on(rank) == tuple(
            (0, rank + num_ranks * chunk) for chunk in range(chunks)
        )
        assert placement.peers_of(rank) == (rank,)


@pytest.mark.parametrize("chunks", [1, 2, 3, 4, 6])
@pytest.mark.parametrize("num_ranks", [*RANKS, 17])
def test_wave_goes_down_and_up_again(num_ranks: int, chunks: int) -> None:
    placement = wave(num_ranks, chunks)
    assert placement.num_stages == num_ranks * chunks
    hops = [
        abs(placement.rank_of(0, stage + 1) - placement.rank_of(0, stage))
        for stage in range(placement.num_stages - 1)
    ]
    turns = [(stage + 1) % num_ranks == 0 for stage in range(placement.num_stages - 1)]
    assert hops == [0 if turn else 1 for turn in turns]
    assert all(len(placement.stages_on(rank)) == chunks for rank in range(num_ranks))


@pytest.mark.parametrize("num_ranks", RANKS)
def test_v_pairs_the_first_stages_with_the_last(num_ranks: int) -> None:
    for rank in range(num_ranks):
        assert v(num_ranks).stages_on(rank) == ((0, rank), (0, 2 * num_ranks - 1 - rank))


@pytest.mark.parametrize("num_ranks", [1, 2, 63, 64, 1023, 1024])
def test_every_stage_has_one_home_up_to_1024_ranks(num_ranks: int) -> None:
    for placement in (
        linear(num_ranks),
        bidirectional(num_ranks),
        looped(num_ranks, 3),
        v(num_ranks),
        wave(num_ranks, 4),
    ):
        held = sorted(pair for rank in range(num_ranks) for pair in placement.stages_on(rank))
        assert held == [
            (direction, stage)
            for direction in range(placement.num_directions)
            for stage in range(placement.num_stages)
        ]
        groups = {placement.reduce_group(rank, 2) for rank in range(num_ranks)}
        assert sorted(rank for group in groups for rank in group) == list(range(2 * num_ranks))
