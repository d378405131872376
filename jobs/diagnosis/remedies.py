"""Remedies: what to change before a run that failed for some cause is submitted again, as keys and commands."""

from __future__ import annotations

from gems.runs.failure_cause import FailureCause
from jobs.diagnosis.evidence import Evidence

# Faults of a node itself; a full quota is the user's, and a full disk that of all nodes.
NODE_FILE_ERRORS = ("Stale", "Input/output error", "Transport endpoint", "Remote I/O", "Read-only file system")
KEEP = "keep"
CHANGE_KEY = "change the key that is named, and submit again"
MPI_TYPE = "cluster.mpi: pmi2 for MPICH, pmix for Open MPI, cray_shasta for Cray MPICH (`srun --mpi=list`)"
MPI_MODULES = "cluster.modules and cluster.setup: the MPI that mpi4py was built with must be loaded in the job"


def blames_node(cause: FailureCause, text: str) -> bool:
    """Return whether a failure is a node's own, so that another node would not have it."""
    if cause is FailureCause.FILE_SYSTEM:
        return any(words in text for words in NODE_FILE_ERRORS)
    return cause in (FailureCause.NODE, FailureCause.DEVICE)


def remedies(cause: FailureCause, text: str, node: str | None, evidence: Evidence) -> tuple[str, ...]:
    """Return what to change, most promising first; nothing for a run that has not failed."""
    run, step, folder = evidence.folder.path.name, evidence.resume_step, evidence.folder
    command, resumes = f"python -m jobs resubmit {run}", "" if step is None else f" resumes at step {step}"
    again = command + resumes
    # a run without a checkpoint to resume from should write some
    checkpoints = () if step is not None else ("train.checkpoint_s: so that less is lost the next time",)
    match cause:
        case FailureCause.DEVICE_MEMORY | FailureCause.DOES_NOT_FIT:
            return _device_memory(evidence)
        case FailureCause.HOST_MEMORY:
            return _host_memory(evidence)
        case FailureCause.NODE | FailureCause.DEVICE:
            return (f"exclude node {node}: {again}" if node else again,)
        case FailureCause.TIME_LIMIT:
            minutes = evidence.spec.cluster.minutes if evidence.spec is not None else None
            more = f"cluster.minutes={2 * minutes}" if minutes else "cluster.minutes"
            return (f"{command} {more}{resumes}", *checkpoints)
        case FailureCause.PREEMPTED | FailureCause.CANCELLED | FailureCause.STOPPED:
            return (again, *checkpoints)
        case FailureCause.STALLED:
            return (
                "read the stacks in stacks/" if (folder.path / "stacks").is_dir() else "look at that rank's node",
                f"if that node is slow or its file system hangs: {command} cluster.exclude=[{node or 'NODE'}]",
                "if the action may take that long: train.hang_timeout_s",
            )
        case FailureCause.FILE_SYSTEM:
            if "quota" in text or "No space" in text:
                where = "of your quota" if "quota" in text else "there"
                return (f"free space {where}, or runs_dir= on another file system", again)
            return (f"runs_dir= on a file system that all nodes can write to; else {again}",)
        case FailureCause.WRONG_MPI:
            return (MPI_TYPE, MPI_MODULES)
        case FailureCause.CONFIGURATION:
            return (CHANGE_KEY,)
        case FailureCause.LAUNCHER:
            if "hared memory" in text or "POSIX" in text or "mpich_shm" in text:
                return ("remove what killed ranks left on those nodes: python -m gems.launch.mpich_cleanup", again)
            return ("cluster.python, cluster.modules and cluster.setup must name what the nodes have",)
        case FailureCause.EXCEPTION:
            if "ImportError" in text or "ModuleNotFoundError" in text:
                return ("cluster.python, cluster.modules and cluster.setup: the nodes' environment lacks a package",)
            return ("the traceback is in logs/ranks.log; fix what it names, and submit again",)
        case FailureCause.KILLED:
            return _killed(text, again)
        case FailureCause.UNKNOWN:
            return (f"read the log: python -m jobs logs {run} --lines all",)
    return ()


def _device_memory(evidence: Evidence) -> tuple[str, ...]:
    spec, advice = evidence.spec, []
    if spec is None or spec.memory.name == KEEP:
        advice.append("memory=plan with machine.device_bytes, which recomputes or offloads what does not fit")
    else:
        advice.append(f"a smaller memory.limit_bytes, now under memory={spec.memory.name}")
    if spec is None or spec.parallel.micro_batch_size > 1:
        advice.append("parallel.micro_batch_size: fewer images at once")
    partitions = "" if spec is None else f", now {spec.parallel.partitions}"
    return (
        *advice,
        f"parallel.partitions: more ranks hold less each{partitions}",
        "schedule.activation_cap_bytes: fewer micro-batches in flight",
    )


def _host_memory(evidence: Evidence) -> tuple[str, ...]:
    spec = evidence.spec
    advice = ["+cluster.sbatch.mem: ask for more of the node's memory"]
    if spec is not None and not spec.cluster.supports_mem_option:
        advice = ["cluster.ranks_per_node: fewer ranks share a node's memory"]
    if spec is None or spec.memory.name != KEEP:
        advice.append("machine.host_bytes: the host memory that offloaded activations of a node may take")
    return (*advice, "data.prefetch_steps: fewer batches read ahead")


def _killed(text: str, again: str) -> tuple[str, ...]:
    if "SIGBUS" in text:
        return ("a full /dev/shm or a file that has vanished ends a process so: look at that node", again)
    if "SIGKILL" in text:
        memory = "if the node ran out of memory: +cluster.sbatch.mem, or fewer cluster.ranks_per_node"
        return (f"{memory}; else somebody killed it", again)
    if any(name in text for name in ("SIGSEGV", "SIGABRT", "SIGILL")):
        return ("native code failed: see the Python stack in logs/ranks.log, and the versions of torch and MPI", again)
    return (again,)
