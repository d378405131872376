"""The preflight: everything that can be known of a job before it is queued, as one list of checks."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime
from fnmatch import fnmatchcase
from typing import Any

from gems.config.cluster_presets import host_names
from gems.config.resolve import global_batch
from gems.config.schema import RunSpec
from gems.errors import GemsError
from gems.runs.run_plan import RunPlan, planned
from jobs.launch.mpi_probe import KEPT_FOR, RANKS, known_probe, needs_probe, summary
from jobs.preflight.cost import cost_words
from jobs.preflight.prediction import check_host, peak_of, steps_s
from jobs.preflight.storage import check_room, place_of
from jobs.slurm.command import UnansweredError
from jobs.slurm.limits import check_limits, check_queue
from jobs.slurm.live_limits import check_account, check_partitions
from jobs.slurm.resources import JobSpec
from jobs.slurm.sbatch_check import try_script
from jobs.slurm.site import ask_accounts, ask_partitions

GIB = 1 << 30
STATES = {"sgd": 2, "adam": 3}  # parameters with what the optimizer keeps of each; momentum is in
CHECKPOINTS = 2


@dataclass(frozen=True, slots=True)
class Check:
    """A check with its outcome: `ok` is None where there was nothing to check it by, and `said` says why or what.

    `refusal` is the error of a check that forbids the job; one that only warns has none.
    """

    name: str
    ok: bool | None
    said: str
    refusal: GemsError | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return what --json shows."""
        return {"check": self.name, "ok": self.ok, "said": self.said}

    def line(self) -> str:
        """Return the line of the table."""
        mark = {True: "ok", None: "--", False: "warn"}[self.ok]
        return f"jobs: {mark:<4} {self.name:<13} {self.said}"


Outcome = tuple[bool | None, str]


def preflight(spec: RunSpec, job: JobSpec, script: str | None, *, here: bool = True) -> Iterator[Check]:
    """Check a costed run, one thing after another, those first that take no time.

    `script` is the batch script, None for a run on this machine. With `here` the SLURM of this machine is asked, which must be
    the one that the preset is of.
    """
    yield Check("configuration", True, _counts(spec, job))
    yield _check("folder", lambda: _folder(spec, job))
    if job.is_batch and script is not None:
        yield _check("limits", lambda: _limits(spec, job, here))
        yield from _asked(spec, job, script) if here else _not_asked(spec)
        yield Check("cost", True, _cost(spec, job))
        yield Check("probe", *_probe(spec, job))
    try:
        made = planned(spec)  # this may take a profile
    except GemsError as error:
        yield Check("memory", False, str(error), error)
        return
    yield _check("memory", lambda: _memory(spec, made))
    yield _check("room", lambda: _room(spec, made))
    yield _check("time", lambda: _time(spec, job, made))


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
    """Print checks on stderr, a line each."""
    for check in checks:
        print(check.line(), file=sys.stderr)


def is_at_home(spec: RunSpec) -> bool:
    """Return whether the SLURM of this machine is the preset's: a preset that names no hosts is of any."""
    patterns = [pattern.lower() for pattern in spec.cluster.hosts]
    return not patterns or any(fnmatchcase(name, pattern) for name in host_names() for pattern in patterns)


def _asked(spec: RunSpec, job: JobSpec, script: str) -> Iterator[Check]:
    partition, name = spec.cluster.partition, spec.cluster.name
    yield _check("partition", lambda: (True, check_partitions(spec, job, ask_partitions(partition))))
    yield _check("account", lambda: (True, check_account(spec, ask_accounts())))
    yield _check("sbatch", lambda: (True, try_script(name, script).words(datetime.now())))


def _not_asked(spec: RunSpec) -> Iterator[Check]:
    reason = f"not asked: {host_names()[0]} is no login node of {spec.cluster.name}"
    for name in ("partition", "account", "sbatch"):
        yield Check(name, None, reason)


