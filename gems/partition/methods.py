"""The partition of a run by the configured method, and the memory and time of its ranks."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from operator import itemgetter

from gems.config import registries
from gems.config.constraints import check_boundaries
from gems.config.schema import OptimizerConfig, PartitionConfig, TrainConfig
from gems.errors import ConfigError, DoesNotFitError
from gems.memory.model import AVERAGED, MIXED, OPTIMIZERS, MemoryModel, time_costs
from gems.memory.reserved import reserved_bytes
from gems.memory.timeline import stage_costs
from gems.models import layers_of
from gems.partition.even import even
from gems.partition.exact import solve
from gems.partition.heuristics import block_partition, pipedream
from gems.partition.links import machine_links
from gems.partition.mcap import mcap
from gems.partition.problem import InfeasibleError, Partition, Problem
from gems.partition.step_time import MAX_SIMULATED, Cost, shortest_step
from gems.profile import ModelProfile
from gems.profile.spans import RankCosts, Spans
from gems.profile.subject import Subject
from gems.schedule.costs import FREE, Network
from gems.schedule.families.one_f_one_b import gpipe
from gems.schedule.lower import compute_only, lower
from gems.schedule.registry import Request
from gems.schedule.replicas import slowest_replica, with_all_reduce
from gems.schedule.schedule import Schedule
from gems.schedule.simulate import EVEN
from gems.schedule.strips import strip_costs, without_strips
from gems.utils.cache import cached
from gems.utils.registry import Registry

HELP = (
    "use recompute or offload for it, a smaller image or micro-batch, or split the image between"
    " ranks"
)
SMALLER = (
    "use more partitions, fewer micro-batches in flight (schedule.activation_cap), a smaller image"
    " or micro-batch"
)
# torchgpipe's balance_by_size multiplies the parameters by these factors, for gradients and the
# optimizer's state
PARAM_SCALES = {"sgd": 3, "adam": 5}

# starting points of the search for a shorter step
QUICK, NUM_STARTS = (("even", "torchgpipe_time", "torchgpipe_size", "pipedream"), 2)
# version of the cuts: change it if methods would cut elsewhere
CUTS = 2

Boundaries = Callable[["PartitionCase"], tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class PartitionMethod:
    """A method: `cut` takes a case, an objective and a budget in seconds.

    If `needs_profile` is False, it only counts layers.
    """

    cut: Callable[[PartitionCase, str, float], Partition]
    needs_profile: bool = True


METHODS: Registry[PartitionMethod] = registries.METHODS


def partition_method(name: str, needs_profile: bool = True) -> Callable[[Boundaries], Boundaries]:
    """Register the decorated function (case to boundaries) as partition=`name`."""

    def register(make: Boundaries) -> Boundaries:
        def cut(case: PartitionCase, objective: str, budget_s: float) -> Partition:
            boundaries = make(case)
            return Partition(name, boundaries, case.cost(objective, boundaries), 0.0, False)

        METHODS.register(name, PartitionMethod(cut, needs_profile))
        return make

    return register


@dataclass(frozen=True)
class PartitionCase:
    """A model to partition: its profile, its lowered schedule, and the limit in bytes, if any.

    For a run in strips, `schedule` is the list of whole micro-batches, which needs the same memory,
    and `in_strips` is the list that runs.
    """

    profile: ModelProfile
    schedule: Schedule
    optimizer: str = "sgd"
    limit_bytes: int | None = None
    network: Network = FREE
    num_replicas: int = 1
    in_strips: Schedule | None = None

    @property
    def num_stages(self) -> int:
        """The number of stages."""
        return self.schedule.num_stages

    @property
    def plain(self) -> PartitionCase:
        """The same stages as a plain pipeline of one micro-batch, with one stage on each rank."""
        return PartitionCase(
            self.profile, lower(gpipe(Request(self.num_stages, 1))), self.optimizer
        )

    @cached_property
    def spans(self) -> Spans:
        """The table over all spans of layers."""
        return Spans(self.profile)

    @cached_property
    def memory(self) -> tuple[RankCosts, ...]:
        """The bytes of each rank."""
        return MemoryModel(self.spans, OPTIMIZERS[self.optimizer]).rank_costs(self.schedule)

    def problem(self, objective: str) -> Problem:
        """Return the partition problem of an objective.

        It minimises the peak bytes, or the compute of the worst rank if the partition fits the
        device. The latter also bounds the time of a step.
        """
        return self._problems[0 if objective == "peak_bytes" else 1]

    @cached_property
    def _problems(self) -> tuple[Problem, Problem]:
        memory = tuple({id(costs): costs for costs in self.memory}.values())
        by_bytes = Problem(
            self.profile.num_layers, self.num_stages, memory, self.spans.boundary_bytes()
        )
        by_time = replace(by_bytes, ranks=time_costs(self.spans, self.schedule))
        if self.limit_bytes is not None:
            by_time = replace(by_time, limits=memory, limit=float(self.limit_bytes))
        return by_bytes, by_time

    def cost(self, objective: str, boundaries: Sequence[int]) -> float:
        """Return the value of an objective for a partition, in bytes or seconds.

        It is infinite if the partition does not fit the device.
        """
        least = self.problem(objective).cost(boundaries)
        if objective != "time" or least == math.inf or self.num_actions > MAX_SIMULATED // 2:
            return least
        return self.step_s(boundaries)

    def step_s(self, boundaries: Sequence[int]) -> float:
        """Return the seconds of a step of the slowest replica, including its all-reduces."""
        timed = self.timed
        network = self.network
        stages = strip_costs(stage_costs(self.spans, boundaries), timed.num_strips)
        costs = with_all_reduce(stages, timed.placement, network, self.num_replicas)
        return slowest_replica(timed, costs, network, [EVEN] * self.num_replicas)[1].span

    @property
    def num_actions(self) -> int:
        """The number of actions of a step."""
        return sum(map(len, self.timed.rank_schedules))

    @property
    def timed(self) -> Schedule:
        """The schedule that runs."""
        return self.in_strips or self.schedule

    def peak_bytes(self, boundaries: Sequence[int]) -> tuple[int, ...]:
        """Return the peak of each rank under a partition, in bytes."""
        return tuple(round(costs.under(boundaries)) for costs in self.memory)

    def reserved_bytes(self, boundaries: Sequence[int]) -> tuple[int, ...]:
        """Return the bytes that torch's allocator would reserve on each rank's GPU."""
        optimizer = OPTIMIZERS[self.optimizer]
        return tuple(
            reserved_bytes(self.profile, self.schedule, rank, boundaries, optimizer)
            for rank in range(self.schedule.num_ranks)
        )


def optimizer_name(train: TrainConfig, optimizer: OptimizerConfig) -> str:
    """Return the name of the run's optimizer state in the memory model."""
    average = AVERAGED if train.ema_decay is not None else ""
    mixed = MIXED if train.dtype != train.compute_dtype else ""
    return f"{('sgd_plain', 'sgd', 'adam')[optimizer.num_states]}{average}{mixed}"


