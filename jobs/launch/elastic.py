"""Continue a run after its job has lost nodes.

The run continues on spare nodes or on fewer nodes of the same allocation, or else in a new job. A
job that outlives its nodes is submitted with --no-kill: SLURM removes a failed node from it, and
ends the step that ran there. The run then resumes from its newest checkpoint on the nodes that are
left.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from gems.errors import ConfigError, GemsError, NodeFailedError, RankFailedError, StalledError
from gems.launch.local_launcher import Ended
from gems.runs.failure_cause import FailureCause
from gems.runs.folder import RunFolder
from gems.runs.owner import own_job_id, verify_gone
from gems.runs.prepare import change_layout
from gems.utils.process_tree import end_family
from gems.utils.units import now_utc
from jobs.batch.command import SchedulerUnavailableError
from jobs.batch.launchers import deputy_by_srun
from jobs.batch.output import report
from jobs.batch.resources import JobSpec, Work, job_spec
from jobs.diagnosis.evidence import newest_checkpoint
from jobs.diagnosis.node_blocklist import NodeBlocklist
from jobs.diagnosis.root_cause import Failure
from jobs.launch.own_job import counted_requeue, own_job, requeue_refusal, requeue_run
from jobs.launch.transaction import Ownership, submit_owned
from jobs.preflight.layouts import smaller_plan
from jobs.probes.nodes import END_LIMIT_S, NodeCheck
from jobs.schedulers.slurm_client.site import expand_nodes
from jobs.status.job_record import JobRecord


class Selection(NamedTuple):
    """The job, the good `nodes` for its ranks, and the end of the check if it was `stopped`."""

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
        NodeFailedError: Fewer good nodes are left than the ranks need; the error names the bad ones
            and their faults.
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
        bad = ", ".join(f"node {node} is bad: {fault}" for node, fault in faults.items())
        shortage = f"good nodes left: {len(good)}, and the ranks need {job.nodes}"
        raise NodeFailedError(f"{bad or 'nodes were lost'}; {shortage}", good, faults)
    if faults:
        report("; ".join(f"node {node} is left out: {fault}" for node, fault in faults.items()))
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
        report(f"node {node} is not noted ({error.strerror})")


CODES = (RankFailedError.exit_code, StalledError.exit_code)
# failures of the run itself, even if a node has failed too
OF_THE_RUN = (
    FailureCause.CONFIGURATION,
    FailureCause.DOES_NOT_FIT,
    FailureCause.DEVICE_MEMORY,
    FailureCause.HOST_MEMORY,
    FailureCause.WRONG_MPI,
    FailureCause.CANCELLED,
)
OF_A_NODE = (FailureCause.NODE, FailureCause.DEVICE)
DEPUTY_LOG = "deputy.log"
GONE = "SLURM has taken it from the job"


class Recovery:
    """The recovery of a run whose job has lost nodes, if the configuration allows it.

    cluster.elastic or cluster.spare_nodes allows it. After a failure, `again` tells whether to
    launch the run again in this job, and `has_moved` whether a new job or a restart continues it.
    `left_out` maps each node that the run may no longer use to its fault.
    """

    def __init__(self, folder: RunFolder, work: Work) -> None:
        self._folder = folder
        self.work = work
        self.left_out: dict[str, str] = {}
        self.again = self.has_moved = False

    def return_to_own_layout(self) -> None:
        """Return a run to its own layout if its job starts with all its own nodes."""
        folder = self._folder
        if not folder.layouts():
            return
        own = folder.read_own_spec()
        now = folder.read_spec()
        if own.cluster.nodes != now.cluster.nodes and len(own_nodes()) >= (own.cluster.nodes or 1):
            why = "the job has as many nodes again"
            folder.add_layout(1, own.layout, own.cluster.nodes, why, _who())

    @contextlib.contextmanager
    def deputy(self, job: JobSpec, nodes: Sequence[str]) -> Iterator[None]:
        """Keep a deputy of this batch script on another node of a job that outlives its nodes."""
        own = os.environ.get("SLURMD_NODENAME")
        others = [node for node in reversed(nodes) if node != own]
        if not job.cluster.outlives_nodes or own is None or not others:
            yield
            return
        argv = deputy_by_srun(job, self._folder, others[0], own)
        with (self._folder.logs / DEPUTY_LOG).open("ab") as log, contextlib.ExitStack() as stack:
            try:
                process = subprocess.Popen(
                    argv,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            except OSError as error:
                report(f"the batch script has no deputy ({error.strerror})")
            else:
                stack.callback(end_family, process, END_LIMIT_S)
            yield

    def is_concerned(self, job: JobSpec, nodes: Sequence[str], failure: Failure) -> bool:
        """Return whether a failure may be the loss of a node from which the run could recover."""
        is_settled = failure.exit_code not in CODES or failure.cause_class in OF_THE_RUN
        return job.cluster.outlives_nodes and bool(nodes) and not is_settled

    def find_faults(
        self, job: JobSpec, environment: Mapping[str, str], nodes: Sequence[str], failure: Failure
    ) -> dict[str, str]:
        """Return the fault of each node of a failed launch that is gone or bad.

        All ranks must have ended on these nodes.
        """
        left = own_nodes()
        blamed = failure.node if failure.cause_class in OF_A_NODE else None
        faults = {name: GONE for name in nodes if name not in left} if left else {}
        if blamed in left and blamed in nodes:
            faults[str(blamed)] = "the failure is its own"
        rest = tuple(name for name in left if name not in faults)
        if not faults and rest:
            check = NodeCheck(rest)
            check.run(job, self._folder, environment)
            faults = check.faults()
        return {name: fault for name, fault in faults.items() if name not in self.left_out}

    def goes_on(
        self, job: JobSpec, facts: Mapping[str, Any], good: Sequence[str], faults: Mapping[str, str]
    ) -> bool:
        """Return whether the run continues without some nodes.

        If so, choose and record its layout and job.
        """
        if not job.cluster.outlives_nodes:
            return False
        self.left_out |= faults
        for name, fault in faults.items():
            note_bad_node(self._folder, job, name, fault)
        lost = (
            "; ".join(f"node {name} is lost: {fault}" for name, fault in faults.items())
            or "nodes are lost"
        )
        return self._choose(job, dict(facts), len(good), lost)

    def _choose(self, job: JobSpec, facts: dict[str, Any], num_good: int, lost: str) -> bool:
        folder = self._folder
        now = self._folder.read_spec()
        own = folder.read_own_spec()
        sizes = own.cluster.smaller_nodes(job.nodes)
        within = [size for size in sizes if size <= num_good]
        if num_good >= job.nodes:
            return self._launch_again(facts, lost, now.layout)
        try:
            if within:
                plan = smaller_plan(own, within[0])
                change_layout(folder, plan, lost, _who(), newest_checkpoint(folder))
                return self._launch_again(facts, lost, plan.spec.layout)
            if sizes and JobRecord.read(folder).next_job is None:
                self._submit(sizes[0], facts, lost)
                return True
        except (ConfigError, OSError) as error:
            report(f"{lost}; the run does not go on: {error}")
            return False
        refusal = requeue_refusal(folder, own.cluster, FailureCause.NODE)
        if refusal is None:
            refusal = requeue_run(
                folder, job, facts | {"cause": lost}, FailureCause.NODE, None, self.work
            )
        goes_on = (
            "the run starts again by itself"
            if refusal is None
            else f"the run does not go on: {refusal}"
        )
        report(f"{lost}; {goes_on}")
        self.has_moved = refusal is None
        return self.has_moved

    def _launch_again(self, facts: dict[str, Any], lost: str, layout: str) -> bool:
        cause = f"{lost}; the run goes on by {layout}"
        self._folder.write_status("requeued", **facts | {"job_id": own_job_id(), "cause": cause})
        report(cause)
        self.again = True
        return True

    def replace_job(self, batch_node: str) -> None:
        """Submit the run as a new job that starts after this one, whose batch script is lost.

        If a chain has a next job, that job continues the run. Without a smaller layout, a new job
        counts as a requeue.

        Raises:
            GemsError: The run has restarted as often as allowed, sbatch refuses the job, or the
                folder has another owner.
        """
        own = self._folder.read_own_spec()
        now = self._folder.read_spec()
        self.left_out[batch_node] = GONE
        lost = f"node {batch_node} is lost, and the batch script with it"
        note_bad_node(self._folder, job_spec(now), batch_node, GONE)
        if (following := JobRecord.read(self._folder).next_job) is not None:
            report(f"{lost}; job {following}, the next of its chain, continues the run")
            return
        sizes = own.cluster.smaller_nodes(now.cluster.nodes or 1)
        if sizes:
            self._submit(sizes[0], {}, lost, after=own_job_id())
            return
        if (refusal := requeue_refusal(self._folder, own.cluster, FailureCause.NODE)) is not None:
            raise GemsError(refusal)
        with counted_requeue(self._folder, FailureCause.NODE, None) as count:
            self._submit(None, count, lost, after=own_job_id())

    def _submit(
        self, size: int | None, facts: Mapping[str, Any], lost: str, after: str | None = None
    ) -> None:
        """Submit the run as a new job without the lost nodes, on `size` nodes unless it is None."""
        folder = self._folder
        own = folder.read_own_spec()
        plan = None if size is None else smaller_plan(own, size)
        spec = folder.read_spec() if plan is None else plan.spec
        exclude = [*dict.fromkeys([*own.cluster.exclude, *self.left_out])]
        spec = replace(spec, cluster=replace(spec.cluster, exclude=exclude))
        if plan is not None:
            change_layout(folder, replace(plan, spec=spec), lost, _who(), newest_checkpoint(folder))
        job = replace(job_spec(spec), after=after)
        with Ownership(verify_gone) as ownership:
            ownership.take(folder)
            (new_id,) = submit_owned(
                job, ownership, [self.work], "requeued", {**facts, "cause": lost}
            )
        report(f"{lost}; the run continues as job {new_id}, by {spec.layout}")
        self.has_moved = True


def _who() -> str:
    return f"job {own_job_id()} on {os.uname().nodename}"
