"""The fastest memory plan, by a MILP and a local search over the choices of layers."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise

from gems.errors import DoesNotFitError
from gems.memory.case import MemoryCase, PlanOutcome
from gems.memory.optimizer.formulation import PlanModel, Weights
from gems.memory.optimizer.windows import WindowOrder, shortened, with_windows
from gems.memory.plan import Choice, MemoryPlan, Segment
from gems.memory.storages import profile_storages

POLICY = "plan"
# further solutions of the MILP: the share of the largest layer's saved bytes to leave free for
# copies in flight, and the share of hidden copy time to add to the objective
VARIANTS = ((0.0, 0.01), (0.25, 0.01))
FLUID_VARIANTS = ((0.5, 0.1), (1.0, 0.1))
# limits of the mixed-integer program, with a looser gap if only a plan is needed; a budget above
# the usual one improves the bound with NODES_PER_S / number of variables nodes a second
NODES = 10
GAP = 0.01
LOOSE_GAP = 0.02
USUAL_BUDGET_S = 10.0
NODES_PER_S = 60_000
GOOD = 0.001  # relative distance to the bound at which the search ends
VARIABLES_PER_S = 600  # size of a MILP that HiGHS solves to these limits in a second
SEARCH_SHARE = 0.5  # of the budget; the MILPs get the rest
# numbers of segments into which a recomputed stage is divided; 0: each layer by itself
PARTS = (0, 1, 2, 3, 4, 6, 8)
ADVICE = (
    "give more memory, use more partitions or fewer micro-batches in flight, or a smaller image or"
    " micro-batch"
)
ACTIONS_PER_S = 60_000  # actions of a schedule that a common core simulates in a second
ACTIONS_OF_A_LAYER = 10  # additional effort to derive a layer's storages
HOTTEST = 0.02  # first temperature of annealing, as a share of the step
STARTS = 3  # plans from which a descent begins
MAX_ROUNDS = 20_000  # ends the search of tiny cases, whose plans are soon all known
RUNS = (2, 3, 4, 6)  # lengths of segments that are recomputed as one change
Cut = tuple[tuple[Segment, ...], ...]
Move = Callable[[tuple[Segment, ...]], tuple[Segment, ...] | None]


@dataclass(frozen=True)
class Planned:
    """A plan that fits, its outcome, and its distance from the least time, in seconds.

    No plan under the limit takes less than `bound_s`. The bound holds for this partition and order
    of the schedule, these rates of the links and bytes as the timeline counts them, for any choice
    per layer, segments and distances of the copies, if an offloaded layer moves all that it saved
    and not only the inputs of its convolutions. Recomputed segments have at most as many layers as
    `MAX_OPTIONS` allows (24 of a stage of 25), or all layers of the stage. If a rank has more than
    one micro-batch, or the MILP is too large for the budget, the bound treats copies as a fluid of
    which any part can leave. `gap` is the step divided by the bound, less 1. `method` names the
    origin of the plan.
    """

    outcome: PlanOutcome
    bound_s: float
    method: str

    @property
    def plan(self) -> MemoryPlan:
        """The plan."""
        return self.outcome.plan

    @property
    def gap(self) -> float:
        """The excess of the step over the bound, as a share of the bound."""
        return self.outcome.step_s / self.bound_s - 1.0 if self.bound_s else float("inf")


def target_limit_bytes(case: MemoryCase, saving: float) -> int:
    """Return the limit in bytes at which the fullest rank saves a share of its dynamic memory.

    Parameters, gradients, the optimizer's state and the step's images stay under any plan.
    """
    limits = []
    for rank in case.kept.ranks:
        static = min(point.device_bytes for point in rank.points)
        limits.append(static + (1.0 - saving) * (rank.peak_bytes - static))
    return int(max(limits))


def plan(
    case: MemoryCase, limit_bytes: int, budget_s: float, rivals: Sequence[MemoryPlan] = ()
) -> Planned:
    """Find the plan with the fastest simulated step under which no rank exceeds `limit_bytes`.

    A mixed-integer program (HiGHS) chooses for each layer under the prefix-bandwidth constraints.
    Copies then get the widest windows that the bytes allow, and the plan is simulated. A search
    changes single layers while `budget_s` lasts; the budget is counted in actions and not in
    seconds, so that the result is the same everywhere. The plan is never worse than the best of
    `rivals` that fit.

    Raises:
        DoesNotFitError: no known plan fits; it names the layer that needs the most by itself, and
        the least bytes that a plan reached.
    """
    search = Search(case, limit_bytes, SEARCH_SHARE * budget_s)
    if not search.excess_bytes(case.kept):
        return _planned(case.kept, case.kept.step_s, "keep")
    attempts = [("all layers alike", search.judge(cut)) for cut in _simple(case)]
    for rival in rivals:
        attempts.append((rival.policy, search.simulate(rival)))
        attempts.append((rival.policy, search.judge(rival.stages)))
    bound_s = 0.0
    for bound_s, cut in _by_milp(case, limit_bytes, budget_s):
        search.good_s = (1.0 + GOOD) * bound_s
        if cut is not None:
            attempts.append(("programme", search.judge(cut)))
        if any(search.is_good(attempt) for _, attempt in attempts):
            break
    method, best = min(attempts, key=lambda attempt: search.cost(attempt[1]))
    improved = search.improve(
        [case.kept, *search.choose_order([attempt for _, attempt in attempts])]
    )
    if search.excess_bytes(improved):
        raise _too_small(case, improved, limit_bytes)
    if improved is not best:
        method += ", improved by search"
    return _planned(
        shortened(search.joined(improved), limit_bytes, search.simulate), bound_s, method
    )


def _planned(outcome: PlanOutcome, bound_s: float, method: str) -> Planned:
    outcome = replace(outcome, plan=replace(outcome.plan, policy=POLICY))
    return Planned(outcome, min(bound_s, outcome.step_s), method)


def _by_milp(
    case: MemoryCase, limit_bytes: int, budget_s: float
) -> Iterator[tuple[float, Cut | None]]:
    """Yield lower bounds of every plan's step in seconds, each with a solution of the MILP.

    The MILP is solved at the limit and below it. If it is too large for the budget, its relaxation
    is rounded. Without any solution no plan can keep the limit, and nothing is yielded.
    """
    is_chain = (
        case.schedule.num_ranks == 1
        and len({action.micro_batch for action in case.schedule.rank_schedules[0]}) == 1
    )
    model = PlanModel(case, limit_bytes, moves_all=is_chain)
    relaxed = model.solve(is_whole=False)
    if relaxed is None:
        return
    weights, bound_s = relaxed
    yield bound_s, _rounded(case, weights)
    is_small = model.program.num_variables <= budget_s * VARIABLES_PER_S
    is_exact = is_small and is_chain
    if is_exact:
        model = PlanModel(case, limit_bytes, is_whole_copies=True)
        more = (budget_s - USUAL_BUDGET_S) * NODES_PER_S / model.program.num_variables
        whole = model.solve(True, NODES + max(0, int(more)), GAP)
        if whole is not None:
            bound_s = max(bound_s, whole[1])
            yield bound_s, _rounded(case, whole[0]) if whole[0] else None
    spans = profile_storages(case.profile).spans
    largest = max(float(spans.stash[layer, layer + 1]) for layer in range(case.profile.num_layers))
    for margin, copy_share in VARIANTS if is_exact else FLUID_VARIANTS[: 1 + is_chain]:
        model = PlanModel(case, int(limit_bytes - margin * largest), is_whole_copies=is_exact)
        solution = model.solve(is_small, NODES if is_chain else 1, LOOSE_GAP, copy_share)
        if solution is not None and solution[0]:
            yield bound_s, _rounded(case, solution[0])


def _rounded(case: MemoryCase, weights: Weights) -> Cut:
    """Return the segments of a solution.

    For a relaxed solution this is the path through each stage with the most weight.
    """
    stages = []
    for (first, end), chosen in zip(pairwise(case.boundaries), weights, strict=True):
        best: dict[int, tuple[float, tuple[Segment, ...]]] = {first: (0.0, ())}
        for option in sorted(chosen, key=lambda option: (option.first, option.end, option.choice)):
            if option.first in best:
                value, path = best[option.first]
                value += chosen[option] * (option.end - option.first)
                if option.end not in best or value > best[option.end][0]:
                    best[option.end] = (value, (*path, option))
        stages.append(best[end][1])
    return tuple(stages)


def _simple(case: MemoryCase) -> Iterator[Cut]:
    """Yield plans to start a search from: everything offloaded, or recomputed in equal parts."""
    for choice, parts in ((Choice.OFFLOAD, 0), *((Choice.RECOMPUTE, parts) for parts in PARTS)):
        cut = []
        for first, end in pairwise(case.boundaries):
            number = min(parts or end - first, end - first)
            marks = [first + round(part * (end - first) / number) for part in range(number + 1)]
            cut.append(tuple(Segment(begin, stop, choice) for begin, stop in pairwise(marks)))
        yield tuple(cut)


def _too_small(case: MemoryCase, least: PlanOutcome, limit_bytes: int) -> DoesNotFitError:
    """Return the error, with the largest layer of the fullest rank and the bytes that it needs."""
    spans = profile_storages(case.profile).spans
    rank = least.fullest_rank
    alone = {
        layer: int(max(spans.forward_peak[layer, layer + 1], spans.backward_peak[layer, layer + 1]))
        for stage in {stage for _, stage in case.schedule.placement.stages_on(rank)}
        for layer in range(case.boundaries[stage], case.boundaries[stage + 1])
    }
    largest = max(alone, key=lambda layer: alone[layer])
    return DoesNotFitError(
        f"rank {rank} under the plan of least memory",
        least.peak_bytes[rank],
        limit_bytes,
        f"its largest layer {case.profile.layers[largest].name} needs {alone[largest]} bytes by"
        f" itself; {ADVICE}",
    )


class Search:
    """The search that improves a plan under a limit by changes of one or two places.

    The order of the changes is drawn from a fixed seed. It ends when a plan takes at most `good_s`
    seconds or the budget is spent. The budget is counted in simulated actions, so that a search is
    the same on every machine. Copies get their windows in the order `way`.
    """

    def __init__(self, case: MemoryCase, limit_bytes: int, budget_s: float) -> None:
        self.case = case
        self.limit_bytes = limit_bytes
        self.good_s = 0.0
        self.way = WindowOrder.OUT_FIRST
        self._left = budget_s * ACTIONS_PER_S
        self._tried: dict[tuple[Cut, WindowOrder], PlanOutcome] = {}
        self._random = random.Random(0)

    def excess_bytes(self, tried: PlanOutcome) -> int:
        """Return the bytes above the limit, summed over ranks so that each rank's change counts."""
        return sum(max(0, peak - self.limit_bytes) for peak in tried.peak_bytes)

    def cost(self, tried: PlanOutcome) -> tuple[float, float]:
        """Return the objective to be minimised: first the bytes above the limit, then seconds."""
        return (float(self.excess_bytes(tried)), tried.step_s)

    def simulate(self, plan: MemoryPlan) -> PlanOutcome:
        """Simulate a plan and charge the budget for it."""
        outcome = self.case.outcome(plan)
        self._left -= (
            sum(map(len, outcome.schedule.rank_schedules))
            + ACTIONS_OF_A_LAYER * self.case.profile.num_layers
        )
        return outcome

    def judge(self, stages: Cut) -> PlanOutcome:
        """Set the windows of a plan's copies and simulate it.

        Kept layers count as separate segments.
        """
        key = (_bare(_by_layer(stages)), self.way)
        if key not in self._tried:
            self._tried[key] = self._with_windows(key[0], (self.way,))
        return self._tried[key]

    def choose_order(self, starts: Sequence[PlanOutcome]) -> list[PlanOutcome]:
        """Choose the window order that suits the best starts, and return all outcomes tried."""
        outcomes = {order: list(starts) for order in WindowOrder}
        for start in sorted(starts, key=self.cost)[:STARTS]:
            for self.way in WindowOrder:
                if self._left > 0:
                    outcomes[self.way].append(self.judge(start.plan.stages))
        self.way = min(WindowOrder, key=lambda order: min(map(self.cost, outcomes[order])))
        return list(
            {id(outcome): outcome for tried in outcomes.values() for outcome in tried}.values()
        )

    def is_good(self, tried: PlanOutcome) -> bool:
        """Return whether a plan fits and is fast enough."""
        return not self.excess_bytes(tried) and tried.step_s <= self.good_s

    def improve(self, starts: Sequence[PlanOutcome]) -> PlanOutcome:
        """Return the best plan found.

        Mix stages of the starts, descend by single changes, then anneal.
        """
        starts = sorted(starts, key=self.cost)
        best = starts[0] if self.is_good(starts[0]) else self._mix(starts[0], starts[1:])
        for start in (best, *starts[1:STARTS]):
            if self.is_good(best):
                return best
            changed = self._descend(start)
            while changed is not start:
                start = changed
                changed = self._descend(changed)
            best = min(best, start, key=self.cost)
        return self._anneal(best)

    def joined(self, best: PlanOutcome) -> PlanOutcome:
        """Return the plan with neighbouring kept segments joined, if that costs nothing.

        The schedule is then shorter.
        """
        plan = MemoryPlan("plan", _bare(best.plan.stages)).joined()
        joined_outcome = self._with_windows(plan.stages, tuple(WindowOrder))
        return (
            joined_outcome
            if self.cost(joined_outcome) <= (self.excess_bytes(best), best.step_s * (1 + 1e-9))
            else best
        )

    def _with_windows(self, stages: Cut, ways: Sequence[WindowOrder]) -> PlanOutcome:
        return with_windows(MemoryPlan("plan", stages), self.limit_bytes, self.simulate, ways)

    def _mix(self, best: PlanOutcome, others: Sequence[PlanOutcome]) -> PlanOutcome:
        """Take single stages from other plans if that helps: not all ranks need the same."""
        for stage in range(len(self.case.boundaries) - 1):
            for other in others:
                if self._left <= 0:
                    return best
                stages = list(_bare(best.plan.stages))
                stages[stage] = _bare(other.plan.stages)[stage]
                best = min(best, self.judge(tuple(stages)), key=self.cost)
        return best

    def _descend(self, best: PlanOutcome) -> PlanOutcome:
        """Try every change once, in an order drawn anew, and take those that help."""
        stages = _by_layer(best.plan.stages)
        moves = [(stage, move) for stage, cut in enumerate(stages) for move in _moves(cut)]
        self._random.shuffle(moves)
        for stage, move in moves:
            outcome = None if self.is_good(best) else self._after(stages, stage, move)
            if outcome is not None and self.cost(outcome) < self.cost(best):
                best = outcome
                stages = _by_layer(outcome.plan.stages)
        return best

    def _anneal(self, best: PlanOutcome) -> PlanOutcome:
        """Accept slower changes, too, with falling temperature (Kirkpatrick et al. 1983)."""
        current = best
        whole = max(self._left, 1.0)
        rounds = 0
        while self._left > 0 and not self.is_good(best) and rounds < MAX_ROUNDS:
            rounds += 1
            stages = _by_layer(current.plan.stages)
            stage = self._random.randrange(len(stages))
            move = self._random.choice(list(_moves(stages[stage])))
            outcome = self._after(stages, stage, move)
            if outcome is None or self.excess_bytes(outcome) > self.excess_bytes(current):
                continue
            warmth = HOTTEST * best.step_s * self._left / whole
            worse_s = outcome.step_s - current.step_s
            if worse_s <= 0 or (warmth > 0 and self._random.random() < math.exp(-worse_s / warmth)):
                current = outcome
                best = min(best, current, key=self.cost)
        return best

    def _after(self, stages: Cut, stage: int, move: Move) -> PlanOutcome | None:
        """Return the plan with one stage changed; None without a change or budget."""
        changed = move(stages[stage])
        if changed is None or self._left <= 0:
            return None
        return self.judge((*stages[:stage], changed, *stages[stage + 1 :]))


