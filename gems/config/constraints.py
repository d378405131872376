"""Constraints between fields of a configuration; what one field may hold alone is declared at the field."""

from __future__ import annotations

import itertools
from pathlib import Path

from gems.config.cluster import CHARGED, CONTAINERS, ClusterConfig
from gems.config.registries import POLICIES
from gems.config.schema import MAX_FORWARDS, MAX_WORLD, RESUME_AUTO, RESUME_NEVER, RunSpec
from gems.errors import ConfigError, one_of
from gems.schedule import FAMILIES, PLACED

PREDICTED = ("emulated", "simulated")
SCHEDULES_OF_STAGES = "is for schedules of stages, and schedule=placed lays operators on ranks"


def check_constraints(spec: RunSpec) -> None:
    """Check the fields of a run against each other; its numbers of micro-batches are resolved.

    Raises:
        ConfigError: the first that does not suit another, is missing beside it, or excludes it.
    """
    _check_size(spec)
    _check_schedule(spec)
    check_memory(spec)
    _check_disturbance(spec)
    _check_train(spec)
    check_cluster(spec.cluster)


def check_memory(spec: RunSpec) -> None:
    """Check the memory policy against machine and schedule.

    Raises:
        ConfigError: a policy without its limit, or one that the machine or the schedule cannot have.
    """
    memory, machine = spec.memory, spec.machine
    if memory.name == "keep":
        return
    policy = POLICIES[memory.name]
    has_target = policy.takes_target and memory.target_reduction is not None
    if policy.needs_limit and memory.limit_bytes is None and machine.device_bytes is None and not has_target:
        target = ", or memory.target_reduction" if policy.takes_target else ""
        raise ConfigError(
            "memory.limit_bytes", "null", f"must be given for memory={memory.name}",
            f"give it, a machine of known memory (machine.device_bytes){target}",
        )  # fmt: skip
    if machine.kind != "real":
        raise ConfigError(
            "memory", memory.name, f"needs a profile of real layers, and machine.kind={machine.kind} has none",
            "use memory=keep, or a machine of kind real",
        )  # fmt: skip
    if spec.schedule.memory_actions:
        raise ConfigError(
            "memory", memory.name, f"excludes schedule.memory_actions={list(spec.schedule.memory_actions)}",
            "let either the schedule's search or the policy choose what leaves the device",
        )  # fmt: skip


def check_cluster(cluster: ClusterConfig) -> None:
    """Check the fields of a cluster preset against each other.

    Raises:
        ConfigError: the first that does not suit another.
    """
    order, image, rate = cluster.device_order, cluster.container_image, cluster.charge_rate
    if order and sorted(order) != list(range(len(order))):
        raise ConfigError(
            "cluster.device_order", order, f"must hold each of 0 to {len(order) - 1} once", "as in [3,2,1,0]"
        )
    if order and len(order) != cluster.gpus_per_node:
        raise ConfigError(
            "cluster.device_order", order, f"must list the {cluster.gpus_per_node} GPUs of a node",
            "change it, or cluster.gpus_per_node",
        )  # fmt: skip
    if image is not None and cluster.container == "none":
        raise ConfigError(
            "cluster.container_image", image, "needs a container runtime",
            f"set cluster.container: {', '.join(CONTAINERS[1:])}",
        )  # fmt: skip
    if image is not None and cluster.container == "pyxis" and cluster.launcher != "srun":
        raise ConfigError(
            "cluster.container", "pyxis", f"is a plug-in of srun, not of {cluster.launcher}", "use apptainer"
        )
    if rate is not None and cluster.charge_per is None:
        raise ConfigError(
            "cluster.charge_per", "null", f"must be given beside cluster.charge_rate={rate:g}", one_of(CHARGED)
        )
    for number, limit in enumerate(cluster.limits):
        if limit.max_nodes is not None and limit.max_nodes < limit.min_nodes:
            key = f"cluster.limits[{number}].max_nodes"
            raise ConfigError(key, limit.max_nodes, f"must be {limit.min_nodes} or more, the row's min_nodes")


def check_boundaries(boundaries: tuple[int, ...], num_layers: int, num_stages: int) -> tuple[int, ...]:
    """Return `boundaries` back when they cut `num_layers` layers into `num_stages` stages of one layer or more.

    Raises:
        ConfigError: they do not.
    """
    rising = all(a < b for a, b in itertools.pairwise(boundaries))
    if len(boundaries) != num_stages + 1 or boundaries[0] != 0 or boundaries[-1] != num_layers or not rising:
        raise ConfigError(
            "parallel.boundaries", list(boundaries),
            f"must be {num_stages + 1} rising numbers from 0 to {num_layers} (the number of layers)",
        )  # fmt: skip
    return boundaries


