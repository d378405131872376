"""Resolution: from a configuration as written to one that can run. All checks of values stand here."""

from __future__ import annotations

import math
from dataclasses import replace

from gems.config import ParallelConfig, RunSpec
from gems.data import check_data, kind_of, labels_per_sample, resolve_data, sources_of
from gems.errors import ConfigError, nearest, one_of
from gems.models import check_image, layers_of, takes_of
from gems.models.imported import resolve_target
from gems.partition import METHODS, OBJECTIVES
from gems.partition.even import check_boundaries
from gems.schedule import ACTIONS, FAMILIES, FROM_FILE, PLACEMENTS

DTYPES = ("float32", "float64", "bfloat16")
DEVICES = ("auto", "cpu", "cuda")
TRANSPORTS = ("auto", "host", "gpu")
OPTIMIZERS = ("sgd", "adam")
LAUNCHERS = ("mpiexec", "srun")
COSTS = ("uniform", "profile")
MACHINES = ("real", "emulated", "simulated")
PROFILES = ("fake", "measured", "incremental")
PROFILED_ON = ("real", "fake")
SCHEDULES = (*FAMILIES, FROM_FILE)


def resolve(spec: RunSpec) -> RunSpec:
    """Gives the run with every derived field filled: micro-batches, nodes.

    Raises:
        ConfigError: the first value that cannot run, with what is allowed.
    """
    spec = _resolve_target(spec)
    _check_choices(spec)
    _check_ranges(spec)
    check_data(spec.data)
    _check_kind(spec)
    check_image(spec.model, spec.data, spec.parallel.micro_batch_size)
    parallel = _resolve_counts(spec)
    _check_schedule(spec)
    num_layers = len(layers_of(spec.model, spec.data))
    family = FAMILIES.get(spec.schedule.name)
    num_stages = family.stages(spec.schedule.chunks) * parallel.partitions if family else 0
    if parallel.boundaries is not None:
        check_boundaries(tuple(parallel.boundaries), num_layers, num_stages or len(parallel.boundaries) - 1)
    return _resolve_nodes(replace(spec, parallel=parallel, data=resolve_data(spec.data)))


def global_batch(spec: RunSpec) -> int:
    """Images of one optimizer step over all micro-batches, directions and replicas of a resolved run."""
    parallel = spec.parallel
    return parallel.replicas * (parallel.micro_batches or 0) * parallel.micro_batch_size


def _resolve_target(spec: RunSpec) -> RunSpec:
    if spec.model.target is not None:
        return replace(spec, model=resolve_target(spec.model))
    for key, value in (("model.kwargs", spec.model.kwargs), ("model.path", spec.model.path)):
        if value:
            raise ConfigError(
                key, value, "is for a network of your own", "name it: model.target=package.module.Class"
            )
    return spec


def labels_per_step(spec: RunSpec) -> int:
    """Labels of one optimizer step of a resolved run: as many as images, or as tokens of its sequences."""
    return global_batch(spec) * labels_per_sample(spec.data)


def _check_kind(spec: RunSpec) -> None:
    takes, gives = takes_of(spec.model), kind_of(spec.data)
    if takes != gives:
        sources = [f"data={name}" for name in sources_of(takes)]
        raise ConfigError(
            "data", spec.data.name, f"gives {gives}, but model {spec.model.name} reads {takes}",
            f"set {' or '.join(sources)}, or another model",
        )  # fmt: skip


def _check_choices(spec: RunSpec) -> None:
    for key, value, valid in (
        ("schedule", spec.schedule.name, SCHEDULES),
        ("partition", spec.partition.name, METHODS),
        ("partition.objective", spec.partition.objective, OBJECTIVES),
        ("cost", spec.cost.name, COSTS),
        ("profile", spec.profile.name, PROFILES),
        ("profile.on", spec.profile.on, PROFILED_ON),
        ("machine.kind", spec.machine.kind, MACHINES),
        ("train.dtype", spec.train.dtype, DTYPES),
        ("train.optimizer", spec.train.optimizer, OPTIMIZERS),
        ("machine.device", spec.machine.device, DEVICES),
        ("machine.transport", spec.machine.transport, TRANSPORTS),
        ("cluster.launcher", spec.cluster.launcher, LAUNCHERS),
    ):
        if value not in valid:
            raise ConfigError(key, value, one_of(valid), f"did you mean {nearest(value, valid, 1)[0]}?")
    if not spec.name or "/" in spec.name or not spec.name.isprintable() or spec.name.startswith("."):
        raise ConfigError(
            "name", repr(spec.name), "must be a folder's name: printable, without '/', not starting with '.'"
        )