@dataclass(frozen=True)
class Partitioner:
    """The configured partition of a model, whatever its schedule.

    `given` are the boundaries of parallel.boundaries. `limit_bytes` is the limit of a rank; None
    without a limit, or if a memory policy makes room after the partition. `get_profile` is called
    if a profile is needed.
    """

    subject: Subject
    config: PartitionConfig
    given: tuple[int, ...] | None
    limit_bytes: int | None
    get_profile: Callable[[], ModelProfile]

    @property
    def optimizer(self) -> str:
        """The name of the run's optimizer state in the memory model."""
        return optimizer_name(self.subject.train, self.subject.optimizer)

    def uses_profile(self, schedule: Schedule) -> bool:
        """Return whether the partition is based on a profile."""
        return self.limit_bytes is not None or self._needs_profile(schedule)

    def _needs_profile(self, schedule: Schedule) -> bool:
        needs_profile = METHODS[self.config.name].needs_profile
        return self.given is None and needs_profile and schedule.num_stages > 1

    def case(self, schedule: Schedule) -> PartitionCase:
        """Return the case of a lowered schedule.

        Raises:
            ConfigError: there are more stages than layers, or the profile is not available.
        """
        profile = self.get_profile()
        self._check_depth(schedule, profile.num_layers)
        subject = self.subject
        links = machine_links(subject.machine)
        replicas = subject.parallel.replicas
        return PartitionCase(profile, schedule, self.optimizer, self.limit_bytes, links, replicas)

    def partition(self, schedule: Schedule) -> Partition:
        """Return the partition: the given one, or that of the configured method.

        It depends on the compute of the ranks, and not on how early they post their receives, which
        depends on its costs: a compute-only schedule and every lowered form of it have the same
        partition.

        Raises:
            ConfigError: there are more stages than layers, the boundaries do not make the
                schedule's stages, or the profile is not available.
            DoesNotFitError: a rank would hold more than the limit.
        """
        given = self.given
        num_stages = schedule.num_stages
        num_layers = len(layers_of(self.subject.model, self.subject.data))
        self._check_depth(schedule, num_layers)
        case = None
        if self.uses_profile(schedule):
            timed = lower(compute_only(schedule))
            if schedule.num_strips > 1:
                case = replace(self.case(lower(without_strips(schedule))), in_strips=timed)
            else:
                case = self.case(timed)
        if given is not None:
            boundaries = check_boundaries(given, num_layers, num_stages)
            partition = Partition("given", boundaries, float("nan"), float("nan"), False)
        elif case is None or not self._needs_profile(schedule):
            partition = Partition(
                "even", even(num_layers, num_stages), float("nan"), float("nan"), num_stages == 1
            )
        else:
            partition = self._by_method(case)
        if case is not None:
            check_fits(case, partition)
        return partition

    def _by_method(self, case: PartitionCase) -> Partition:
        """Return the partition by the configured method, from the cache if it has been made."""
        method = self.config.name
        budget_s = self.config.budget_s
        objective = "time" if self.config.objective == "auto" else self.config.objective
        facts = (
            CUTS,
            method,
            objective,
            case.limit_bytes,
            case.network,
            case.num_replicas,
            case.optimizer,
            budget_s,
        )
        cached_partition = cached(
            self.subject.cache_dir,
            "partition",
            repr((facts, case.profile, case.timed.digest())),
            lambda: asdict(partition_by(method, case, objective, budget_s)),
        )
        return Partition(
            **(cached_partition | {"boundaries": tuple(cached_partition["boundaries"])})
        )

    def _check_depth(self, schedule: Schedule, num_layers: int) -> None:
        num_stages = schedule.num_stages
        if num_stages <= num_layers:
            return
        partitions = self.subject.parallel.partitions
        on_a_rank = num_stages // partitions
        placed = (
            f" (schedule {schedule.name} puts {on_a_rank} stages on a rank)"
            if on_a_rank > 1
            else ""
        )
        raise ConfigError(
            "parallel.partitions",
            partitions,
            f"makes {num_stages} stages{placed}, and must make at most {num_layers}, the layers of"
            f" {self.subject.model.name}",
            "use fewer partitions or a deeper model",
        )


