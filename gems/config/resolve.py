"""Resolution: from a configuration as written to one that can run, and its identity."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from typing import Any

from gems.config.constraints import check_constraints
from gems.config.fields import check_fields, keys
from gems.config.micro_batches import resolve_micro_batches
from gems.config.registries import DATASETS, RESOLVERS
from gems.config.schema import ClusterConfig, DataConfig, ParallelConfig, RunSpec
from gems.config.training import RESUME_AUTO, RESUME_FORCE, RESUME_NEVER
from gems.errors import ConfigError
from gems.utils.registry import load_plugins, plugin_folder
from gems.utils.targets import locate

# Fields of `cost` that a profile fills: what is measured is no part of what the user asked for.
PROFILED = (
    "forward",
    "input_grad",
    "weight_grad",
    "recompute",
    "times",
    "activations",
    "unit_s",
    "activation_bytes",
    "boundary_bytes",
    "param_bytes",
    "stages",
)


def resolve(spec: RunSpec) -> RunSpec:
    """Return the run with all derived fields filled: micro-batches, nodes.

    Raises:
        ConfigError: the first value that cannot run, with what is allowed.
    """
    if spec.plugins:
        spec = replace(spec, plugins_dir=spec.plugins_dir or plugin_folder(spec.plugins))
        load_plugins(spec.plugins, spec.plugins_dir)
    check_fields(spec)
    spec = _resolve_targets(spec)
    for resolver in RESOLVERS.values():
        spec = resolver(spec)
    spec = replace(spec, parallel=resolve_micro_batches(spec.parallel, spec.schedule.name))
    check_constraints(spec)
    return replace(spec, cluster=_resolve_nodes(spec.cluster, spec.world_size))


def _resolve_targets(spec: RunSpec) -> RunSpec:
    """Return the run with the folders of the targets of its recipe, so that ranks find them wherever they start."""
    changed: dict[str, Any] = {}
    for section in ("loss", "optimizer", "lr_scheduler"):
        config = getattr(spec, section)
        if config.target is not None:
            changed[section] = replace(
                config, path=locate(f"{section}.target", config.target, config.path)[1]
            )
    metrics = {
        name: (
            {
                **options,
                "path": locate(
                    f"metrics.{name}.target", str(options["target"]), options.get("path")
                )[1],
            }
            if isinstance(options, dict) and options.get("target")
            else options
        )
        for name, options in spec.metrics.items()
    }
    return replace(spec, metrics=metrics, **changed)


def run_id(spec: RunSpec) -> str:
    """Return 8 hexadecimal digits of the values of a resolved run that differ from the schema's defaults.

    Fields with `in_run_id=False` are left out, and so is all that a profile fills. A key that a
    later version adds changes no ID as long as it has its default.
    """
    values = {}
    for key in keys(RunSpec):
        section, _, name = key.name.rpartition(".")
        value = getattr(getattr(spec, section) if section else spec, name)
        is_profiled = section == "cost" and name in PROFILED and spec.cost.from_layers
        is_default = value == key.default or (
            key.name == "train.resume" and value in (RESUME_AUTO, RESUME_NEVER, RESUME_FORCE)
        )
        if key.rule.in_run_id and not is_profiled and not is_default:
            values[key.name] = value
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:8]


def check_gpus(parallel: ParallelConfig) -> None:
    """Check that a run uses as many GPUs as parallel.gpus, if that is given.

    Raises:
        ConfigError: it uses more or fewer.
    """
    if parallel.gpus not in (None, parallel.world_size):
        raise ConfigError(
            "parallel.gpus",
            parallel.gpus,
            f"must be partitions x replicas = {parallel.partitions} x {parallel.replicas} for"
            " a run",
            "let `gems plan` choose both, or leave it out",
        )


def check_batch(data: DataConfig, batch: int) -> None:
    """Check that the data has the samples of one step of a run that reads them.

    Raises:
        ConfigError: it has fewer.
    """
    counts_itself = data.target is not None or DATASETS[data.name].counts_itself
    if batch > data.train_samples and not counts_itself:
        raise ConfigError(
            "data.train_samples",
            data.train_samples,
            f"must be {batch} or more, the samples of one step",
            "use more samples, or fewer micro-batches or replicas",
        )


def _resolve_nodes(cluster: ClusterConfig, world_size: int) -> ClusterConfig:
    per_node = cluster.ranks_per_node or cluster.gpus_per_node or None
    if per_node is None and cluster.usable_cpus_per_node is not None:
        per_node = max(1, cluster.usable_cpus_per_node // cluster.cpus_per_rank)
    nodes = cluster.nodes
    if nodes is None:
        nodes = -(-world_size // (per_node or world_size))
    if per_node is None or cluster.ranks_per_node is None:
        per_node = min(per_node or world_size, -(-world_size // nodes))
    if nodes * per_node != world_size:
        raise ConfigError(
            "cluster.nodes",
            nodes,
            f"times {per_node} ranks a node must be the world size, partitions x replicas ="
            f" {world_size}",
            "change cluster.nodes, cluster.ranks_per_node, parallel.partitions or"
            " parallel.replicas",
        )
    if cluster.gpus_per_node and per_node > cluster.gpus_per_node:
        raise ConfigError(
            "cluster.ranks_per_node",
            per_node,
            f"must be at most cluster.gpus_per_node={cluster.gpus_per_node}: one GPU a rank",
        )
    return replace(cluster, nodes=nodes, ranks_per_node=per_node)
