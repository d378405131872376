"""How many more jobs of a study the queue takes: by the preset's limits, and by what sbatch has refused.

A study uses no job arrays: the elements of an array share one request of nodes and time, and a study's points have each
their own. So a site's limits of arrays do not bind it, and its limits of jobs do.
"""

from __future__ import annotations

import re

from gems.config.schema import RunSpec
from gems.errors import ConfigError
from jobs.slurm.jobs import num_queued
from jobs.slurm.limits import limit_of
from jobs.slurm.resources import JobSpec

# All of SLURM's names of limits on a user's or account's jobs have this in common, as QOSMaxSubmitJobPerUserLimit and
# AssocGrpSubmitJobsLimit have. The words of the policy stand for limits of size and time too, whose names sbatch says before.
PASSING = re.compile(r"SubmitJob|temporarily unable to accept job")
POLICY, NAMED = "Job violates accounting/QOS policy", re.compile(r"\b(?:QOS|Assoc|Partition)[A-Z]\w*")
OURS = re.compile(r"\d+ jobs are queued, and \d+ are allowed")
SAME_FOLDER = re.compile(r"is that of job \d+, which has not ended")

Scope = tuple[str | None, str | None, str | None]


class Throttle:
    """The room for jobs at one look at the queue; every limit's jobs are counted once."""

    def __init__(self) -> None:
        self._room: dict[Scope, int | None] = {}
        self._full: set[Scope] = set()

    def has_room(self, spec: RunSpec, job: JobSpec) -> bool:
        """Return whether the queue takes one more job, as far as one knows.

        Raises:
            ConfigError: the preset allows no job of this size.
        """
        if _scope(spec) in self._full:
            return False
        room = self._room_of(spec, job)
        return room is None or room > 0

    def took(self, spec: RunSpec, job: JobSpec) -> None:
        """Count a job that was submitted."""
        limit = limit_of(spec.cluster, job.nodes)
        if limit is not None:
            key = (spec.cluster.name, limit.partition, limit.qos)
            room = self._room.get(key)
            self._room[key] = None if room is None else room - 1

    def refused(self, spec: RunSpec) -> None:
        """Record that SLURM takes no more jobs of this account, partition and qos now."""
        self._full.add(_scope(spec))

    def _room_of(self, spec: RunSpec, job: JobSpec) -> int | None:
        limit = limit_of(spec.cluster, job.nodes)
        if limit is None or limit.queued_jobs is None:
            return None
        key = (spec.cluster.name, limit.partition, limit.qos)
        if key not in self._room:
            queued = num_queued(limit.partition, limit.qos)
            self._room[key] = None if queued is None else limit.queued_jobs - queued
        return self._room[key]


def is_passing(error: ConfigError) -> bool:
    """Return whether a refused submission would be taken once jobs have ended: the queue is full, or the folder in use."""
    text = str(error)
    if OURS.search(text) or SAME_FOLDER.search(text) or PASSING.search(text):
        return True
    return POLICY in text and NAMED.search(text) is None


def _scope(spec: RunSpec) -> Scope:
    qos = spec.cluster.sbatch.get("qos")
    return spec.cluster.full_account, spec.cluster.partition, None if qos is None else str(qos)
