"""The runner of a study: starts the points that are due, and with --wait looks again until all have ended.

A study uses no job arrays: the elements of an array share one request of nodes and time, and each point of a study has
its own. So a site's limits on arrays do not bind it, and its limits on jobs do.

Small points may share a job, one after another, as `cluster.runs_per_job` allows. They do not run side by side under
`srun --exact`: a study is there to be timed, and neighbours on a node share memory bandwidth, links, power and cores of
the system. It is also robust: whether steps that overlap get disjoint CPUs and GPUs depends on SLURM's release and on
the site. The job takes one slot in the queue, the resources of the largest point, and the minutes of all.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from gems.config.schema import RunSpec
from gems.errors import SIGNAL_BASE, ConfigError, GemsError, RankFailedError, TryLaterError
from gems.utils.stdio import report
from jobs.launch.submission import start_run, submit_together
from jobs.slurm.jobs import num_queued
from jobs.slurm.limits import check_limits, check_queue, queue_limit
from jobs.slurm.resources import JobSpec, job_spec
from jobs.status.run_status import run_statuses
from jobs.status.study_record import StudyRecord
from jobs.studies.points import Point

WAITING = "waiting"
Scope = tuple[str | None, str | None, str | None]
POINT_KEYS = ("nodes", "ranks_per_node", "cpus_per_rank", "gpus_per_node", "minutes")
MIN_POLL_S, MAX_POLL_S, POLL_GROWTH = 1.0, 30.0, 1.5


class QueueSlots:
    """The free slots for jobs at one look at the queue; the jobs of each limit are counted once."""

    def __init__(self) -> None:
        self._slots: dict[Scope, int | None] = {}
        self.full: set[Scope] = set()  # accounts, partitions and qos for which SLURM takes no more jobs now

    def has_slot(self, spec: RunSpec, job: JobSpec) -> bool:
        """Return whether the queue takes one more job, as far as is known; raise ConfigError if none of this size."""
        if _scope(spec) in self.full:
            return False
        key, allowed = _limit(spec, job)
        if allowed is not None and key not in self._slots:
            queued = num_queued(*key[1:])
            self._slots[key] = None if queued is None else allowed - queued
        slots = self._slots.get(key)
        return slots is None or slots > 0

    def take(self, spec: RunSpec, job: JobSpec) -> None:
        """Count a job that was submitted."""
        key, _ = _limit(spec, job)
        if (slots := self._slots.get(key)) is not None:
            self._slots[key] = slots - 1


class StudyRunner:
    """Runs the points of a study that are due; `waiting` are those of them that the queue does not take yet."""

    def __init__(self, points: Sequence[Point], record: StudyRecord, due: Sequence[Point]) -> None:
        self._points = points
        self._numbers = {point.folder.path: number for number, point in enumerate(points, 1)}
        self._record = record
        self._submitted: list[Point] = []
        self._is_stopped = False
        self.waiting = list(due)

    def run(self) -> int:
        """Start what is due, as far as the queue takes it; return the worst exit code of what failed or did not start.

        Points of this machine run here, one after another. Unless a signal to a point's run or a cancelled study ends
        the whole, only points without a slot in the queue are left in `waiting`.
        """
        due, self.waiting = pack_points(self.waiting), []
        slots, code = QueueSlots(), 0
        for pack in due:
            if self._record.is_cancelled:
                report("jobs", f"study {self._record.name} was cancelled; the other points are left")
                break
            if not job_spec(pack[0].spec).is_batch:
                ended = self._run_here(pack[0])
                code = max(code, ended)
                state = pack[0].folder.read_status().get("state")
                if state == "stopped" or (ended > SIGNAL_BASE and state != "cancelled"):
                    self._is_stopped = True  # someone ends the whole study, and not this point alone
                    break
                continue
            code = max(code, self._submit(pack, slots))
        return code

    def wait(self) -> int:
        """Wait until every job of the study has ended, submit what waits as slots come, and return the worst exit code.

        One squeue asks for all points; polls become rarer while nothing changes.
        """
        pause, poll_s, code = threading.Event(), MIN_POLL_S, 0
        before: Counter[str] = Counter()
        while not self._is_stopped:
            found = run_statuses([point.folder for point in self._points])
            counts = Counter(run.state for run in found.runs)
            if self._record.is_cancelled or not (self.waiting or any(run.is_active for run in found.runs)):
                break
            if counts != before:
                states = ", ".join(f"{number} {state}" for state, number in sorted(counts.items()))
                more = f", {len(self.waiting)} of them wait for a slot in the queue" if self.waiting else ""
                report("jobs", f"study {self._record.name}: {states}{more}")
                before, poll_s = counts, MIN_POLL_S
            if self.waiting:
                code = max(code, self.run())
            pause.wait(poll_s)
            poll_s = min(MAX_POLL_S, poll_s * POLL_GROWTH)
        ours = [point.folder for point in self._submitted]
        for run in run_statuses(ours).runs:
            own = run.status.get("exit_code")
            if run.state not in ("finished", "stopped"):
                code = max(code, own if isinstance(own, int) and own else RankFailedError.exit_code)
        return code

    def _run_here(self, point: Point) -> int:
        """Run one point and return its exit code; what cannot start is reported in one line."""
        self._report_start(point)
        try:
            code = start_run(point.spec)
        except GemsError as error:
            return self._report_refusal(point, error)
        if code:
            report("jobs", f"{self._label(point)} has failed: {point.folder.path}")
        return code

    def _submit(self, pack: Sequence[Point], slots: QueueSlots) -> int:
        """Submit the points of one job; those without a slot wait."""
        spec = pack[0].spec
        try:
            job = pack_resources(pack) if len(pack) > 1 else job_spec(spec)
            if not slots.has_slot(spec, job):
                self.waiting += pack
                return 0
            if len(pack) > 1:
                submit_pack(pack)
            else:
                start_run(spec, assume_yes=True)  # confirmed for all points together
        except GemsError as error:
            if isinstance(error, TryLaterError) and num_queued() != 0:
                slots.full.add(_scope(spec))
                self.waiting += pack
                return 0
            return max(self._report_refusal(point, error) for point in pack)
        slots.take(spec, job)
        self._submitted += pack
        for point in pack:
            self._report_start(point, f", job {point.folder.read_status().get('job_id')}")
        return 0

    def _report_refusal(self, point: Point, error: GemsError) -> int:
        report("jobs", f"{self._label(point)} cannot start: {error}")
        return error.exit_code

    def _report_start(self, point: Point, more: str = "") -> None:
        number = self._numbers[point.folder.path]
        report("jobs", f"point {number} of {len(self._points)}: {point.label}, {point.spec.world_size} ranks{more}")

    def _label(self, point: Point) -> str:
        return f"point {self._numbers[point.folder.path]} of {len(self._points)} ({point.label})"


def pack_points(points: Sequence[Point]) -> list[tuple[Point, ...]]:
    """Group points of one node and of the same cluster settings, as many as a job may hold, in their order.

    A pack takes the position of its first point. Its minutes stay within what the site allows for one job.
    """
    packs: list[list[Point]] = []
    open_packs: dict[str, list[Point]] = {}
    for point in points:
        key = _pack_key(point)
        pack = open_packs.get(key or "")
        if pack is None or not _fits(pack, point):
            packs.append(pack := [])
            if key is not None:
                open_packs[key] = pack
        pack.append(point)
    return [tuple(pack) for pack in packs]


def pack_resources(points: Sequence[Point]) -> JobSpec:
    """Return the resources that suffice for each point of a pack in turn."""
    jobs = [job_spec(point.spec) for point in points]
    tasks = max(job.tasks_per_node for job in jobs)
    cpus = max(job.tasks_per_node * job.cpus_per_task for job in jobs)
    return replace(
        jobs[0], tasks=tasks, tasks_per_node=tasks, cpus_per_task=-(-cpus // tasks),
        gpus_per_node=max(job.gpus_per_node for job in jobs), minutes=sum(job.minutes for job in jobs),
    )  # fmt: skip


def submit_pack(points: Sequence[Point]) -> str:
    """Submit the points of a pack as one job and return its number."""
    from jobs.slurm.executor import need_sbatch

    spec, job = points[0].spec, pack_resources(points)
    check_limits(spec, job)
    need_sbatch(job)
    check_queue(spec, job)
    return submit_together([point.spec for point in points], job, [None] * len(points))


def _pack_key(point: Point) -> str | None:
    """Return what points of one job must share; None for a point with a job of its own."""
    spec = point.spec
    job = job_spec(spec)
    if spec.cluster.runs_per_job == 1 or job.nodes > 1 or not job.is_batch:
        return None
    settings: dict[str, Any] = {key: value for key, value in asdict(spec.cluster).items() if key not in POINT_KEYS}
    if job.launcher == "ibrun":  # takes the number of tasks from the job
        settings["tasks"] = job.tasks
    return repr(settings)


def _fits(pack: Sequence[Point], point: Point) -> bool:
    if len(pack) >= point.spec.cluster.runs_per_job:
        return False
    try:
        check_limits(point.spec, pack_resources([*pack, point]))
    except ConfigError:
        return False
    return True


def _limit(spec: RunSpec, job: JobSpec) -> tuple[Scope, int | None]:
    """Return the cluster, partition and qos of the preset's limit for a job, and how many jobs it allows."""
    limit = queue_limit(spec.cluster, job.nodes)
    if limit is None:
        return (spec.cluster.name, None, None), None
    return (spec.cluster.name, limit.partition, limit.qos), limit.queued_jobs


def _scope(spec: RunSpec) -> Scope:
    qos = spec.cluster.sbatch.get("qos")
    return spec.cluster.full_account, spec.cluster.partition, None if qos is None else str(qos)
