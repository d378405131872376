"""Local search around a plan: change a layer's choice or move the ends of a recomputed segment, and simulate."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

from gems.memory.case import MemoryCase, PlanOutcome
from gems.memory.optimizer.windows import WindowOrder, with_windows
from gems.memory.plan import Choice, MemoryPlan, Segment

ACTIONS_PER_S = 60_000  # actions of a schedule that a common core simulates in a second
ACTIONS_OF_A_LAYER = 10  # what finding out a layer's storages costs beside
HOTTEST = 0.02  # the share of a step that annealing first gives away lightly
STARTS = 3  # plans from which a descent begins
MAX_ROUNDS = 20_000  # a case so small that all its plans are known soon must end too
RUNS = (2, 3, 4, 6)  # lengths of segments that are recomputed as one change
CHOICES = (Choice.KEEP, Choice.OFFLOAD, Choice.RECOMPUTE, Choice.SELECTIVE)
Cut = tuple[tuple[Segment, ...], ...]
Move = Callable[[tuple[Segment, ...]], tuple[Segment, ...] | None]


@dataclass(frozen=True, eq=False)
class Candidate:
    """A simulated plan; the better one has the lower `cost`: bytes above the limit first, seconds then."""

    outcome: PlanOutcome
    limit_bytes: int

    @property
    def excess_bytes(self) -> int:
        """Bytes above the limit, of all ranks together: so each rank's change counts."""
        return sum(max(0, peak - self.limit_bytes) for peak in self.outcome.peak_bytes)

    @property
    def cost(self) -> tuple[float, float]:
        """The objective, to be minimised."""
        return (float(self.excess_bytes), self.outcome.step_s)


class Search:
    """Improves a plan under a limit by changes of one or two places, in an order drawn from a fixed seed.

    It ends where a plan takes no more than `good_s`, seconds, or the budget is spent, which is counted in simulated
    actions so that a search is the same on every machine. Copies get their windows in one `way`.
    """

    def __init__(self, case: MemoryCase, limit_bytes: int, budget_s: float) -> None:
        self.case, self.limit_bytes = case, limit_bytes
        self.good_s = 0.0
        self.way = WindowOrder.OUT_FIRST
        self._left = budget_s * ACTIONS_PER_S
        self._tried: dict[tuple[Cut, WindowOrder], Candidate] = {}
        self._random = random.Random(0)

    def simulate(self, plan: MemoryPlan) -> PlanOutcome:
        """Simulate a plan and count what that took."""
        found = self.case.outcome(plan)
        self._left -= sum(map(len, found.schedule.rows)) + ACTIONS_OF_A_LAYER * self.case.profile.num_layers
        return found

    def judge(self, stages: Cut) -> Candidate:
        """Set the windows of a plan's copies and simulate it, with kept layers as segments of their own."""
        key = (_bare(_by_layer(stages)), self.way)
        if key not in self._tried:
            self._tried[key] = self._with_windows(key[0], (self.way,))
        return self._tried[key]

    def choose_order(self, starts: Sequence[Candidate]) -> list[Candidate]:
        """Choose the window order under which the best starts do best, and return all candidates."""
        found = {way: list(starts) for way in WindowOrder}
        for start in sorted(starts, key=lambda each: each.cost)[:STARTS]:
            for self.way in WindowOrder:
                if self._left > 0:
                    found[self.way].append(self.judge(start.outcome.plan.stages))
        self.way = min(WindowOrder, key=lambda way: min(each.cost for each in found[way]))
        return list(dict.fromkeys(each for tried in found.values() for each in tried))

    def is_good(self, tried: Candidate) -> bool:
        """Whether a plan fits and is fast enough."""
        return not tried.excess_bytes and tried.outcome.step_s <= self.good_s

    def improve(self, starts: Sequence[Candidate]) -> Candidate:
        """Return the best plan found: mix stages of the starts, descend by single changes, then anneal."""
        starts = sorted(starts, key=lambda each: each.cost)
        best = starts[0] if self.is_good(starts[0]) else self._mix(starts[0], starts[1:])
        for start in (best, *starts[1:STARTS]):
            if self.is_good(best):
                return best
            changed = self._descend(start)
            while changed is not start:
                start, changed = changed, self._descend(changed)
            best = min(best, start, key=lambda each: each.cost)
        return self._anneal(best)

    def joined(self, best: Candidate) -> Candidate:
        """Return the plan with neighbouring kept segments joined if that costs nothing, for a shorter schedule."""
        plan = MemoryPlan("plan", _bare(best.outcome.plan.stages)).joined()
        found = self._with_windows(plan.stages, tuple(WindowOrder))
        return found if found.cost <= (best.excess_bytes, best.outcome.step_s * (1 + 1e-9)) else best

    def _with_windows(self, stages: Cut, ways: Sequence[WindowOrder]) -> Candidate:
        outcome = with_windows(MemoryPlan("plan", stages), self.limit_bytes, self.simulate, ways)
        return Candidate(outcome, self.limit_bytes)

    def _mix(self, best: Candidate, others: Sequence[Candidate]) -> Candidate:
        """Take single stages from other plans if that helps: not all ranks need the same."""
        for stage in range(len(self.case.boundaries) - 1):
            for other in others:
                if self._left <= 0:
                    return best
                stages = list(_bare(best.outcome.plan.stages))
                stages[stage] = _bare(other.outcome.plan.stages)[stage]
                best = min(best, self.judge(tuple(stages)), key=lambda each: each.cost)
        return best

    def _descend(self, best: Candidate) -> Candidate:
        """Try every change once, in an order drawn anew, and take those that help."""
        stages = _by_layer(best.outcome.plan.stages)
        moves = [(stage, move) for stage, cut in enumerate(stages) for move in _moves(cut)]
        self._random.shuffle(moves)
        for stage, move in moves:
            found = None if self.is_good(best) else self._after(stages, stage, move)
            if found is not None and found.cost < best.cost:
                best, stages = found, _by_layer(found.outcome.plan.stages)
        return best

    def _anneal(self, best: Candidate) -> Candidate:
        """Take changes that cost a little too, ever less as the budget goes (Kirkpatrick et al. 1983)."""
        now, whole, rounds = best, max(self._left, 1.0), 0
        while self._left > 0 and not self.is_good(best) and rounds < MAX_ROUNDS:
            rounds += 1
            stages = _by_layer(now.outcome.plan.stages)
            stage = self._random.randrange(len(stages))
            move = self._random.choice(list(_moves(stages[stage])))
            found = self._after(stages, stage, move)
            if found is None or found.excess_bytes > now.excess_bytes:
                continue
            warmth = HOTTEST * best.outcome.step_s * self._left / whole
            worse_s = found.outcome.step_s - now.outcome.step_s
            if worse_s <= 0 or (warmth > 0 and self._random.random() < math.exp(-worse_s / warmth)):
                now = found
                best = now if now.cost < best.cost else best
        return best

    def _after(self, stages: Cut, stage: int, move: Move) -> Candidate | None:
        """Return the candidate with one stage changed, or None if nothing changes or the budget is spent."""
        changed = move(stages[stage])
        if changed is None or self._left <= 0:
            return None
        return self.judge((*stages[:stage], changed, *stages[stage + 1 :]))


