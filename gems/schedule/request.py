"""What a generator is asked for: counts, and for those that search also costs and a cap."""

from __future__ import annotations

from dataclasses import dataclass, field

from gems.schedule.costs import DepthCosts, Network


@dataclass(frozen=True, slots=True)
class Request:
    """The size of a schedule. `num_parts` is GEMS's micro-batches a run, `chunks` the stages a rank where that is free.

    `cap` is the most activations a rank may hold, in units of one micro-batch on the heaviest of P equal parts of the
    model. `costs` and `network` matter to generators that search; `seed` and `budget_s` bound their search, and
    `allow` names the memory actions that they may use ("recompute", "offload"), `max_stages` the stages that the model
    can be cut into at most (None where that is not known, and no limit then).
    """

    num_ranks: int
    num_micro_batches: int
    num_parts: int = 1
    chunks: int = 2
    cap: float | None = None
    costs: DepthCosts = field(default_factory=lambda: DepthCosts(1))
    network: Network = field(default_factory=Network)
    allow: tuple[str, ...] = ()
    placements: tuple[str, ...] = ()
    seed: int = 0
    budget_s: float = 5.0
    max_stages: int | None = None