def _moves(cut: tuple[Segment, ...]) -> Iterator[Move]:
    """Yield the changes of a stage, by layer, so that they stay valid after other changes."""
    layers = range(cut[0].first, cut[-1].end)
    for layer in layers:
        for choice in Choice:
            yield partial(_chosen, first=layer, end=layer + 1, choice=choice)
        for length in RUNS:
            if layer + length <= layers.stop:
                for choice in (Choice.RECOMPUTE, Choice.SELECTIVE, Choice.OFFLOAD_INPUTS):
                    yield partial(_chosen, first=layer, end=layer + length, choice=choice)
        for step in (1, 2, 3):
            yield partial(_swapped, layer=layer, other=layer + step)
        if layer + 1 in layers:
            yield partial(_toggled, layer=layer + 1)


def _chosen(
    segments: tuple[Segment, ...], first: int, end: int, choice: Choice
) -> tuple[Segment, ...] | None:
    """Make a range of layers one segment with a choice.

    The remainders of the segments around them stay as they were.
    """
    if any(
        (segment.first, segment.end, segment.choice) == (first, end, choice) for segment in segments
    ):
        return None
    before = [
        replace(segment, end=min(segment.end, first))
        for segment in segments
        if segment.first < first
    ]
    after = [
        replace(segment, first=max(segment.first, end)) for segment in segments if segment.end > end
    ]
    return (*before, Segment(first, end, choice), *after)


