"""The optimal plan: per layer keep, offload or recompute, so that every rank fits and the step is fastest."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from gems.errors import DoesNotFitError
from gems.memory.case import MemoryCase, PlanOutcome
from gems.memory.optimizer.formulation import PlanModel, Weights
from gems.memory.optimizer.search import Candidate, Cut, Search
from gems.memory.optimizer.windows import shortened
from gems.memory.plan import Choice, MemoryPlan, Segment
from gems.memory.storages import profile_storages

POLICY = "plan"
# For which limits and prices of copies the MILP is solved beside: the share of the largest layer's saved bytes that is
# left for copies under way, and what of a hidden copy's time counts as if it were exposed, where plans are alike.
VARIANTS = ((0.0, 0.01), (0.25, 0.01))
FLUID_VARIANTS = ((0.5, 0.1), (1.0, 0.1))
# how far the mixed-integer program is followed, and its looser end where only a plan is asked for; a budget above the
# usual one follows the bound further, by so many nodes a second over the number of variables
NODES, GAP, LOOSE_GAP = 10, 0.01, 0.02
USUAL_BUDGET_S, NODES_PER_S = 10.0, 60_000
GOOD = 0.001  # a plan this near to the bound is not improved further
VARIABLES_PER_S = 600  # of a MILP that HiGHS follows so far in a second
SEARCH_SHARE = 0.5  # of the budget; the MILPs have the rest
PARTS = (0, 1, 2, 3, 4, 6, 8)  # in how many segments all of a stage is recomputed; 0: each layer by itself
ADVICE = "give more memory, use more partitions or fewer micro-batches in flight, or a smaller image or micro-batch"


@dataclass(frozen=True)
class Planned:
    """A plan that fits, what it does, and how far it is from the least time, in seconds.

    No plan under the limit takes less than `bound_s`, for this partition and order of the schedule, these links' rates
    and bytes as the timeline counts them, whatever each layer's choice, the segments and the distances of the copies.
    Recomputed segments have at most so many layers as `MAX_OPTIONS` allows (24 of a stage of 25), or all of the stage.
    If a rank has more than one micro-batch, or the MILP is too large for the budget, the bound takes copies for a fluid
    of which any part can leave. `gap` is the step over the bound, less 1. `method` names where the plan came from.
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
        """How much longer than the bound a step takes, as a share of the bound."""
        return self.outcome.step_s / self.bound_s - 1.0 if self.bound_s else float("inf")


def target_limit_bytes(case: MemoryCase, saving: float) -> int:
    """Return the limit in bytes at which the rank with the most has saved a share of what comes and goes in a step.

    Parameters, gradients, the optimizer's state and the step's images stay, whatever the plan.
    """
    limits = []
    for rank in case.kept.ranks:
        static = min(point.device_bytes for point in rank.points)
        limits.append(static + (1.0 - saving) * (rank.peak_bytes - static))
    return int(max(limits))


def plan(case: MemoryCase, limit_bytes: int, budget_s: float, rivals: Sequence[MemoryPlan] = ()) -> Planned:
    """Find a plan under which each rank holds at most `limit_bytes` and the simulated step takes the least time.

    A mixed-integer program (HiGHS) chooses for each layer under the prefix-bandwidth constraints; copies then get the
    widest windows that the bytes allow, the plan is simulated, and a search changes single layers while `budget_s`
    lasts, counted in actions and not in seconds, so that the same plan comes out everywhere. It is never worse than the
    best of `rivals` that fit.

    Raises:
        DoesNotFitError: no plan fits that is known; names the layer that needs the most by itself, and the least bytes
            that a plan reached.
    """
    search = Search(case, limit_bytes, SEARCH_SHARE * budget_s)
    kept = Candidate(case.kept, limit_bytes)
    if not kept.excess_bytes:
        return _planned(case.kept, case.kept.step_s, "keep")
    tried = [("all layers alike", search.judge(cut)) for cut in _simple(case)]
    for rival in rivals:
        tried.append((rival.policy, Candidate(search.simulate(rival), limit_bytes)))
        tried.append((rival.policy, search.judge(rival.stages)))
    bound_s = 0.0
    for bound_s, cut in _by_programme(case, limit_bytes, budget_s):
        search.good_s = (1.0 + GOOD) * bound_s
        if cut is not None:
            tried.append(("programme", search.judge(cut)))
        if any(search.is_good(each) for _, each in tried):
            break
    method, best = min(tried, key=lambda each: each[1].cost)
    found = search.improve([kept, *search.choose_order([each for _, each in tried])])
    if found.excess_bytes:
        raise _too_small(case, found.outcome, limit_bytes)
    if found is not best:
        method += ", improved by search"
    return _planned(shortened(search.joined(found).outcome, limit_bytes, search.simulate), bound_s, method)


def _planned(outcome: PlanOutcome, bound_s: float, method: str) -> Planned:
    outcome = replace(outcome, plan=replace(outcome.plan, policy=POLICY))
    return Planned(outcome, min(bound_s, outcome.step_s), method)


def _by_programme(case: MemoryCase, limit_bytes: int, budget_s: float) -> Iterator[tuple[float, Cut | None]]:
    """Yield solutions of the MILP at the limit and below it, each with a lower bound of every plan's step, in seconds.

    Where the MILP is too large for the budget its relaxation is rounded. Without any solution no plan can keep the
    limit, and nothing is yielded.
    """
    is_chain = case.schedule.num_ranks == 1 and len({action.micro_batch for action in case.schedule.rows[0]}) == 1
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
        found = model.solve(is_small, NODES if is_chain else 1, LOOSE_GAP, copy_share)
        if found is not None and found[0]:
            yield bound_s, _rounded(case, found[0])


def _rounded(case: MemoryCase, weights: Weights) -> Cut:
    """Return the segments of a solution; of a relaxed one the path through each stage with the most weight."""
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
    stages = list(pairwise(case.boundaries))
    yield tuple(
        tuple(Segment(layer, layer + 1, Choice.OFFLOAD) for layer in range(first, end)) for first, end in stages
    )
    for parts in PARTS:
        cut = []
        for first, end in stages:
            number = min(parts or end - first, end - first)
            marks = [first + round(part * (end - first) / number) for part in range(number + 1)]
            cut.append(tuple(Segment(begin, stop, Choice.RECOMPUTE) for begin, stop in pairwise(marks)))
        yield tuple(cut)


def _too_small(case: MemoryCase, least: PlanOutcome, limit_bytes: int) -> DoesNotFitError:
    """Return the error: the layer with which the best plan exceeds the limit, and what it needs by itself."""
    spans, rank = profile_storages(case.profile).spans, least.fullest_rank
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
        f"its largest layer {case.profile.layers[largest].name} needs {alone[largest]} bytes by itself; {ADVICE}",
    )
