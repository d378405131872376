"""Run a study: start the points that are due, and with --wait poll until all have ended.

Points whose jobs are equal are submitted as one job array: one sbatch with a task for each point.
Each point has its own folder, logs and end. The elements of an array share one request of nodes and
time, so points of different sizes make different arrays. A single point is a plain job.

Small points may share a job, one after another, as `cluster.runs_per_job` allows. They do not run
side by side under `srun --exact`: a study measures times, and neighbours on a node share memory
bandwidth, links, power and system cores. Running in turn is also robust: whether overlapping steps
get disjoint CPUs and GPUs depends on SLURM's release and on the site. The job takes one slot in the
queue, the resources of the largest point, and the minutes of all points.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

from gems.config.schema import ClusterConfig
from gems.errors import SIGNAL_BASE, ConfigError, GemsError, RankFailedError, TryLaterError
from gems.plan.evaluate import evaluate
from gems.runs.folder import RunFolder
from gems.runs.owner import read_owner
from gems.runs.prepare import prepare
from jobs.batch.job import UnclearSubmissionError
from jobs.batch.output import report
from jobs.batch.preset_limits import check_limits, is_on_site, queue_limit
from jobs.batch.resources import JobSpec, job_spec
from jobs.launch.batch import BatchJob
from jobs.launch.submission import start_run
from jobs.launch.transaction import Ownership, submit_owned
from jobs.preflight.checks import passed, preflight, site_checks
from jobs.schedulers.scheduler import scheduler_for, write_script
from jobs.schedulers.slurm_client.site import cached_site_queries
from jobs.status.job_record import find_among, gone_verifier, read_chain
from jobs.status.lookup import StudyRecord
from jobs.status.run_status import describe_states, run_statuses
from jobs.studies.points import Point

HELD_BACK = "waiting"
Pack = tuple[Point, ...]  # the points of one job, or of one task of an array
Scope = tuple[str | None, str | None, str | None]
POINT_KEYS = ("nodes", "ranks_per_node", "cpus_per_rank", "gpus_per_node", "minutes")
MIN_POLL_S = 1.0
MAX_POLL_S = 30.0
POLL_GROWTH = 1.5


class QueueSlots:
    """The free queue slots at one look at the queue; the jobs of each limit are counted once."""

    def __init__(self) -> None:
        self._slots: dict[Scope, int | None] = {}
        # accounts, partitions and qos for which SLURM takes no more jobs now
        self.full: set[Scope] = set()

    def num_free(self, job: JobSpec) -> float:
        """Return how many more jobs the queue takes; infinity if that is unknown.

        Raises:
            ConfigError: The queue takes no job of this size.
        """
        if _scope(job.cluster) in self.full:
            return 0
        key, allowed = _limit(job)
        if allowed is not None and key not in self._slots:
            scheduler = scheduler_for(job.cluster)
            queued = scheduler.num_queued(*key[1:], clusters=scheduler.clusters(job.cluster))
            self._slots[key] = None if queued is None else allowed - queued
        slots = self._slots.get(key)
        return math.inf if slots is None else max(0, slots)

    def take(self, job: JobSpec, num_jobs: int) -> None:
        """Count jobs that were submitted; a limit counts each task of an array."""
        key, _ = _limit(job)
        if (slots := self._slots.get(key)) is not None:
            self._slots[key] = slots - num_jobs


class StudyRunner:
    """The runner of a study's due points.

    `waiting` are the due points that the queue does not take yet. `refused` maps the folder of each
    point that cannot start to its error.
    """

    def __init__(self, points: Sequence[Point], record: StudyRecord, due: Sequence[Point]) -> None:
        self._points = points
        self._numbers = {point.folder.path: number for number, point in enumerate(points, 1)}
        self._record = record
        self._submitted: list[Point] = []
        self._is_stopped = False
        self._has_arrays = True  # until a site refuses an array but takes its points
        self.num_due = len(due)
        self.waiting = list(due)
        self.refused: dict[Path, GemsError] = {}

    def run(self) -> int:
        """Start the due points, as far as the queue takes them.

        Return the worst exit code of the points that failed or did not start. Points of this
        machine run here, one after another. Afterwards, `waiting` holds only points without a slot
        in the queue, unless a signal to a point's run or a cancelled study ended the whole run.
        """
        due = pack_points(self.waiting)
        self.waiting = []
        slots = QueueSlots()
        code = 0
        with cached_site_queries():
            for packs in group_packs(due):
                if self._record.is_cancelled:
                    report(f"study {self._record.name} was cancelled; the other points are left")
                    break
                point = packs[0][0]
                if job_spec(point.spec).is_batch:
                    code = max(code, self._submit(packs, slots))
                    continue
                ended = self._run_here(point)
                code = max(code, ended)
                state = point.folder.read_status().get("state")
                if state == "stopped" or (ended > SIGNAL_BASE and state != "cancelled"):
                    # someone ends the whole study, not just this point
                    self._is_stopped = True
                    break
        return code

    def wait(self) -> int:
        """Wait until all jobs of the study have ended, and return the worst exit code.

        Waiting points are submitted as slots become free. One squeue covers all points, and polls
        become rarer while nothing changes.
        """
        pause = threading.Event()
        poll_s = MIN_POLL_S
        code = 0
        before = ""
        while not self._is_stopped:
            runs = run_statuses([point.folder for point in self._points]).runs
            states = describe_states(run.state for run in runs)
            if self._record.is_cancelled or not (
                self.waiting or any(run.is_active for run in runs)
            ):
                break
            if states != before:
                more = (
                    f", {len(self.waiting)} of them wait for a slot in the queue"
                    if self.waiting
                    else ""
                )
                report(f"study {self._record.name}: {states}{more}")
                before = states
                poll_s = MIN_POLL_S
            if self.waiting:
                code = max(code, self.run())
            pause.wait(poll_s)
            poll_s = min(MAX_POLL_S, poll_s * POLL_GROWTH)
        ours = [point.folder for point in self._submitted]
        for run in run_statuses(ours).runs:
            if run.state not in ("finished", "stopped"):
                code = max(code, run.status.get("exit_code") or RankFailedError.exit_code)
        return code

    def _run_here(self, point: Point) -> int:
        """Run one point and return its exit code; report a point that cannot start in one line."""
        self._report_start(point)
        try:
            code = start_run(point.spec)
        except GemsError as error:
            return self._report_refusal(point, error)
        if code:
            report(f"{self._label(point)} has failed: {point.folder.path}")
        return code

    def _submit(self, packs: Sequence[Pack], slots: QueueSlots) -> int:
        """Submit packs of equal jobs; hold back those without a slot."""
        spec = packs[0][0].spec
        try:
            job = pack_resources(packs[0])
            scheduler_for(job.cluster).check_submission(job.cluster)
            num_free = slots.num_free(job)
            fitting = packs[: int(min(num_free, len(packs)))]
            self._hold_back(packs[len(fitting) :])
            if not fitting:
                return 0
            if len(fitting) > 1 or len(fitting[0]) > 1:
                return self._submit_array(fitting, job, slots)
            start_run(spec, assume_yes=True)  # the user has confirmed all points together
        except GemsError as error:
            return self._refuse(packs, error, slots)
        self._note_submitted(fitting, job, slots)
        return 0

    def _submit_array(self, packs: Sequence[Pack], job: JobSpec, slots: QueueSlots) -> int:
        """Prepare the points of equal jobs and submit them together.

        Points that cannot be prepared are left out.
        """
        host_bytes = packs[0][0].spec.machine.host_bytes
        home = RunFolder(self._record.path)
        check_limits(job, host_bytes)
        scheduler_for(job.cluster).check_here()
        passed(site_checks(job, write_script(job, home), host_bytes))
        find = find_among([*_owners(point for pack in packs for point in pack)])
        ownership = Ownership(gone_verifier(find=find))
        ready: list[Pack] = []
        code = 0
        last = None
        try:
            for pack in packs:
                prepared = []
                for point in pack:
                    try:
                        _prepare(point, job, ownership, last)
                        prepared.append(last := point)
                    except GemsError as error:
                        code = max(code, self._refuse([(point,)], error, slots))
                if prepared:
                    ready.append(tuple(prepared))
            return max(code, self._submit_parts(ready, job, home, ownership, slots))
        finally:
            ownership.release()

    def _submit_parts(
        self,
        packs: list[Pack],
        job: JobSpec,
        home: RunFolder,
        ownership: Ownership,
        slots: QueueSlots,
    ) -> int:
        """Submit prepared packs as one array.

        Split it in halves if the queue does not take so many, and submit the packs one by one if
        the site refuses arrays.
        """
        parts = deque([packs] if packs else [])
        code = 0
        refusal: ConfigError | None = None
        while parts:
            part = parts.popleft()
            if len(part) > 1 and not self._has_arrays:
                parts.extendleft([pack] for pack in reversed(part))
                continue
            try:
                submit_packs(part, job, home, ownership)
                self._note_submitted(part, job, slots)
                if refusal is not None:
                    report(
                        f"no job array ({refusal}); each point is a job of its own:"
                        " cluster.array=false"
                    )
                    refusal = None
            except TryLaterError as error:
                half = len(part) // 2
                if isinstance(error, UnclearSubmissionError) or not half:
                    code = max(
                        code,
                        self._refuse(
                            [*part, *(pack for rest in parts for pack in rest)], error, slots
                        ),
                    )
                    break
                parts.extendleft((part[half:], part[:half]))
            except ConfigError as error:
                if len(part) > 1 and job.cluster.max_parallel is None:
                    refusal = error
                    self._has_arrays = False
                    parts.appendleft(part)
                    continue
                if refusal is not None:  # the site did not refuse it for being an array
                    part = [*part, *(pack for rest in parts for pack in rest)]
                    self._has_arrays = True
                    parts.clear()
                code = max(code, self._refuse(part, error, slots))
                refusal = None
            except GemsError as error:
                code = max(code, self._refuse(part, error, slots))
        return code

    def _refuse(self, packs: Sequence[Pack], error: GemsError, slots: QueueSlots) -> int:
        """Hold packs back if their jobs would be taken later, or report that they cannot start.

        Return the exit code.
        """
        cluster = packs[0][0].spec.cluster
        scheduler = scheduler_for(cluster)
        clusters = scheduler.clusters(cluster)
        if isinstance(error, TryLaterError) and scheduler.num_queued(clusters=clusters) != 0:
            slots.full.add(_scope(cluster))
            self._hold_back(packs)
            return 0
        return max(self._report_refusal(point, error) for pack in packs for point in pack)

    def _hold_back(self, packs: Iterable[Pack]) -> None:
        self.waiting += [point for pack in packs for point in pack]

    def _note_submitted(self, packs: Sequence[Pack], job: JobSpec, slots: QueueSlots) -> None:
        slots.take(job, len(packs))
        for point in (point for pack in packs for point in pack):
            self._submitted.append(point)
            self._report_start(point, f", job {point.folder.read_status().get('job_id')}")

    def _report_refusal(self, point: Point, error: GemsError) -> int:
        self.refused[point.folder.path] = error
        report(f"{self._label(point)} cannot start: {error}")
        return error.exit_code

    def _report_start(self, point: Point, more: str = "") -> None:
        number = self._numbers[point.folder.path]
        report(
            f"point {number} of {len(self._points)}: {point.label}, {point.spec.world_size}"
            f" ranks{more}"
        )

    def _label(self, point: Point) -> str:
        return f"point {self._numbers[point.folder.path]} of {len(self._points)} ({point.label})"


def group_packs(packs: Sequence[Pack]) -> list[list[Pack]]:
    """Group packs whose jobs are equal into arrays of at most as many tasks as the site allows.

    The groups are in the order of their first packs.

    Raises:
        ConfigError: cluster.max_parallel is set, and the site allows no arrays.
    """
    groups: dict[str, list[Pack]] = {}
    for number, pack in enumerate(packs):
        job = pack_resources(pack)
        has_arrays = job.is_batch and scheduler_for(job.cluster).has_arrays
        is_alone = not has_arrays or not job.cluster.array
        groups.setdefault(str(number) if is_alone else repr(job), []).append(pack)
    parts = []
    for group in groups.values():
        cluster = group[0][0].spec.cluster
        could_share = len(group) > 1 and is_on_site(cluster)
        size = scheduler_for(cluster).max_array_tasks() if could_share else 1
        if could_share and size == 1 and cluster.max_parallel is not None:
            problem = "limits a job array, and this site allows none"
            raise ConfigError("cluster.max_parallel", cluster.max_parallel, problem, "leave it out")
        parts += [group[at : at + size] for at in range(0, len(group), size)]
    return parts


def pack_points(points: Sequence[Point]) -> list[Pack]:
    """Group one-node points with the same cluster settings into packs that can share a job.

    The order is kept: a pack takes the position of its first point. Its minutes stay within the
    site's limit for one job.
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
    if len(jobs) == 1:
        return jobs[0]
    tasks = max(job.tasks_per_node for job in jobs)
    cpus = max(job.cpus_per_node for job in jobs)
    return replace(
        jobs[0],
        tasks=tasks,
        tasks_per_node=tasks,
        cpus_per_task=-(-cpus // tasks),
        gpus_per_node=max(job.gpus_per_node for job in jobs),
        minutes=sum(job.minutes for job in jobs),
    )


def submit_packs(
    packs: Sequence[Pack], job: JobSpec, home: RunFolder, ownership: Ownership
) -> None:
    """Submit prepared points as a job array with a task for each pack, or as one job.

    `home` is the study's folder.
    """
    works = [BatchJob(tuple(str(point.folder.path) for point in pack)) for pack in packs]
    part = ownership.part([point.folder for pack in packs for point in pack])
    submit_owned(job, part, works, home=home)


def _owners(points: Iterable[Point]) -> Iterator[str]:
    """Yield the recorded jobs that own the folders of points."""
    for point in points:
        owner = read_owner(point.folder)
        if owner is not None and owner.job_id is not None:
            yield owner.job_id
        yield from read_chain(point.folder)


def _prepare(point: Point, job: JobSpec, ownership: Ownership, last: Point | None) -> None:
    """Prepare a point whose job the site takes, after the checks that depend on the point.

    The code archive of the `last` point is reused if the code is the same.
    """
    plan = cache(partial(evaluate, point.spec))
    passed(preflight(point.spec, job, None, plan))
    code = [*point.spec.own_code()]
    has_same_code = last is not None and code == [*last.spec.own_code()]
    like = last.folder if last is not None and has_same_code else None
    prepare(point.spec, plan(), own=ownership.take, like=like)


def _pack_key(point: Point) -> str | None:
    """Return what the points of one job must share; None if the point needs its own job."""
    spec = point.spec
    job = job_spec(spec)
    if spec.cluster.runs_per_job == 1 or job.nodes > 1 or not job.is_batch:
        return None
    settings: dict[str, Any] = {
        key: value for key, value in asdict(spec.cluster).items() if key not in POINT_KEYS
    }
    if job.launcher == "ibrun":  # ibrun takes the number of tasks from the job
        settings["tasks"] = job.tasks
    return repr(settings)


def _fits(pack: Sequence[Point], point: Point) -> bool:
    if len(pack) >= point.spec.cluster.runs_per_job:
        return False
    try:
        check_limits(pack_resources([*pack, point]), point.spec.machine.host_bytes)
    except ConfigError:
        return False
    return True


def _limit(job: JobSpec) -> tuple[Scope, int | None]:
    """Return the cluster, partition and qos of the preset's limit for a job, and the limit."""
    limit = queue_limit(job.cluster, job.allocated_nodes)
    if limit is None:
        return (job.cluster.name, None, None), None
    return (job.cluster.name, limit.partition, limit.qos), limit.queued_jobs


def _scope(cluster: ClusterConfig) -> Scope:
    qos = cluster.sbatch.get("qos")
    return cluster.full_account, cluster.partition, None if qos is None else str(qos)