def _swapped(segments: tuple[Segment, ...], layer: int, other: int) -> tuple[Segment, ...] | None:
    """Exchange the choices of two layers."""
    if other >= segments[-1].end:
        return None
    first, second = (
        next(s.choice for s in segments if s.first <= index < s.end) for index in (layer, other)
    )
    changed = None if first is second else _chosen(segments, layer, layer + 1, second)
    return None if changed is None else _chosen(changed, other, other + 1, first)


def _toggled(segments: tuple[Segment, ...], layer: int) -> tuple[Segment, ...] | None:
    """Split a recomputed segment before a layer, or join the two that meet there."""
    for index, segment in enumerate(segments):
        if not segment.choice.is_recomputed:
            continue
        if segment.first < layer < segment.end:
            return (
                *segments[:index],
                replace(segment, end=layer),
                replace(segment, first=layer),
                *segments[index + 1 :],
            )
        if segment.first == layer and index and segments[index - 1].choice is segment.choice:
            return (
                *segments[: index - 1],
                replace(segment, first=segments[index - 1].first),
                *segments[index + 1 :],
            )
    return None


def _by_layer(stages: Cut) -> Cut:
    """Return kept segments layer by layer."""

    def parts(segment: Segment) -> list[Segment]:
        if segment.choice is not Choice.KEEP:
            return [segment]
        return [
            replace(segment, first=layer, end=layer + 1)
            for layer in range(segment.first, segment.end)
        ]

    return tuple(tuple(part for segment in cut for part in parts(segment)) for cut in stages)


def _bare(stages: Cut) -> Cut:
    """Return segments without distances."""
    return tuple(
        tuple(Segment(segment.first, segment.end, segment.choice) for segment in cut)
        for cut in stages
    )
