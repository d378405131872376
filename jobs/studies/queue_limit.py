"""How many more jobs of a study the queue takes: by the preset's limits, and by what sbatch has refused.

A study uses no job arrays: the elements of an array share one request of nodes and time, and each point of a study has
its own. So a site's limits on arrays do not bind it, and its limits on jobs do.
"""

from __future__ import annotations

from gems.config.schema import RunSpec
from jobs.slurm.jobs import num_queued
from jobs.slurm.limits import queue_limit
from jobs.slurm.resources import JobSpec

Scope = tuple[str | None, str | None, str | None]


class QueueSlots:
    """The free slots for jobs at one look at the queue; the jobs of each limit are counted once."""

    def __init__(self) -> None:
        self._slots: dict[Scope, int | None] = {}
        self._full: set[Scope] = set()

    def has_slot(self, spec: RunSpec, job: JobSpec) -> bool:
        """Return whether the queue takes one more job, as far as is known.

        Raises:
            ConfigError: the preset allows no job of this size.
        """
        if _scope(spec) in self._full:
            return False
        limit = queue_limit(spec.cluster, job.nodes)
        if limit is None or limit.queued_jobs is None:
            return True
        key = (spec.cluster.name, limit.partition, limit.qos)
        if key not in self._slots:
            queued = num_queued(limit.partition, limit.qos)
            self._slots[key] = None if queued is None else limit.queued_jobs - queued
        slots = self._slots[key]
        return slots is None or slots > 0

    def take(self, spec: RunSpec, job: JobSpec) -> None:
        """Count a job that was submitted."""
        limit = queue_limit(spec.cluster, job.nodes)
        if limit is not None:
            key = (spec.cluster.name, limit.partition, limit.qos)
            slots = self._slots.get(key)
            self._slots[key] = None if slots is None else slots - 1

    def mark_full(self, spec: RunSpec) -> None:
        """Record that SLURM takes no more jobs of this account, partition and qos now."""
        self._full.add(_scope(spec))


def _scope(spec: RunSpec) -> Scope:
    qos = spec.cluster.sbatch.get("qos")
    return spec.cluster.full_account, spec.cluster.partition, None if qos is None else str(qos)
