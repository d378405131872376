"""Run the preflight: a list of checks of all that can be known of a job before it is queued."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from gems.config.cluster_presets import host_names
from gems.config.resolve import run_id
from gems.config.schema import MemoryConfig, RunSpec
from gems.errors import ConfigError, DoesNotFitError, GemsError
from gems.launch.recipe import check_recipe, needs_check
from gems.plan.evaluate import Peak, Plan
from gems.runs.folder import RunFolder
from gems.runs.prepare import check_folder
from gems.simulation.memory_case import SMALLER
from gems.utils.units import GIB
from jobs.batch.command import SchedulerUnavailableError
from jobs.batch.output import report
from jobs.batch.preset_limits import check_limits, check_queue
from jobs.batch.resources import JobSpec
from jobs.preflight.cost import describe_cost
from jobs.preflight.layouts import check_layouts
from jobs.probes.mpi import MAX_AGE, RANKS, MpiProbe, describe_probe
from jobs.schedulers.scheduler import Outcome, scheduler_for

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
        f" micro-batches of {parallel.micro_batch_size}, {parallel.global_batch} samples a step"
    )
    yield Check("configuration", True, counts)
    folder = RunFolder.of(spec)

    def look_at_folder() -> Outcome:
        check_folder(folder, run_id(spec), spec.train.resume)
        return _check_storage(folder, spec.runs_dir, job.is_batch)

    yield _check("folder", look_at_folder)
    if job.is_batch and script is not None:
        yield from site_checks(job, script, spec.machine.host_bytes, here=here)
        limit = job.cluster.confirm_above_gpu_hours
        confirm = (
            ""
            if limit is None or job.gpu_hours <= limit
            else f"; above {limit:g}, so that it must be confirmed"
        )
        yield Check("cost", True, f"at most {describe_cost([job])}{confirm}")
        probe = MpiProbe(job, spec.machine, spec.cache_dir)
        yield _check("probe", lambda: _check_probe(probe))
    try:
        plan = make_plan()
    except GemsError as error:
        yield Check("memory", False, str(error), error)
        return
    yield _check("memory", lambda: _check_memory(plan))
    if needs_check(spec):
        yield _check("recipe", lambda: check_recipe(spec))
    if job.is_batch and job.cluster.elastic:
        yield _check("elastic", lambda: check_layouts(spec))
    yield _check("room", lambda: _check_checkpoints(folder, plan))
    yield _check("time", lambda: _check_time(job, plan))


def site_checks(
    job: JobSpec, script: str, host_bytes: int | None, *, here: bool = True
) -> Iterator[Check]:
    """Check whether the site takes a job; the answer holds for every run with an equal job.

    `host_bytes` is that of `check_limits`.
    """
    yield _check("limits", lambda: _check_limits(job, host_bytes, here))
    away = f"not asked: {host_names()[0]} is no login node of {job.cluster.name}"
    scheduler = scheduler_for(job.cluster)
    looks = scheduler.site_checks(job, script)
    if not looks:
        text = f"not asked: {scheduler.title} itself checks queue and account at submission"
        yield Check("site", None, text)
    for name, look in looks.items():
        yield _check(name, look) if here else Check(name, None, away)


def passed(checks: Iterable[Check]) -> list[Check]:
    """Return the checks, up to the last or the first that forbids the job.

    Raises:
        ConfigError: A check that forbids the job.
        DoesNotFitError: It needs more memory than there is.
        ScheduleError: Its schedule would not run.
    """
    done = []
    for check in checks:
        done.append(check)
        if check.refusal is not None:
            raise check.refusal
    return done


def show(checks: Iterable[Check]) -> None:
    """Print checks on stderr, one per line."""
    for check in checks:
        report(f"{MARKS[check.ok]:<4} {check.name:<13} {check.said}")


def check_host_memory(limit: int | None, memory: MemoryConfig, peak: Peak) -> None:
    """Raise DoesNotFitError if the ranks of a node would keep more in host memory than it has.

    `limit` is the memory of a node in bytes, if it is known.
    """
    if limit is not None and peak.host_bytes > limit:
        where = f"host memory of the ranks on a node under {memory.choice}"
        raise DoesNotFitError(
            where, peak.host_bytes, limit, SMALLER, key="cluster.node_memory_bytes"
        )


def _check(name: str, look: Callable[[], Outcome]) -> Check:
    try:
        outcome = look()
    except SchedulerUnavailableError as reason:
        return Check(name, None, f"not asked: {reason}")
    except GemsError as error:
        return Check(name, False, str(error), error)
    return Check(name, *((True, outcome) if isinstance(outcome, str) else outcome))


def _check_memory(plan: Plan) -> Outcome:
    spec = plan.spec
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
    check_host_memory(spec.cluster.node_memory_bytes, spec.memory, peak)
    text = f"predicted {peak.device_bytes / GIB:.2f} GiB on rank {peak.rank}"
    text += (
        f" of {limit / GIB:.2f} GiB" if limit is not None else "; machine.device_bytes is not given"
    )
    if spec.train.compile:
        text += ", by layers that are not compiled: train.compile changes what they keep"
    if peak.host_bytes:
        text += f", {peak.host_bytes / GIB:.2f} GiB of a node's host memory"
    return (True if limit is not None else None), text


def _check_limits(job: JobSpec, host_bytes: int | None, here: bool) -> Outcome:
    check_limits(job, host_bytes)
    if here:
        scheduler = scheduler_for(job.cluster)
        check_queue(job, partial(scheduler.num_queued, clusters=scheduler.clusters(job.cluster)))
    limits = len(job.cluster.limits)
    return f"within the preset's {limits} limits" if limits else (None, "the preset has none")


def _check_storage(folder: RunFolder, runs_dir: str, is_batch: bool) -> Outcome:
    storage = find_storage(folder, runs_dir)
    text = check_free_space(runs_dir, storage)
    if not is_batch or storage.is_shared:
        return text
    if storage.is_shared is False:
        return False, f"{text}; compute nodes cannot see it, for it is in this machine's memory"
    return None, f"{text}; compute nodes must see it"


def _check_checkpoints(folder: RunFolder, plan: Plan) -> Outcome:
    if plan.profile is None:
        return None, "the size of a checkpoint is not predicted"
    spec = plan.spec
    states = (1 + spec.optimizer.num_states + (spec.train.ema_decay is not None)) * sum(
        layer.param_bytes for layer in plan.profile.layers
    )
    needed_bytes = CHECKPOINTS * states
    check_free_space(spec.runs_dir, find_storage(folder, spec.runs_dir), needed_bytes)
    return f"{needed_bytes / GIB:.2f} GiB for {CHECKPOINTS} checkpoints of weights and optimizer"


def _check_time(job: JobSpec, plan: Plan) -> Outcome:
    predicted_s = plan.steps_s
    if predicted_s is None:
        return None, f"{job.minutes} min requested; the steps' time is not predicted"
    confidence = plan.confidence if plan.spec.machine.is_real else None
    least_s, most_s = (confidence and confidence.range_s(predicted_s)) or (predicted_s, predicted_s)
    minutes = (
        f"{least_s / 60:.2g} to {most_s / 60:.2g}"
        if least_s < most_s
        else f"{predicted_s / 60:.2g}"
    )
    text = f"{job.minutes} min requested, {minutes} min predicted for {plan.spec.train.steps} steps"
    text += f" ({confidence.words})" if confidence is not None else ""
    if not job.is_batch or most_s <= 60 * job.minutes:
        return text
    if least_s <= 60 * job.minutes:
        return None, f"{text}: it may not finish (cluster.minutes)"
    return False, f"{text}: it would not finish (cluster.minutes)"


def _check_probe(probe: MpiProbe) -> Outcome:
    known = probe.known()
    if known is not None:
        return f"{describe_probe(known)}; of {known['utc'][:10]}, kept for {MAX_AGE.days} days"
    if not probe.is_needed:
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


def find_storage(folder: RunFolder, runs_dir: str) -> Storage:
    """Find the storage of a run's folder; raise ConfigError if it is not writable."""
    wanted = folder.path
    path = next(existing for existing in (wanted, *wanted.parents) if os.path.lexists(existing))
    if not path.is_dir() or not os.access(path, os.W_OK | os.X_OK):
        reason = "Permission denied" if path.is_dir() else "Not a directory"
        text = f"cannot write there ({reason}: {path})"
        raise ConfigError("runs_dir", runs_dir, text, "give runs_dir= a folder of yours")
    seen = os.statvfs(path)
    return Storage(
        path,
        _kind(path.resolve()),
        seen.f_bavail * seen.f_frsize,
        seen.f_favail if seen.f_files else None,
    )


def check_free_space(runs_dir: str, storage: Storage, needed_bytes: int = 0) -> str:
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
        raise ConfigError("runs_dir", runs_dir, error, "free some, or give another folder")
    return f"{storage.path} on {storage.kind}, {free} free"


def _kind(path: Path) -> str:
    """Return the type of the file system that holds a path, by the longest mount point above it."""
    above = [
        mount for mount in psutil.disk_partitions(all=True) if path.is_relative_to(mount.mountpoint)
    ]
    return (
        max(reversed(above), key=lambda mount: len(mount.mountpoint)).fstype if above else "unknown"
    )
