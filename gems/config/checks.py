"""Checks of a configuration's values, one by one: names that exist, numbers in their range."""

from __future__ import annotations

import math
from pathlib import Path

from gems.config.schema import RESUME_AUTO, RESUME_NEVER, RunSpec
from gems.errors import ConfigError, nearest, one_of
from gems.memory import POLICIES, RECLAIMS, RECOMPUTES
from gems.partition import METHODS, OBJECTIVES
from gems.schedule import FAMILIES, FROM_FILE, PLACED

DTYPES = ("float32", "float64", "bfloat16")
DEVICES = ("auto", "cpu", "cuda")
TRANSPORTS = ("auto", "host", "gpu")
OPTIMIZERS = ("sgd", "adam")
COSTS = ("uniform", "profile")
MACHINES = ("real", "emulated", "simulated", "probe")
PROFILES = ("fake", "measured", "incremental")
PROFILED_ON = ("real", "fake")
MAX_SYNC = 3
MAX_NOISE = 0.5
# Linux's limits, with room for what a run adds to its name and folder.
MAX_NAME_BYTES, MAX_PART_BYTES, MAX_PATH_BYTES = 200, 255, 3000
# Policies that need to be told how much a device has.
LIMITED = ("vdnn_dyn", "lms", "lms_limit", "plan")
SCHEDULES = (*FAMILIES, FROM_FILE, PLACED)


def check_choices(spec: RunSpec) -> None:
    """Check the words that name one of several things, and the run's own name.

    Raises:
        ConfigError: the first that is none of them.
    """
    for key, value, valid in (
        ("schedule", spec.schedule.name, SCHEDULES),
        ("partition", spec.partition.name, METHODS),
        ("partition.objective", spec.partition.objective, OBJECTIVES),
        ("cost", spec.cost.name, COSTS),
        ("profile", spec.profile.name, PROFILES),
        ("profile.on", spec.profile.on, PROFILED_ON),
        ("memory", spec.memory.name, POLICIES),
        ("memory.recompute", spec.memory.recompute, RECOMPUTES),
        ("memory.reclaim", spec.memory.reclaim, RECLAIMS),
        ("machine.kind", spec.machine.kind, MACHINES),
        ("train.dtype", spec.train.dtype, DTYPES),
        ("train.optimizer", spec.train.optimizer, OPTIMIZERS),
        ("machine.device", spec.machine.device, DEVICES),
        ("machine.transport", spec.machine.transport, TRANSPORTS),
    ):
        if value not in valid:
            raise ConfigError(key, value, one_of(valid), f"did you mean {nearest(value, valid, 1)[0]}?")
    if "\0" in spec.runs_dir:
        raise ConfigError("runs_dir", repr(spec.runs_dir), "must have no NUL character")
    if not spec.name or "/" in spec.name or not spec.name.isprintable() or spec.name.startswith("."):
        raise ConfigError(
            "name", repr(spec.name), "must be a folder's name: printable, without '/', not starting with '.'"
        )
    if not spec.train.resume or not spec.train.resume.isprintable():
        raise ConfigError(
            "train.resume", repr(spec.train.resume), "must be auto, never, or the folder of a run or a checkpoint"
        )
    if len(spec.name.encode()) > MAX_NAME_BYTES:
        raise ConfigError(
            "name", spec.name, f"must be at most {MAX_NAME_BYTES} bytes, for it is part of a folder's name"
        )
    for key, path in (("runs_dir", spec.runs_dir), ("cache_dir", spec.cache_dir)):
        if path is None:
            continue
        longest = max(len(part.encode()) for part in path.split("/"))
        if not path or longest > MAX_PART_BYTES or len(path.encode()) > MAX_PATH_BYTES:
            raise ConfigError(key, path, "must be a folder, whose path is not longer than a file system allows")


