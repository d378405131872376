"""The closed forms of the families, held against the simulation of what the generators build."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gems.errors import ConfigError
from gems.schedule import FAMILIES, generate
from gems.schedule.costs import DepthCosts, uniform
from gems.schedule.schedule import Schedule
from gems.schedule.simulate import Simulation, simulate
from gems.schedule.validate import validate
from tests.helpers.closed_forms import bubble, peak_units, step_units

RANKS = (*range(1, 10), 12, 16)  # of every remainder by 2 and 3
Cost = tuple[float, float, float]
COSTS: list[Cost] = [(1, 1, 1), (1, 0.5, 0.5), (2, 1, 2), (3, 4, 2), (2, 2, 1)]
EVEN: Cost = (1, 1, 1)


def build(name: str, p: int, n: int, cost: Cost, parts: int = 1, **more: object) -> Schedule:
    return generate(name, p, n, parts, costs=DepthCosts(p, *cost), **more)


def play(made: Schedule, cost: Cost) -> Simulation:
    return simulate(made, uniform(made.num_ranks, made.num_stages, *cost))


def form(name: str, p: int, n: int, cost: Cost, parts: int = 1, **more: object) -> float | None:
    f, i, w = cost
    return step_units(name, p, n, f, i + w, parts, weight_grad=w, **more)  # type: ignore[arg-type]


def check(
    name: str, p: int, n: int, cost: Cost, expected: float, parts: int = 1, **more: object
) -> None:
    """Hold a formula written in the test against `step_units` and against the simulation, and the peak too."""
    played = play(build(name, p, n, cost, parts, **more), cost)
    assert form(name, p, n, cost, parts, **more) == pytest.approx(expected), (p, n, cost)
    assert played.span == pytest.approx(expected), (p, n, cost)
    assert max(played.peak) == pytest.approx(peak_units(name, p, n, parts, **more)), (p, n, cost)  # type: ignore[arg-type]


def idle_inside(made: Schedule, cost: Cost) -> float:
    """Return the most that a rank idles between its first and its last action."""
    played = play(made, cost)
    spans = zip(played.start, played.end, played.busy, strict=True)
    return max(max(end) - min(start) - busy for start, end, busy in spans)


@pytest.mark.parametrize("p", RANKS)
def test_one_chunk_one_way(p: int) -> None:
    for n, (f, i, w) in product((1, 2, 5, 17), COSTS):
        b = i + w
        check("layer_parallel", p, n, (f, i, w), n * p * (f + b))
        check("gpipe", p, n, (f, i, w), (n + p - 1) * (f + b))
        check("1f1b", p, n, (f, i, w), (n + p - 1) * (f + b))


@pytest.mark.parametrize("p", RANKS)
def test_1f1b_under_a_cap_waits_once_a_group(p: int) -> None:
    for n, cap, (f, i, w) in product((1, 5, 16), (1, 2, 3.5, 8, 20), COSTS[:3]):
        k = min(p, int(cap))
        expected = (n + p - 1 + (n - 1) // k * (p - k)) * (f + i + w)
        check("1f1b", p, n, (f, i, w), expected, cap=cap)
        if n % k == 0:  # N (f + b) P / K for whole groups, and the drain
            assert expected == pytest.approx((n * p / k + k - 1) * (f + i + w))


@pytest.mark.parametrize("chunks", [2, 3, 4])
@pytest.mark.parametrize("p", [*range(1, 9), 13, 16])
def test_loops(p: int, chunks: int) -> None:
    """The bubble is 1F1B's over v where there are at least P micro-batches.

    Below, a pass waits for the one before.
    """
    for n in (1, 3, p, 2 * p):
        for f, i, w in COSTS[:2]:
            short = (chunks - 1) * max(0, p - n) / chunks
            expected = (n + (p - 1) / chunks + short) * (f + i + w)
            check("interleaved_1f1b", p, n, (f, i, w), expected, chunks=chunks)
            check("looped_bfs", p, n, (f, i, w), expected, chunks=chunks)


@pytest.mark.parametrize(("p", "v", "peak"), [(4, 2, 5.5), (8, 2, 11.5)])
def test_published_peaks_of_interleaved_1f1b(p: int, v: int, peak: float) -> None:
    assert p * (1 + (p - 1) / (p * v)) == peak == peak_units("interleaved_1f1b", p, 4 * p, chunks=v)
    assert max(play(build("interleaved_1f1b", p, 4 * p, EVEN, chunks=v), EVEN).peak) == peak


@pytest.mark.parametrize(
    ("p", "chunks"),
    [*product((*range(1, 9), 13), (2,)), *product(range(1, 7), (3,)), *product(range(1, 5), (4,))],
)
def test_group_interleaved(p: int, chunks: int) -> None:
    """Groups of P / 2 to P: G pairs a chunk and P more are held, and the first rank waits for its first I alone."""
    smallest = (p + 1) // 2
    for group, more in product(
        range(smallest, p + 1) if p <= 8 else (smallest, p - 2, p), ((), (smallest,))
    ):
        sizes = (group, group, group, *more)
        held = ((chunks - 1) * group + p) / chunks
        n = sum(sizes)
        made = build("group_interleaved", p, n, EVEN, chunks=chunks, cap=held)
        if n >= p:
            check(
                "group_interleaved",
                p,
                n,
                EVEN,
                3 * n + p - (1 + (chunks - 1) * group) / chunks,
                chunks=chunks,
                cap=held,
            )
            assert max(play(made, EVEN).peak) == pytest.approx(min(n, held))
        for cost in COSTS if p <= 8 else ():
            assert (
                max(
                    play(build("group_interleaved", p, n, cost, chunks=chunks, cap=held), cost).peak
                )
                <= held + 1e-9
            )


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 12), st.integers(1, 40), st.integers(2, 5), st.floats(1, 12))
def test_group_interleaved_keeps_any_cap(p: int, n: int, chunks: int, cap: float) -> None:
    try:
        made = build("group_interleaved", p, n, EVEN, chunks=chunks, cap=cap)
    except ConfigError:
        assert cap < (2 * p + 9) / 3
        return
    peak = peak_units("group_interleaved", p, n, chunks=chunks, cap=cap)
    played = play(validate(made), EVEN)
    assert peak is not None
    assert max(played.peak) <= peak + 1e-9 <= cap + 2e-9
    expected = form("group_interleaved", p, n, EVEN, chunks=chunks, cap=cap)
    assert expected is None or played.span == pytest.approx(expected)


@pytest.mark.parametrize(
    ("p", "n", "cap", "cost", "most"),
    [
        (16, 64, 9, EVEN, 200.875),
        (16, 64, 10, EVEN, 200.875),
        (16, 64, 9, (1, 1.2, 0.8), 204.625),
        (16, 64, 7, EVEN, 212.375),
        (12, 48, 6.75, EVEN, 150.625),
        (8, 32, 4.5, EVEN, 100.375),
    ],
)
def test_group_interleaved_under_a_cap(p: int, n: int, cap: float, cost: Cost, most: float) -> None:
    """Eight chunks a rank, below half of 1F1B's memory and a little above."""
    played = play(build("group_interleaved", p, n, cost, chunks=8, cap=cap), cost)
    assert played.span <= most + 1e-9
    assert max(played.peak) <= cap + 1e-9