def _check_ranges(spec: RunSpec) -> None:
    parallel, train, cluster, data, cost = spec.parallel, spec.train, spec.cluster, spec.data, spec.cost
    for key, value, least in (
        ("parallel.partitions", parallel.partitions, 1),
        ("parallel.replicas", parallel.replicas, 1),
        ("parallel.replications", parallel.replications, 1),
        ("parallel.parts", parallel.parts, 1),
        ("parallel.micro_batches", parallel.micro_batches, 1),
        ("parallel.micro_batch_size", parallel.micro_batch_size, 1),
        ("data.field_px", data.field_px, 1),
        ("model.width", spec.model.width, 1),
        ("machine.threads_per_rank", spec.machine.threads_per_rank, 1),
        ("train.steps", train.steps, 1),
        ("train.warmup_steps", train.warmup_steps, 0),
        ("cluster.nodes", cluster.nodes, 1),
        ("cluster.ranks_per_node", cluster.ranks_per_node, 1),
        ("cluster.cpus_per_rank", cluster.cpus_per_rank, 1),
        ("cluster.gpus_per_node", cluster.gpus_per_node, 0),
        ("cluster.minutes", cluster.minutes, 1),
        ("schedule.chunks", spec.schedule.chunks, 1),
        ("schedule.max_stages", spec.schedule.max_stages, spec.parallel.partitions),
        ("schedule.activation_cap_bytes", spec.schedule.activation_cap_bytes, 1),
        ("cost.activation_bytes", cost.activation_bytes, 0),
        ("cost.boundary_bytes", cost.boundary_bytes, 0),
        ("cost.param_bytes", cost.param_bytes, 0),
        ("machine.ranks_per_node", spec.machine.ranks_per_node, 1),
        ("machine.device_bytes", spec.machine.device_bytes, 1),
        ("profile.repetitions", spec.profile.repetitions, 1),
        ("seed", spec.seed, 0),
    ):
        if value is not None and value < least:
            raise ConfigError(key, value, f"must be {least} or more")
    for name, number, open_end in (
        ("cost.forward", cost.forward, True),
        ("cost.input_grad", cost.input_grad, True),
        ("cost.weight_grad", cost.weight_grad, False),
        ("cost.link", cost.link, False),
        ("cost.recompute", cost.recompute, False),
        ("cost.offload", cost.offload, False),
        ("cost.unit_s", cost.unit_s, True),
        ("schedule.activation_cap", spec.schedule.activation_cap, True),
        ("schedule.budget_s", spec.schedule.budget_s, True),
        ("partition.budget_s", spec.partition.budget_s, True),
        ("machine.link_latency_s", spec.machine.link_latency_s, False),
        ("machine.link_bytes_per_s", spec.machine.link_bytes_per_s, True),
        ("machine.node_latency_s", spec.machine.node_latency_s, False),
        ("machine.node_bytes_per_s", spec.machine.node_bytes_per_s, True),
        ("machine.flops_per_s", spec.machine.flops_per_s, True),
        ("machine.bfloat16_flops_per_s", spec.machine.bfloat16_flops_per_s, True),
        ("machine.float64_flops_per_s", spec.machine.float64_flops_per_s, True),
        ("machine.memory_bytes_per_s", spec.machine.memory_bytes_per_s, True),
        ("machine.efficiency", spec.machine.efficiency, True),
        ("train.learning_rate", train.learning_rate, True),
        ("train.stall_limit_s", train.stall_limit_s, True),
        ("train.sample_interval_s", train.sample_interval_s, True),
        ("train.momentum", train.momentum, False),
        ("train.weight_decay", train.weight_decay, False),
    ):
        if number is None:
            continue
        if not math.isfinite(number) or number < 0 or (open_end and not number):
            raise ConfigError(
                name, number, "must be above 0 and finite" if open_end else "must be 0 or more and finite"
            )
    if train.warmup_steps >= train.steps:
        raise ConfigError(
            "train.warmup_steps", train.warmup_steps, f"must be below train.steps={train.steps}"
        )