def partition_by(
    method: str, case: PartitionCase, objective: str = "peak_bytes", budget_s: float = 30.0
) -> Partition:
    """Partition by the name of a method.

    `cost` and `bound` are values of the objective, in seconds or bytes.

    Raises:
        DoesNotFitError: No partition keeps every rank within the limit (exact method, objective
            time).
    """
    begin = time.perf_counter()
    partition = METHODS[method].cut(case, objective, budget_s)
    return replace(partition, method=method, solve_s=time.perf_counter() - begin)


def check_fits(case: PartitionCase, partition: Partition) -> None:
    """Check the peaks of a partition against the device.

    Raises:
        DoesNotFitError: A rank, or a single layer, is too large.
    """
    if case.limit_bytes is None:
        return
    peaks = case.peak_bytes(partition.boundaries)
    if max(peaks) > case.limit_bytes:
        where = (
            f"rank {peaks.index(max(peaks))} of {len(peaks)} with the {partition.method} partition"
        )
        raise _too_large(case, where, max(peaks))


def _too_large(case: PartitionCase, where: str, needed_bytes: int) -> DoesNotFitError:
    """Return the error for a layer that alone exceeds the limit on a rank, or else for `where`."""
    limit = case.limit_bytes
    assert limit is not None
    for index, layer in enumerate(case.profile.layers):
        alone = min(
            max(float(tables[place]()[index, index + 1]) for tables in costs.moments)
            for costs in case.memory
            for place in range(len(costs.stages))
        )
        if alone > limit:
            return DoesNotFitError(f"layer {layer.name} alone on a rank", round(alone), limit, HELP)
    return DoesNotFitError(where, needed_bytes, limit, SMALLER)