@pytest.mark.parametrize("p", RANKS)
def test_zero_bubble(p: int) -> None:
    """Published for w <= f, i: bubbles of (P - 1)(f + i - w) and (P - 1)(f + i - 2 w)."""
    for cost in [(1, 1, 2), (1, 3, 2), (1, 2, 3), (2, 1, 3)]:  # w above f or i
        f, i, w = cost
        check("zb_h1", p, p + 3, cost, (p + 3) * (f + i + w) + (p - 1) * max(f, i, f + i - w))
    for f, i, w in [(1, 1, 1), (2, 2, 1), (3, 4, 2), (3, 1, 1), (2, 3, 1)]:
        work = f + i + w
        for n in (p, 2 * p + 1):
            check("zb_h1", p, n, (f, i, w), n * work + (p - 1) * max(f, i, f + i - w))
            if w <= i:
                assert max(f, i, f + i - w) == f + i - w
        for n in (2 * p - 1, 3 * p):
            late = max(
                f, f + i - 2 * w
            )  # the last rank starts (P - 1) f after the first, bubble or no bubble
            check("zb_h2", p, n, (f, i, w), n * work + (p - 1) * late)
    assert idle_inside(build("zb_h2", p, 3 * p, EVEN), EVEN) == pytest.approx(0)


