"""The search: many templates under many rules; the best ones are varied, within a budget."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random

from gems.schedule.synthesis.list_scheduler import NEVER, ListScheduler, Rules
from gems.schedule.synthesis.pattern import Template
from gems.schedule.synthesis.problem import Act, Acting, Problem, acting, least_room
from gems.schedule.synthesis.solver import is_small, solve
from gems.schedule.synthesis.templates import (
    Budget,
    acts_to_try,
    anneal,
    free_running,
    in_whole_micro_batches,
    patterns,
)

GREEDY = "greedy"
PATTERN = "pattern"
ANNEALING = "annealing"
SOLVER = "solver"
QUICK = ((1.0, 0.5), (2.0, NEVER), (0.0, NEVER), (NEVER, NEVER), (4.0, 1.0))
LEADS = (0.0, 0.25, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 20.0, NEVER)
DEFERS = (0.0, 0.25, 0.5, 1.0, 4.0, NEVER)
AHEADS = (2, 4, 3, 1, 6)
PATIENCES = (0.0, 0.0, 0.0, 0.25, 0.5)
NUM_REFINED = 8
NUM_CLIMBED = 3
MAX_REFINED = 3000
PATTERN_SHARE = 0.3
WHOLE_SHARE = 0.05
SOLVER_SHARE = 0.2
SCREEN_SHARE = 0.5
REFINE_SHARE = 0.5
NUM_SOLVED = 2
CLIMB_FAIR = 0.6
OVERHEAD_STEPS = 150
SLACK = 1.02
PATTERN_SLACK = 1.15


@dataclass(frozen=True, slots=True)
class ListingPlan:
    """The input of the list scheduler.

    It has keys by micro-batch and operation, acts by micro-batch, and rules. `template` is the
    number of its template.
    """

    problem: Problem
    method: str
    keys: tuple[Sequence[int], ...]
    acts: tuple[tuple[int, ...], ...]
    rules: Rules
    template: int
    span: int = NEVER

    @property
    def time(self) -> float:
        """The step's time in units; infinite if it did not end."""
        return self.span / self.problem.ticks_per_unit if self.span < NEVER else float("inf")


Case = tuple[Problem, tuple[int, ...], str, Template]