def _check(name: str, look: Callable[[], Outcome]) -> Check:
    try:
        return Check(name, *look())
    except UnansweredError as reason:
        return Check(name, None, f"not asked: {reason}")
    except GemsError as error:
        return Check(name, False, str(error), error)


def _counts(spec: RunSpec, job: JobSpec) -> str:
    parallel = spec.parallel
    return (
        f"{spec.world_size} ranks: {parallel.partitions} partitions x {parallel.replicas} replicas, {job.tasks_per_node} "
        f"on each of {job.nodes} nodes; {parallel.micro_batches} micro-batches of {parallel.micro_batch_size}, "
        f"{global_batch(spec)} samples a step"
    )


def _memory(spec: RunSpec, made: RunPlan) -> Outcome:
    if spec.machine.kind != "real":
        return None, f"a run on machine={spec.machine.name} computes nothing"
    peak, limit = peak_of(spec, made), spec.machine.device_bytes
    if peak is None:
        return (
            None,
            "not predicted: neither the cut nor a limit needs a profile (machine.device_bytes=BYTES gives one)",
        )
    check_host(spec, peak)
    said = f"predicted {peak.device_bytes / GIB:.2f} GiB on rank {peak.rank}"
    said += f" of {limit / GIB:.2f} GiB" if limit is not None else "; machine.device_bytes is not given"
    if peak.host_bytes:
        said += f", {peak.host_bytes / GIB:.2f} GiB of a node's host memory"
    return (True if limit is not None else None), said


def _limits(spec: RunSpec, job: JobSpec, here: bool) -> Outcome:
    check_limits(spec, job)
    if here:
        check_queue(spec, job)
    limits = len(spec.cluster.limits)
    return (True, f"within the preset's {limits} limits") if limits else (None, "the preset knows none")


def _folder(spec: RunSpec, job: JobSpec) -> Outcome:
    place = place_of(spec)
    said = check_room(spec, place)
    if not job.is_batch:
        return True, said
    if place.is_shared is False:
        return False, f"{said}; compute nodes cannot see it, for it is in this machine's memory"
    return (True, said) if place.is_shared else (None, f"{said}; compute nodes must see it")


def _room(spec: RunSpec, made: RunPlan) -> Outcome:
    if made.profile is None:
        return None, "the size of a checkpoint is not predicted"
    states = STATES.get(spec.train.optimizer, 2) * sum(layer.param_bytes for layer in made.profile.layers)
    kept_bytes = CHECKPOINTS * states
    check_room(spec, place_of(spec), kept_bytes)
    return True, f"{kept_bytes / GIB:.2f} GiB for {CHECKPOINTS} checkpoints of weights and optimizer"


def _cost(spec: RunSpec, job: JobSpec) -> str:
    limit = spec.cluster.confirm_above_gpu_hours
    asks = "" if limit is None or job.gpu_hours <= limit else f"; above {limit:g}, so that it asks first"
    return f"at most {cost_words([job])}{asks}"


def _time(spec: RunSpec, job: JobSpec, made: RunPlan) -> Outcome:
    predicted_s = steps_s(spec, made)
    if predicted_s is None:
        return None, f"{job.minutes} min asked; the steps' time is not predicted"
    said = f"{job.minutes} min asked, {predicted_s / 60:.2g} min predicted for {spec.train.steps} steps"
    if not job.is_batch or predicted_s <= 60 * job.minutes:
        return True, said
    return False, f"{said}: it would not finish (cluster.minutes)"


def _probe(spec: RunSpec, job: JobSpec) -> Outcome:
    found = known_probe(spec, job)
    if found is not None:
        return True, f"{summary(found)}; of {found['utc'][:10]}, kept for {KEPT_FOR.days} days"
    if not needs_probe(spec, job):
        return None, "none needed"
    return None, f"none kept of this cluster and environment: the job starts with one of {RANKS} ranks"
