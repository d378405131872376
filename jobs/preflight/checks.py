"""Run the preflight: a list of checks of all that can be known of a job before it is queued."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import psutil

from gems.config.cluster_presets import host_names
from gems.config.schema import RunSpec
from gems.errors import ConfigError, DoesNotFitError, GemsError
from gems.launch.recipe import check_recipe, needs_check
from gems.plan.evaluate import Peak, Plan
from gems.runs.folder import RunFolder
from gems.runs.prepare import check_folder
from gems.simulation.memory_case import SMALLER
from gems.utils.units import GIB
from jobs.batch.command import SchedulerUnavailableError
from jobs.batch.output import report
from jobs.batch.resources import JobSpec
from jobs.preflight.cost import describe_cost
from jobs.preflight.layouts import check_layouts
from jobs.probes.mpi import MAX_AGE, RANKS, describe_probe, known_probe, needs_probe
from jobs.schedulers.scheduler import scheduler_for
from jobs.schedulers.slurm_client.limits import (
    check_account,
    check_limits,
    check_partitions,
    check_queue,
    check_script,
    shortage,
)
from jobs.schedulers.slurm_client.site import Partition, query_accounts, query_partitions

CHECKPOINTS = 2
MARKS = {True: "ok", None: "--", False: "warn"}
MIN_BYTES = 64 << 20  # logs, traces and notes of a small run
MIN_FILES = 1000
LOCAL = ("tmpfs", "ramfs", "devtmpfs")  # in this machine's own memory
SHARED = (
    "nfs",
    "lustre",
    "gpfs",
    "beegfs",
    "ceph",
    "panfs",
    "wekafs",
    "pvfs",
    "orangefs",
    "daos",
    "fuse.",
    "afs",
    "9p",
)


@dataclass(frozen=True, slots=True)
class Check:
    """A check and its outcome.

    `ok` is None if the check could not be made. `said` is what was found, or why it could not be
    made. `refusal` is the error of a check that forbids the job; a check that only warns has none.
    """

    name: str
    ok: bool | None
    said: str
    refusal: GemsError | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return the fields for --json."""
        return {"check": self.name, "ok": self.ok, "said": self.said}


Outcome = tuple[bool | None, str] | str  # a text alone is one that passed


def preflight(
    spec: RunSpec,
    job: JobSpec,
    script: str | None,
    make_plan: Callable[[], Plan],
    *,
    here: bool = True,
) -> Iterator[Check]:
    """Check a run; checks that take no time come first.

    `script` is the batch script, None for a run on this machine. `make_plan` returns the plan of
    the run, which may take a profile. `here` queries the batch system of this machine, which must
    be the preset's.
    """
    parallel = spec.parallel
    counts = (
        f"{spec.world_size} ranks: {parallel.partitions} partitions x {parallel.replicas} replicas,"
        f" {job.tasks_per_node} on each of {job.nodes} nodes; {parallel.micro_batches}"
        f" micro-batches of {parallel.micro_batch_size}, {spec.parallel.global_batch} samples a step"
    )
    yield Check("configuration", True, counts)
    yield _check("folder", lambda: _check_folder(spec, job))
    if job.is_batch and script is not None:
        yield from site_checks(spec, job, script, here=here)
        limit = spec.cluster.confirm_above_gpu_hours
        confirm = (
            ""
            if limit is None or job.gpu_hours <= limit
            else f"; above {limit:g}, so that it must be confirmed"
        )
        yield Check("cost", True, f"at most {describe_cost([job])}{confirm}")
        yield _check("probe", lambda: _check_probe(spec, job))
    try:
        plan = make_plan()
    except GemsError as error:
        yield Check("memory", False, str(error), error)
        return
    yield _check("memory", lambda: _check_memory(spec, plan))
    if needs_check(spec):
        yield _check("recipe", lambda: check_recipe(spec))
    if job.is_batch and spec.cluster.elastic:
        yield _check("elastic", lambda: check_layouts(spec))
    yield _check("room", lambda: _check_checkpoints(spec, plan))
    yield _check("time", lambda: _check_time(spec, job, plan))


