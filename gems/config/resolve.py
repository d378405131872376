"""Resolution: from a configuration as written to one that can run."""

from __future__ import annotations

from dataclasses import replace

from gems.config.constraints import check_constraints
from gems.config.fields import check_fields
from gems.config.schema import ParallelConfig, RunSpec
from gems.data import check_data, kind_of, labels_per_sample, resolve_data, sources_of
from gems.errors import ConfigError
from gems.models import check_image, layers_of, takes_of
from gems.models.imported.describe import resolve_target
from gems.models.operators import num_branching, operators_of
from gems.partition.even import check_boundaries
from gems.schedule import FAMILIES, PLACED


def resolve(spec: RunSpec) -> RunSpec:
    """Return the run with every derived field filled: micro-batches, nodes.

    Raises:
        ConfigError: the first value that cannot run, with what is allowed.
    """
    check_fields(spec)
    spec = _resolve_target(spec)
    check_data(spec.data)
    _check_kind(spec)
    check_image(spec.model, spec.data, spec.parallel.micro_batch_size)
    parallel = _resolve_counts(spec)
    check_constraints(replace(spec, parallel=parallel))
    layers = layers_of(spec.model, spec.data)
    if spec.schedule.name == PLACED and not num_branching(operators_of(layers)):
        raise ConfigError(
            "schedule", PLACED, f"lays branches beside each other, and {spec.model.name} is a chain without any",
            "use a model with branches (inception_v3, googlenet), or a schedule of stages",
        )  # fmt: skip
    num_layers = len(layers)
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
            raise ConfigError(key, value, "is for a network of your own", "name it: model.target=package.module.Class")
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


def _resolve_counts(spec: RunSpec) -> ParallelConfig:
    """Derive replications x parts = micro-batches, the three ways to say the same (two runs at least for GEMS)."""
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


def check_gpus(spec: RunSpec) -> None:
    """Check that a run uses the GPUs that it is given, where parallel.gpus says how many.

    Raises:
        ConfigError: it uses more or fewer.
    """
    parallel = spec.parallel
    if parallel.gpus not in (None, spec.world_size):
        raise ConfigError(
            "parallel.gpus", parallel.gpus,
            f"must be partitions x replicas = {parallel.partitions} x {parallel.replicas} for a run",
            "let `gems plan` choose both, or leave it out",
        )  # fmt: skip


def check_batch(spec: RunSpec) -> None:
    """Check that the data has the images of one step of a resolved run; a machine on paper reads none.

    Raises:
        ConfigError: it has fewer.
    """
    if spec.machine.kind != "real":
        return
    if global_batch(spec) > spec.data.train_samples and spec.data.name != "folder":
        raise ConfigError(
            "data.train_samples", spec.data.train_samples, f"must be {global_batch(spec)} or more, the images of one step",
            "use more images, or fewer micro-batches or replicas",
        )  # fmt: skip


def _resolve_nodes(spec: RunSpec) -> RunSpec:
    cluster = spec.cluster
    per_node = cluster.ranks_per_node or cluster.gpus_per_node or None
    if per_node is None and cluster.usable_cpus_per_node is not None:
        per_node = max(1, cluster.usable_cpus_per_node // cluster.cpus_per_rank)
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