def _resolve_counts(spec: RunSpec) -> ParallelConfig:
    """Derives replications x parts = micro-batches, the three ways to say the same (two runs at least for GEMS)."""
    parallel = spec.parallel
    is_gems = _has_runs(spec)
    total, runs, parts = parallel.micro_batches, parallel.replications, parallel.parts
    if spec.schedule.name == "gems_mast":
        if runs not in (None, 2):
            raise ConfigError(
                "parallel.replications", runs, "must be 2 for gems_mast", "use schedule=gems_master for more"
            )
        runs = 2
    if total is not None:
        if is_gems and total % 2:
            raise ConfigError(
                "parallel.micro_batches", total, f"must be even for {spec.schedule.name}: half run in each direction",
                f"use {total - 1} or {total + 1}" if total > 1 else "use 2",
            )  # fmt: skip
        if runs is None:
            parts = parts or 1
            runs = total // parts
        elif parts is None:
            parts = total // runs
        if runs * parts != total:
            raise ConfigError(
                "parallel.micro_batches", total, f"must be replications x parts = {runs} x {parts}",
                "give two of the three, or numbers that agree",
            )  # fmt: skip
    else:
        runs = runs or (2 if is_gems else 1)
        parts = parts or (1 if is_gems else max(2, 2 * parallel.partitions))
        total = runs * parts
    if is_gems and runs % 2:
        raise ConfigError(
            "parallel.replications", runs, f"must be even for {spec.schedule.name}: the two directions take turns",
            f"use {runs + 1}, or change parallel.micro_batches or parallel.parts",
        )  # fmt: skip
    return replace(parallel, micro_batches=total, replications=runs, parts=parts)


def _has_runs(spec: RunSpec) -> bool:
    return spec.schedule.name in FAMILIES and FAMILIES[spec.schedule.name].has_runs


def _check_schedule(spec: RunSpec) -> None:
    schedule, cost = spec.schedule, spec.cost
    cap, cap_bytes = schedule.activation_cap, schedule.activation_cap_bytes
    if cap is not None and cap_bytes is not None:
        raise ConfigError(
            "schedule.activation_cap",
            cap,
            f"stands beside schedule.activation_cap_bytes={cap_bytes}",
            "give one of them",
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
    for key, values, valid in (
        ("allow", schedule.allow, ACTIONS),
        ("placements", schedule.placements, PLACEMENTS),
    ):
        for value in values:
            if value not in valid:
                raise ConfigError(f"schedule.{key}", value, one_of(valid))
    for key, weights in (("cost.times", cost.times), ("cost.activations", cost.activations)):
        if not weights or any(not math.isfinite(weight) or weight <= 0 for weight in weights):
            raise ConfigError(key, weights, "must be one or more numbers above 0")


def check_batch(spec: RunSpec) -> None:
    """Checks that the data has the images of one step of a resolved run; a machine on paper reads none.

    Raises:
        ConfigError: it has fewer.
    """
    if spec.machine.kind != "real":
        return
    if global_batch(spec) > spec.data.train_images and spec.data.name != "folder":
        raise ConfigError(
            "data.train_images", spec.data.train_images, f"must be {global_batch(spec)} or more, the images of one step",
            "use more images, or fewer micro-batches or replicas",
        )  # fmt: skip


def _resolve_nodes(spec: RunSpec) -> RunSpec:
    cluster = spec.cluster
    per_node = cluster.ranks_per_node or (cluster.gpus_per_node or None)
    nodes = cluster.nodes
    if nodes is None:
        nodes = 1 if per_node is None or spec.world_size <= per_node else -(-spec.world_size // per_node)
    if per_node is None or cluster.ranks_per_node is None:
        per_node = min(per_node or spec.world_size, -(-spec.world_size // nodes))
    if nodes * per_node != spec.world_size:
        raise ConfigError(
            "cluster.nodes", nodes,
            f"times {per_node} ranks a node must be the world size, partitions x replicas = {spec.world_size}",
            "change cluster.nodes, cluster.ranks_per_node, parallel.partitions or parallel.replicas",
        )  # fmt: skip
    if cluster.gpus_per_node and per_node > cluster.gpus_per_node:
        raise ConfigError(
            "cluster.ranks_per_node",
            per_node,
            f"must be at most cluster.gpus_per_node={cluster.gpus_per_node}: one GPU a rank",
        )
    return replace(spec, cluster=replace(cluster, nodes=nodes, ranks_per_node=per_node))