@pytest.mark.parametrize("p", RANKS)
def test_v_shapes_with_equal_times(p: int) -> None:
    """Two chunks a rank, f = i = w = 1.

    Bubbles against 1F1B's 3 (P - 1) of none, a half and two thirds.
    """
    full = 3 * (p - 1)
    for n in (p, 2 * p, 3 * p + 1):
        check(
            "zb_v", p, n, EVEN, 3 * n + (p - 1) / 2
        )  # rank P - 1 starts (P - 1) / 2 after the first
        if n >= 2 * p - 1:
            assert idle_inside(build("zb_v", p, n, EVEN), EVEN) == pytest.approx(0)
        if p >= 3:
            check("v_half", p, n, EVEN, 3 * n + full / 2 - (0.5 if p % 2 else 2))
            check("v_min", p, n, EVEN, 3 * n + full * 2 / 3 - (1.5, 0.5, 2.5)[p % 3])
        if n >= 2 * p:
            check("dualpipe_v", p, n, EVEN, 3 * n + (p - 1) / 2)
            assert idle_inside(build("dualpipe_v", p, n, EVEN), EVEN) == pytest.approx((p - 1) / 2)


@pytest.mark.parametrize("p", range(1, 9))
def test_v_adaptive(p: int) -> None:
    """Under any cap: from 7/8 of P on the last rank waits for its first F and I alone.

    Never slower than V-Half.
    """
    for held in {2 * ((p + 4) // 3), p + 2, (7 * p + 3) // 4, 2 * p - 1, 2 * p, 2 * p + 2}:
        cap = held / 2
        used = min(held, 2 * p)
        if held < 2 * ((p + 4) // 3):
            continue
        for n in (2 * p, 2 * p + 3):
            played = play(validate(build("v_adaptive", p, n, EVEN, cap=cap), cap=cap), EVEN)
            peak = peak_units("v_adaptive", p, n, cap=cap)
            assert peak is not None
            assert max(played.peak) <= peak <= cap
            if 4 * used >= 7 * p:
                expected = 3 * n + (3 * p - 1 - used) / 2
                assert played.span == form("v_adaptive", p, n, EVEN, cap=cap) == expected
            if held >= 2 * ((p + 2) // 2):
                assert played.span <= play(build("v_half", p, n, EVEN), EVEN).span


def test_v_adaptive_at_some_caps() -> None:
    for p, n, cap, span in (
        (8, 32, 4, 107.5),
        (8, 32, 6, 101.5),
        (16, 64, 9, 212.5),
        (16, 64, 11, 206.5),
        (16, 64, 12, 204),
    ):
        assert play(build("v_adaptive", p, n, EVEN, cap=cap), EVEN).span == span


@pytest.mark.parametrize("p", [*RANKS, 24])
def test_published_memory(p: int) -> None:
    """zb_h1 and zb_v P, zb_h2 2 P - 1, v_half (P + 2) div 2, v_min (P + 4) div 3, dualpipe_v P + 1/2."""
    n = 2 * p
    published = {
        "zb_h1": p,
        "zb_h2": 2 * p - 1,
        "zb_v": p,
        "v_half": (p + 2) // 2,
        "v_min": (p + 4) // 3,
        "dualpipe_v": p + 0.5,
    }
    for name, peak in published.items():
        assert peak_units(name, p, n) == peak
        assert max(play(build(name, p, n, EVEN), EVEN).peak) == pytest.approx(peak), name


@pytest.mark.parametrize("p", [1, 2, 3, 4, 5, 6, 9, 12])
def test_memory_of_split_backwards_holds_whatever_the_times(p: int) -> None:
    for name, n in product(("zb_h1", "zb_h2", "zb_v", "v_half", "v_min"), (1, 2, p + 1)):
        limit = peak_units(name, p, n)
        assert limit is not None
        for cost in COSTS:
            assert max(play(build(name, p, n, cost), cost).peak) <= limit


@pytest.mark.parametrize("p", RANKS)
def test_chimera_where_forward_and_backward_take_the_same(p: int) -> None:
    """2 N + P - 2 for even P, with N a multiple of P.

    For odd P, 2 N + P - 1 with N a multiple of P + 1.
    """
    cost = (1.0, 0.5, 0.5)
    odd = p % 2
    for units in (1, 2, 3):
        n = units * (p + odd)
        check("chimera", p, n, cost, 2 * n + p - 2 + odd)
    for n in (2, 6, 10):
        made = build("chimera", p, n, cost)
        assert max(play(made, cost).peak) == peak_units("chimera", p, n)


@pytest.mark.parametrize("p", RANKS)
def test_gems_with_one_part(p: int) -> None:
    for n, (f, i, w) in product((2, 4, 8, 14), COSTS):
        b = i + w
        if b >= f:
            check("gems_master", p, n, (f, i, w), p * f + n * p * b + (n - 1) * f)
        if i >= f:
            check("gems_zb", p, n, (f, i, w), p * f + n * p * i + (n - 1) * (f + w) + w)


@pytest.mark.parametrize("parts", [2, 3, 4, 7])
@pytest.mark.parametrize("p", [1, 2, 3, 5, 8, 16])
def test_gems_master_with_parts(p: int, parts: int) -> None:
    for runs, (f, i, w) in product((2, 4, 6), [(1, 1, 1), (2, 1, 2), (1, 0.5, 0.5)]):
        b = i + w
        expected = (p - 1 + parts) * (f + runs * b) + (runs - 1) * parts * f
        check("gems_master", p, runs * parts, (f, i, w), expected, parts)


@pytest.mark.parametrize("p", [1, 2, 5, 8])
def test_gems_mast_is_master_with_two_runs(p: int) -> None:
    for parts in (1, 2, 5):
        master = play(build("gems_master", p, 2 * parts, EVEN, parts), EVEN).span
        check("gems_mast", p, 2 * parts, EVEN, master, parts)


OUT_OF_RANGE = [
    ("unknown", 4, 8, EVEN, {}),
    ("gems_master", 4, 8, (2, 0.5, 0.5), {}),  # needs b >= f
    ("gems_zb", 4, 8, (2, 1, 1), {}),  # needs i >= f
    ("gems_zb", 4, 7, EVEN, {}),
    ("zb_h1", 4, 3, EVEN, {}),  # needs N >= P
    ("zb_h2", 4, 8, (1, 3, 2), {}),  # needs w <= f
    ("zb_h2", 4, 6, (2, 3, 1), {}),  # needs N >= 2 P - 1
    ("zb_v", 4, 8, (1, 1.5, 0.5), {}),
    ("v_half", 4, 3, EVEN, {}),
    ("v_min", 2, 4, EVEN, {}),
    ("v_min", 4, 3, EVEN, {}),
    ("v_adaptive", 8, 32, EVEN, {"cap": 6.5}),
    ("v_adaptive", 4, 7, EVEN, {}),
    ("dualpipe_v", 4, 7, EVEN, {}),
    ("chimera", 4, 6, (1, 0.5, 0.5), {}),
    ("chimera", 4, 8, EVEN, {}),
    ("interleaved_1f1b", 4, 13, EVEN, {}),
    ("1f1b", 4, 8, EVEN, {"cap": 0.5}),
    ("group_interleaved", 4, 3, EVEN, {}),
    ("group_interleaved", 8, 32, EVEN, {"cap": 5}),
    ("group_interleaved", 4, 8, (1, 2, 1), {}),
]


@pytest.mark.parametrize(("name", "p", "n", "cost", "more"), OUT_OF_RANGE)
def test_no_closed_form_is_said_so(
    name: str, p: int, n: int, cost: Cost, more: dict[str, object]
) -> None:
    assert form(name, p, n, cost, **more) is None


def test_unknown_names_have_no_bubble_and_no_peak() -> None:
    assert bubble("unknown", 4, 8, 1, 2) is None
    assert peak_units("unknown", 4, 8) is None
    assert bubble("gems_master", 4, 8, 2, 1) is None


def test_every_family_but_the_searched_one_has_both_forms() -> None:
    for name in set(FAMILIES) - {"capped"}:
        assert form(name, 4, 8, (1, 0.5, 0.5) if name == "chimera" else EVEN) is not None, name
        assert peak_units(name, 4, 8) is not None, name


@pytest.mark.parametrize(
    ("name", "units", "peaks"),
    [("gems_master", 551, {1}), ("layer_parallel", 768, {1}), ("1f1b", 117, set(range(1, 9)))],
)
def test_published_figures_at_8_ranks_and_32_micro_batches(
    name: str, units: int, peaks: set[int]
) -> None:
    played = play(build(name, 8, 32, EVEN), EVEN)
    assert step_units(name, 8, 32, 1, 2) == played.span == units
    assert set(played.peak) == peaks
    assert bubble(name, 8, 32, 1, 2) == pytest.approx(1 - 32 * 3 / units)
    assert bubble(name, 8, 32, 1, 2) == pytest.approx(1 - played.efficiency)


def test_bubble_of_gems_tends_to_its_published_limit() -> None:
    """With b = 2f and many runs the bubble is (P - 1)/(P + 1/2)."""
    found = bubble("gems_master", 8, 100_000, 1, 2)
    assert found == pytest.approx(7 / 8.5, abs=1e-4)
