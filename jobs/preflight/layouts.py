"""Find the layouts on fewer nodes with which a run can continue.

They have other numbers of partitions x replicas, and the same samples per step.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from gems.config.resolve import resolve
from gems.config.schema import ClusterConfig, ParallelConfig, RunSpec
from gems.errors import ConfigError, DoesNotFitError, ScheduleError
from gems.plan.evaluate import Plan, evaluate
from gems.runs.folder import RunFolder
from jobs.batch.command import SchedulerUnavailableError
from jobs.batch.resources import job_spec
from jobs.schedulers.scheduler import scheduler_for

NO_LAYOUT = (ConfigError, DoesNotFitError, ScheduleError)
SEARCH_BUDGET_S = 10.0


def smaller_plan(spec: RunSpec, nodes: int) -> Plan:
    """Return the plan with which a resolved run continues on fewer nodes.

    It has as many ranks as the nodes hold, at most the run's own, and the run's micro-batches, so
    that each step sums the same gradients. It takes the fastest partitions x replicas with the
    run's own schedule and memory policy; if none fits, the best that `gems plan` finds.

    Raises:
        ConfigError: No layout there can make the run's steps.
    """
    cluster = spec.cluster
    why = ""
    most = min(cluster.max_ranks_per_node, spec.world_size // nodes)
    for per_node in range(most, 0, -1):
        run = replace(spec, cluster=replace(cluster, nodes=nodes, ranks_per_node=per_node))
        plans: list[Plan] = []
        for parallel in _own_layouts(run.parallel, nodes * per_node):
            try:
                plans.append(evaluate(resolve(replace(run, parallel=parallel))))
            except NO_LAYOUT as error:
                why = f" ({error})"
        if plans:
            return min(plans, key=lambda plan: (plan.step_s, -plan.spec.parallel.partitions))
        if run.machine.is_real:
            try:
                return _searched_plan(run, nodes * per_node)
            except NO_LAYOUT as error:
                why = f" ({error})"
    where = f"{nodes} node{'s' if nodes > 1 else ''}"
    steps = f"steps of {spec.parallel.global_batch} samples"
    text = (
        f"no layout on {where} makes {steps} in micro-batches of"
        f" {spec.parallel.micro_batch_size}{why}"
    )
    raise ConfigError("cluster.elastic", spec.cluster.elastic, text, f"leave {nodes} out")


def check_layouts(spec: RunSpec) -> tuple[bool, str]:
    """Return whether a resolved run could go on on fewer nodes, and by which layouts.

    Raises:
        ConfigError: It has none on a number of nodes of cluster.elastic.
    """
    nodes = spec.cluster.nodes or 1
    sizes = spec.cluster.smaller_nodes(nodes)
    if not sizes:
        return (
            False,
            (
                f"cluster.elastic={spec.cluster.elastic} has no number below {nodes}, the nodes of"
                " this job"
            ),
        )
    return True, "else " + ", or ".join(smaller_plan(spec, nodes).spec.layout for nodes in sizes)


def plan_of_start(spec: RunSpec, folder: RunFolder) -> tuple[Plan, str] | None:
    """Return the plan on fewer nodes that a submission begins with, and the reason.

    Return None if it has its own nodes. Take the most nodes that cluster.exclude leaves and that
    the queue gives within cluster.elastic_wait_h; if it gives none so soon, take those that it
    gives first.
    """
    cluster = spec.cluster
    own = spec.cluster.nodes or 1
    sizes = cluster.smaller_nodes(own)
    if not sizes:
        return None
    left = _num_left(cluster)
    why = ""
    waits_h = dict[int, float]()
    for size in (own, *sizes):
        if left is not None and size + cluster.spare_nodes > left:
            why = why or f"cluster.exclude leaves {left} nodes"
            continue
        wait_h = 0.0
        if cluster.elastic_wait_h is not None:
            job = job_spec(spec if size == own else smaller_plan(spec, size).spec)
            scheduler = scheduler_for(cluster)
            wait_h = scheduler.wait_h(scheduler.script(job, folder)) or 0.0
        waits_h[size] = wait_h
        if wait_h <= (cluster.elastic_wait_h or 0.0):
            break
        when = (
            "no estimated start" if math.isinf(wait_h) else f"an estimated start in {wait_h:.1f} h"
        )
        why = why or f"{size} nodes have {when}"
    chosen = min(waits_h, key=lambda size: round(waits_h[size], 1), default=own)
    return None if chosen == own else (smaller_plan(spec, chosen), why)


def _num_left(cluster: ClusterConfig) -> int | None:
    """Return how many nodes of the partition are not excluded.

    None if SLURM does not answer, or none is excluded.
    """
    if not cluster.exclude:
        return None
    try:
        return len(scheduler_for(cluster).left_nodes(cluster)[0])
    except SchedulerUnavailableError:
        return None


def _own_layouts(parallel: ParallelConfig, world_size: int) -> Iterator[ParallelConfig]:
    """Yield a run's ways to use this number of ranks with its own schedule.

    The number of micro-batches over all replicas stays the same.
    """
    total = parallel.replicas * (parallel.micro_batches or 0)
    for replicas in range(1, world_size + 1):
        if world_size % replicas or total % replicas:
            continue
        for parts in dict.fromkeys((parallel.parts, None)):
            micro_batches = total // replicas
            if parts is not None and micro_batches % parts:
                continue
            yield replace(
                parallel,
                partitions=world_size // replicas,
                replicas=replicas,
                micro_batches=micro_batches,
                replications=None,
                parts=parts,
                boundaries=None,
                gpus=None,
            )


def _searched_plan(spec: RunSpec, world_size: int) -> Plan:
    """Return the plan of the best configuration that `gems plan` finds.

    It has the run's micro-batches and strips.

    Raises:
        ConfigError, DoesNotFitError: There is none.
    """
    from gems.search.evaluate import Planner
    from gems.search.fastest import fastest

    if len(spec.parallel.grid) > 1:
        raise ConfigError(
            "parallel.strips",
            spec.parallel.strips,
            "leaves no choice of layouts, which are searched for strips of rows",
            "give their number",
        )
    size = spec.parallel.micro_batch_size
    strips = spec.parallel.num_strips
    per_node = spec.cluster.ranks_per_node
    planner = Planner(
        replace(spec, parallel=replace(spec.parallel, gpus=world_size)),
        spec.memory.limit_bytes or spec.machine.device_bytes,
    )
    _, search = fastest(
        planner,
        [spec.parallel.global_batch],
        1,
        SEARCH_BUDGET_S,
        accepts=lambda one: one.micro_batch_size == size and one.strips == strips,
    )
    run = planner.run_of(search.best[0].candidate, search.best[0].boundaries)
    return evaluate(resolve(replace(run, cluster=replace(run.cluster, ranks_per_node=per_node))))
