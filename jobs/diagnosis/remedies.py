"""Advice: what to change before a run of some cause is sent again, in keys and commands."""

from __future__ import annotations

from jobs.diagnosis.evidence import Evidence
from jobs.diagnosis.judge import Cause

# Faults of a node itself; a full quota is the user's, and a full disk that of all nodes.
OF_A_NODE = ("Stale", "Input/output error", "Transport endpoint", "Remote I/O", "Read-only file system")
RESUBMIT = "python -m jobs resubmit {run}"
KEEP = "keep"


def blames_node(cause: Cause, text: str) -> bool:
    """Return whether a failure is a node's own, so that another node would not have it."""
    if cause is Cause.FILE_SYSTEM:
        return any(words in text for words in OF_A_NODE)
    return cause in (Cause.NODE, Cause.DEVICE)


def advice_of(cause: Cause, text: str, node: str | None, evidence: Evidence) -> tuple[str, ...]:
    """Return what to change, most promising first; nothing for a run that has not failed."""
    run = evidence.folder.path.name
    again = RESUBMIT.format(run=run)
    if evidence.resume_step is not None:
        again += f" goes on from step {evidence.resume_step}"
    if cause in (Cause.DEVICE_MEMORY, Cause.DOES_NOT_FIT):
        return _memory(evidence)
    if cause is Cause.HOST_MEMORY:
        return _host_memory(evidence)
    if cause in (Cause.NODE, Cause.DEVICE):
        return (f"leave node {node} out: {again} does" if node else again,)
    if cause is Cause.TIME_LIMIT:
        return _time_limit(evidence, again)
    if cause in (Cause.PREEMPTED, Cause.CANCELLED, Cause.STOPPED):
        return (again, *_checkpoints(evidence))
    if cause is Cause.STALLED:
        return (
            "read the stacks in stacks/" if (evidence.folder.path / "stacks").is_dir() else "look at that rank's node",
            f"if that node is slow or its file system hangs: {again} cluster.exclude=[{node or 'NODE'}]",
            "if the action may take that long: train.hang_timeout_s",
        )
    if cause is Cause.FILE_SYSTEM:
        return _file_system(text, again)
    if cause is Cause.WRONG_MPI:
        return (
            "cluster.mpi: pmi2 for MPICH, pmix for Open MPI, cray_shasta for Cray MPICH (`srun --mpi=list`)",
            "cluster.modules and cluster.setup: the MPI that mpi4py was built with must be loaded in the job",
        )
    if cause is Cause.CONFIGURATION:
        return ("change the key that is named, and submit again",)
    if cause is Cause.LAUNCHER:
        if "hared memory" in text or "POSIX" in text or "mpich_shm" in text:
            return ("remove what killed ranks left on those nodes: python -m gems.launch.mpich_cleanup", again)
        return ("cluster.python, cluster.modules and cluster.setup must name what the nodes have",)
    if cause is Cause.EXCEPTION:
        if "ImportError" in text or "ModuleNotFoundError" in text:
            return ("cluster.python, cluster.modules and cluster.setup: the nodes' environment lacks a package",)
        return ("the traceback is in logs/ranks.log; mend what it names, and submit again",)
    if cause is Cause.KILLED:
        return _killed(text, again)
    if cause is Cause.UNKNOWN:
        return (f"read the log: python -m jobs logs {run} --lines all",)
    return ()


def _memory(evidence: Evidence) -> tuple[str, ...]:
    spec, words = evidence.spec, []
    if spec is None or spec.memory.name == KEEP:
        words.append("memory=plan with machine.device_bytes, which recomputes or offloads what does not fit")
    else:
        words.append(f"a smaller memory.limit_bytes, now under memory={spec.memory.name}")
    if spec is None or spec.parallel.micro_batch_size > 1:
        words.append("parallel.micro_batch_size: fewer images at once")
    partitions = "" if spec is None else f", now {spec.parallel.partitions}"
    words += [
        f"parallel.partitions: more ranks hold less each{partitions}",
        "schedule.activation_cap_bytes: fewer micro-batches in flight",
    ]
    return tuple(words)


def _host_memory(evidence: Evidence) -> tuple[str, ...]:
    spec = evidence.spec
    words = ["+cluster.sbatch.mem: ask for more of the node's memory"]
    if spec is not None and not spec.cluster.supports_mem_option:
        words = ["cluster.ranks_per_node: fewer ranks share a node's memory"]
    if spec is None or spec.memory.name != KEEP:
        words.append("machine.host_bytes: what offloaded activations of a node may take")
    return (*words, "data.prefetch_steps: fewer batches read ahead")


def _time_limit(evidence: Evidence, again: str) -> tuple[str, ...]:
    minutes = evidence.spec.cluster.minutes if evidence.spec is not None else None
    more = f"cluster.minutes={2 * minutes}" if minutes else "cluster.minutes"
    return (f"{again} {more}" if evidence.resume_step is None else f"{again}, with more time by {more}",
            *_checkpoints(evidence))  # fmt: skip


def _checkpoints(evidence: Evidence) -> tuple[str, ...]:
    """Advise checkpoints to a run that has none to go on from."""
    return () if evidence.resume_step is not None else ("train.checkpoint_s: so that less is lost the next time",)


def _file_system(text: str, again: str) -> tuple[str, ...]:
    if "quota" in text:
        return ("free space of your quota, or runs_dir= on another file system", again)
    if "No space" in text:
        return ("free space there, or runs_dir= on another file system", again)
    return (f"runs_dir= on a file system that all nodes can write to; else {again}",)


def _killed(text: str, again: str) -> tuple[str, ...]:
    if "SIGBUS" in text:
        return ("a full /dev/shm or a file that has vanished ends a process so: look at that node", again)
    if "SIGKILL" in text:
        return (
            "if the node ran out of memory: +cluster.sbatch.mem, or fewer cluster.ranks_per_node; else somebody killed it",
            again,
        )
    if "SIGSEGV" in text or "SIGABRT" in text or "SIGILL" in text:
        return (
            "native code has failed: see the Python stack in logs/ranks.log, and the versions of torch and MPI",
            again,
        )
    return (again,)