def check_ranges(spec: RunSpec) -> None:
    """Check numbers against their least.

    Raises:
        ConfigError: the first that is below it, or not finite.
    """
    parallel, train, cluster, data, cost = spec.parallel, spec.train, spec.cluster, spec.data, spec.cost
    memory = spec.memory
    for key, value, least in (
        ("parallel.partitions", parallel.partitions, 1),
        ("parallel.replicas", parallel.replicas, 1),
        ("parallel.replications", parallel.replications, 1),
        ("parallel.parts", parallel.parts, 1),
        ("parallel.micro_batches", parallel.micro_batches, 1),
        ("parallel.micro_batch_size", parallel.micro_batch_size, 1),
        ("parallel.gpus", parallel.gpus, 1),
        ("data.field_of_view_px", data.field_of_view_px, 1),
        ("model.width", spec.model.width, 1),
        ("model.vocabulary", spec.model.vocabulary, 1),
        ("machine.threads_per_rank", spec.machine.threads_per_rank, 1),
        ("train.steps", train.steps, 1),
        ("train.warmup_steps", train.warmup_steps, 0),
        ("train.checkpoint_steps", train.checkpoint_steps, 1),
        ("train.keep_checkpoints", train.keep_checkpoints, 1),
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
        ("machine.host_bytes", spec.machine.host_bytes, 1),
        ("machine.slow_rank", spec.machine.slow_rank, 0),
        ("memory.swapout_threshold", memory.swapout_threshold, 1),
        ("memory.swapin_ahead", memory.swapin_ahead, 1),
        ("memory.swapin_groupby", memory.swapin_groupby, 0),
        ("memory.sync_mode", memory.sync_mode, 0),
        ("memory.segments", memory.segments, 1),
        ("memory.limit_bytes", memory.limit_bytes, 1),
        ("memory.min_offload_bytes", memory.min_offload_bytes, 0),
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
        ("cost.input_load", cost.input_load, False),
        ("cost.unit_s", cost.unit_s, True),
        ("schedule.activation_cap", spec.schedule.activation_cap, True),
        ("schedule.budget_s", spec.schedule.budget_s, True),
        ("partition.budget_s", spec.partition.budget_s, True),
        ("memory.budget_s", memory.budget_s, True),
        ("memory.target_reduction", memory.target_reduction, True),
        ("memory.ratio", memory.ratio, True),
        ("machine.d2h_bytes_per_s", spec.machine.d2h_bytes_per_s, True),
        ("machine.h2d_bytes_per_s", spec.machine.h2d_bytes_per_s, True),
        ("machine.link_latency_s", spec.machine.link_latency_s, False),
        ("machine.link_bytes_per_s", spec.machine.link_bytes_per_s, True),
        ("machine.node_latency_s", spec.machine.node_latency_s, False),
        ("machine.node_bytes_per_s", spec.machine.node_bytes_per_s, True),
        ("machine.flops_per_s", spec.machine.flops_per_s, True),
        ("machine.bfloat16_flops_per_s", spec.machine.bfloat16_flops_per_s, True),
        ("machine.float64_flops_per_s", spec.machine.float64_flops_per_s, True),
        ("machine.memory_bytes_per_s", spec.machine.memory_bytes_per_s, True),
        ("machine.efficiency", spec.machine.efficiency, True),
        ("machine.noise", spec.machine.noise, False),
        ("machine.held_out_error", spec.machine.held_out_error, False),
        ("train.learning_rate", train.learning_rate, True),
        ("train.hang_timeout_s", train.hang_timeout_s, True),
        ("train.sample_interval_s", train.sample_interval_s, True),
        ("train.checkpoint_s", train.checkpoint_s, True),
        ("train.momentum", train.momentum, False),
        ("train.weight_decay", train.weight_decay, False),
    ):
        if number is None:
            continue
        if not math.isfinite(number) or number < 0 or (open_end and not number):
            raise ConfigError(
                name, number, "must be above 0 and finite" if open_end else "must be 0 or more and finite"
            )
    if spec.machine.noise > MAX_NOISE:
        raise ConfigError(
            "machine.noise", spec.machine.noise, f"must be at most {MAX_NOISE}, a share of a compute's time"
        )
    if train.warmup_steps >= train.steps:
        raise ConfigError("train.warmup_steps", train.warmup_steps, f"must be below train.steps={train.steps}")


def check_start(spec: RunSpec) -> None:
    """Check that there are weights, or a saved state, where a run is told to start from them.

    Raises:
        ConfigError: no folder, or one without a checkpoint.
    """
    start, resume = spec.train.initial_checkpoint, spec.train.resume
    if start is not None:
        folder = Path(start)  # a run's folder, or that of the weights
        if not _holds("train.initial_checkpoint", folder, ("checkpoint/stage*.pt", "stage*.pt")):
            raise ConfigError(
                "train.initial_checkpoint", start, "holds no checkpoint (stage*.pt)", "give a finished run's folder"
            )
    if resume not in (RESUME_AUTO, RESUME_NEVER):
        manifests = ("checkpoints/step*/manifest.json", "step*/manifest.json", "manifest.json")
        if not _holds("train.resume", Path(resume), manifests):
            raise ConfigError(
                "train.resume", resume, "is neither auto nor never, nor a folder with a checkpoint (manifest.json)",
                "give the folder of a run that saved its state, or of one checkpoint",
            )  # fmt: skip


def _holds(key: str, folder: Path, patterns: tuple[str, ...]) -> bool:
    try:
        return folder.is_dir() and any(True for pattern in patterns for _ in folder.glob(pattern))
    except OSError as error:
        raise ConfigError(key, folder, f"cannot be read ({error.strerror})") from error


def check_memory(spec: RunSpec) -> None:
    """Check what a memory policy asks for against the rest of the run.

    Raises:
        ConfigError: a share above 1, a policy without its limit, or one that the machine or the schedule cannot have.
    """
    memory, machine = spec.memory, spec.machine
    for key, share in (("memory.target_reduction", memory.target_reduction), ("memory.ratio", memory.ratio)):
        if share is not None and share > 1:
            raise ConfigError(key, share, "must be a share of at most 1")
    if memory.sync_mode is not None and memory.sync_mode > MAX_SYNC:
        raise ConfigError(
            "memory.sync_mode", memory.sync_mode, f"must be at most {MAX_SYNC}: 0 none, 1 out, 2 in, 3 both"
        )
    if memory.name == "keep":
        return
    if (
        memory.name in LIMITED
        and memory.limit_bytes is None
        and machine.device_bytes is None
        and (memory.name != "plan" or memory.target_reduction is None)
    ):
        saving = ", or memory.target_reduction" if memory.name == "plan" else ""
        raise ConfigError(
            "memory.limit_bytes", "null", f"must be given for memory={memory.name}",
            f"give it, a machine of known memory (machine.device_bytes){saving}",
        )  # fmt: skip
    if machine.kind != "real":
        raise ConfigError(
            "memory", memory.name, f"stands on a profile of real layers, and machine.kind={machine.kind} has none",
            "use memory=keep, or a machine of kind real",
        )  # fmt: skip
    if spec.schedule.memory_actions:
        raise ConfigError(
            "memory", memory.name, f"stands beside schedule.memory_actions={list(spec.schedule.memory_actions)}",
            "let either the schedule's search or the policy choose what leaves the device",
        )  # fmt: skip