def site_checks(spec: RunSpec, job: JobSpec, script: str, *, here: bool = True) -> Iterator[Check]:
    """Check whether the site takes a job; the answer holds for every run with an equal job."""
    yield _check("limits", lambda: _check_limits(spec, job, here))
    away = f"not asked: {host_names()[0]} is no login node of {spec.cluster.name}"
    scheduler = scheduler_for(spec)
    if not scheduler.has_site_checks:
        yield Check(
            "site",
            None,
            f"not asked: {scheduler.title} itself checks queue and account at submission",
        )
        return
    partitions = cache(
        partial(query_partitions, spec.cluster.partition, scheduler.clusters(spec.cluster))
    )
    looks: dict[str, Callable[[], Outcome]] = {
        "partition": lambda: _check_partitions(spec, job, partitions()),
        "account": lambda: check_account(spec, query_accounts()),
        "sbatch": lambda: check_script(spec.cluster.name, script, _shortage(job, partitions)),
    }
    for name, look in looks.items():
        yield _check(name, look) if here else Check(name, None, away)


def passed(checks: Iterable[Check]) -> list[Check]:
    """Return the checks, up to the last or the first that forbids the job.

    Raises:
        ConfigError: a check that forbids the job.
        DoesNotFitError: it needs more memory than there is.
        ScheduleError: its schedule would not run.
    """
    made = []
    for check in checks:
        made.append(check)
        if check.refusal is not None:
            raise check.refusal
    return made


def show(checks: Iterable[Check]) -> None:
    """Print checks on stderr, one per line."""
    for check in checks:
        report(f"{MARKS[check.ok]:<4} {check.name:<13} {check.said}")


def check_host_memory(spec: RunSpec, peak: Peak) -> None:
    """Raise DoesNotFitError if the ranks of a node would keep more in host memory than it has."""
    limit = spec.cluster.node_memory_bytes
    if limit is not None and peak.host_bytes > limit:
        where = f"host memory of the ranks on a node under {spec.memory.choice}"
        raise DoesNotFitError(
            where, peak.host_bytes, limit, SMALLER, key="cluster.node_memory_bytes"
        )


def _check(name: str, look: Callable[[], Outcome]) -> Check:
    try:
        found = look()
    except SchedulerUnavailableError as reason:
        return Check(name, None, f"not asked: {reason}")
    except GemsError as error:
        return Check(name, False, str(error), error)
    return Check(name, True, found) if isinstance(found, str) else Check(name, *found)


def _check_memory(spec: RunSpec, plan: Plan) -> Outcome:
    if not spec.machine.is_real:
        return None, f"a run on machine={spec.machine.name} computes nothing"
    peak = plan.peak
    limit = spec.machine.device_bytes
    if peak is None:
        reason = (
            "neither the partition nor a limit needs a profile (machine.device_bytes=BYTES makes"
            " one)"
        )
        return None, f"not predicted: {reason}"
    check_host_memory(spec, peak)
    text = f"predicted {peak.device_bytes / GIB:.2f} GiB on rank {peak.rank}"
    text += (
        f" of {limit / GIB:.2f} GiB" if limit is not None else "; machine.device_bytes is not given"
    )
    if spec.train.compile:
        text += ", by layers that are not compiled: train.compile changes what they keep"
    if peak.host_bytes:
        text += f", {peak.host_bytes / GIB:.2f} GiB of a node's host memory"
    return (True if limit is not None else None), text


def _check_limits(spec: RunSpec, job: JobSpec, here: bool) -> Outcome:
    check_limits(spec, job)
    if here:
        scheduler = scheduler_for(spec)
        check_queue(
            spec, job, partial(scheduler.num_queued, clusters=scheduler.clusters(spec.cluster))
        )
    limits = len(spec.cluster.limits)
    return f"within the preset's {limits} limits" if limits else (None, "the preset has none")


def _check_partitions(spec: RunSpec, job: JobSpec, partitions: Sequence[Partition]) -> Outcome:
    text = check_partitions(spec, job, partitions)
    short_of = shortage(job, partitions)
    return (
        text
        if short_of is None
        else (False, f"{text}; the job would wait in the queue: {short_of}")
    )


def _shortage(job: JobSpec, partitions: Callable[[], Sequence[Partition]]) -> str | None:
    try:
        return shortage(job, partitions())
    except (ConfigError, SchedulerUnavailableError):
        return None


def _check_folder(spec: RunSpec, job: JobSpec) -> Outcome:
    check_folder(RunFolder.of(spec), spec)
    storage = find_storage(spec)
    text = check_free_space(spec, storage)
    if not job.is_batch or storage.is_shared:
        return text
    if storage.is_shared is False:
        return False, f"{text}; compute nodes cannot see it, for it is in this machine's memory"
    return None, f"{text}; compute nodes must see it"


