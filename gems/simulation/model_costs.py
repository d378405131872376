"""The costs of a profiled model on any placement of its stages, with a cut for each.

The search under a cap reads them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property

from gems.memory.timeline import acting_stage_costs
from gems.partition.methods import Partitioner
from gems.partition.step_time import Boundaries, Cost, shortest_step
from gems.schedule.action import Action, Kind
from gems.schedule.costs import Network, StageCosts
from gems.schedule.ledger import TOLERANCE, peaks
from gems.schedule.placement import Placement, linear
from gems.schedule.schedule import Schedule
from gems.schedule.simulate import simulate
from gems.schedule.strips import strip_costs

CUT_BUDGET_S = 0.5  # of one placement, of which a search tries several


class ModelCosts:
    """The costs of a model's stages by its profile, in units, on any placement.

    A placement is cut as given in `cuts`, at the run's own boundaries, or by its method of
    partitioning. A unit of time is the average time of a forward, an input gradient or a weight
    gradient of one micro-batch on one of P equal ranks. A unit of activations is the most that one
    micro-batch holds on any of P stages.

    Raises:
        ConfigError: there are fewer layers than ranks.
    """

    def __init__(
        self,
        partitioner: Partitioner,
        least_bytes: int,
        cuts: Mapping[Placement, Boundaries] | None = None,
    ):
        config = partitioner.config
        config = replace(config, budget_s=min(CUT_BUDGET_S, config.budget_s))
        # what fits is seen once there is a schedule
        self._partitioner = replace(partitioner, config=config, limit_bytes=None)
        self._least_bytes = least_bytes
        self._parallel = partitioner.subject.parallel
        self.profile = partitioner.get_profile()
        self._given = dict(cuts or {})
        self._cuts = dict(self._given)
        total_s = sum(layer.time_s for layer in self.profile.layers)
        self.unit_s = total_s / (3 * self._parallel.partitions)
        self._made: dict[Placement, StageCosts] = {}

    def __repr__(self) -> str:
        """Return everything on which the costs depend, as a part of the cache key of a search."""
        facts = (
            self._partitioner.config,
            self._parallel.boundaries,
            self._partitioner.optimizer,
            self._least_bytes,
            self._rates,
        )
        return repr((facts, self.profile, sorted(self._given.items(), key=repr)))

    @cached_property
    def unit_bytes(self) -> int:
        """Bytes in a unit of activations."""
        one = _one_micro_batch(linear(self._parallel.partitions))
        boundaries = replace(self._partitioner, given=None).partition(one).boundaries
        costs = self._in_bytes(boundaries)
        return max(1, round(max(*costs.activation, *costs.held_for_weights)))

    @property
    def is_cut(self) -> bool:
        """Whether the cut of each placement is fixed for all schedules."""
        method = self._partitioner.config
        is_by_time = method.name == "exact" and method.objective in ("auto", "time")
        return self._partitioner.given is not None or not is_by_time

    def cut(self, placement: Placement) -> Boundaries:
        """Return the boundaries at which the model is cut into the stages of a placement."""
        if placement not in self._cuts:
            one = _one_micro_batch(placement)
            self._cuts[placement] = self._partitioner.partition(one).boundaries
        return self._cuts[placement]

    def of(self, placement: Placement) -> StageCosts:
        """Return the costs of the stages of a placement, in units."""
        if placement not in self._made:
            self._made[placement] = self.at(self.cut(placement))
        return self._made[placement]

    def at(self, boundaries: Boundaries) -> StageCosts:
        """Return the costs of the stages between boundaries, in units."""
        return self._in_bytes(boundaries).in_units(self.unit_s, self.unit_bytes)

    def faster_cut(
        self, schedule: Schedule, network: Network, cap: float | None, share: float = 1.0
    ) -> Boundaries:
        """Return the cut, among those near the placement's, that makes a schedule's steps shortest.

        The cut keeps the cap. `share` is the part of the largest number of cuts that may be
        simulated. Boundaries that are given, or made by another method or for another objective
        than time, stay.
        """
        best = self.cut(schedule.placement)
        if self.is_cut:
            return best

        def cost(boundaries: Boundaries) -> Cost:
            costs = strip_costs(self.at(boundaries), schedule.num_strips)
            peak = max(peaks(schedule, costs))
            is_kept = cap is None or peak <= cap + TOLERANCE
            return simulate(schedule, costs, network).span if is_kept else math.inf, peak

        return shortest_step(best, cost, math.ceil(sum(map(len, schedule.rank_schedules)) / share))[
            0
        ]

    def with_cut(self, placement: Placement, boundaries: Boundaries) -> ModelCosts:
        """Return these costs with another cut for a placement."""
        costs_with_cut = ModelCosts(
            self._partitioner, self._least_bytes, self._given | {placement: boundaries}
        )
        costs_with_cut.unit_bytes = self.unit_bytes  # that of the model, whatever its cuts
        costs_with_cut._cuts = self._cuts | costs_with_cut._cuts
        costs_with_cut._made = {
            known: costs for known, costs in self._made.items() if known != placement
        }
        return costs_with_cut

    @property
    def _rates(self) -> tuple[float, float]:
        machine = self._partitioner.subject.machine
        return machine.d2h_bytes_per_s, machine.h2d_bytes_per_s

    def _in_bytes(self, boundaries: Boundaries) -> StageCosts:
        return acting_stage_costs(self.profile, boundaries, self._least_bytes, *self._rates)


def _one_micro_batch(placement: Placement) -> Schedule:
    """Return the schedule of one micro-batch in each direction, for which a placement is cut."""
    rank_schedules = []
    for rank in range(placement.num_ranks):
        stages = placement.stages_on(rank)
        forwards = [Action(Kind.F, stage, direction, direction) for direction, stage in stages]
        rank_schedules.append(
            (
                *forwards,
                *(
                    Action(Kind.B, stage, direction, direction)
                    for direction, stage in reversed(stages)
                ),
            )
        )
    return Schedule("one micro-batch", placement.num_directions, placement, tuple(rank_schedules))
