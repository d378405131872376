"""Checks of a cluster preset's values, one by one, before anything is made of them."""

from __future__ import annotations

import math
import re

from gems.config.cluster import ClusterConfig, QueueLimit
from gems.errors import ConfigError, nearest, one_of

LAUNCHERS = ("mpiexec", "srun", "ibrun")
GPU_REQUESTS = ("gpus-per-node", "gpus-per-task", "gres", "none")
CONTAINERS = ("none", "apptainer", "singularity", "pyxis")
CHARGED = ("gpu-hour", "node-hour")
MAX_SIGNAL_S = 65535  # of sbatch's --signal
MAX_REQUEUES = 1000
GPU_BIND = re.compile(
    r"((verbose|quiet),)*(none|closest|(single|per_task):\d+|map_gpu:\d+(\*\d+)?(,\d+(\*\d+)?)*|"
    r"mask_gpu:(0x)?[0-9a-fA-F]+(,(0x)?[0-9a-fA-F]+)*)"
)
MAP = r"(?:map_(?:cpu|ldom):(?P<map>\d+(?:,\d+)*)|mask_(?:cpu|ldom):(?P<mask>(?:0x)?[0-9a-fA-F]+(?:,(?:0x)?[0-9a-fA-F]+)*))"
CPU_BIND = re.compile(rf"(?:(?:verbose|quiet),)*(?:none|cores|threads|sockets|ldoms|rank|rank_ldom|{MAP})")
MODULE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_./+=@-]*")
NODE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,252}(\[[0-9]+([,-][0-9]+)*\])?")
HOST = re.compile(r"[A-Za-z0-9.*?\[\]!_-]+")
NODE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,252}")


def check_cluster(cluster: ClusterConfig) -> None:
    """Check a preset by itself.

    Raises:
        ConfigError: the first value that SLURM, the shell or we could not take, with what is allowed.
    """
    _check_words(cluster)
    for key, pattern, texts, says in (
        ("gpu_bind", GPU_BIND, [cluster.gpu_bind],
         "allowed: none, closest, single:N, per_task:N, map_gpu:LIST, mask_gpu:LIST"),
        ("cpu_bind", CPU_BIND, [cluster.cpu_bind],
         "allowed: none, cores, threads, sockets, ldoms, rank, rank_ldom, map_cpu:LIST, mask_cpu:LIST, map_ldom:LIST, "
         "mask_ldom:LIST"),
        ("modules", MODULE, cluster.modules, "must be names of modules, as in [gcc/13.2,openmpi]"),
        ("hosts", HOST, cluster.hosts, "must be patterns of host names, as in [login*.site.org]"),
        ("exclude", NODE, cluster.exclude, "must be names of nodes, as in [n001,'n[003-005]']"),
    ):  # fmt: skip
        for text in texts:
            if text is not None and not pattern.fullmatch(text):
                raise ConfigError(f"cluster.{key}", repr(text), says)
    for key, word in (
        ("partition", cluster.partition),
        ("account", cluster.account),
        ("account_suffix", cluster.account_suffix),
        ("mpi", cluster.mpi),
    ):
        if word is not None and not (word and word.isprintable()):
            raise ConfigError(
                f"cluster.{key}", repr(word), "must be printable text on one line", f"or null: cluster.{key}=null"
            )
    for key, words in (
        ("srun", cluster.srun),
        ("container_options", cluster.container_options),
        ("python", [cluster.python]),
    ):
        for text in words:
            if text is not None and not str(text).isprintable():
                raise ConfigError(f"cluster.{key}", repr(text), "must be printable text on one line")
    _check_order(cluster)
    _check_container(cluster)
    for number, limit in enumerate(cluster.limits):
        _check_limit(f"cluster.limits[{number}]", limit)


def places_of(cpu_bind: str | None) -> int | None:
    """Number of places in a list of CPUs or masks; None for a word that needs none."""
    found = CPU_BIND.fullmatch(cpu_bind or "")
    places = found and (found["map"] or found["mask"])
    return len(places.split(",")) if places else None


def _check_words(cluster: ClusterConfig) -> None:
    for key, value, valid in (
        ("launcher", cluster.launcher, LAUNCHERS),
        ("gpu_request", cluster.gpu_request, GPU_REQUESTS),
        ("container", cluster.container, CONTAINERS),
        ("charge_per", cluster.charge_per, CHARGED),
    ):
        if value is not None and value not in valid:
            raise ConfigError(f"cluster.{key}", value, one_of(valid), f"did you mean {nearest(value, valid, 1)[0]}?")
    for key, number in (
        ("usable_cpus_per_node", cluster.usable_cpus_per_node),
        ("node_memory_bytes", cluster.node_memory_bytes),
        ("runs_per_job", cluster.runs_per_job),
    ):
        if number is not None and number < 1:
            raise ConfigError(f"cluster.{key}", number, "must be 1 or more")
    for key, number, most in (
        ("signal_before_end_s", cluster.signal_before_end_s, MAX_SIGNAL_S),
        ("max_requeues", cluster.max_requeues, MAX_REQUEUES),
    ):
        if not 0 <= number <= most:
            raise ConfigError(f"cluster.{key}", number, f"must be from 0 to {most}")
    rate = cluster.charge_rate
    if rate is not None and not (math.isfinite(rate) and rate >= 0):
        raise ConfigError("cluster.charge_rate", rate, "must be 0 or more and finite")
    hours = cluster.confirm_above_gpu_hours
    if hours is not None and not (math.isfinite(hours) and hours >= 0):
        raise ConfigError(
            "cluster.confirm_above_gpu_hours", hours, "must be 0 or more and finite", "or null: never ask"
        )
    if rate is not None and cluster.charge_per is None:
        raise ConfigError("cluster.charge_per", "null", f"must be given beside cluster.charge_rate={rate:g}",
                          one_of(CHARGED))  # fmt: skip


def _check_order(cluster: ClusterConfig) -> None:
    order = cluster.device_order
    if order and sorted(order) != list(range(len(order))):
        raise ConfigError(
            "cluster.device_order", order, f"must hold each of 0 to {len(order) - 1} once", "as in [3,2,1,0]"
        )
    if order and len(order) != cluster.gpus_per_node:
        raise ConfigError(
            "cluster.device_order", order, f"must be of the {cluster.gpus_per_node} GPUs of a node",
            "change it, or cluster.gpus_per_node",
        )  # fmt: skip


def _check_container(cluster: ClusterConfig) -> None:
    if cluster.container_image is None:
        return
    if cluster.container_image.startswith("-") or not cluster.container_image.isprintable():
        raise ConfigError(
            "cluster.container_image", repr(cluster.container_image), "must be an image's path or name on one line"
        )
    if cluster.container == "none":
        raise ConfigError(
            "cluster.container_image", cluster.container_image, "needs a container runtime",
            f"set cluster.container: {', '.join(CONTAINERS[1:])}",
        )  # fmt: skip
    if cluster.container == "pyxis" and cluster.launcher != "srun":
        raise ConfigError(
            "cluster.container", "pyxis", f"is a plug-in of srun, not of {cluster.launcher}", "use apptainer"
        )


def _check_limit(key: str, limit: QueueLimit) -> None:
    for name, value, least in (
        ("min_nodes", limit.min_nodes, 1),
        ("max_nodes", limit.max_nodes, limit.min_nodes),
        ("minutes", limit.minutes, 1),
        ("queued_jobs", limit.queued_jobs, 1),
    ):
        if value is not None and value < least:
            raise ConfigError(f"{key}.{name}", value, f"must be {least} or more")