class Search:
    """A search that tries plans on several placements and keeps the best plan of each template."""

    def __init__(
        self,
        problems: Sequence[Problem],
        allow: Sequence[str],
        budget: Budget,
        seed: int,
        least: float = 0.0,
    ) -> None:
        """Initialize the search; it stops at `least`, a lower bound of the time in units."""
        self.problems = problems
        self.allow = allow
        self.budget = budget
        self.least = least
        self.seed, self.random = seed, Random(seed)
        self.tried = 0
        self.best: dict[int, ListingPlan] = {}
        self.fastest = float("inf")
        self._actings: dict[tuple[str, tuple[int, ...], int], Acting] = {}

    def run(self) -> list[ListingPlan]:
        """Return the plans found, the fastest first; there is at least one, whatever the budget."""
        templates = self.templates()
        whole = self.budget
        with whole.share(SCREEN_SHARE) as self.budget:
            self.screen(templates)
        with whole.share(REFINE_SHARE) as self.budget:
            self.refine()
        self.budget = whole
        self.climb()
        return self.plans()

    def plans(self) -> list[ListingPlan]:
        """Return the best plan of each template, the fastest first."""
        return sorted(self.best.values(), key=lambda plan: (plan.time, plan.template))

    def listed(self, plan: ListingPlan) -> ListScheduler:
        """Run the list scheduler with a plan."""
        actings = []
        ahead = plan.rules.ahead
        for acts in plan.acts:
            key = (plan.problem.name, acts, ahead)
            if key not in self._actings:
                self._actings[key] = acting(plan.problem, acts, ahead)
            actings.append(self._actings[key])
        return ListScheduler(plan.problem, plan.keys, actings, plan.rules)

    def evaluate(self, plan: ListingPlan, must: bool = False) -> ListingPlan | None:
        """Return a plan with its span.

        Return None if the budget is spent or the least time has been reached.
        """
        if self.best and self.fastest <= self.least * (1 + 1e-9):
            return None
        steps = (
            OVERHEAD_STEPS
            + plan.problem.num_steps
            + 4 * sum(1 for acts in plan.acts for act in acts if act)
        )
        if not self.budget.spend(steps) and not must:
            return None
        self.tried += 1
        return replace(plan, span=self.listed(plan).span)

    def keep(self, plan: ListingPlan) -> None:
        """Keep a plan if it is the best of its template."""
        known = self.best.get(plan.template)
        if plan.span < NEVER and (known is None or plan.time < known.time):
            self.best[plan.template] = plan
            self.fastest = min(self.fastest, plan.time)

    def templates(self) -> list[Case]:
        """Return the templates of all placements, acts and period sizes, the most promising first.

        The size of a period is its number of micro-batches.
        """
        assignments = [
            (problem, acts)
            for problem in self.problems
            for acts in acts_to_try(problem, self.allow)
        ]
        cases: list[Case] = [
            (problem, acts, GREEDY, free_running(problem, acts)) for problem, acts in assignments
        ]
        cells = [
            (problem, acts, times * problem.num_directions)
            for problem, acts in assignments
            for times in (1, 2)
            if times * problem.num_directions <= problem.num_micro_batches
        ]
        cells.sort(key=lambda cell: cell[2])
        fastest = float("inf")
        with self.budget.share(PATTERN_SHARE) as budget:
            for i, (problem, acts, group) in enumerate(cells):
                longest = fastest * PATTERN_SLACK * group * problem.ticks_per_unit / problem.grain
                with budget.share(3.0 / (len(cells) - i + 2)) as own:
                    for template in patterns(problem, acts, group, own, longest):
                        cases.append((problem, acts, PATTERN, template))
                        if not template.overflow:
                            fastest = min(fastest, _pace(problem, template))
                            better = anneal(problem, acts, template, own, self.random)
                            cases += [] if better is None else [(problem, acts, ANNEALING, better)]
        whole = [(in_whole_micro_batches(problem), acts, group) for problem, acts, group in cells]
        lower = [
            (whole_problem, acts, group)
            for whole_problem, acts, group in whole
            if whole_problem and least_room(whole_problem, acts) <= whole_problem.cap
        ]
        with self.budget.share(WHOLE_SHARE) as budget:
            for i, (problem, acts, group) in enumerate(lower):
                with budget.share(3.0 / (len(lower) - i + 2)) as own:
                    cases += [
                        (problem, acts, PATTERN, template)
                        for template in patterns(problem, acts, group, own)
                    ]
        solvable = [
            case
            for case in cases
            if case[2] != GREEDY and not case[3].overflow and is_small(*case[:2], case[3])
        ]
        solvable.sort(key=lambda case: _pace(case[0], case[3]))
        budget = Budget(int(self.budget.steps * SOLVER_SHARE))  # the solver has its own time
        for problem, acts, _, template in solvable[:NUM_SOLVED]:
            better = solve(problem, template, budget, self.seed)
            cases += [] if better is None else [(problem, acts, SOLVER, better)]
        return sorted(
            cases,
            key=lambda case: (case[2] == GREEDY or case[3].overflow > 0, _pace(case[0], case[3])),
        )

    def screen(self, templates: Sequence[Case]) -> None:
        """Simulate every template under a few rules.

        Templates whose pace alone is too slow are skipped.
        """
        for lead, defer in QUICK:
            for number, (problem, acts, method, template) in enumerate(templates):
                if _pace(problem, template) * problem.num_micro_batches > self.fastest * SLACK:
                    continue
                ahead = AHEADS[0] if problem.num_stages < 4 * problem.num_ranks else AHEADS[1]
                num = problem.num_micro_batches
                rules = _rules(problem, lead, defer, 0.0, ahead)
                plan = ListingPlan(
                    problem,
                    method,
                    tuple(template.keys(problem.grain, num)),
                    (acts,) * num,
                    rules,
                    number,
                )
                result = self.evaluate(plan, must=not self.best)
                if result is not None:
                    self.keep(result)

    def any_rules(self, problem: Problem, ahead: int) -> Rules:
        """Draw random rules."""
        choice = self.random.choice
        return _rules(problem, choice(LEADS), choice(DEFERS), choice(PATIENCES), ahead)

    def refine(self) -> None:
        """Simulate the best templates under more rules."""
        random = self.random
        best = self.plans()[:NUM_REFINED]
        tried = set()
        for _ in range(MAX_REFINED if best else 0):
            plan = best[min(int(random.expovariate(0.5)), len(best) - 1)]
            ahead = random.choice(AHEADS) if any(map(any, plan.acts)) else plan.rules.ahead
            rules = self.any_rules(plan.problem, ahead)
            if (plan.template, rules) in tried:
                continue
            tried.add((plan.template, rules))
            result = self.evaluate(replace(plan, rules=rules))
            if result is None:
                break
            self.keep(result)

    def climb(self) -> None:
        """Vary the best plans of the best placements, with equal effort, and finally the best one.

        Variations that are not worse are kept.
        """
        best: dict[str, ListingPlan] = {}
        for plan in self.plans():
            best.setdefault(plan.problem.name, plan)
        leaders = list(best.values())[:NUM_CLIMBED]
        fair = self.budget.spent + CLIMB_FAIR * self.budget.left
        spent = [0] * len(leaders)
        while leaders:
            i = spent.index(min(spent))
            if self.budget.spent > fair:
                i = min(range(len(leaders)), key=lambda i: leaders[i].time)
            result = self.evaluate(self.vary(leaders[i]))
            if result is None:
                break
            spent[i] += OVERHEAD_STEPS + result.problem.num_steps
            if result.span <= leaders[i].span:
                leaders[i] = result
        for plan in leaders:
            self.keep(plan)

    def vary(self, plan: ListingPlan) -> ListingPlan:
        """Return a plan with one change.

        It changes the keys of some micro-batches or operations, the rules, or an act.
        """
        random = self.random
        problem = plan.problem
        num_stages = problem.num_stages
        num = problem.num_micro_batches
        unit = problem.work() / (3 * problem.num_ranks)
        shift = round(random.choice((-1, 1)) * unit * random.choice((0.25, 0.5, 1.0, 2.0, 4.0)))
        choice = random.random()
        if choice < 0.2 and any(map(any, plan.acts)):
            return self.vary_acts(plan)
        if choice < 0.3:
            return replace(plan, rules=self.any_rules(problem, plan.rules.ahead))
        # fill and drain are chosen more often
        place, kind = (min(int(random.expovariate(0.4)), num - 1), random.random())
        first = place if kind < 0.5 else num - 1 - place if kind < 0.7 else random.randrange(num)
        chosen = range(first, min(num, first + random.choice((1, 1, 2, 4))))
        low = 0
        high = 3 * num_stages
        if choice < 0.55:  # move the rest of the step up
            chosen = range(first, num)
            shift = -abs(shift) if random.random() < 0.8 else shift
        elif 0.7 <= choice < 0.85:
            low = random.randrange(2 * num_stages)
            high = random.choice((low + 1, low + problem.num_ranks, 2 * num_stages))
            chosen = chosen if choice < 0.78 else range(num)
        elif choice >= 0.85:
            low = 2 * num_stages
            high = 3 * num_stages
        keys = list(plan.keys)
        for m in chosen:
            row = list(keys[m])
            row[low:high] = [key + shift for key in row[low:high]]
            keys[m] = row
        return replace(plan, keys=tuple(keys))

    def vary_acts(self, plan: ListingPlan) -> ListingPlan:
        """Return a plan with another act for a stage, for some micro-batches at the ends or all."""
        random = self.random
        problem = plan.problem
        num = problem.num_micro_batches
        ways = [0, *(int(Act[name.upper()]) for name in self.allow)]
        count = random.choice((1, 2, 4, num))
        chosen = (
            range(min(count, num)) if random.random() < 0.5 else range(max(0, num - count), num)
        )
        stage = random.randrange(problem.num_stages - 1)
        way = random.choice(ways)
        stages = range(
            stage, min(problem.num_stages - 1, stage + random.choice((1, problem.num_ranks)))
        )
        acts = list(plan.acts)
        for m in chosen:
            acts[m] = tuple(way if stage in stages else act for stage, act in enumerate(acts[m]))
        return replace(plan, acts=tuple(acts))


def _rules(problem: Problem, lead: float, defer: float, patience: float, ahead: int) -> Rules:
    """Return rules from times in units of an average action of a whole rank."""
    unit = problem.work() / (3 * problem.num_ranks)

    def ticks(time: float) -> int:
        return NEVER if time >= NEVER else round(time * unit)

    return Rules(ticks(lead), ticks(defer), ticks(patience), ahead)


def _pace(problem: Problem, template: Template) -> float:
    """Return the time in units that a template takes per micro-batch."""
    return template.period * problem.grain / template.num_micro_batches / problem.ticks_per_unit
