"""Closed forms of the published schedules' step time and memory, held against the simulation by tests."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class _Size:
    """P, N, GEMS's parts, chunks a rank, in-flight limit, and f, i, w of a rank's part of the model."""

    p: int
    n: int
    parts: int
    chunks: int
    group: int
    f: float
    i: float
    w: float

    @property
    def b(self) -> float:
        return self.i + self.w

    @property
    def work(self) -> float:
        return self.n * (self.f + self.b)

    @property
    def is_even(self) -> bool:
        """Whether f = i = w."""
        return self.f == self.i == self.w


def step_units(
    name: str,
    num_ranks: int,
    num_micro_batches: int,
    forward: float,
    backward: float,
    parts: int = 1,
    *,
    weight_grad: float | None = None,
    chunks: int = 2,
    cap: float | None = None,
) -> float | None:
    """Return the time of one step with equal stages and free links, in the unit of `forward` and `backward`.

    With f, b = i + w for the forward and backward of a rank's part of the model and W = N (f + b):

    - layer_parallel N P (f + b); gpipe and 1f1b W + (P - 1)(f + b), and 1f1b with a cap K < P
      ((N - 1) div K)(P - K)(f + b) more.
    - interleaved_1f1b, where the N div P groups are full, and looped_bfs: W + (P - 1)(f + b) / v for N >= P and
      W + (P - 1 - (v - 1)(N - 1) / v)(f + b) below.
    - zb_h1, for N >= P: W + (P - 1) max(f, i, f + i - w); zb_h2, for N >= 2 P - 1 and w <= f:
      W + (P - 1) max(f, f + i - 2 w). The last rank starts (P - 1) f late, so that with no bubble the step
      still takes W + (P - 1) f.
    - with f = i = w only: zb_v, for N >= P, W + (P - 1) f / 2; v_half, for N >= P >= 3, W + (3 P - 4) f / 2; v_min
      W + (4 P - 5) f / 2, for P >= 2; dualpipe_v W + (P - 1) f / 2.
    - chimera with f = b: W + (P - 2) f where P is even and divides N, W + (P - 1) f where P is odd and P + 1 divides N.
    - GEMS with runs of m parts, for b >= f: (P - 1 + m) f + (N / m)(P - 1 + m) b + (N / m - 1) m f, which for m = 1 is
      P f + N P b + (N - 1) f; gems_zb, for i >= f: P f + N P i + (N - 1)(f + w) + w.

    None for a name without a closed form, or outside the form's range. `weight_grad` is w, by default half of b.
    """
    w = backward / 2 if weight_grad is None else weight_grad
    group = num_ranks if cap is None else min(num_ranks, int(cap))
    form = _STEPS.get(name)
    if form is None or not group:
        return None
    size = _Size(num_ranks, num_micro_batches, parts, chunks, group, forward, backward - w, w)
    if name in ("gems_mast", "gems_master", "gems_zb", "chimera") and num_micro_batches % (2 * parts):
        return None
    return form(size)


def peak_units(
    name: str, num_ranks: int, num_micro_batches: int, parts: int = 1, *, chunks: int = 2, cap: float | None = None
) -> float | None:
    """Return the most activations that a rank holds, in micro-batches on one of P equal parts of the model.

    layer_parallel and gems_zb 1; GEMS its parts; gpipe and looped_bfs N; 1f1b min(P, N), or the cap's integer part
    where that is less; zb_h1, zb_v and chimera min(P, N); zb_h2 min(2 P - 1, N); v_half min((P + 2) div 2, N) and v_min
    min((P + 4) div 3, N); dualpipe_v P + 1/2; interleaved_1f1b ((v - 1) G + 2 P - 1) / v and at most N, with
    G = ceil(N / (N div P)) (a bound where the groups are not full, exact otherwise). None for an unknown name.
    """
    p, n = num_ranks, num_micro_batches
    group = p if cap is None else min(p, int(cap))
    size = -(-n // max(1, n // p))
    return {
        "layer_parallel": 1.0,
        "gpipe": float(n),
        "1f1b": float(min(n, group)),
        "interleaved_1f1b": min(n, ((chunks - 1) * size + 2 * p - 1) / chunks),
        "looped_bfs": float(n),
        "zb_h1": float(min(n, p)),
        "zb_h2": float(min(n, 2 * p - 1)),
        "zb_v": float(min(n, p)),
        "v_half": float(min(n, (p + 2) // 2)),
        "v_min": float(min(n, (p + 4) // 3)),
        "dualpipe_v": p + 0.5,
        "chimera": float(min(n, p)),
        "gems_mast": float(parts),
        "gems_master": float(parts),
        "gems_zb": 1.0,
    }.get(name)


def bubble(
    name: str, num_ranks: int, num_micro_batches: int, forward: float, backward: float, parts: int = 1
) -> float | None:
    """Return the share of a step in which a rank idles, by the closed form."""
    span = step_units(name, num_ranks, num_micro_batches, forward, backward, parts)
    return None if not span else 1.0 - num_micro_batches * (forward + backward) / span


def _one_f_one_b(s: _Size) -> float:
    return s.work + (s.p - 1 + (s.n - 1) // s.group * (s.p - s.group)) * (s.f + s.b)


def _looped(s: _Size) -> float:
    return s.work + (s.p - 1 - (s.chunks - 1) * (min(s.n, s.p) - 1) / s.chunks) * (s.f + s.b)


def _interleaved(s: _Size) -> float | None:
    return None if s.n % max(1, s.n // s.p) else _looped(s)


def _zb_h1(s: _Size) -> float | None:
    return s.work + (s.p - 1) * max(s.f, s.i, s.f + s.i - s.w) if s.n >= s.p else None


def _zb_h2(s: _Size) -> float | None:
    return s.work + (s.p - 1) * max(s.f, s.f + s.i - 2 * s.w) if s.n >= 2 * s.p - 1 and s.w <= s.f else None


def _zb_v(s: _Size) -> float | None:
    return s.work + (s.p - 1) * s.f / 2 if s.n >= s.p and s.is_even else None


def _v_half(s: _Size) -> float | None:
    return s.work + (3 * s.p - 4) * s.f / 2 if s.n >= s.p >= 3 and s.is_even else None


def _v_min(s: _Size) -> float | None:
    return s.work + (4 * s.p - 5) * s.f / 2 if s.p >= 2 and s.is_even else None


def _dualpipe_v(s: _Size) -> float | None:
    return s.work + (s.p - 1) * s.f / 2 if s.n >= 2 * s.p and s.is_even else None


def _chimera(s: _Size) -> float | None:
    is_odd = s.p % 2
    return s.work + (s.p - 2 + is_odd) * s.f if s.f == s.b and s.n % (s.p + is_odd) == 0 else None


def _gems(s: _Size) -> float | None:
    runs, way = s.n // s.parts, s.p - 1 + s.parts
    return way * s.f + runs * way * s.b + (runs - 1) * s.parts * s.f if s.b >= s.f else None


def _gems_zb(s: _Size) -> float | None:
    return s.p * s.f + s.n * s.p * s.i + (s.n - 1) * (s.f + s.w) + s.w if s.i >= s.f else None


_STEPS: dict[str, Callable[[_Size], float | None]] = {
    "layer_parallel": lambda s: s.p * s.work,
    "gpipe": lambda s: s.work + (s.p - 1) * (s.f + s.b),
    "1f1b": _one_f_one_b,
    "interleaved_1f1b": _interleaved,
    "looped_bfs": _looped,
    "zb_h1": _zb_h1,
    "zb_h2": _zb_h2,
    "zb_v": _zb_v,
    "v_half": _v_half,
    "v_min": _v_min,
    "dualpipe_v": _dualpipe_v,
    "chimera": _chimera,
    "gems_mast": _gems,
    "gems_master": _gems,
    "gems_zb": _gems_zb,
}
