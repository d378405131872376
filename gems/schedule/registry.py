"""Registry of schedule families: each generator registers its name and its properties."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from gems.schedule.costs import DepthCosts, Network, StageCosts
from gems.schedule.placement import Placement, linear
from gems.schedule.schedule import Schedule
from gems.utils.registry import Registry

CAPPED = "capped"
FROM_FILE = "file"
PLACED = "placed"


class Costs(Protocol):
    """The costs of a model on any placement of its stages.

    The stages have equal depth, or each placement has a cut of its own.
    """

    def of(self, placement: Placement) -> StageCosts:
        """Return the costs of the stages of a placement, sizes in the unit of a cap."""


@dataclass(frozen=True, slots=True)
class Request:
    """The parameters of a generator.

    `num_parts` is the number of micro-batches in a run of GEMS, and `chunks` the stages of a rank
    if that number is free. `cap` is the most activations that a rank may hold, in units of one
    micro-batch on the heaviest of P equal parts of the model. The other fields are for generators
    that search. `seed` and `budget_s` bound their search, and `allow` names the memory actions that
    they may use ("recompute", "offload"). `max_stages` is the largest number of stages that the
    model allows, if known, and `num_stages` the exact number if the cut of the model is given.
    `num_strips` is the number of strips of each micro-batch. They share `shared_latency` of the
    network's latency: with more strips, each message has less of it.
    """

    num_ranks: int
    num_micro_batches: int
    num_parts: int = 1
    chunks: int = 2
    cap: float | None = None
    costs: Costs = field(default_factory=lambda: DepthCosts(1))
    network: Network = field(default_factory=Network)
    allow: tuple[str, ...] = ()
    placements: tuple[str, ...] = ()
    seed: int = 0
    budget_s: float = 5.0
    max_stages: int | None = None
    num_stages: int | None = None
    num_strips: int = 1
    shared_latency: float = 0.0

    def allows(self, num_stages: int) -> bool:
        """Return whether the model can be cut into that number of stages."""
        if self.num_stages is not None:
            return num_stages == self.num_stages
        return self.max_stages is None or num_stages <= self.max_stages


@dataclass(frozen=True, slots=True)
class Terms:
    """The terms of a closed form, named as in the papers.

    They are P ranks, N micro-batches, the parts of GEMS, the chunks of a rank, a cap in
    micro-batches (if any), and the times of forward (f), input gradient (i) and weight gradient (w)
    of one micro-batch on a rank's part of the model.
    """

    p: int
    n: int
    parts: int = 1
    chunks: int = 2
    cap: float | None = None
    f: float = 1.0
    i: float = 1.0
    w: float = 1.0

    @property
    def b(self) -> float:
        """Time of a whole backward."""
        return self.i + self.w

    @property
    def work(self) -> float:
        """Time that a rank computes in a step."""
        return self.n * (self.f + self.b)

    @property
    def is_even(self) -> bool:
        """Whether f = i = w."""
        return self.f == self.i == self.w

    @property
    def in_flight(self) -> int:
        """Most micro-batches in flight: P, or the integer part of the cap if that is less."""
        return self.p if self.cap is None else min(self.p, int(self.cap))


Generator = Callable[[Request], Schedule]
Sizes = Callable[[Request], Iterable[Request]]
ClosedForm = Callable[[Terms], float | None]
ChainBound = Callable[[Terms, float, float], float]


def as_asked(request: Request) -> Iterable[Request]:
    """Return the request itself, for a family that has no other sizes to try."""
    return (request,)


def forward_and_input_grad(s: Terms, recompute: float, share: float) -> float:
    """Return a lower bound of the step time of any schedule.

    One micro-batch passes down the stages and its gradient comes back.
    """
    return s.f + s.i


@dataclass(frozen=True, slots=True)
class Family:
    """A named schedule and its known properties."""

    # makes the compute-only schedule; raises ConfigError for counts that it cannot serve
    build: Generator
    step_units: ClosedForm | None = (
        None  # time of a step with equal stages, free links; None outside of its range
    )
    peak_units: ClosedForm | None = (
        None  # most activations of a rank, in micro-batches on one of P equal parts
    )
    # Time below which no step is, whatever the partition; links are free, and f, i, w the whole
    # model's. The other arguments are the least factor by which recomputing lengthens a layer's
    # time, and the least share of forward.
    chain_bound: ChainBound = forward_and_input_grad
    # The fewest micro-batches that each rank has in flight on each of its stages at its peak.
    least_in_flight: Callable[[Terms], Sequence[float]] = lambda s: [1] * s.p
    placement: Callable[..., Placement] = linear  # a function of `gems.schedule.placement`
    stages_per_rank: int | None = (
        1  # in one direction; None if `schedule.chunks` sets it, 0 if a search does
    )
    num_directions: int = 1  # 2 if the pipeline runs both ways, each with half of the micro-batches
    has_runs: bool = False  # whether GEMS's replications x parts make its micro-batches
    planned: Sizes | None = as_asked  # sizes that `gems plan` tries; None to leave the family out
    rival: Sizes | None = (
        as_asked  # sizes that a search under a cap must beat; None to leave the family out
    )
    siblings: str | None = (
        None  # such families trade memory for time alone: the largest that fits is the fastest
    )
    is_quick: bool = (
        False  # whether the planner tries it first, and at any size: it takes no time to build
    )

    @property
    def is_searched(self) -> bool:
        """Whether a search finds the schedule, its stages and, for costs of layers, their cut."""
        return self.stages_per_rank == 0

    def stages(self, chunks: int) -> int:
        """Return the stages of a rank in one direction.

        It is 0 if the number is known only after the schedule has been built.
        """
        return chunks if self.stages_per_rank is None else self.stages_per_rank

    def place(self, num_ranks: int, chunks: int) -> Placement:
        """Return the placement of the stages."""
        return (
            self.placement(num_ranks, chunks)
            if self.stages_per_rank is None
            else self.placement(num_ranks)
        )

    def terms(self, request: Request) -> Terms:
        """Return the terms of the closed forms at the size of a request, with f = i = w = 1."""
        chunks = self.stages(request.chunks)
        return Terms(
            request.num_ranks, request.num_micro_batches, request.num_parts, chunks, request.cap
        )


FAMILIES: Registry[Family] = Registry(
    "schedule", "gems.schedule.families.*", "gems.schedule.synthesis"
)


def schedule_family(name: str, **known: Any) -> Callable[[Generator], Generator]:
    """Register the decorated generator as schedule=`name`; `known` has other `Family` fields."""

    def register(build: Generator) -> Generator:
        FAMILIES.register(name, Family(build, **known))
        return build

    return register


def is_searched(name: str) -> bool:
    """Return whether a schedule of this name is found by a search."""
    return name in FAMILIES and FAMILIES[name].is_searched


def published() -> list[str]:
    """Return the names of all families except those of a search."""
    return [name for name in FAMILIES if not is_searched(name)]


def step_units(name: str, terms: Terms) -> float | None:
    """Return the time of a step with equal stages and free links, in the unit of the terms.

    Return None for a family without a closed form, or outside the range of the form.
    """
    family: Family | None = FAMILIES.get(name)
    if (
        family is None
        or family.step_units is None
        or (family.num_directions == 2 and terms.n % (2 * terms.parts))
    ):
        return None
    return family.step_units(terms)


def generate(
    name: str, num_ranks: int, num_micro_batches: int, num_parts: int = 1, **more: object
) -> Schedule:
    """Build the compute-only schedule of a family; `more` are further fields of `Request`.

    Raises:
        ConfigError: no family has that name, or the family cannot serve the counts or the cap.
    """
    return FAMILIES[name].build(Request(num_ranks, num_micro_batches, num_parts, **more))  # type: ignore[arg-type]


def with_sizes(field: str, values: Iterable[Any]) -> Sizes:
    """Return a function that varies one field of a request, with one request for each value."""
    return lambda request: [replace(request, **{field: value}) for value in values]
