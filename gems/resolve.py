"""Resolution: from a configuration as written to one that can run. All checks of values stand here."""

from __future__ import annotations

import math
from dataclasses import replace

from gems.config import ParallelConfig, RunSpec
from gems.data import check_data, resolve_data
from gems.errors import ConfigError, nearest, one_of
from gems.models import check_image, layers_of
from gems.partition.even import check_boundaries, even
from gems.schedule import FAMILIES

DTYPES = ("float32", "float64", "bfloat16")
DEVICES = ("auto", "cpu", "cuda")
TRANSPORTS = ("auto", "host", "gpu")
OPTIMIZERS = ("sgd", "adam")
LAUNCHERS = ("mpiexec", "srun")


def resolve(spec: RunSpec) -> RunSpec:
    """Gives the run with every derived field filled: micro-batches, boundaries, nodes.

    Raises:
        ConfigError: the first value that cannot run, with what is allowed.
    """
    _check_choices(spec)
    _check_ranges(spec)
    check_data(spec.data)
    check_image(spec.model, spec.data, spec.parallel.micro_batch_size)
    parallel = _resolve_counts(spec)
    num_layers = len(layers_of(spec.model, spec.data))
    if parallel.partitions > num_layers:
        raise ConfigError(
            "parallel.partitions", parallel.partitions, f"must be at most {num_layers}, the layers of {spec.model.name}",
            "use fewer partitions or a deeper model",
        )  # fmt: skip
    boundaries = parallel.boundaries
    cut = even(num_layers, parallel.partitions) if boundaries is None else tuple(boundaries)
    parallel = replace(parallel, boundaries=list(check_boundaries(cut, num_layers, parallel.partitions)))
    resolved = replace(spec, parallel=parallel, data=resolve_data(spec.data))
    _check_batch(resolved)
    return _resolve_nodes(resolved)


def global_batch(spec: RunSpec) -> int:
    """Images of one optimizer step over all micro-batches, directions and replicas of a resolved run."""
    parallel = spec.parallel
    return parallel.replicas * (parallel.micro_batches or 0) * parallel.micro_batch_size


def _check_choices(spec: RunSpec) -> None:
    for key, value, valid in (
        ("schedule", spec.schedule.name, tuple(FAMILIES)),
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
        ("seed", spec.seed, 0),
    ):
        if value is not None and value < least:
            raise ConfigError(key, value, f"must be {least} or more")
    for name, number, open_end in (
        ("cost.forward", cost.forward, True),
        ("cost.input_grad", cost.input_grad, True),
        ("cost.weight_grad", cost.weight_grad, False),
        ("cost.link", cost.link, False),
        ("train.learning_rate", train.learning_rate, True),
        ("train.stall_limit_s", train.stall_limit_s, True),
        ("train.sample_interval_s", train.sample_interval_s, True),
        ("train.momentum", train.momentum, False),
        ("train.weight_decay", train.weight_decay, False),
    ):
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
    is_gems = FAMILIES[spec.schedule.name].num_directions == 2
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


def _check_batch(spec: RunSpec) -> None:
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