def _moves(cut: tuple[Segment, ...]) -> Iterator[Move]:
    """Yield the changes of a stage, by its layers, so that they mean something after other changes too."""
    layers = range(cut[0].first, cut[-1].end)
    for layer in layers:
        for choice in CHOICES:
            yield partial(_chosen, first=layer, end=layer + 1, choice=choice)
        for length in RUNS:
            if layer + length <= layers.stop:
                for choice in (Choice.RECOMPUTE, Choice.SELECTIVE):
                    yield partial(_chosen, first=layer, end=layer + length, choice=choice)
        for step in (1, 2, 3):
            yield partial(_swapped, layer=layer, other=layer + step)
        if layer + 1 in layers:
            yield partial(_toggled, layer=layer + 1)


def _chosen(now: tuple[Segment, ...], first: int, end: int, choice: Choice) -> tuple[Segment, ...] | None:
    """Make layers one segment of a choice; what is left of the segments around them stays as it was."""
    if any((each.first, each.end, each.choice) == (first, end, choice) for each in now):
        return None
    before = [replace(each, end=min(each.end, first)) for each in now if each.first < first]
    after = [replace(each, first=max(each.first, end)) for each in now if each.end > end]
    return (*before, Segment(first, end, choice), *after)


def _swapped(now: tuple[Segment, ...], layer: int, other: int) -> tuple[Segment, ...] | None:
    """Exchange the choices of two layers."""
    if other >= now[-1].end:
        return None
    one, two = (next(s.choice for s in now if s.first <= each < s.end) for each in (layer, other))
    changed = None if one is two else _chosen(now, layer, layer + 1, two)
    return None if changed is None else _chosen(changed, other, other + 1, one)


def _toggled(now: tuple[Segment, ...], layer: int) -> tuple[Segment, ...] | None:
    """Split a recomputed segment before a layer, or join the two that meet there."""
    for index, segment in enumerate(now):
        if not segment.choice.is_recomputed:
            continue
        if segment.first < layer < segment.end:
            return (*now[:index], replace(segment, end=layer), replace(segment, first=layer), *now[index + 1 :])
        if segment.first == layer and index and now[index - 1].choice is segment.choice:
            return (*now[: index - 1], replace(segment, first=now[index - 1].first), *now[index + 1 :])
    return None


def _by_layer(stages: Cut) -> Cut:
    """Return kept segments layer by layer."""

    def parts(segment: Segment) -> list[Segment]:
        if segment.choice is not Choice.KEEP:
            return [segment]
        return [replace(segment, first=layer, end=layer + 1) for layer in range(segment.first, segment.end)]

    return tuple(tuple(part for segment in cut for part in parts(segment)) for cut in stages)


def _bare(stages: Cut) -> Cut:
    """Return segments without distances."""
    return tuple(tuple(Segment(segment.first, segment.end, segment.choice) for segment in cut) for cut in stages)