def _check_size(spec: RunSpec) -> None:
    """Check that the schedule of a step can be held in memory."""
    parallel, family = spec.parallel, FAMILIES.get(spec.schedule.name)
    if spec.world_size > MAX_WORLD:
        raise ConfigError(
            "parallel.replicas", parallel.replicas,
            f"times parallel.partitions={parallel.partitions} must be at most {MAX_WORLD} ranks",
        )  # fmt: skip
    num_stages = parallel.partitions * (family.stages(spec.schedule.chunks) if family else 1)
    forwards = num_stages * (parallel.micro_batches or 1)
    if forwards > MAX_FORWARDS:
        raise ConfigError(
            "parallel.micro_batches", parallel.micro_batches,
            f"times {num_stages} stages is {forwards} forwards in a step, and there may be {MAX_FORWARDS}",
            "use fewer micro-batches, partitions or chunks",
        )  # fmt: skip


def _check_schedule(spec: RunSpec) -> None:
    schedule, cost, partitions = spec.schedule, spec.cost, spec.parallel.partitions
    cap, cap_bytes, max_stages = schedule.activation_cap, schedule.activation_cap_bytes, schedule.max_stages
    if max_stages is not None and max_stages < partitions:
        raise ConfigError(
            "schedule.max_stages", max_stages, f"must be {partitions} or more, a stage for each partition"
        )
    if cap is not None and cap_bytes is not None:
        raise ConfigError(
            "schedule.activation_cap", cap, f"excludes schedule.activation_cap_bytes={cap_bytes}", "give one of them"
        )
    if cap_bytes is not None and not cost.activation_bytes and cost.name != "profile":
        raise ConfigError(
            "schedule.activation_cap_bytes", cap_bytes, "needs cost.activation_bytes, the bytes of one unit",
            "give it, use cost=profile, or give schedule.activation_cap in units",
        )  # fmt: skip
    if schedule.name == "capped" and cap is None and cap_bytes is None:
        raise ConfigError(
            "schedule.activation_cap", "null", "must be given for schedule=capped",
            "1 is what GEMS holds: one micro-batch on a rank's part of the model",
        )  # fmt: skip
    if schedule.name == "file" and not schedule.path:
        raise ConfigError(
            "schedule.path", "null", "must be given for schedule=file", "a file of `gems schedule --json`"
        )
    if schedule.name != PLACED:
        return
    for key, value, usual in (
        ("parallel.boundaries", spec.parallel.boundaries, None),
        ("schedule.activation_cap", cap, None),
        ("schedule.activation_cap_bytes", cap_bytes, None),
        ("memory", spec.memory.name, "keep"),
        ("cost", cost.name, "uniform"),
    ):
        if value != usual:
            raise ConfigError(key, value, SCHEDULES_OF_STAGES, "leave it out")
    if partitions < 2:
        raise ConfigError("parallel.partitions", partitions, "must be 2 or more for schedule=placed")


def _check_disturbance(spec: RunSpec) -> None:
    """Check the straggler and the input load, which only an emulated or simulated machine has."""
    machine, cost = spec.machine, spec.cost
    for key, value, default in (
        ("machine.slow_rank", machine.slow_rank, None),
        ("machine.slowdown", machine.slowdown, 1.0),
        ("cost.input_load", cost.input_load, 0.0),
    ):
        if value != default and machine.kind not in PREDICTED:
            raise ConfigError(
                key, value, f"is for a machine without devices, and machine.kind={machine.kind} has its own times",
                "use machine=emulated or machine=simulated",
            )  # fmt: skip
    if machine.slow_rank is None and machine.slowdown != 1:
        raise ConfigError("machine.slowdown", machine.slowdown, "needs machine.slow_rank, the rank that is slow")
    if machine.slow_rank is not None and machine.slow_rank >= spec.world_size:
        raise ConfigError(
            "machine.slow_rank", machine.slow_rank, f"must be below the world size, {spec.world_size} ranks"
        )


def _check_train(spec: RunSpec) -> None:
    train, resume = spec.train, spec.train.resume
    if train.warmup_steps >= train.steps:
        raise ConfigError("train.warmup_steps", train.warmup_steps, f"must be below train.steps={train.steps}")
    if train.initial_checkpoint is not None:
        weights = ("checkpoint/stage*.pt", "stage*.pt")  # of a run's folder, or of that of the weights
        if not _has_any("train.initial_checkpoint", train.initial_checkpoint, weights):
            raise ConfigError(
                "train.initial_checkpoint", train.initial_checkpoint, "holds no checkpoint (stage*.pt)",
                "give a finished run's folder",
            )  # fmt: skip
    manifests = ("checkpoints/step*/manifest.json", "step*/manifest.json", "manifest.json")
    if resume not in (RESUME_AUTO, RESUME_NEVER) and not _has_any("train.resume", resume, manifests):
        raise ConfigError(
            "train.resume", resume, "is neither auto nor never, nor a folder with a checkpoint (manifest.json)",
            "give the folder of a run that saved its state, or of one checkpoint",
        )  # fmt: skip


def _has_any(key: str, folder: str, patterns: tuple[str, ...]) -> bool:
    try:
        return Path(folder).is_dir() and any(True for pattern in patterns for _ in Path(folder).glob(pattern))
    except OSError as error:
        raise ConfigError(key, folder, f"cannot be read ({error.strerror})") from error
