"""Several small points of a study in one job, one after another, as `cluster.runs_per_job` allows.

They do not run side by side under `srun --exact`: a study is there to be timed, and neighbours on a node share memory
bandwidth, links, power and cores of the system. It is also robust: whether steps that overlap get disjoint CPUs and
GPUs depends on SLURM's release and on the site. The job takes one slot in the queue, the resources of the largest
point, and the minutes of all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from gems.errors import ConfigError
from gems.runs.prepare import prepare
from jobs.launch.batch import BatchJob
from jobs.launch.submission import release_folder
from jobs.slurm.limits import check_limits, check_queue
from jobs.slurm.resources import JobSpec, job_spec
from jobs.studies.points import Point

POINT_KEYS = ("nodes", "ranks_per_node", "cpus_per_rank", "gpus_per_node", "minutes")


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
        jobs[0],
        tasks=tasks,
        tasks_per_node=tasks,
        cpus_per_task=-(-cpus // tasks),
        gpus_per_node=max(job.gpus_per_node for job in jobs),
        minutes=sum(job.minutes for job in jobs),
    )


def submit_pack(points: Sequence[Point]) -> str:
    """Submit the points of a pack as one job and return its number."""
    from jobs.slurm.executor import need_sbatch, submit_job

    spec, job = points[0].spec, pack_resources(points)
    check_limits(spec, job)
    need_sbatch(job)
    check_queue(spec, job)
    for point in points:
        release_folder(point.folder)
    folders = [prepare(point.spec) for point in points]
    work = BatchJob(tuple(str(folder.path) for folder in folders))
    job_id = submit_job(spec, job, folders[0], work)
    for folder in folders:
        folder.write_status("submitted", job_id=job_id)
    return job_id


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