def _exact(case: PartitionCase, objective: str, budget_s: float) -> Partition:
    """Return the partition of least cost.

    For the objective time, it is the shortest step found near the most even compute of ranks.
    """
    try:
        partition = solve(case.problem(objective), budget_s)
        if objective != "time":
            return partition

        def cost(boundaries: tuple[int, ...]) -> Cost:
            return case.cost(objective, boundaries), float(max(case.peak_bytes(boundaries)))

        starts = {
            partition.boundaries,
            *(METHODS[name].cut(case, "rank_time", 0.0).boundaries for name in QUICK),
        }
        nearest = sorted(starts, key=lambda start: (*cost(start), start))[:NUM_STARTS]
        ends = (shortest_step(start, cost, case.num_actions) for start in nearest)
        boundaries, (step_s, _) = min(ends, key=itemgetter(1))
        is_optimal = step_s <= partition.bound * (1 + 1e-9)
        return replace(partition, boundaries=boundaries, cost=step_s, is_optimal=is_optimal)
    except InfeasibleError as error:
        where = f"the best partition into {case.num_stages} stages"
        raise _too_large(case, where, round(error.least)) from error


METHODS.register("exact", PartitionMethod(_exact))


@partition_method("even", needs_profile=False)
def _even(case: PartitionCase) -> tuple[int, ...]:
    return even(case.profile.num_layers, case.num_stages)


@partition_method("mcap")
def _mcap(case: PartitionCase) -> tuple[int, ...]:
    """Partition by mCAP, with measured runs replaced by the predicted peaks of the schedule.

    mCAP does not know of ranks with several stages. If there are any, its runs are plain pipelines
    of one micro-batch.
    """
    runs = case.plain if any(len(costs.stages) > 1 for costs in case.memory) else case
    return mcap(runs.peak_bytes, case.profile.num_layers, case.num_stages)


@partition_method("torchgpipe_size")
def _by_size(case: PartitionCase) -> tuple[int, ...]:
    scale = PARAM_SCALES.get(case.optimizer, 2)
    sizes = [layer.kept_bytes + scale * layer.param_bytes for layer in case.profile.layers]
    return block_partition(sizes, case.num_stages)


@partition_method("torchgpipe_time")
def _by_time(case: PartitionCase) -> tuple[int, ...]:
    return block_partition([layer.time_s for layer in case.profile.layers], case.num_stages)


@partition_method("pipedream")
def _pipedream(case: PartitionCase) -> tuple[int, ...]:
    times = [layer.time_s for layer in case.profile.layers]
    rate = 1.0 / case.network.per_byte if case.network.per_byte else None
    return pipedream(times, case.spans.boundary_bytes(), case.num_stages, rate)