def _check_checkpoints(spec: RunSpec, plan: Plan) -> Outcome:
    if plan.profile is None:
        return None, "the size of a checkpoint is not predicted"
    states = (1 + spec.optimizer.num_states + (spec.train.ema_decay is not None)) * sum(
        layer.param_bytes for layer in plan.profile.layers
    )
    needed_bytes = CHECKPOINTS * states
    check_free_space(spec, find_storage(spec), needed_bytes)
    return f"{needed_bytes / GIB:.2f} GiB for {CHECKPOINTS} checkpoints of weights and optimizer"


def _check_time(spec: RunSpec, job: JobSpec, plan: Plan) -> Outcome:
    predicted_s = plan.steps_s
    if predicted_s is None:
        return None, f"{job.minutes} min requested; the steps' time is not predicted"
    confidence = plan.confidence if spec.machine.is_real else None
    least_s, most_s = (confidence and confidence.range_s(predicted_s)) or (predicted_s, predicted_s)
    minutes = (
        f"{least_s / 60:.2g} to {most_s / 60:.2g}"
        if least_s < most_s
        else f"{predicted_s / 60:.2g}"
    )
    text = f"{job.minutes} min requested, {minutes} min predicted for {spec.train.steps} steps"
    text += f" ({confidence.words})" if confidence is not None else ""
    if not job.is_batch or most_s <= 60 * job.minutes:
        return text
    if least_s <= 60 * job.minutes:
        return None, f"{text}: it may not finish (cluster.minutes)"
    return False, f"{text}: it would not finish (cluster.minutes)"


def _check_probe(spec: RunSpec, job: JobSpec) -> Outcome:
    found = known_probe(spec, job)
    if found is not None:
        return f"{describe_probe(found)}; of {found['utc'][:10]}, kept for {MAX_AGE.days} days"
    if not needs_probe(spec, job):
        return None, "none needed"
    return (
        None,
        f"none known of this cluster and environment: the job starts with one of {RANKS} ranks",
    )


@dataclass(frozen=True, slots=True)
class Storage:
    """The nearest existing folder of a run's, its file system, and the free space.

    `files` is None if not counted.
    """

    path: Path
    kind: str
    free_bytes: int
    files: int | None

    @property
    def is_shared(self) -> bool | None:
        """Whether other nodes can see it; None if its kind does not show that."""
        if self.kind.startswith(LOCAL):
            return False
        return True if self.kind.startswith(SHARED) else None


def find_storage(spec: RunSpec) -> Storage:
    """Find the storage of a run's folder; raise ConfigError if it is not writable."""
    wanted = RunFolder.of(spec).path
    path = next(each for each in (wanted, *wanted.parents) if os.path.lexists(each))
    if not path.is_dir() or not os.access(path, os.W_OK | os.X_OK):
        reason = "Permission denied" if path.is_dir() else "Not a directory"
        text = f"cannot write there ({reason}: {path})"
        raise ConfigError("runs_dir", spec.runs_dir, text, "give runs_dir= a folder of yours")
    seen = os.statvfs(path)
    return Storage(
        path,
        _kind(path.resolve()),
        seen.f_bavail * seen.f_frsize,
        seen.f_favail if seen.f_files else None,
    )


def check_free_space(spec: RunSpec, storage: Storage, needed_bytes: int = 0) -> str:
    """Describe the free space; raise ConfigError if the run's files do not fit.

    Quotas are not visible to this check.
    """
    needed = max(needed_bytes, MIN_BYTES)
    free = f"{storage.free_bytes / GIB:.2f} GiB"
    error = None
    if storage.free_bytes < needed:
        error = f"{free} are free there, and the run writes {needed / GIB:.2f} GiB"
    elif storage.files is not None and storage.files < MIN_FILES:
        error = f"only {storage.files} more files can be made there"
    if error is not None:
        raise ConfigError("runs_dir", spec.runs_dir, error, "free some, or give another folder")
    return f"{storage.path} on {storage.kind}, {free} free"


def _kind(path: Path) -> str:
    """Return the type of the file system that holds a path, by the longest mount point above it."""
    above = [
        mount for mount in psutil.disk_partitions(all=True) if path.is_relative_to(mount.mountpoint)
    ]
    return (
        max(reversed(above), key=lambda mount: len(mount.mountpoint)).fstype if above else "unknown"
    )
