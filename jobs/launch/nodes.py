"""Select the nodes of this process's own job.

The module finds which nodes the job still has, which are good, and which the ranks run on.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import NamedTuple

from gems.errors import NodeFailedError
from gems.launch.local_launcher import Ended
from gems.runs.folder import RunFolder
from gems.utils.stdio import report
from gems.utils.units import now_utc
from jobs.batch.command import SchedulerUnavailableError
from jobs.batch.resources import JobSpec
from jobs.diagnosis.node_blocklist import NodeBlocklist
from jobs.launch.own_job import own_job
from jobs.probes.nodes import NodeCheck
from jobs.schedulers.slurm_client.site import expand_nodes


class Selection(NamedTuple):
    """The job with the good `nodes` that its ranks run on.

    It also has how the check ended if the job was stopped then.
    """

    job: JobSpec
    nodes: tuple[str, ...] = ()
    stopped: Ended | None = None


def select_nodes(
    job: JobSpec, folder: RunFolder, environment: Mapping[str, str], left_out: Collection[str] = ()
) -> Selection:
    """Check the nodes of this job if its cluster requests that, and choose the ranks' nodes.

    A bad node goes on the node blocklist; spare nodes, or those of a larger layout, take its place.
    Nodes in `left_out` are not checked. If the cluster requests neither a check nor spare nodes, no
    node is checked.

    Raises:
        NodeFailedError: fewer good nodes are left than the ranks need; it names a bad one and its
            fault.
    """
    cluster = job.cluster
    if job.launcher != "srun" or not (cluster.outlives_nodes or cluster.checks_nodes):
        return Selection(job)
    nodes = tuple(node for node in own_nodes() if node not in left_out)
    faults = {}
    if nodes and cluster.checks_nodes:
        check = NodeCheck(nodes)
        ended = check.run(job, folder, environment)
        if ended.stopped_by is not None:
            return Selection(job, nodes, ended)
        faults = check.faults()
    for node, fault in faults.items():
        note_bad_node(folder, job, node, fault)
    good = tuple(node for node in nodes if node not in faults)
    if nodes and len(good) < job.nodes:
        raise NodeFailedError(_shortage(job, len(good), faults), good, faults)
    if faults:
        what = "; ".join(f"node {node} is left out: {fault}" for node, fault in faults.items())
        report("jobs", what)
    return Selection(replace(job, nodelist=good[: job.nodes]), good)


def own_nodes() -> tuple[str, ...]:
    """Return the nodes that this job has now.

    SLURM removes a failed node from a job that outlives its nodes.
    """
    job = own_job()
    listed = (
        job.nodes if job is not None and job.nodes else os.environ.get("SLURM_JOB_NODELIST", "")
    )
    try:
        return expand_nodes([listed]) if listed else ()
    except SchedulerUnavailableError:
        return ()


def note_bad_node(folder: RunFolder, job: JobSpec, node: str, fault: str) -> None:
    """Put a node on the node blocklist; a folder without write permission ends no run."""
    attempt = f"{folder.path.name} attempt {folder.attempt}"
    try:
        NodeBlocklist(folder.path.parent).add(
            job.cluster.name, node, fault[:200], attempt, now_utc()
        )
    except OSError as error:
        report("jobs", f"node {node} is not noted ({error.strerror})")


def _shortage(job: JobSpec, num_good: int, faults: Mapping[str, str]) -> str:
    named = ", ".join(f"node {node} is bad: {fault}" for node, fault in faults.items())
    return (
        f"{named or 'nodes were lost'}; good nodes left: {num_good}, and the ranks need {job.nodes}"
    )
