"""Constraints between fields of a configuration.

What one field may hold alone is declared at the field.
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from gems.config.checkpoint_schema import check_schema
from gems.config.cluster import (
    CHARGED,
    CONTAINERS,
    MAX_WORLD,
    NCCL,
    ORDERED_TRANSPORTS,
    ClusterConfig,
    MachineConfig,
)
from gems.config.recipe import FIGURES_OF_TASK, METRICS, TABLES
from gems.config.registries import POLICIES
from gems.config.schema import (
    MAX_FORWARDS,
    MAX_STRIPS,
    CostConfig,
    MemoryConfig,
    ParallelConfig,
    RunSpec,
    ScheduleConfig,
)
from gems.config.training import RESUME_AUTO, RESUME_FORCE, RESUME_NEVER, TrainConfig
from gems.errors import ConfigError, one_of
from gems.schedule import FROM_FILE, PLACED, is_searched
from gems.schedule.costs import STAGE_BYTES, STAGE_SIZES, STAGE_TIMES, STRIP_LOADS

SCHEDULES_OF_STAGES = "is for schedules of stages, and schedule=placed lays operators on ranks"
METRIC_KEYS = ("name", "target", "kwargs", "path")
STATE_DICTS = (".pt", ".pth", ".safetensors")
Check = tuple[object, str, object, str, str]  # whether it is wrong, key, value, problem and advice


def check_constraints(spec: RunSpec) -> None:
    """Check the fields of a run against each other; its numbers of micro-batches are resolved.

    Raises:
        ConfigError: the first that does not suit another, is missing beside it, or excludes it.
    """
    cost, machine, memory = spec.cost, spec.machine, spec.memory
    parallel, schedule = spec.parallel, spec.schedule
    is_profiled = cost.from_layers or (is_searched(schedule.name) and machine.is_real)
    _refuse_first(_grid_checks(parallel, len(spec.data.sides)))
    _refuse_first(_size_checks(parallel, schedule))
    _refuse_first(_cap_checks(schedule, memory, is_profiled, bool(cost.activation_bytes)))
    if schedule.name == PLACED:
        _refuse_first(_placed_checks(parallel, schedule, memory, cost))
    check_memory(memory, machine, schedule, parallel.num_strips)
    check_stages(cost.stages)
    _refuse_first(_machine_checks(machine, cost.input_load, spec.world_size))
    if spec.model.norm == "ghost_batch" and not parallel.num_strips:
        raise ConfigError(
            "parallel.strips",
            0,
            "leaves open how many strips there are, by which model.norm=ghost_batch normalizes",
            "give their number",
        )
    _check_names(spec.metrics)
    _check_train(spec.train)
    check_cluster(spec.cluster)


def _refuse_first(checks: Iterable[Check]) -> None:
    for is_wrong, key, value, problem, advice in checks:
        if is_wrong:
            raise ConfigError(key, value, problem, advice)


def _size_checks(parallel: ParallelConfig, schedule: ScheduleConfig) -> Iterator[Check]:
    """Yield the limits of ranks, forwards and stages, and the file of schedule=file."""
    partitions = parallel.partitions
    num_stages = schedule.num_stages(partitions) or partitions
    forwards = num_stages * (parallel.micro_batches or 1)
    yield (
        parallel.world_size > MAX_WORLD,
        "parallel.replicas",
        parallel.replicas,
        f"times parallel.partitions={partitions} must be at most {MAX_WORLD} ranks",
        "",
    )
    yield (
        forwards > MAX_FORWARDS,
        "parallel.micro_batches",
        parallel.micro_batches,
        f"times {num_stages} stages is {forwards} forwards in a step, and there may be {MAX_FORWARDS}",
        "use fewer micro-batches, partitions or chunks",
    )
    yield (
        schedule.max_stages is not None and schedule.max_stages < partitions,
        "schedule.max_stages",
        schedule.max_stages,
        f"must be {partitions} or more, a stage for each partition",
        "",
    )
    yield (
        schedule.name == FROM_FILE and not schedule.path,
        "schedule.path",
        "null",
        f"must be given for schedule={FROM_FILE}",
        "a file of `gems schedule --json`",
    )


def _cap_checks(
    schedule: ScheduleConfig, memory: MemoryConfig, is_profiled: bool, has_unit_bytes: bool
) -> Iterator[Check]:
    """Yield what a cap of activations needs, and the schedule that is searched under it."""
    cap_bytes = schedule.activation_cap_bytes
    is_under_policy = not memory.keeps and memory.target_reduction is None and is_profiled
    yield (
        schedule.activation_cap is not None and cap_bytes is not None,
        "schedule.activation_cap",
        schedule.activation_cap,
        f"excludes schedule.activation_cap_bytes={cap_bytes}",
        "give one of them",
    )
    yield (
        cap_bytes is not None and not has_unit_bytes and not is_profiled,
        "schedule.activation_cap_bytes",
        cap_bytes,
        "needs cost.activation_bytes, the bytes of one unit",
        "give it, use cost=profile, or give schedule.activation_cap in units",
    )
    yield (
        is_searched(schedule.name) and not schedule.has_cap and not is_under_policy,
        "schedule.activation_cap",
        "null",
        f"must be given for schedule={schedule.name}",
        "1 is what GEMS holds: one micro-batch on a rank's part of the model; or let memory=plan"
        " decide",
    )


def _grid_checks(parallel: ParallelConfig, num_axes: int) -> Iterator[Check]:
    """Yield the faults of the blocks of samples with so many axes."""
    if isinstance(parallel.strips, list):
        is_wrong = not 1 <= len(parallel.strips) <= num_axes or 0 in parallel.strips
        yield (
            is_wrong or parallel.num_strips > MAX_STRIPS,
            "parallel.strips",
            parallel.strips,
            f"must be a number, or [rows, columns] of 1 or more, of at most {MAX_STRIPS} blocks;"
            " of volumes [depth, rows, columns]",
            "",
        )


def _placed_checks(
    parallel: ParallelConfig, schedule: ScheduleConfig, memory: MemoryConfig, cost: CostConfig
) -> Iterator[Check]:
    """Yield what schedule=placed excludes, and the ranks that it needs."""
    for key, is_given, value in (
        ("parallel.boundaries", parallel.boundaries is not None, parallel.boundaries),
        ("parallel.strips", parallel.num_strips > 1, parallel.strips),
        ("schedule.activation_cap", schedule.activation_cap is not None, schedule.activation_cap),
        ("schedule.activation_cap_bytes", schedule.has_cap, schedule.activation_cap_bytes),
        ("memory", not memory.keeps, memory.name),
        ("cost", cost.name != CostConfig().name, cost.name),
    ):
        yield is_given, key, value, SCHEDULES_OF_STAGES, "leave it out"
    few = "must be 2 or more for schedule=placed"
    yield parallel.partitions < 2, "parallel.partitions", parallel.partitions, few, ""


def check_memory(
    memory: MemoryConfig, machine: MachineConfig, schedule: ScheduleConfig, strips: int
) -> None:
    """Check the memory policy against machine and schedule; open `strips` are checked when chosen.

    Raises:
        ConfigError: a policy without its limit, or one that the machine or the schedule cannot
        have.
    """
    if memory.keeps:
        return
    _refuse_first(_limit_checks(memory, machine))
    if memory.policy.recomputes:
        _refuse_first(_recompute_checks(memory, strips))
    in_strips = (name for name, policy in POLICIES.items() if policy.in_strips)
    _refuse_first(
        [
            (
                strips > 1 and not memory.policy.in_strips,
                "memory",
                memory.name,
                f"cannot plan parallel.strips={strips}",
                f"use {' or '.join(sorted(in_strips))}",
            ),
            (
                strips > 1 and is_searched(schedule.name) and not schedule.has_cap,
                "schedule.activation_cap",
                "null",
                f"must be given for schedule={schedule.name} in strips",
                "give it, or another schedule",
            ),
            (
                schedule.memory_actions,
                "memory",
                memory.name,
                f"excludes schedule.memory_actions={list(schedule.memory_actions)}",
                "let either the schedule's search or the policy choose what leaves the device",
            ),
        ]
    )


def _limit_checks(memory: MemoryConfig, machine: MachineConfig) -> Iterator[Check]:
    policy = memory.policy
    has_limit = memory.limit_bytes is not None or machine.device_bytes is not None
    has_target = policy.takes_target and memory.target_reduction is not None
    target = ", or memory.target_reduction" if policy.takes_target else ""
    yield (
        policy.needs_limit and not has_limit and not has_target,
        "memory.limit_bytes",
        "null",
        f"must be given for {memory.choice}",
        f"give it, a machine of known memory (machine.device_bytes){target}",
    )
    yield (
        not machine.is_real,
        "memory",
        memory.name,
        f"needs a profile of real layers, and machine.kind={machine.kind} has none",
        "use memory=keep, or a machine of kind real",
    )


def _recompute_checks(memory: MemoryConfig, strips: int) -> Iterator[Check]:
    how = memory.recompute
    yield (
        memory.offload_inputs and how == "selective",
        "memory.offload_inputs",
        "true",
        "needs memory.recompute=segment or stage, and it is selective",
        "what selected layers keep stays on the device",
    )
    yield (
        strips > 1 and (how == "selective" or memory.segments is not None),
        "memory.recompute",
        how,
        "acts on parts of a stage, and a strip of a stage is recomputed as one",
        "set memory.recompute=strip, and leave memory.segments out",
    )
    yield (
        strips == 1 and how == "strip",
        "memory.recompute",
        how,
        "needs parallel.strips above 1",
        "set it, or memory.recompute=stage",
    )


def check_stages(stages: Mapping[str, object]) -> None:
    """Check the costs of stages in `cost.stages`.

    Lists of equal length by the names of `StageCosts`.

    Raises:
        ConfigError: they are not.
    """
    needed = ("forward", "input_grad", "weight_grad", "activation")
    allowed = (*STAGE_TIMES, *STAGE_SIZES, *STAGE_BYTES, STRIP_LOADS)
    lengths = {
        name: len(values) if isinstance(values, list) else 0 for name, values in stages.items()
    }
    for name, values in stages.items():
        key = f"cost.stages.{name}"
        numbers = values if isinstance(values, list) else []
        is_long = len(numbers) == lengths.get("forward")
        if name == STRIP_LOADS:
            numbers = [
                value
                for of_stage in numbers
                for value in (of_stage if isinstance(of_stage, list) else [None])
            ]
        is_number = all(
            isinstance(value, int | float) and not isinstance(value, bool) for value in numbers
        )
        _refuse_first(
            [
                (name not in allowed, key, values, one_of(allowed), ""),
                (not numbers, key, values, "must be a list of numbers, one for each stage", ""),
                (
                    not is_number or any(not 0 <= value < math.inf for value in numbers),
                    key,
                    values,
                    "must hold numbers of 0 or more",
                    "",
                ),
                (
                    not is_long,
                    key,
                    f"of {lengths[name]} stages",
                    f"must be as long as cost.stages.forward, of {lengths.get('forward', 0)}",
                    "",
                ),
            ]
        )
    missing = [name for name in needed if name not in stages] if stages else []
    _refuse_first([(missing, "cost.stages", sorted(stages), f"must have {', '.join(missing)}", "")])


def check_cluster(cluster: ClusterConfig) -> None:
    """Check the fields of a cluster preset against each other.

    Raises:
        ConfigError: the first that does not suit another.
    """
    _refuse_first(_cluster_checks(cluster))
    for key in () if cluster.launcher == "srun" else ("elastic", "spare_nodes", "check_nodes"):
        if value := getattr(cluster, key):
            problem = f"needs cluster.launcher=srun, and it is {cluster.launcher}"
            raise ConfigError(f"cluster.{key}", value, problem, "leave it out")
    for number, limit in enumerate(cluster.limits):
        if limit.max_nodes is not None and limit.max_nodes < limit.min_nodes:
            key = f"cluster.limits[{number}].max_nodes"
            raise ConfigError(
                key, limit.max_nodes, f"must be {limit.min_nodes} or more, the row's min_nodes"
            )


def _cluster_checks(cluster: ClusterConfig) -> Iterator[Check]:
    order = cluster.device_order
    image = cluster.container_image
    rate = cluster.charge_rate
    yield (
        order and sorted(order) != list(range(len(order))),
        "cluster.device_order",
        order,
        f"must hold each of 0 to {len(order) - 1} once",
        "as in [3,2,1,0]",
    )
    yield (
        order and len(order) != cluster.gpus_per_node,
        "cluster.device_order",
        order,
        f"must list the {cluster.gpus_per_node} GPUs of a node",
        "change it, or cluster.gpus_per_node",
    )
    yield (
        image is not None and cluster.container == "none",
        "cluster.container_image",
        image,
        "needs a container runtime",
        f"set cluster.container: {', '.join(CONTAINERS[1:])}",
    )
    yield (
        image is not None and cluster.container in ("pyxis", "uenv") and cluster.launcher != "srun",
        "cluster.container",
        cluster.container,
        f"is a plug-in of srun, not of {cluster.launcher}",
        "use apptainer",
    )
    yield (
        rate is not None and cluster.charge_per is None,
        "cluster.charge_per",
        "null",
        f"must be given beside cluster.charge_rate={rate or 0:g}",
        one_of(CHARGED),
    )
    yield (
        cluster.max_parallel is not None and not (cluster.array and cluster.scheduler == "slurm"),
        "cluster.max_parallel",
        cluster.max_parallel,
        "limits the job arrays of SLURM",
        "leave it out, or set cluster.scheduler=slurm and cluster.array=true",
    )
    yield (
        cluster.elastic != sorted({*cluster.elastic}, reverse=True),
        "cluster.elastic",
        cluster.elastic,
        "must be numbers of nodes, each smaller than the one before",
        "as in [8,6,4]",
    )


def check_boundaries(
    boundaries: tuple[int, ...], num_layers: int, num_stages: int
) -> tuple[int, ...]:
    """Return `boundaries` back when they cut `num_layers` layers into `num_stages` stages of one layer or more.

    Raises:
        ConfigError: they do not.
    """
    rising = all(a < b for a, b in itertools.pairwise(boundaries))
    if (
        len(boundaries) != num_stages + 1
        or boundaries[0] != 0
        or boundaries[-1] != num_layers
        or not rising
    ):
        raise ConfigError(
            "parallel.boundaries",
            list(boundaries),
            f"must be {num_stages + 1} rising numbers from 0 to {num_layers} (the number of"
            " layers)",
        )
    return boundaries


def _machine_checks(machine: MachineConfig, input_load: float, world_size: int) -> Iterator[Check]:
    """Yield what only an emulated or simulated machine has, and what links and a slow rank need."""
    slow = machine.slow_rank
    problem = f"is for a machine without devices, and machine.kind={machine.kind} has its own times"
    for key, value, default in (
        ("machine.slow_rank", slow, None),
        ("machine.slowdown", machine.slowdown, 1.0),
        ("cost.input_load", input_load, 0.0),
    ):
        is_wrong = value != default and (machine.is_real or machine.is_probe)
        yield is_wrong, key, value, problem, "use machine=emulated or machine=simulated"
    transport = machine.transport
    yield (
        machine.is_emulated and transport in ORDERED_TRANSPORTS,
        "machine.transport",
        transport,
        "is for ranks with devices, and emulated messages are MPI's",
        "leave it out",
    )
    yield (
        transport == NCCL and machine.device == "cpu",
        "machine.transport",
        transport,
        "needs GPUs, and machine.device=cpu has none",
        "use mpi or gloo",
    )
    slowdown = machine.slowdown
    needs = "needs machine.slow_rank, the rank that is slow"
    yield slow is None and slowdown != 1, "machine.slowdown", slowdown, needs, ""
    below = f"must be below the world size, {world_size} ranks"
    yield slow is not None and slow >= world_size, "machine.slow_rank", slow, below, ""


def _check_names(metrics: Mapping[str, Any]) -> None:
    for name, options in metrics.items():
        key = f"metrics.{name}"
        if not isinstance(options, dict):
            raise ConfigError(
                key,
                options,
                "must be a mapping",
                f"give {key}.target, or metrics=[{', '.join(METRICS)}]",
            )
        for option in options:
            if option not in METRIC_KEYS:
                raise ConfigError(f"{key}.{option}", options[option], one_of(METRIC_KEYS))
        if not options.get("target") and options.get("name", name) not in METRICS:
            raise ConfigError(
                key, options.get("name", name), one_of(METRICS), f"or give {key}.target"
            )


def check_metrics(metrics: Mapping[str, Any], monitor: str | None, task: str) -> None:
    """Check the metrics of a run and train.monitor against the task of its data.

    Raises:
        ConfigError: a metric that is none or for another task, or a monitor that validation gives
        no number of.
    """
    _check_names(metrics)
    figures = list(FIGURES_OF_TASK[task])
    custom = []
    for name, options in metrics.items():
        kind = str(options.get("name", name))
        if options.get("target"):
            custom.append(name)
        elif task not in METRICS[kind]:
            text = f"is for {' and '.join(METRICS[kind])}"
            raise ConfigError(f"metrics.{name}", kind, text, f"data.task is {task}")
        elif kind not in TABLES:
            figures.append(kind)
    if monitor is None:
        return
    figure = monitor.removeprefix("validation_")
    if figure not in figures and not any(
        figure == name or figure.startswith(f"{name}_") for name in custom
    ):
        more = [
            name
            for name, tasks in METRICS.items()
            if task in tasks and name not in (*TABLES, *figures)
        ]
        advice = f"ask for another: metrics=[{','.join(more)}]" if more else "give one of them"
        raise ConfigError("train.monitor", monitor, one_of([*figures, *custom]), advice)


def _check_train(train: TrainConfig) -> None:
    resume = train.resume
    if train.validate_steps is not None and train.validate_epochs is not None:
        raise ConfigError(
            "train.validate_epochs",
            train.validate_epochs,
            "excludes train.validate_steps",
            "give one",
        )
    every = train.validate_steps or train.validate_epochs
    for key, value in (("train.patience", train.patience), ("train.monitor", train.monitor)):
        if value is not None and not (every or (key == "train.monitor" and train.evaluate)):
            raise ConfigError(
                key,
                value,
                "needs validations",
                "give train.validate_steps or train.validate_epochs",
            )
    if train.patience is not None and train.monitor is None:
        raise ConfigError(
            "train.patience", train.patience, "needs a metric to judge by", "give train.monitor"
        )
    if train.initial_checkpoint is not None:
        # in a run's folder, or in the folder of the weights
        weights = ("checkpoint/stage*.pt", "stage*.pt")
        is_file = (
            Path(train.initial_checkpoint).suffix in STATE_DICTS
            and Path(train.initial_checkpoint).is_file()
        )
        if not is_file and not _has_any(
            "train.initial_checkpoint", train.initial_checkpoint, weights
        ):
            raise ConfigError(
                "train.initial_checkpoint",
                train.initial_checkpoint,
                (
                    "holds no checkpoint (stage*.pt)"
                    if os.path.lexists(train.initial_checkpoint)
                    else "no such file or folder"
                ),
                f"give a finished run's folder, or a state dict ({', '.join(STATE_DICTS)})",
            )
    manifests = ("checkpoints/step*/manifest.json", "step*/manifest.json", "manifest.json")
    if resume in (RESUME_AUTO, RESUME_NEVER, RESUME_FORCE):
        return
    if not _has_any("train.resume", resume, manifests):
        raise ConfigError(
            "train.resume",
            resume,
            "is neither auto nor never, nor a folder with a checkpoint (manifest.json)",
            "give the folder of a run that saved its state, or of one checkpoint",
        )
    check_schema("train.resume", resume, Path(resume))


def _has_any(key: str, folder: str, patterns: tuple[str, ...]) -> bool:
    try:
        return Path(folder).is_dir() and any(
            True for pattern in patterns for _ in Path(folder).glob(pattern)
        )
    except OSError as error:
        raise ConfigError(key, folder, f"cannot be read ({error.strerror})") from error
